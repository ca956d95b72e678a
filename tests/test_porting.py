"""What docs/porting shows works as it stands there, and its numbers hold."""

import ast
import contextlib
import dataclasses
import inspect
import io
import itertools
import json
import pathlib
import re
import time
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_lossscale as ols
from optax_lossscale.presets.declaration import PRESETS
from tests import documents
from tests import reference
from tests.autocast.programs import products
from tests.presets import traces

PAGES = {
  path.stem: path.read_text()
  for path in sorted((documents.ROOT / "docs" / "porting").glob("*.md"))
}
ALL = "\n".join(PAGES.values())
# What the old lines also set, and no preset does.
OTHERS = {"fp16", "--fp16", "enabled", "opt_level"}

# Sections that several tests read.
EXAMPLE = "A Megatron run, continued"
SATURATION = "Saturation mode: an overflow gives 65504"
NPU = "NPULossScaleOptimizer in a train step"
WATCHING = "Watching and tuning S"
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


# What follows the preset's name in its heading, and the page that has it.
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
  return next(run for run in runs if traces.is_importable(system, run))


def checkpoint(system, saved):
  """Returns the names that the old lines find the original's state under."""
  checkpoints = {
    "torch": {"scaler": saved},
    "torch_sharded": {"scaler": saved},
    "paddle": {"scaler": saved},
    "apex": {"amp": saved},
    "apex_hysteresis": {"PipelineMixedPrecisionPlugin": saved},
    "fairseq": {"last_optimizer_state": {**saved, "param_groups": []}},
    "metaseq": {"last_optimizer_state": {**saved, "param_groups": []}},
    "colossalai": {"grad_scaler": saved},
    "flax": {"dynamic_scale": saved},
  }
  scaler = SimpleNamespace(dtype="torch.float16", **saved)

  def parameter(name):
    return SimpleNamespace(name=name, asnumpy=lambda: saved[name])

  def load_checkpoint(path):
    return {name: parameter(name) for name in saved}

  def read(path):
    prefix, suffix = "loss_scale/", "/.ATTRIBUTES/VARIABLE_VALUE"
    if system != "tensorflow":
      prefix = suffix = ""
    tensors = {prefix + name + suffix: saved[name] for name in saved}
    return SimpleNamespace(get_tensor=tensors.__getitem__)

  return {
    "np": np,
    "path": "",
    "plugin": "PipelineMixedPrecisionPlugin",
    "optimizer": None,
    "checkpoint": checkpoints.get(system),
    "sd": {"optimizer": {"grad_scaler": saved}},
    "zero": {"optimizer_state_dict": {"loss_scaler": scaler}},
    "file": {"optimizer/vars": saved},
    "manager": SimpleNamespace(**saved),
    "loss_scale": SimpleNamespace(**saved),
    "scaler": SimpleNamespace(
      scale_value=parameter("scale_value"), counter=parameter("counter")
    ),
    "program": SimpleNamespace(state_dict=lambda: saved),
    "mindspore": SimpleNamespace(load_checkpoint=load_checkpoint),
    "tf": SimpleNamespace(train=SimpleNamespace(load_checkpoint=read)),
    "NPULossScaleOptimizer": lambda optimizer, manager: None,
  }


def linked():
  """Returns the class, page and anchor in each preset's row of the table."""
  found = re.findall(
    r"^\| [^|]+ \| ([^|]+) \| \[(\w+)\]\((\w+)\.md#([\w-]+)\) \|$",
    section("From system to system"),
    re.MULTILINE,
  )
  assert len({name for _, name, _, _ in found}) == len(found)
  return {name: (text, stem, anchor) for text, name, stem, anchor in found}


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


@pytest.mark.parametrize("stem", [x for x in PAGES if x != "README"])
def test_a_page_leads_to_the_train_step_at_once(stem):
  title, introduction, *_ = PAGES[stem].split("\n\n")
  assert re.fullmatch("# .*", title)
  assert "(README.md#the-train-step)" in introduction


def test_every_block_is_run_or_parsed_by_a_test():
  in_tables = "".join([*OLD.values(), *NEW.values()])
  # tests/precision/test_policy.py runs this one.
  covered = documents.blocks(section("Mixed precision: policies by name"))
  covered += documents.blocks(section(EXAMPLE), "text")
  covered += [
    block(*(eval(ast.unparse(x)) for x in node.args))
    for node in ast.walk(ast.parse(pathlib.Path(__file__).read_text()))
    if isinstance(node, ast.Call) and ast.unparse(node.func) == "block"
    if node.args and not isinstance(node.args[0], ast.Starred)
  ]
  found = [
    code
    for language in ("python", "sh", "json", "text")
    for code in documents.blocks(ALL, language)
  ]
  assert len(found) == ALL.count("```") / 2
  for code in found:
    assert code in in_tables or code in covered, code


def parameters(system):
  """Returns the defaults of a preset's arguments by their names."""
  signature = inspect.signature(getattr(ols.presets, system))
  return {name: x.default for name, x in signature.parameters.items()}


