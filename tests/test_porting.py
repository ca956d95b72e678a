"""The code on the pages of docs/porting runs, and their tables hold."""

import ast
import dataclasses
import inspect
import itertools
import json
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
from tests.autocast.programs import products
from tests.presets import traces
from tests.support import assert_same_bits

PAGES = {
  path.stem: path.read_text()
  for path in sorted((documents.ROOT / "docs" / "porting").glob("*.md"))
}
ALL = "\n".join(PAGES.values())
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
def test_the_old_lines_have_the_arguments_and_find_the_dictionary(system):
  new = keywords(statements(system, NEW)[0].value)
  given = list(old_arguments(system))
  assert given and given == [new] * len(given)

  expected = raw = traces.saved_dict(system, recorded(system))
  if system == "keras":  # Numbered there: the page gives them their names.
    raw = traces.state_dict(recorded(system)["state_dict"])
  names = checkpoint(system, raw)
  # All but the constructors, which need the originals.
  old = statements(system, OLD)
  run([x for x in old if not getattr(x.value, "keywords", None)], names)
  saved = dict(names["saved"])
  assert (saved.pop("dtype", None) is not None) == ("deepspeed" in system)
  assert saved == expected
  run(statements(system, NEW)[1:], {"ols": ols, "saved": names["saved"]})
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


