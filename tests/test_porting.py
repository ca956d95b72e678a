"""The code on the pages of docs/porting runs, and their tables hold."""

import ast
import dataclasses
import inspect
import json
import re
import tomllib
from types import SimpleNamespace

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_lossscale as ols
from optax_lossscale.presets.declaration import PRESETS
from tests import documents
from tests.autocast.programs import products
from tests.presets import traces
from tests.support import assert_same_bits
from tests.test_notebooks import of_mindspores_notebook

PAGES = {
  path.stem: path.read_text()
  for path in sorted((documents.ROOT / "docs" / "porting").glob("*.md"))
}
ALL = "\n".join(PAGES.values())
# The site's search shows these pages first: docs/conf.py.
SEARCHED = tomllib.loads(documents.read("tools/names.toml"))
# Arguments of the old lines without a counterpart in a preset.
OTHERS = {"fp16", "--fp16", "enabled", "opt_level"}

# The old lines need other systems, and tests of presets run their sections.
NOT_RUN = (
  r'<tr valign="top"><td>.*?</td><td>|\n## (?:'
  + "|".join(PRESETS)
  + r"): .*?(?=\n## |\Z)"
)

# Sections that several tests read.
NPU = "NPULossScaleOptimizer in a train step"
ACCELERATE = "accelerate_train_mode, TellMeStepOrLossHook: low precision first"
MODEL = "amp_level in MindSpore's Model"
KERAS = "A Keras 3 model in a JAX loop"


def page_with(title):
  """Returns the one page that has a section of this title."""
  (found,) = (x for x in PAGES.values() if f"# {title}\n" in x)
  return found


def section(title):
  return documents.section(page_with(title), title)


def block(title, words):
  """Returns the one Python block of a section that has some words in it."""
  return documents.block(page_with(title), title, words)


# The rest of each preset's heading, and the page that has it.
HEADINGS = {
  name: (heading, stem)
  for stem, page in PAGES.items()
  for name, heading in re.findall(r"^## (\w+): (.+)$", page, re.MULTILINE)
  if name in PRESETS
}


def preset_section(system):
  return section(f"{system}: {HEADINGS[system][0]}")


def sides(system):
  """Returns the old and the new side of a preset's table."""
  pattern = r"<tr valign.*?>(.*?)</td><td>(.*?)</td></tr></table>"
  (found,) = re.findall(pattern, preset_section(system), re.DOTALL)
  return found


OLD = {system: sides(system)[0] for system in HEADINGS}
NEW = {system: sides(system)[1] for system in HEADINGS}
SYSTEMS = sorted(OLD)


def cells(text):
  """Returns the cells of a Markdown table's rows, but for its head."""
  lines = [line for line in text.splitlines() if line.startswith("|")]
  return [
    [cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]
  ]


def statements(system, language_block):
  return ast.parse(
    "\n".join(documents.blocks(language_block[system], "python"))
  ).body


def run(nodes, names):
  code = ast.unparse(ast.Module(list(nodes), []))
  exec(compile(code, "docs/porting", "exec"), names)


def keywords(call):
  return {
    item.arg: eval(ast.unparse(item.value), {"jnp": jnp})
    for item in call.keywords
    if item.arg not in OTHERS
  }


def names_in_configurations(system):
  """Returns the preset's argument for each name of a configuration."""
  return {
    name: re.match(r"`(\w+)`", argument)[1]
    for systems, configured, argument in cells(
      section("Names in configuration files")
    )
    if f"`{system}`" in systems
    for name in re.findall(r"`([^`]+)`", configured)
  }


def old_arguments(system):
  """Yields what each block of the old lines gives for the preset."""
  translation = names_in_configurations(system)
  for text in documents.blocks(OLD[system], "json"):
    configured = json.loads(text)["fp16"]
    assert configured.pop("loss_scale") == 0  # DeepSpeed's word for dynamic.
    configured["initial_scale_power"] = 2 ** configured["initial_scale_power"]
    yield {
      translation[key]: value
      for key, value in configured.items()
      if key not in OTHERS
    }
  for text in documents.blocks(OLD[system], "sh"):
    yield {
      translation[flag]: float(value)
      for flag, _, value in (line.partition(" ") for line in text.splitlines())
      if flag not in OTHERS
    }
  first = statements(system, OLD)[0].value
  if isinstance(first, ast.Call) and first.keywords:
    is_config = ast.unparse(first.func) == "OptimizerConfig"
    yield {
      translation[name] if is_config else name: value
      for name, value in keywords(first).items()
    }