@pytest.mark.parametrize("system", PRESETS)
def test_a_preset_saves_the_keys_of_the_original(system):
  names = {"ols": ols}
  run(statements(system, NEW)[:1], names)
  rule = names["rule"]
  saved = ols.presets.to_state_dict(rule, rule.init())
  assert saved.keys() == traces.saved_dict(system, recorded(system)).keys()


def notes(system):
  """Returns what is in backticks in the text below a preset's lines."""
  return re.findall(r"`([^`]+)`", preset_section(system).split("</table>")[1])


def test_megatrons_documented_hysteresis_is_an_argument_of_both_calls():
  (added,) = [note for note in notes("megatron") if note.startswith("refill")]
  overflows = [True, False, True, True, *[False] * 3, True, False, True, True]
  scales = {}
  for argument in ("", added):
    fresh, resumed = [
      ast.unparse(node).replace("hysteresis=2", f"hysteresis=2, {argument}")
      for node in statements("megatron", NEW)
    ]
    model = reference.MODELS["megatron"](
      initial_scale=65536.0, **eval(f"dict({argument})")
    )
    names = {"ols": ols}
    exec(fresh, names)
    state = names["rule"].init()
    scales[argument] = []
    for step, overflow in enumerate(overflows):
      state = names["rule"].update(state, overflow)
      model.update(overflow)
      assert state.loss_scale == model.scale
      scales[argument].append(float(model.scale))
      if step == 2:  # From a checkpoint it goes on in the same way.
        names["saved"] = ols.presets.to_state_dict(names["rule"], state)
        exec(resumed, names)
        state = names["state"]
  assert scales[""] != scales[added]


def test_megatrons_found_inf_moves_the_rule_in_its_own_shape():
  (line,) = [x for x in notes("megatron") if x.startswith("state = ")]
  names = {"ols": ols}
  run(statements("megatron", NEW)[:1], names)
  names["state"] = start = names["rule"].init()
  for found_inf in ([0.0], [1.0], [1.0]):
    names["found_inf"] = np.array(found_inf, np.float32)
    exec(line, names)
  assert names["state"].loss_scale == start.loss_scale / 2
  assert jax.tree.map(jnp.shape, names["state"]) == jax.tree.map(
    jnp.shape, start
  )


def test_the_names_in_configuration_files_are_of_arguments():
  for systems, _, argument in cells(section("Names in configuration files")):
    for system in re.findall(r"`(\w+)`", systems):
      assert re.match(r"`(\w+)`", argument)[1] in parameters(system)