# Transformations around the wrapper, which put its state further inside.
WRAPS = {
  "alone": lambda tx: tx,
  "recorded": lambda tx: ols.instruments.record(tx, capacity=100),
  "chained": lambda tx: optax.chain(tx, optax.identity()),
  "injected": lambda tx: optax.inject_hyperparams(lambda unused: tx)(unused=1),
  "partitioned": lambda tx: optax.partition(
    {"all": tx}, lambda params: jax.tree.map(lambda _: "all", params)
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
    assert_flags_choose_the_manager(page["create_optimizer"])


def assert_flags_choose_the_manager(create_optimizer):
  """Asserts which optimizer each flag gives."""
  opt = optax.sgd(1.0)
  for flag, use_fp16 in ((1024.0, False), (None, True), (-1, True)):
    assert create_optimizer(opt, flag, use_fp16) is opt
  for flag, first, then in ((0, 2.0**32, 2.0**31), (1024.0, 1024.0, 1024.0)):
    tx = create_optimizer(opt, flag)
    state = tx.init(jnp.zeros(1))
    assert ols.get_loss_scale(state) == first
    for _ in range(2):
      _, state = tx.update(jnp.full(1, 65504.0), state)
      assert state.skipped
    assert ols.get_loss_scale(state) == then
  for flag in (0.5, float("nan")):
    with pytest.raises(ValueError, match=f"^Invalid loss scale: {flag}$"):
      create_optimizer(opt, flag)


def calls(text):
  """Returns the keywords of each call in some code by the function's name."""
  found = [x for x in ast.walk(ast.parse(text)) if isinstance(x, ast.Call)]
  return {
    ast.unparse(call.func): {x.arg: x.value for x in call.keywords}
    for call in found
  }


def test_the_lines_for_ascend_have_the_arguments_of_the_old_ones():
  old = ast.parse(block(NPU, "= NPULossScaleOptimizer(")).body
  new = ast.parse(block(NPU, "presets.npu_loss_scale_optimizer(")).body
  assert keywords(old[0].value) == keywords(new[0].value)
  old_wrap, new_wrap = ast.unparse(old[2].value), ast.unparse(new[2].value)
  assert old_wrap.removeprefix("NPULossScaleOptimizer(") in (
    new_wrap.replace(", axis_name='data'", "")
  )

  old = calls(block(ACCELERATE, "TellMeStepOrLossHook"))
  schedule = ast.parse(block(ACCELERATE, "make_train_step")).body[0].value
  text = old["ExperimentalConfig"]["accelerate_train_mode"]
  assert ast.unparse(text) == ast.unparse(schedule.args[0])
  total = old["TellMeStepOrLossHook"]["total_step"].value
  assert total == old["estimator.train"]["max_steps"].value
  assert keywords(schedule) == {
    "total_steps": total,
    "precision_mode": old["NPURunConfig"]["precision_mode"].value,
  }


def test_the_rows_for_ascend_run():
  text = section(ACCELERATE)
  lines = re.findall(r"`(ols\.presets\.accelerate_train_mode\([^`]*\))`", text)
  assert len(lines) == 3
  for line in lines:
    assert eval(line.replace("\\|", "|")).init().low
  arguments = inspect.signature(ols.presets.accelerate_train_mode).parameters
  for name in ("total_step", "final_loss"):
    assert re.search(f"`{name}` is `(\\w+)`", text)[1] in arguments

  names = {"jax": jax, "time": time, "train_step": lambda x: 2 * x}
  title = "Without a counterpart"
  exec(*right_of(title, "graph mode"), names)
  names["loss"] = names["train_step"](jnp.float32(1.0))
  assert eval(*right_of(title, "device target"), names) == jax.default_backend()
  clock, wait = right_of(title, "timing in the log")
  assert eval(wait, names) == 2.0 and eval(clock, names) > 0


# MindSpore --------------------------------------------------------------------


def test_what_mindspores_model_becomes_runs():
  names = {
    "network": SimpleNamespace(apply=lambda params, x: jnp.tanh(x @ params)),
    "loss": lambda outputs, labels: jnp.mean((outputs - labels) ** 2),
  }
  path = "docs/porting/mindspore.md"
  with documents.reading(path, NOT_RUN, **names) as page:
    page.run()
  params, images = jnp.eye(2), jnp.ones((3, 2))
  assert set(products(page["forward"], params, images)) == {"float16"}
  assert jnp.isfinite(page["loss_fn"](params, images, images))
  assert page["rule"].init().loss_scale == 2.0**24


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
        scale = 2.0**23 if is_dynamic else 1
        assert (after, rule.skip) == (scale, is_dynamic)
        cases += 1
  assert cases == 2 + 4 + 4 * 4


def mlp(params, x):
  """Returns a product, in a scope called as LeNet-5's, and a product of it."""
  with jax.named_scope("LeNet5"), jax.named_scope("conv1"):
    x = jnp.tanh(x @ params)
  return x @ params


# The check of each row of MindSpore's tutorial, by words of the row.
TUTORIAL = {
  "DynamicLossScaleManager()": lambda rule: rule.init().loss_scale == 2.0**24,
  "FixedLossScaleManager()": lambda rule: rule.init().loss_scale == 128.0,
  "one-hot": lambda loss: np.isclose(loss, np.log(4)),
  "repeat": lambda batches: batches == [0, 1, 0, 1],
  "conv1": lambda o2: products(o2, *[jnp.eye(2)] * 2) == ["float16"] * 4,
  "manual": lambda o2: o2(jnp.ones((1, 1)), jnp.ones((1, 70000))) == 70000,
  "automatic differentiation": lambda mixed: (
    jax.grad(lambda x: mixed(x).sum())(jnp.ones(2)).tolist() == [3, 3]
  ),
  "CustomTrain": lambda step, grads: (
    step(jnp.ones(2))[0] == 2.0 and grads.tolist() == [2.0, 2.0]
  ),
  "half the memory": lambda o2: kept(o2) == kept(mlp) / 2,
  "communication": lambda tx: tx.init(jnp.ones(3, jnp.float16)),
  "speed": lambda o2: set(products(o2, *[jnp.eye(2)] * 2)) == {"float16"},
}


def kept(apply):
  """Returns the bytes that are kept for the backward pass."""
  _, backward = jax.vjp(apply, jnp.eye(32), jnp.ones((64, 32)))
  return sum(leaf.nbytes for leaf in jax.tree.leaves(backward))


@pytest.mark.parametrize("words", TUTORIAL)
def test_a_row_of_mindspores_tutorial_does_what_it_says(words):
  @jax.custom_vjp
  def function(x):
    return x * x

  # Not the derivative, so that it shows which one is taken.
  function.defvjp(lambda x: (x * x, x), lambda x, g: (3 * x * g,))
  _, rows = mindspore_tables()
  assert len(rows) == len(TUTORIAL)
  (right,) = [right for left, right in rows if words in left]
  names = {"ols": ols, "optax": optax, "rule": ols.FixedLossScale(8.0)}
  names |= {"network": SimpleNamespace(apply=mlp), "function": function}
  names |= {
    "logits": jnp.zeros((6, 4)),
    "labels": np.eye(4)[[0, 1, 2, 3, 1, 1]],
  }
  if words == "manual":
    names["network"] = SimpleNamespace(apply=lambda w, x: jnp.sum(w @ x))
  names |= {"dataset": range(2), "opt": optax.sgd(1.0)}
  names |= {"loss_fn": lambda x: jnp.sum(x**2)}
  names["scaled_grads"] = jnp.full(2, 2048.0)
  codes = [x for x in re.findall(r"`([^`]+)`", right) if "(" in x or " " in x]
  assert TUTORIAL[words](*[eval(code, names) for code in codes])


# Keras ------------------------------------------------------------------------


@pytest.fixture
def keras(monkeypatch, tmp_path):
  """Keras on JAX, which writes its configuration into no home."""
  monkeypatch.setenv("KERAS_BACKEND", "jax")
  monkeypatch.setenv("KERAS_HOME", str(tmp_path))
  import keras

  keras.utils.set_random_seed(0)
  yield keras
  keras.config.set_dtype_policy("float32")


def is_right_in_float16(page):
  """Returns whether the step is right and has all products in float16."""
  args = page["params"], page["others"]
  report = ols.instruments.check_step(
    page["train_step"], *args, page["opt_state"], page["batch"]
  )
  found = products(page["loss_fn"], *args, page["batch"])
  return report.ok and set(found) == {"float16"}


@pytest.fixture
def batches():
  """The same batch again and again, so that a model learns it by heart."""
  inputs = np.random.default_rng(0).normal(size=(32, 20)).astype(np.float32)
  return [{"x": inputs, "y": np.arange(32) % 10}] * 20


def test_a_keras_model_trains_in_a_jax_loop(keras, batches):
  path = "docs/porting/tensorflow_keras.md"
  with documents.reading(path, NOT_RUN, batches=batches, jnp=jnp) as page:
    page.run(KERAS, 1)
    assert page["loss"] < 1.0  # At first it is log(10), or more.
    assert page["opt_state"].applied_steps == 20
    assert is_right_in_float16(page)
    model, batch = page["model"], page["batch"]
    chosen = np.argmax(model(batch["x"], training=False), axis=1)
    assert np.mean(chosen == batch["y"]) > 0.9
    # And the table of what Keras's optimizer becomes.
    (made,) = right_of(KERAS, "LossScaleOptimizer")
    assert jax.tree.structure(
      eval(made, page.names).init(page["params"])
    ) == jax.tree.structure(page["opt_state"])
    (read,) = right_of(KERAS, "optimizer.dynamic_scale")
    assert eval(read, page.names) == 2.0**15
    page.run(KERAS)
    args = page["params"], page["others"], batch
    assert set(products(page["loss_fn"], *args)) == {"float32"}
    mixed = eval(right_of(KERAS, "set_dtype_policy")[1], page.names)
    assert set(products(mixed, *args)) == {"float16"}


@pytest.mark.slow
def test_a_keras_model_with_its_own_policy_trains_in_a_jax_loop(keras, batches):
  keras.config.set_dtype_policy("mixed_float16")
  lines, found = re.subn(
    r"@ols.autocast\ndef loss_fn.*?\n\n\n",
    block(KERAS, "jnp.float32(logits)") + "\n\n",
    block(KERAS, "import keras"),
    flags=re.DOTALL,
  )
  assert found == 1
  names = {"batches": batches, "jnp": jnp}
  exec(lines, names)
  assert names["loss"] < 1.0
  assert is_right_in_float16(names)