def recorded(system):
  """Returns a run with a dictionary that can be read."""
  runs = traces.load(system)["runs"]
  return next(run for run in runs if traces.is_importable(run))


def linked():
  """Returns the class, page and anchor in each preset's row of the table."""
  found = re.findall(
    r"^\| [^|]+ \| ([^|]+) \| \[(\w+)\]\((\w+)\.md#([\w-]+)\) \|$",
    section("From system to system"),
    re.MULTILINE,
  )
  assert len({name for _, name, _, _ in found}) == len(found)
  return {name: (text, stem, anchor) for text, name, stem, anchor in found}


# The sections of presets ------------------------------------------------------


@pytest.mark.parametrize("system", PRESETS)
def test_a_preset_is_found_by_the_name_of_the_old_class(system):
  original = traces.load(system)["original"].split(".")[-1].rstrip("_")
  heading, stem = HEADINGS[system]
  assert original in heading
  text, page, anchor = linked()[system]
  assert original in text
  # That there is such an anchor, tests/test_pages.py shows of every link.
  assert page == stem
  assert anchor.startswith(f"{system}-")


def test_the_pages_have_each_preset_once_in_the_order_of_the_table():
  headings = re.findall(r"^#+ (\w+): ", ALL, re.MULTILINE)
  found = [name for name in headings if name in PRESETS]
  assert sorted(found) == sorted(PRESETS)
  for stem in PAGES:
    of_page = [name for name in found if HEADINGS[name][1] == stem]
    assert of_page == [name for name in linked() if name in of_page]


@pytest.mark.parametrize("system", SYSTEMS)
def test_the_old_lines_have_the_arguments_and_read_the_dictionary(system):
  new = keywords(statements(system, NEW)[0].value)
  given = list(old_arguments(system))
  assert given and given == [new] * len(given)

  old = statements(system, OLD)
  assert ast.unparse(old[-1].targets[0]) == "saved"
  if isinstance(old[-1].value, (ast.Dict, ast.DictComp)):
    words = {w for x in old for w in re.findall(r"\w+", ast.unparse(x))}
    assert words >= traces.saved_dict(system, recorded(system)).keys()
  in_table = "".join([OLD[system], NEW[system]])
  assert preset_section(system).count("```") == in_table.count("```")


