"""What docs/porting.md shows works as it stands there, and its numbers hold."""

import ast
import contextlib
import dataclasses
import inspect
import io
import json
import re
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

PAGE = documents.read("docs/porting.md")
# What the old lines also set, and no preset does.
OTHERS = {"fp16", "--fp16", "enabled", "opt_level"}


def rows():
  """Returns the old and the new side of each row, by the preset's name."""
  pattern = (
    r'id="(\w+)">\n\n\*\*`\1`\*\*:.*?<tr valign.*?>(.*?)</td><td>(.*?)</td>'
  )
  found = re.findall(pattern, PAGE, flags=re.DOTALL)
  assert len(found) == PAGE.count('<td colspan="2" id=')
  return {name: (old, new) for name, old, new in found}


OLD = {name: old for name, (old, _) in rows().items()}
NEW = {name: new for name, (_, new) in rows().items()}
SYSTEMS = sorted(OLD)


def section(title):
  return documents.section(PAGE, title)


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
  exec(compile(code, "docs/porting.md", "exec"), names)


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


def test_the_table_has_one_row_for_each_preset():
  assert sorted(PRESETS) == SYSTEMS
  links = re.findall(r"\[(\w+)\]\(#(\w+)\)", PAGE)
  assert [name for name, target in links if name == target] == list(OLD)


def parameters(system):
  """Returns the defaults of a preset's arguments by their names."""
  signature = inspect.signature(getattr(ols.presets, system))
  return {name: x.default for name, x in signature.parameters.items()}


def test_the_arguments_and_keys_are_of_all_presets_in_the_order_of_the_page():
  table = cells(section("Arguments and keys"))
  assert [f"`{system}`" for system in OLD] == [row[0] for row in table]


@pytest.mark.parametrize("system", PRESETS)
def test_the_page_has_the_arguments_of_a_preset_and_their_defaults(system):
  _, arguments, _ = arguments_and_keys(system)
  shown = {
    name: eval(default) if default else inspect.Parameter.empty
    for name, default in re.findall(r"`(\w+)(?:=([^`]+))?`", arguments)
  }
  assert list(shown.items()) == list(parameters(system).items())


@pytest.mark.parametrize("system", PRESETS)
def test_the_page_has_the_keys_that_a_preset_saves_and_reads(system):
  *_, keys = arguments_and_keys(system)
  names = {"ols": ols}
  run(statements(system, NEW)[:1], names)
  rule = names["rule"]
  saved = ols.presets.to_state_dict(rule, rule.init())
  paths = [
    "/".join(x.key for x in path)
    for path, _ in jax.tree_util.tree_flatten_with_path(
      saved, is_leaf=lambda x: not isinstance(x, dict)
    )[0]
  ]
  assert sorted(re.findall(r"`([^`]+)`", keys)) == sorted(paths)
  assert (keys == "none") == (not saved)
  original = traces.saved_dict(system, recorded(system))
  assert saved.keys() == original.keys()


def arguments_and_keys(system):
  """Returns a preset's row of the table."""
  table = cells(section("Arguments and keys"))
  return next(row for row in table if row[0] == f"`{system}`")


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
  machines = [names["rule"].machine, rule.machine]
  if hasattr(rule.machine, "init_scale"):
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


def test_the_train_step_runs():
  step = documents.block(PAGE, "The train step", "def train_step")
  rule = ols.presets.torch(init_scale=8.0)
  names = {
    "jax": jax,
    "ols": ols,
    "optax": optax,
    "inner": optax.sgd(0.5),
    "rule": rule,
    "state": rule.init()._replace(loss_scale=jnp.float32(4.0)),
    "params": jnp.ones(2),
    "loss_fn": lambda params, batch: jnp.sum(params * batch),
  }
  exec(step, names)
  params, opt_state, loss = names["train_step"](
    names["params"], names["opt_state"], jnp.ones(2)
  )
  assert loss == 2.0
  assert jnp.all(params == 0.5)
  assert ols.get_loss_scale(opt_state) == 4.0
  opt_state = optax.tree.set(opt_state, loss_scale=jnp.float32(1024.0))
  assert ols.get_loss_scale(opt_state) == 1024.0


def test_what_the_page_names_of_the_library_exists():
  for path in set(re.findall(r"\bols\.(\w+(?:\.\w+)?)", PAGE)):
    value = ols
    for name in path.split("."):
      value = getattr(value, name)
  for field in set(re.findall(r"\bopt_state\.(\w+)", PAGE)):
    assert field in (*ols.LossScalingState._fields, "_replace")


def test_the_worked_example_prints_what_the_page_shows():
  title = "A Megatron run, continued"
  example = documents.block(PAGE, title, "from_state_dict")
  (shown,) = documents.blocks(section(title), "text")
  printed = io.StringIO()
  with contextlib.redirect_stdout(printed):
    exec(example, {})
  assert printed.getvalue() == shown