@pytest.mark.parametrize("system", SYSTEMS)
def test_the_new_lines_make_the_preset_and_read_what_the_original_saved(system):
  recording = recorded(system)
  saved = traces.saved_dict(system, recording)
  names = {"ols": ols, "saved": saved}
  fresh, resumed = statements(system, NEW)
  run([fresh], names)
  assert names["rule"].system == system
  assert "state" not in names
  run([resumed], names)
  assert names["rule"].system == system
  steps = len(recording["overflows"])
  scale = traces.scales(recording["scales"], steps)[steps // 2 - 1]
  if saved:
    assert names["state"].loss_scale == np.float32(scale)


@pytest.mark.parametrize("system", SYSTEMS)
def test_the_new_lines_have_the_arguments_of_the_old_ones(system):
  new = keywords(statements(system, NEW)[0].value)
  given = list(old_arguments(system))
  assert given
  assert given == [new] * len(given)


@pytest.mark.parametrize("system", SYSTEMS)
def test_a_checkpoint_gives_the_rule_of_a_fresh_start(system):
  names = {"ols": ols}
  fresh, resumed = statements(system, NEW)
  run([fresh], names)
  rule = names["rule"]
  names["saved"] = ols.presets.to_state_dict(rule, rule.init())
  run([resumed], names)
  assert names["rule"].skip == rule.skip
  assert jax.tree.all(
    jax.tree.map(jnp.array_equal, names["state"], rule.init())
  )
  # The first S is in the state by now, whatever the rule would start with.
  machines = [names["rule"]._machine, rule._machine]
  if hasattr(rule._machine, "init_scale"):
    machines = [dataclasses.replace(x, init_scale=1e4) for x in machines]
  assert machines[0] == machines[1]


@pytest.mark.parametrize("system", SYSTEMS)
def test_the_old_lines_find_the_dictionary_in_the_checkpoint(system):
  recording = recorded(system)
  expected = traces.saved_dict(system, recording)
  raw = expected
  if system == "keras":  # Numbered there: the page gives them their names.
    raw = traces.state_dict(recording["state_dict"])
  names = checkpoint(system, raw)
  # All but the constructors, which need the originals.
  run(
    (
      node
      for node in statements(system, OLD)
      if not getattr(node.value, "keywords", None)
    ),
    names,
  )
  saved = dict(names["saved"])
  assert (saved.pop("dtype", None) is not None) == ("deepspeed" in system)
  assert saved == expected
  _, resumed = statements(system, NEW)
  run([resumed], {"ols": ols, "saved": names["saved"]})


# Where the wrapper may be, as its state is then further inside.
WRAPS = {
  "alone": lambda tx: tx,
  "recorded": lambda tx: ols.instruments.record(tx, capacity=100),
  "chained": lambda tx: optax.chain(tx, optax.identity()),
  "injected": lambda tx: optax.inject_hyperparams(lambda unused: tx)(unused=1),
  "partitioned": lambda tx: optax.partition(
    {"all": tx}, lambda params: jax.tree.map(lambda _: "all", params)
  ),
}
wherever = pytest.mark.parametrize("wrap", WRAPS.values(), ids=WRAPS)


def right_of(title, left):
  """Returns the code on the right of a row that has some words on its left."""
  (row,) = [x for x in cells_of_all(section(title)) if left in x[0]]
  return re.findall(r"`([^`]+)`", row[1])


def cells_of_all(text):
  """Returns the rows of all Markdown tables in a text, heads included."""
  lines = [line for line in text.splitlines() if line.startswith("| ")]
  return [
    [x.strip().replace("\\|", "|") for x in re.split(r"(?<!\\)\|", line)[1:-1]]
    for line in lines
  ]


def run_train_step(wrap):
  """Runs the page's train step once, and returns the names."""
  text = block("The train step", "loss_scaling")
  readme = documents.read("README.md")
  text += re.search("^@jax.jit\ndef train_step.*?\n\n", readme, re.M | re.S)[0]
  first = "tx = ols.loss_scaling(inner, rule)\n"
  assert text.startswith(first)
  rule = ols.presets.torch(init_scale=8.0)
  names = {
    "jax": jax,
    "jnp": jnp,
    "ols": ols,
    "optax": optax,
    "tx": wrap(ols.loss_scaling(optax.sgd(0.5), rule)),
    "rule": rule,
    "state": rule.init()._replace(loss_scale=jnp.float32(4.0)),
    "params": jnp.ones(2),
    "mixed_loss_fn": lambda params, batch: jnp.sum(params * batch),
  }
  exec(text.removeprefix(first), names)
  result = names["train_step"](names["params"], names["opt_state"], jnp.ones(2))
  return names | dict(zip(("params", "opt_state", "loss"), result, strict=True))


@wherever
def test_the_train_step_runs(wrap):
  names = run_train_step(wrap)
  opt_state = names["opt_state"]
  assert names["loss"] == 2.0
  assert jnp.all(names["params"] == 0.5)
  assert ols.get_loss_scale(opt_state) == 4.0
  opt_state = optax.tree.set(opt_state, loss_scale=jnp.float32(1024.0))
  assert ols.get_loss_scale(opt_state) == 1024.0


@wherever
def test_s_is_set_and_read_in_the_loop_wherever_loss_scaling_is(wrap):
  names = run_train_step(wrap)
  structure = jax.tree.structure(names["opt_state"])
  for line in right_of("The train step", "scaler.update(new_scale)"):
    exec(line, names)
  assert jax.tree.structure(names["opt_state"]) == structure
  (read,) = right_of("The train step", "get_scale()")
  assert eval(read, names) == 1024.0
  saved = right_of("The train step", "scaler.state_dict()")[-1]
  assert eval(saved, names)["scale"] == 1024.0


@wherever
def test_skipped_steps_are_seen_in_the_loop_wherever_loss_scaling_is(wrap):
  names = run_train_step(wrap)
  *_, names["opt_state"], _ = names["train_step"](
    names["params"], names["opt_state"], jnp.array([1.0, jnp.inf])
  )
  overflow, *keys = right_of("The train step", "found_inf`, skipped")
  assert eval(overflow, names)
  metrics = overflow.removesuffix('["overflow"]')
  assert [int(eval(metrics + key, names)) for key in keys] == [1, 1]
  (applied, *_) = right_of(NPU, "`global_step`")
  assert eval(applied, names) == 1
  names["metrics"] = eval(metrics, names)
  assert eval(right_of(NPU, "all steps")[0], names) == 2


def test_what_the_pages_name_of_the_library_exists():
  for path in set(re.findall(r"\bols\.(\w+(?:\.\w+)?)", ALL)):
    value = ols
    for name in path.split("."):
      value = getattr(value, name)
  for field in set(re.findall(r"\bopt_state\.(\w+)", ALL)):
    assert field in (*ols.LossScalingState._fields, "_replace")


def test_the_worked_example_prints_what_the_page_shows():
  example = block(EXAMPLE, "from_state_dict")
  (shown,) = documents.blocks(section(EXAMPLE), "text")
  printed = io.StringIO()
  with contextlib.redirect_stdout(printed):
    exec(example, {})
  assert printed.getvalue() == shown


OLD_LINES = "NPULossScaleOptimizer("
NEW_LINES = "opt = ols.presets.npu_loss_scale_optimizer("


def run_npu_lines(batches):
  """Runs the lines for Ascend as one script, and returns its names."""

  def loss_fn(params, batch):
    return jnp.mean(jnp.float32(jnp.float16(params) * jnp.float16(batch)))

  names = {
    "jax": jax,
    "jnp": jnp,
    "ols": ols,
    "optax": optax,
    "opt": optax.sgd(0.5),
    "params": jnp.zeros(()),
    "loss_fn": loss_fn,
    "batches": batches,
  }
  printed = io.StringIO()
  with contextlib.redirect_stdout(printed):
    exec(block(NPU, NEW_LINES), names)
    exec(block(NPU, "def train_step"), names)
    exec(block(WATCHING, "loss_scale_metrics"), names)
  return names | {"printed": printed.getvalue()}


def test_the_lines_for_ascend_have_the_arguments_of_the_old_ones():
  old = ast.parse(block(NPU, OLD_LINES)).body
  new = ast.parse(block(NPU, NEW_LINES)).body
  assert keywords(old[0].value) == keywords(new[0].value)
  old_wrap, new_wrap = old[2].value, new[2].value
  assert ast.unparse(old_wrap).removeprefix("NPULossScaleOptimizer(") in (
    ast.unparse(new_wrap).replace(", axis_name='data'", "")
  )


@pytest.mark.slow
def test_the_lines_for_ascend_train_and_count_how_often_s_drops():
  names = run_npu_lines([jnp.ones(16)] * 100)
  state = names["opt_state"]
  # The gradient of each worker is S, finite in float16 up to 2**15, and each
  # halving takes two skipped steps.
  assert ols.get_loss_scale(state) == 2.0**15
  assert (state.skipped_steps, state.applied_steps) == (34, 66)
  assert names["params"] == -0.5 * 66
  assert names["printed"].splitlines() == [
    "S 32768, dropped 17 times",
    "last step finite: True",
    "applied 66",
    "skipped 34",
  ]


@pytest.mark.slow
def test_the_lines_for_ascend_skip_on_all_workers_if_one_saturates():
  # Of two rows of a worker: with S = 2**15 their gradient is 65504, and that of
  # the other workers and the mean of all are far below.
  clean = jnp.ones(16)
  saturated = clean.at[5].set(65504.0 / 2**14 - 1)
  names = run_npu_lines([clean] * 35 + [saturated])
  assert names["opt_state"].skipped
  assert names["opt_state"].amax == 65504.0
  assert names["opt_state"].applied_steps == 1


def create_optimizer(*args, **kwargs):
  """Calls the page's function of that name."""
  names = {"ols": ols}
  exec(block("The loss-scale flag of a BERT script", "create_optimizer"), names)
  return names["create_optimizer"](*args, **kwargs)


@pytest.mark.parametrize(
  ("flag", "use_fp16"),
  [(1024.0, False), (0.5, False), (None, True), (-1, True)],
)
def test_the_flag_for_no_loss_scaling_gives_the_bare_optimizer(flag, use_fp16):
  opt = optax.sgd(1.0)
  assert create_optimizer(opt, flag, use_fp16) is opt
  loss_fn = jnp.square
  loss, grad = ols.scaled_value_and_grad(loss_fn, 1.0)(jnp.float32(3.0))
  assert (loss, grad) == (9.0, 6.0)


def test_the_flag_0_gives_a_dynamic_loss_scale():
  tx = create_optimizer(optax.sgd(1.0), 0)
  rule = ols.presets.npu_exponential(
    init_loss_scale=2.0**32,
    incr_every_n_steps=1000,
    decr_every_n_nan_or_inf=2,
    incr_ratio=2,
    decr_ratio=0.5,
  )
  params = jnp.float32(0.0)
  state, expected = tx.init(params), rule.init()
  update, move = jax.jit(tx.update), jax.jit(rule.update)
  for bad in [True, False, True, *[False] * 1001, True, True]:
    # 65504: the check is that for hardware in saturation mode.
    _, state = update(jnp.where(bad, 65504.0, 1.0), state, params)
    expected = move(expected, bad)
    assert ols.get_loss_scale(state) == expected.loss_scale
  assert expected.loss_scale == 2.0**31


@pytest.mark.parametrize("flag", [1, 1024.0])
def test_the_flag_of_1_and_above_gives_a_fixed_loss_scale(flag):
  tx = create_optimizer(optax.sgd(1.0), flag)
  params = jnp.float32(0.0)
  state = tx.init(params)
  for gradient, skipped in ((8.0, False), (65504.0, True)):
    updates, state = tx.update(jnp.float32(gradient), state, params)
    assert ols.get_loss_scale(state) == flag
    assert state.skipped == skipped
    assert updates == (0.0 if skipped else -8.0 / flag)


@pytest.mark.parametrize("flag", [0.5, -2, float("nan")])
def test_any_other_flag_is_an_error(flag):
  with pytest.raises(ValueError, match=f"^Invalid loss scale: {flag}$"):
    create_optimizer(optax.sgd(1.0), flag)


def test_the_flag_goes_together_with_is_distributed():
  tx = create_optimizer(
    optax.sgd(1.0), 8.0, is_distributed=True, axis_name="data"
  )
  state = tx.init(jnp.float32(0.0))
  update = jax.vmap(lambda g: tx.update(g, state)[0], axis_name="data")
  assert jax.jit(update)(jnp.array([8.0, 65504.0])).tolist() == [0.0, 0.0]


def test_the_comparison_lists_each_trace_once():
  table = cells(section("How this was compared"))
  assert [row[0] for row in table] == [f"`{x}`" for x in traces.SYSTEMS]


def test_systems_for_reinforcement_learning_have_the_rules_of_their_scalers():
  title = "Systems for reinforcement learning"
  # With the arguments in their sources, and the scalers' own defaults.
  for system, name, arguments in (
    ("verl with FSDP", "torch_sharded", {"growth_interval": 400}),
    (
      "verl with Megatron",
      "megatron",
      {"initial_scale": 32768, "min_scale": 1},
    ),
    ("OpenRLHF with ZeRO", "deepspeed", {}),
  ):
    (line,) = re.findall(
      rf"^\| {system} \|.*`(ols[^`]*)` \|$", section(title), re.MULTILINE
    )
    rule, model = eval(line), reference.MODELS[name](**arguments)
    move, state = jax.jit(rule.update), rule.init()
    for overflow in (*[True] * 5, *[False] * 1001, True, *[False] * 401):
      state = move(state, overflow)
      model.update(overflow)
      assert state.loss_scale == model.scale, system


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


def mindspore_level(amp_level, version, device):
  """Returns the level of MindSpore's `Model` and whether its S is dynamic.

  By `_check_level` and `_config_level` of mindspore/train/amp.py: as in 2.10.0,
  and as documented from 2.4.0 on; before, as documented from 1.7 to 2.3.1.
  """
  if amp_level == "auto" and version < (2, 4):
    amp_level = {"GPU": "O2", "Ascend": "O3"}[device]
  return amp_level, amp_level == "O2"


def mindspore_tables():
  """Returns the rows of MindSpore's levels, and those of its tutorial."""
  levels, tutorial = section(MODEL).split("\n\n| in MindSpore's")
  return cells(levels), cells("| in MindSpore's" + tutorial)


def test_the_levels_of_mindspores_model_are_those_of_its_sources():
  above = {"ols": ols, "optax": optax, "network": SimpleNamespace(apply=len)}
  exec(block(MODEL, "mindspore_cell"), above)
  levels, _ = mindspore_tables()
  cases = 0
  for name, level, text in levels:
    code = re.match(r"`([^`]+)`", text)
    rule = eval(code[1], {"ols": ols}) if code else above["rule"]
    assert code or text == "the rule above"
    after = rule.update(rule.init(), overflow=True).loss_scale
    versions = [(2, 3)] if "to MindSpore 2.3" in name else [(2, 4), (2, 10)]
    devices = [x for x in ("GPU", "Ascend") if x in name] or ["GPU", "Ascend"]
    for amp_level in re.findall(r'"(\w+)"', name):
      for version, device in itertools.product(versions, devices):
        expected, is_dynamic = mindspore_level(amp_level, version, device)
        assert level in (f'`"{expected}"`', "the same")
        assert (after, rule.skip) == (
          (2.0**23, True) if is_dynamic else (1, False)
        )
        cases += 1
  assert cases == 2 + 4 + 4 * 4


def tutorial(words, **names):
  """Runs what a row of MindSpore's tutorial names of this library."""
  _, rows = mindspore_tables()
  (right,) = [right for left, right in rows if words in left]
  codes = [x for x in re.findall(r"`([^`]+)`", right) if "(" in x or " " in x]
  names = {"ols": ols, "optax": optax} | names
  values = [eval(code, names) for code in codes]
  return values if len(values) > 1 else values[0]


def mlp(params, x):
  """Returns a product, in a scope called as LeNet-5's, and a product of it."""
  with jax.named_scope("LeNet5"), jax.named_scope("conv1"):
    x = jnp.tanh(x @ params)
  return x @ params


def test_mindspores_managers_have_their_defaults():
  cell = dict(tutorial("DynamicLossScaleManager()").arguments)
  manager = parameters("mindspore")
  assert list(cell.values()) == list(manager.values())
  given = [x for x in notes("mindspore_cell") if "=" in x]
  assert eval(f"dict({','.join(given)})") == cell
  fixed = tutorial("FixedLossScaleManager()")
  assert fixed.init().loss_scale == 128.0
  assert fixed.skip
  model = reference.MODELS["mindspore_fixed"]()
  assert fixed.init().loss_scale == model.scale


def test_one_hot_labels_give_the_mean_cross_entropy():
  logits = np.random.default_rng(0).normal(size=(6, 4)).astype(np.float32)
  chosen = np.array([0, 1, 2, 3, 1, 1])
  loss = tutorial("one-hot", logits=logits, labels=np.eye(4)[chosen])
  probabilities = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
  expected = -np.log(probabilities[np.arange(6), chosen]).mean()
  np.testing.assert_allclose(loss, expected, rtol=1e-6)


def test_a_repeated_dataset_is_passed_over_anew():
  class Shuffled:
    passes = 0

    def __iter__(self):
      self.passes += 1
      return iter([f"{self.passes}a", f"{self.passes}b"])

  batches = tutorial("repeat", dataset=Shuffled())
  assert batches == ["1a", "1b", "2a", "2b"]


def test_mindspores_o2_has_conv1_in_float16_already():
  network = SimpleNamespace(apply=mlp)
  o2 = tutorial("conv1", network=network)
  alone = ols.autocast(mlp, "O2", overrides={"LeNet5/conv1": jnp.float16})
  x = jnp.eye(2)
  assert str(jax.make_jaxpr(o2)(x, x)) == str(jax.make_jaxpr(alone)(x, x))
  assert products(o2, x, x) == ["float16"] * 4


def test_a_level_keeps_the_sum_that_a_cast_by_hand_loses():
  def apply(params, x):
    return jnp.sum(params @ x)

  params, x = jnp.ones((1, 1)), jnp.ones((1, 70000))
  assert apply(params.astype(jnp.float16), x.astype(jnp.float16)) == jnp.inf
  level = tutorial("manual", network=SimpleNamespace(apply=apply))
  assert level(params, x) == 70000.0
  assert set(products(level, params, x)) == {"float16"}


def test_a_custom_vjp_is_used_under_autocast():
  @jax.custom_vjp
  def function(x):
    return x @ x

  # Not the derivative, so that it shows which one is taken.
  function.defvjp(lambda x: (x @ x, x), lambda x, g: (3 * (g @ x),))
  mixed = tutorial("automatic differentiation", function=function)
  x = jnp.array([[1.0, 2.0], [0.0, 1.0]])
  gradient = jax.grad(lambda x: jnp.sum(mixed(x)))
  assert jnp.array_equal(gradient(x), 3 * jnp.ones((2, 2)) @ x)
  assert set(products(gradient, x)) == {"float16"}


def test_a_step_of_ones_own_unscales_for_an_optimizer_that_does_not():
  def loss_fn(x):
    return jnp.sum(jnp.square(x))

  x = jnp.array([1.0, -3.0])
  value_and_grad = ols.scaled_value_and_grad(loss_fn, 1024.0)
  loss, scaled_grads = value_and_grad(x)
  of_page, unscaled = tutorial(
    "CustomTrain", loss_fn=loss_fn, scaled_grads=scaled_grads
  )
  assert jax.tree.all(
    jax.tree.map(jnp.array_equal, of_page(x), (loss, scaled_grads))
  )
  assert loss == 10.0
  assert jnp.array_equal(unscaled, 2 * x)


def test_float16_halves_what_is_kept_for_the_backward_pass():
  params, x = jnp.eye(32), jnp.ones((64, 32))

  def kept(apply):
    _, backward = jax.vjp(apply, params, x)
    return sum(leaf.nbytes for leaf in jax.tree.leaves(backward))

  o2 = tutorial("half the memory", network=SimpleNamespace(apply=mlp))
  assert kept(o2) == kept(mlp) / 2
  gradient = jax.grad(lambda params: jnp.sum(o2(params, x)))(params)
  assert (gradient.dtype, params.dtype) == (jnp.float32, jnp.float32)


def test_gradients_of_float16_parameters_travel_as_float16():
  tx = tutorial(
    "communication", opt=optax.sgd(1.0), rule=ols.FixedLossScale(8.0)
  )
  params = jnp.ones(3, jnp.float16)
  state = tx.init(params)
  update = jax.make_jaxpr(tx.update, axis_env=[("data", 2)])
  traffic = re.findall(
    r":(f\w+)\[3\]\S* = psum", str(update(params, state, params))
  )
  assert traffic == ["f16"]


def test_o2_has_every_product_in_float16():
  o2 = tutorial("speed", network=SimpleNamespace(apply=mlp))
  assert set(products(o2, jnp.eye(2), jnp.eye(2))) == {"float16"}


def test_what_mindspores_model_becomes_runs():
  names = {
    "ols": ols,
    "optax": optax,
    "network": SimpleNamespace(apply=lambda params, x: jnp.tanh(x @ params)),
    "loss": lambda outputs, labels: jnp.mean((outputs - labels) ** 2),
  }
  exec(block(MODEL, "mindspore_cell"), names)
  params, images = jnp.eye(2), jnp.ones((3, 2))
  assert set(products(names["forward"], params, images)) == {"float16"}
  opt_state = names["tx"].init(params)
  value_and_grad = ols.scaled_value_and_grad(names["loss_fn"], opt_state)
  _, scaled_grads = value_and_grad(params, images, images)
  _, opt_state = names["tx"].update(scaled_grads, opt_state, params)
  assert opt_state.skipped  # S starts at 2**24, which is too large here.
  assert ols.get_loss_scale(opt_state) == 2.0**23


def calls(text):
  """Returns the keywords of each call in some code by the function's name."""
  found = [x for x in ast.walk(ast.parse(text)) if isinstance(x, ast.Call)]
  return {
    ast.unparse(call.func): {x.arg: x.value for x in call.keywords}
    for call in found
  }


def test_the_lines_for_accelerate_train_mode_say_what_the_old_ones_do():
  old = calls(block(ACCELERATE, "TellMeStepOrLossHook"))
  new = ast.parse(block(ACCELERATE, "make_train_step")).body
  schedule = new[0].value
  text = old["ExperimentalConfig"]["accelerate_train_mode"]
  assert ast.unparse(text) == ast.unparse(schedule.args[0])
  total = old["TellMeStepOrLossHook"]["total_step"].value
  assert total == old["estimator.train"]["max_steps"].value
  assert keywords(schedule) == {
    "total_steps": total,
    "precision_mode": old["NPURunConfig"]["precision_mode"].value,
  }


@pytest.mark.parametrize("name", ["alone", "recorded", "chained"])
def test_the_loop_for_accelerate_train_mode_goes_by_applied_steps(name):
  # S comes down from 2**32 to 2**14, and each halving takes two steps.
  manager = ols.presets.npu_exponential(
    init_loss_scale=2.0**32, incr_every_n_steps=1000, decr_ratio=0.5
  )
  tx = ols.presets.npu_loss_scale_optimizer(optax.sgd(0.0), manager)
  tx = WRAPS[name](tx)
  params = jnp.ones((2, 2))
  x = 1.5 * jnp.eye(2)
  names = {"ols": ols, "jax": jax, "tx": tx, "params": params}
  names |= {"opt_state": tx.init(params), "batches": iter(lambda: x, None)}
  names["loss_fn"] = lambda params, x: 8 * jnp.mean(x @ params)
  lines = block(ACCELERATE, "make_train_step")
  exec(lines.replace("10_000", "50"), names)
  metrics = ols.loss_scale_metrics(names["opt_state"])
  assert (metrics["applied_steps"], metrics["skipped_steps"]) == (50, 36)
  assert not names["schedule_state"].low
  (loop,) = right_of(ACCELERATE, "in mode *loss*, where")
  condition = loop.removeprefix("while ").removesuffix(":")
  assert not eval(condition.replace("10_000", "50"), names)
  assert eval(condition.replace("10_000", "51"), names)
  # The loop that the page warns of, in the numbers of the page.
  state = names["schedule"].init()
  opt_state = tx.init(params)
  for _ in range(50):
    params, opt_state, state, _ = names["train_step"](
      params, opt_state, state, x
    )
  assert (state.steps, state.low) == (14, True)


def test_the_rows_for_accelerate_train_mode_run():
  text = section(ACCELERATE)
  lines = re.findall(r"`(ols\.presets\.accelerate_train_mode\([^`]*\))`", text)
  assert len(lines) == 3
  for line in lines:
    assert eval(line.replace("\\|", "|")).init().low


@pytest.mark.parametrize(
  ("name", "mode", "value", "before", "at"),
  [("total_step", "step", 100, 89, 90), ("final_loss", "loss", 2.0, 2.2, 2.0)],
)
def test_the_names_of_the_hook_are_told_by_the_page(
  name, mode, value, before, at
):
  renamed = re.search(f"`{name}` is `(\\w+)`", section(ACCELERATE))[1]
  schedule = ols.presets.accelerate_train_mode(
    f"fast|{mode}", **{renamed: value}
  )
  state = schedule.init()
  assert schedule.update(state, **{mode: before}).low
  assert not schedule.update(state, **{mode: at}).low


@pytest.mark.slow
def test_clipping_sees_what_compute_gradients_returned_on_ascend():
  clipped, *_, unscaled = right_of(NPU, "`compute_gradients`")
  names = {"optax": optax, "ols": ols, "opt": optax.sgd(1.0)}
  exec(clipped, names)
  # As the block above the row has it.
  opt = optax.chain(ols.pmean_gradients("data"), names["opt"])
  manager = ols.presets.npu_fixed(loss_scale=8.0)
  tx = ols.presets.npu_loss_scale_optimizer(
    opt, manager, is_distributed=True, axis_name="data"
  )
  state = tx.init(jnp.zeros(2))
  # The true gradients of two workers: each is too large, their mean is not.
  grads = jnp.array([[8.0, 0.0], [-7.0, 0.5]])
  update = jax.vmap(lambda g: tx.update(g * 8, state)[0], axis_name="data")
  np.testing.assert_array_equal(update(grads), [[-0.5, -0.25]] * 2)
  # And one whose mean is too large: its norm becomes 1.
  np.testing.assert_allclose(
    jnp.linalg.norm(update(jnp.full((2, 2), 5.0)), axis=1), 1.0, rtol=1e-6
  )
  names |= {"opt_state": state, "scaled_grads": grads * 8}
  assert jnp.array_equal(eval(unscaled, names), grads)


def test_the_lines_beside_what_has_no_counterpart_run():
  title = "Without a counterpart"
  names = {"jax": jax, "time": time, "train_step": lambda x: 2 * x}
  (compiled,) = right_of(title, "graph mode")
  exec(compiled, names)
  names["loss"] = names["train_step"](jnp.float32(1.0))
  (backend,) = right_of(title, "device target")
  assert eval(backend, names) == jax.default_backend()
  clock, wait = right_of(title, "timing in the log")
  assert eval(wait, names) == 2.0 and eval(clock, names) > 0
  for words in ("session's configuration", "porting tool"):
    assert right_of(title, words) == []


def test_the_check_for_saturation_mode_skips_what_was_clipped():
  names = {"ols": ols, "jnp": jnp, "inner": optax.sgd(1.0)}
  names["rule"] = ols.FixedLossScale(8.0)
  exec(block(SATURATION, "ols.saturated"), names)
  state = names["tx"].init(jnp.zeros(2))
  update = jax.jit(
    lambda scaled_grads: names["tx"].update(scaled_grads, state)[1].skipped
  )
  for gradient in (65504.0, -65504.0, jnp.inf, jnp.nan):
    assert update(jnp.array([1.0, gradient]))
  assert not update(jnp.array([1.0, 65472.0]))


@pytest.fixture
def keras(monkeypatch, tmp_path):
  """Keras on JAX, which writes its configuration into no home."""
  monkeypatch.setenv("KERAS_BACKEND", "jax")
  monkeypatch.setenv("KERAS_HOME", str(tmp_path))
  import keras

  keras.utils.set_random_seed(0)
  yield keras
  keras.config.set_dtype_policy("float32")


def run_keras_loop(lines):
  """Runs the page's loop on one batch, and returns its names."""
  inputs = np.random.default_rng(0).normal(size=(32, 20)).astype(np.float32)
  batch = {"x": inputs, "y": np.arange(32) % 10}
  names = {"batches": [batch] * 20, "jnp": jnp}
  exec(lines, names)
  return names


def is_right_in_float16(names):
  """Returns whether the step is right and has all products in float16."""
  args = names["params"], names["others"]
  report = ols.instruments.check_step(
    names["train_step"], *args, names["opt_state"], names["batch"]
  )
  found = products(names["loss_fn"], *args, names["batch"])
  return report.ok and set(found) == {"float16"}


def test_a_keras_model_trains_in_a_jax_loop(keras):
  names = run_keras_loop(block(KERAS, "import keras"))
  assert names["loss"] < 1.0  # At first it is log(10), or more.
  assert names["opt_state"].applied_steps == 20
  assert is_right_in_float16(names)
  model, batch = names["model"], names["batch"]
  for variables, values in (
    (model.trainable_variables, names["params"]),
    (model.non_trainable_variables, names["others"]),
  ):
    for variable, value in zip(variables, values, strict=True):
      np.testing.assert_array_equal(variable.value, value)
  chosen = np.argmax(model(batch["x"], training=False), axis=1)
  assert np.mean(chosen == batch["y"]) > 0.9
  # And the table of what Keras's optimizer becomes.
  (made,) = right_of(KERAS, "LossScaleOptimizer")
  assert jax.tree.structure(
    eval(made, names).init(names["params"])
  ) == jax.tree.structure(names["opt_state"])
  (read,) = right_of(KERAS, "optimizer.dynamic_scale")
  assert eval(read, names) == 2.0**15
  exec(block(KERAS, "jnp.float32(logits)"), names)
  args = names["params"], names["others"], batch
  assert set(products(names["loss_fn"], *args)) == {"float32"}
  mixed = eval(right_of(KERAS, "set_dtype_policy")[1], names)
  assert set(products(mixed, *args)) == {"float16"}


@pytest.mark.slow
def test_a_keras_model_with_its_own_policy_trains_in_a_jax_loop(keras):
  keras.config.set_dtype_policy("mixed_float16")
  lines, found = re.subn(
    r"@ols.autocast\ndef loss_fn.*?\n\n\n",
    block(KERAS, "jnp.float32(logits)") + "\n\n",
    block(KERAS, "import keras"),
    flags=re.DOTALL,
  )
  assert found == 1
  names = run_keras_loop(lines)
  assert names["loss"] < 1.0
  assert is_right_in_float16(names)


@pytest.mark.slow
def test_keras_does_what_the_page_says_of_its_optimizer(keras):
  optimizer = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(1.0))
  weight = keras.Variable([0.0])
  optimizer.build([weight])
  # It divides by S, whether the loss was multiplied by it or not.
  (after,), _ = optimizer.stateless_apply(
    [x.value for x in optimizer.variables], [jnp.ones(1)], [weight.value]
  )
  assert after == -(2.0**-15)
  # Under jit the S of the first call stays.
  scale_loss = jax.jit(optimizer.scale_loss)
  assert scale_loss(1.0) == 2.0**15
  optimizer.dynamic_scale.assign(4.0)
  assert (scale_loss(1.0), optimizer.scale_loss(1.0)) == (2.0**15, 4.0)
  # A step that is skipped leaves its mark on the batch statistics.
  norm, dense = keras.layers.BatchNormalization(), keras.layers.Dense(1)
  model = keras.Sequential([keras.Input((4,)), norm, dense])
  model.compile(
    keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1)), loss="mse"
  )
  before = np.asarray(dense.kernel.value)
  model.fit(np.full((4, 4), np.inf), np.zeros((4, 1)), verbose=0)
  assert model.optimizer.dynamic_scale.value == 2.0**14
  np.testing.assert_array_equal(dense.kernel.value, before)
  assert np.isnan(norm.moving_variance.value).all()