@pytest.mark.parametrize("system", SYSTEMS)
def test_the_new_lines_make_the_rule_and_read_what_the_original_saved(system):
  recording = recorded(system)
  names = {"ols": ols, "saved": traces.saved_dict(system, recording)}
  fresh, resumed = statements(system, NEW)
  run([fresh], names)
  rule = names["rule"]
  assert rule.system == system and "state" not in names
  run([resumed], names)
  steps = len(recording["overflows"])
  scale = traces.scales(recording["scales"], steps)[steps // 2 - 1]
  if names["saved"]:
    assert names["state"].loss_scale == np.float32(scale)

  # A checkpoint of its own gives the rule of a fresh start.
  names["saved"] = ols.presets.to_state_dict(rule, rule.init())
  run([resumed], names)
  assert (names["rule"].system, names["rule"].skip) == (system, rule.skip)
  assert_same_bits(names["state"], rule.init())
  # The first S is in the state by now, whatever the rule would start with.
  machines = [names["rule"]._machine, rule._machine]
  if hasattr(rule._machine, "init_scale"):
    machines = [dataclasses.replace(x, init_scale=1e4) for x in machines]
  assert machines[0] == machines[1]


def notes(system):
  """Returns what is in backticks in the text below a preset's lines."""
  return re.findall(r"`([^`]+)`", preset_section(system).split("</table>")[1])


def test_the_notes_on_megatron_are_code_for_both_calls():
  (added,) = [note for note in notes("megatron") if note.startswith("refill")]
  (line,) = [x for x in notes("megatron") if x.startswith("state = ")]
  fresh, resumed = [
    ast.unparse(node).replace("hysteresis=2", f"hysteresis=2, {added}")
    for node in statements("megatron", NEW)
  ]
  names = {"ols": ols}
  exec(fresh, names)
  names["state"] = start = names["rule"].init()
  for found_inf in ([0.0], [1.0], [1.0]):
    names["found_inf"] = np.array(found_inf, np.float32)
    exec(line, names)
  assert names["state"].loss_scale == start.loss_scale / 2
  names["saved"] = ols.presets.to_state_dict(names["rule"], names["state"])
  exec(resumed, names)
  assert added.replace('"', "'") in repr(names["rule"])
  assert names["state"].loss_scale == start.loss_scale / 2


# The tables that all systems share --------------------------------------------


def test_the_names_in_configuration_files_are_of_arguments():
  for systems, _, argument in cells(section("Names in configuration files")):
    for system in re.findall(r"`(\w+)`", systems):
      assert re.match(r"`(\w+)`", argument)[1] in parameters(system)


def parameters(system):
  """Returns the defaults of a preset's arguments by their names."""
  signature = inspect.signature(getattr(ols.presets, system))
  return {name: x.default for name, x in signature.parameters.items()}


def test_the_comparison_lists_each_trace_once():
  table = cells(section("How this was compared"))
  assert [row[0] for row in table] == [f"`{x}`" for x in traces.SYSTEMS]


def test_systems_for_reinforcement_learning_have_presets():
  text = section("Systems for reinforcement learning")
  rules = [
    eval(x) for x in re.findall(r"`(ols\.presets[^`]*)` \|$", text, re.M)
  ]
  assert [x.system for x in rules] == ["torch_sharded", "megatron", "deepspeed"]


@pytest.mark.parametrize("stem", SEARCHED)
def test_the_names_that_people_search_for_are_on_the_page(stem):
  page = documents.one_line(PAGES[stem])
  missing = [
    name
    for name in SEARCHED[stem]
    if not re.search(rf"(?<!\w){re.escape(name)}(?!\w)", page, re.IGNORECASE)
  ]
  assert not missing


@pytest.mark.parametrize("system", ["MindSpore", "Megatron", "npu_bridge"])
def test_the_right_side_of_each_other_name_runs(system):
  names = documents.training()
  names["scaled_grads"] = names["params"]
  names |= {"network": SimpleNamespace(apply=abs), "train_step": abs}
  for left, right in cells_of_all(section(f"Other names of {system}"))[1:]:
    codes = re.findall(r"`([^`]+\([^`]+)`", right)
    assert codes or re.search("not needed, because|\\]\\(", right), left
    for code in codes:
      exec(code, names)


def test_what_the_pages_name_of_the_library_exists():
  for path in set(re.findall(r"\bols\.(\w+(?:\.\w+)?)", ALL)):
    value = ols
    for name in path.split("."):
      value = getattr(value, name)
  for field in set(re.findall(r"\bopt_state\.(\w+)", ALL)):
    assert field in (*ols.LossScalingState._fields, "_replace")


def test_the_right_side_of_each_row_of_mixed_precision_runs():
  titles = re.findall("^## (.* becomes? ols.autocast)$", ALL, re.MULTILINE)
  # The page common to all leads to each of them.
  overview = section("Mixed precision: levels and lists")
  assert len(titles) == overview.count("-olsautocast)")
  rows = [
    (left, re.findall(r"`(ols\.autocast\(loss_fn.*?\))`", right))
    for title in titles
    for left, right in cells_of_all(section(title))[1:]
  ]
  x = jnp.eye(2)

  def loss_fn(x):
    with jax.named_scope("LeNet5"), jax.named_scope("conv1"):
      x = x @ x
    return jnp.sum(jnp.tanh(x) @ x)

  for left, lines in rows:
    assert lines, left
    dtype = "bfloat16" if "torch.bfloat16" in left else "float16"
    for line in lines:
      mixed = eval(line, {"ols": ols, "jnp": jnp, "loss_fn": loss_fn})
      assert dtype in products(mixed, x), line


def cells_of_all(text):
  """Returns the rows of all Markdown tables in a text, heads included."""
  lines = [line for line in text.splitlines() if line.startswith("| ")]
  return [
    [x.strip().replace("\\|", "|") for x in re.split(r"(?<!\\)\|", line)[1:-1]]
    for line in lines
  ]


def right_of(title, left):
  """Returns the code on the right of a row that has some words on its left."""
  (row,) = [x for x in cells_of_all(section(title)) if left in x[0]]
  return re.findall(r"`([^`]+)`", row[1])


# The blocks of each page ------------------------------------------------------


@pytest.mark.parametrize(
  "stem", ["apex_fairseq", "flax_jmp", "megatron_deepspeed", "paddle", "torch"]
)
def test_a_page_of_presets_prints_what_it_shows(stem):
  with documents.reading(f"docs/porting/{stem}.md", NOT_RUN) as page:
    if stem == "megatron_deepspeed":
      page.run()


(RECORD,) = re.findall(r"`(ols\.instruments\.record\(.*?\))`", PAGES["README"])
# Transformations around the wrapper, which put its state further inside.
WRAPS = {
  "alone": lambda tx: tx,
  "inside": lambda tx: optax.partition(
    {
      "all": optax.chain(eval(RECORD, {"ols": ols, "tx": tx}), optax.identity())
    },
    lambda params: jax.tree.map(lambda _: "all", params),
  ),
}


@pytest.mark.parametrize("wrap", WRAPS.values(), ids=WRAPS)
def test_the_train_step_and_its_loop_work_wherever_loss_scaling_is(wrap):
  rule = ols.presets.torch(init_scale=8.0)
  state = rule.init()._replace(loss_scale=jnp.float32(4.0))
  tx = wrap(ols.loss_scaling(optax.sgd(0.5), rule))
  with documents.reading("docs/porting/README.md", NOT_RUN) as page:
    swap = {"tx = ols.loss_scaling(inner, rule)\n": ""}
    page.run("The train step", swap=swap, tx=tx, rule=rule, state=state)
    page.run("Mixed precision: policies by name")
  names = page.names
  step = documents.step(documents.STEP, names)
  given = names["params"], names["opt_state"]
  *_, names["opt_state"], loss = step(*given, names["batch"])
  assert jnp.isfinite(loss)
  (read,) = right_of("The train step", "get_scale()")
  assert eval(read, names) == 4.0
  *_, names["opt_state"], _ = step(*given, names["batch"] * np.inf)
  overflow, *keys = right_of("The train step", "found_inf`, skipped")
  assert eval(overflow, names)
  metrics = overflow.removesuffix('["overflow"]')
  assert [int(eval(metrics + key, names)) for key in keys] == [1, 1]

  structure = jax.tree.structure(names["opt_state"])
  for line in right_of("The train step", "scaler.update(new_scale)"):
    exec(line, names)
  assert jax.tree.structure(names["opt_state"]) == structure
  assert eval(read, names) == 1024.0
  saved = right_of("The train step", "scaler.state_dict()")[-1]
  assert eval(saved, names)["scale"] == 1024.0


@pytest.mark.slow
def test_the_lines_for_ascend_train_and_say_how_often_s_drops():
  def loss_fn(params, batch):
    return jnp.mean(jnp.float32(jnp.float16(params) * jnp.float16(batch)))

  given = {"params": jnp.zeros(()), "opt": optax.sgd(0.5), "loss_fn": loss_fn}
  with documents.reading("docs/porting/ascend.md", NOT_RUN, **given) as page:
    page.run("Saturation mode: an overflow gives 65504")
    state = page["tx"].init(jnp.zeros(2))
    for gradient, overflows in ((65504.0, True), (65472.0, False)):
      _, after = page["tx"].update(jnp.array([1.0, gradient]), state)
      assert after.overflow == overflows

    page.run(NPU)
    batches = [jnp.ones(16)] * 100
    printed = page.run("Watching and tuning S", batches=batches)
    # The gradient of each worker is S, finite in float16 up to 2**15, and each
    # halving takes two skipped steps.
    assert printed.splitlines() == [
      "S 32768, dropped 17 times",
      "last step finite: True",
      "applied 66",
      "skipped 34",
    ]
    (applied, *_) = right_of(NPU, "`global_step`")
    assert eval(applied, page.names) == 66
    assert eval(right_of(NPU, "all steps")[0], page.names) == 100
    page.run(
      ACCELERATE,
      swap={"10_000": "50"},
      loss_fn=lambda params, x: 8 * jnp.mean(x @ params),
      params=jnp.ones((2, 2)),
      opt_state=page["tx"].init(jnp.ones((2, 2))),
      batches=iter(lambda: jnp.eye(2), None),
    )
    assert page["schedule_state"].steps == 50
    assert not page["schedule_state"].low
    page.run("The loss-scale flag of a BERT script")
    opt = optax.sgd(1.0)
    for flag, scale in ((0, 2.0**32), (1024.0, 1024.0)):
      state = page["create_optimizer"](opt, flag).init(jnp.zeros(1))
      assert ols.get_loss_scale(state) == scale
    for flag, use_fp16 in ((1024.0, False), (None, True)):
      assert page["create_optimizer"](opt, flag, use_fp16) is opt


def test_the_rows_for_ascend_run():
  text = section(ACCELERATE)
  lines = re.findall(r"`(ols\.presets\.accelerate_train_mode\([^`]*\))`", text)
  assert len(lines) == 3
  for line in lines:
    assert eval(line.replace("\\|", "|")).init().low


# MindSpore --------------------------------------------------------------------


class Normalized(nn.Module):
  """A network that is in training while its statistics may change."""

  @nn.compact
  def __call__(self, x):
    frozen = not self.is_mutable_collection("batch_stats")
    x = nn.Dense(32)(x)
    x = nn.BatchNorm(use_running_average=frozen, momentum=0.5)(x)
    return nn.Dense(4)(nn.relu(x))


def train_by_page(variables, loss, batch):
  names = {"network": Normalized(), "loss": loss}
  path = "docs/porting/mindspore.md"
  with documents.reading(path, NOT_RUN, **names) as page:
    page.run()
  params, statistics = variables["params"], variables["batch_stats"]
  dtypes = products(page["loss_fn"], params, statistics, *batch)
  assert set(dtypes) == {"float16"}
  carry = params, statistics, page["tx"].init(params)
  while True:
    *carry, value = page["train_step"](*carry, *batch)
    params, statistics, state = carry
    yield {"params": params, "batch_stats": statistics}, state.skipped, value


def train_by_notebook(variables, loss, batch):
  sgd = optax.sgd(0.01, momentum=0.9)
  model = of_mindspores_notebook("Model")["Model"](
    Normalized(), loss, sgd, {"loss": loss}, "O2", params=variables
  )
  while True:
    report = model.train(1, [batch])
    yield model.params, report["skipped"][0], report["loss"][0]


@pytest.mark.parametrize("train", [train_by_page, train_by_notebook])
def test_a_network_with_batch_norm_trains_and_a_skip_keeps_statistics(train):
  images = np.random.default_rng(0).normal(size=(32, 8)).astype(np.float32)
  labels = np.eye(4, dtype=np.float32)[images[:, :4].argmax(axis=1)]

  def loss(logits, labels):
    return optax.losses.softmax_cross_entropy(logits, labels).mean()

  variables = Normalized().init(jax.random.key(0), images)
  steps = train(variables, loss, (images, labels))
  losses, skips = [], []
  for _ in range(200):
    before, (variables, skipped, value) = variables, next(steps)
    if skipped:
      assert_same_bits(variables, before)
    losses.append(float(value))
    skips.append(bool(skipped))
  assert skips[0] and not skips[-1]
  assert losses[-1] < 0.1 * losses[0]
  # The statistics have become those of the only batch.
  _, moved = Normalized().apply(variables, images, mutable=["batch_stats"])
  chex.assert_trees_all_close(
    variables["batch_stats"], moved["batch_stats"], rtol=0.02, atol=0.02
  )


def test_adam_weight_decay_makes_mindspores_steps():
  # nn/optim/adam.py of MindSpore, `_update_run_op`, in plain numbers.
  title = "nn.AdamWeightDecay is not optax.adamw"
  code = block(title, "scale_by_moments")
  notebook = documents.read("notebooks/mindspore_mixed_precision.ipynb")
  copies = ["".join(x["source"]) for x in json.loads(notebook)["cells"]]
  assert [x for x in copies if code.partition("\n\n\n")[0] in x]
  names = documents.training()
  for decay in (0.25, 0.0):
    exec(code.replace("_weights(0.0", f"_weights({decay}"), names)
    w, m, v, steps = np.array([1.0, -3.0]), 0.0, 0.0, []
    params = jnp.float32(w)
    state = names["optimizer"].init(params)
    for step in range(1, 11):
      g = np.array([0.1, 1e-5 * step])
      m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g * g
      update = 0.01 * (decay * w + m / (1e-6 + np.sqrt(v)))
      w = w - update
      new, state = names["optimizer"].update(jnp.float32(g), state, params)
      params = optax.apply_updates(params, new)
      np.testing.assert_allclose(new, -update, rtol=1e-5)
      steps.append(f"{update[0]:.3f}")
  *most, last = [steps[i - 1] for i in (1, 2, 5, 10)]  # Without decay.
  shown = f"{', '.join(most)} and {last}"
  assert shown in documents.one_line(section(title))


def test_the_rows_of_mindspores_tutorial_run():
  def mlp(params, x):
    return jnp.tanh(x @ params) @ params

  function = jax.custom_vjp(lambda x: x * x)
  # Not the derivative, so that it shows which one is taken.
  function.defvjp(lambda x: (x * x, x), lambda x, g: (3 * x * g,))
  names = {"ols": ols, "optax": optax, "rule": ols.FixedLossScale(8.0)}
  names |= {"network": SimpleNamespace(apply=mlp), "function": function}
  names |= {"logits": jnp.zeros((2, 4)), "labels": np.eye(4)[[0, 1]]}
  names |= {"dataset": range(2), "opt": optax.sgd(1.0), "loss_fn": jnp.sum}
  names["scaled_grads"] = jnp.full(2, 2048.0)
  found = {
    left: [eval(x, names) for x in re.findall(r"`([^`]+\([^`]+)`", right)]
    for left, right in cells_of_all(section(MODEL))[7:]
  }
  assert len(found) == 11

  def of(words):
    (values,) = [x for left, x in found.items() if words in left]
    return values

  (dynamic,), (fixed,) = of("DynamicLossScaleM"), of("FixedLossScaleM")
  assert dynamic.init().loss_scale == 2.0**24
  assert fixed.init().loss_scale == 128.0
  np.testing.assert_allclose(of("one-hot")[0], np.log(4), rtol=1e-6)
  assert of("CustomTrain")[1].tolist() == [2.0, 2.0]
  (mixed,) = of("automatic differentiation")
  assert jax.grad(lambda x: mixed(x).sum())(jnp.ones(2)).tolist() == [3, 3]
  (o2,) = of("speed")
  assert set(products(o2, jnp.eye(2), jnp.eye(2))) == {"float16"}


# Keras ------------------------------------------------------------------------


def test_a_keras_model_trains_in_a_jax_loop(monkeypatch, tmp_path):
  # Keras writes its configuration into no home.
  monkeypatch.setenv("KERAS_BACKEND", "jax")
  monkeypatch.setenv("KERAS_HOME", str(tmp_path))
  import keras

  keras.utils.set_random_seed(0)
  # The same batch again and again, so that the model learns it by heart.
  inputs = np.random.default_rng(0).normal(size=(32, 20)).astype(np.float32)
  batch = {"x": inputs, "y": np.arange(32) % 10}
  path = "docs/porting/tensorflow_keras.md"
  with documents.reading(path, NOT_RUN, batches=[batch] * 20, jnp=jnp) as page:
    page.run(KERAS, 1)
    assert page["loss"] < 1.0  # At first it is log(10), or more.
    assert page["opt_state"].applied_steps == 20
    args = page["params"], page["others"], batch
    assert set(products(page["loss_fn"], *args)) == {"float16"}
    chosen = np.argmax(page["model"](inputs, training=False), axis=1)
    assert np.mean(chosen == batch["y"]) > 0.9
    # And the table of what Keras's optimizer becomes.
    (made,) = right_of(KERAS, "LossScaleOptimizer")
    assert jax.tree.structure(
      eval(made, page.names).init(page["params"])
    ) == jax.tree.structure(page["opt_state"])
    (read,) = right_of(KERAS, "optimizer.dynamic_scale")
    assert eval(read, page.names) == 2.0**15
    page.run(KERAS)
    assert set(products(page["loss_fn"], *args)) == {"float32"}
    mixed = eval(right_of(KERAS, "set_dtype_policy")[1], page.names)
    assert set(products(mixed, *args)) == {"float16"}