OLD_LINES = "NPULossScaleOptimizer("
NEW_LINES = "opt = ols.presets.npu_loss_scale_optimizer("


def npu(words):
  """Returns the block for Ascend that has some words in it."""
  return documents.block(PAGE, "NPULossScaleOptimizer, on Ascend", words)


def run_npu_lines(batches):
  """Runs the lines for Ascend as one script, and returns its names."""

  def loss_fn(params, batch):
    return jnp.mean(jnp.float32(jnp.float16(params) * jnp.float16(batch)))

  names = {
    "jax": jax,
    "ols": ols,
    "optax": optax,
    "opt": optax.sgd(0.5),
    "params": jnp.zeros(()),
    "loss_fn": loss_fn,
    "batches": batches,
  }
  printed = io.StringIO()
  with contextlib.redirect_stdout(printed):
    for words in (NEW_LINES, "def train_step", "loss_scale_metrics"):
      exec(npu(words), names)
  return names | {"printed": printed.getvalue()}


def test_the_lines_for_ascend_have_the_arguments_of_the_old_ones():
  old, new = (ast.parse(npu(words)).body for words in (OLD_LINES, NEW_LINES))
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
def test_the_lines_for_ascend_advise_a_smaller_first_s(capsys):
  names = run_npu_lines([jnp.ones(16)])
  steps = np.arange(1, 101)
  history = ols.instruments.replay(
    names["manager"],
    ols.instruments.History(
      steps, np.float32(steps * 0 + 1), np.float32(steps * 0 + 1), steps < 0
    ),
    saturating=True,
  ).history
  tx = ols.instruments.record(
    ols.loss_scaling(optax.sgd(0.5), names["manager"]), 100
  )
  names["opt_state"] = tx.init(jnp.zeros(()))._replace(
    recorded_steps=jnp.int32(100),
    recorded_scale=jnp.asarray(history.loss_scale),
    recorded_amax=jnp.asarray(history.amax),
    recorded_overflow=jnp.asarray(history.overflow),
  )
  exec(npu("instruments.advise"), names)
  advice, *_ = capsys.readouterr().out.splitlines()
  assert advice.startswith(
    "init_loss_scale: 2**32 -> 2**15: 34 steps overflowed"
  )


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
  exec(npu("def create_optimizer"), names)
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


def test_the_right_side_of_each_row_of_mixed_precision_runs():
  table = section("Mixed precision: levels and lists")
  lines = re.findall(r"`(ols\.autocast\(loss_fn.*?\))`(?=,|;| \|)", table)
  assert len(lines) >= table.count("\n| ") - 1
  x = jnp.eye(2)

  def loss_fn(x):
    with jax.named_scope("LeNet5"), jax.named_scope("conv1"):
      x = x @ x
    return jnp.sum(jnp.tanh(x) @ x)

  for line in lines:
    mixed = eval(line, {"ols": ols, "jnp": jnp, "loss_fn": loss_fn})
    low = [x for x in products(mixed, x) if x == "float16"]
    assert low, line


def test_what_mindspores_model_becomes_runs():
  title = "Mixed precision: levels and lists"
  block = documents.block(PAGE, title, "mindspore_cell")
  names = {
    "ols": ols,
    "optax": optax,
    "network": SimpleNamespace(apply=lambda params, x: jnp.tanh(x @ params)),
    "loss": lambda outputs, labels: jnp.mean((outputs - labels) ** 2),
  }
  exec(block, names)
  params, images = jnp.eye(2), jnp.ones((3, 2))
  assert set(products(names["forward"], params, images)) == {"float16"}
  opt_state = names["tx"].init(params)
  value_and_grad = ols.scaled_value_and_grad(names["loss_fn"], opt_state)
  _, grads = value_and_grad(params, images, images)
  _, opt_state = names["tx"].update(grads, opt_state, params)
  assert opt_state.skipped  # S starts at 2**24, which is too large here.
  assert ols.get_loss_scale(opt_state) == 2.0**23


def test_the_lines_for_accelerate_train_mode_run():
  title = "Low precision first: accelerate_train_mode, on Ascend"
  block = documents.block(PAGE, title, "make_train_step")
  tx = ols.loss_scaling(optax.sgd(0.1), ols.DynamicLossScale())
  params = jnp.ones((2, 2))
  names = {"ols": ols, "jax": jax, "tx": tx}
  names["loss_fn"] = lambda params, x: jnp.mean((x @ params) ** 2)
  exec(block, names)
  *_, state, _ = names["train_step"](
    params, tx.init(params), names["schedule_state"], jnp.eye(2)
  )
  assert (state.low, state.steps) == (True, 1)
  text = section(title)
  lines = re.findall(r"`(ols\.precision_schedule\([^`]*\))`", text)
  assert len(lines) == 3
  for line in lines:
    assert eval(line.replace("\\|", "|")).init().low
