"""Every preset: how it moves S, its arguments, and its rule as a value."""

import inspect
import pickle
import re
import textwrap

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_lossscale as ols
from optax_lossscale import presets
from optax_lossscale.presets import _keys
from optax_lossscale.presets import declaration
from tests import documents
from tests import support
from tests.presets import systems
from tests.presets import traces

each_system = pytest.mark.parametrize("system", systems.SYSTEMS)
# The rule of each other system is like that of one of these.
UNLIKE = "apex colossalai deepspeed fairseq flax keras megatron mindspore"
UNLIKE += " mindspore_fixed npu_fixed paddle tensorflow tf_exponential torch"


# How S moves.


def test_every_preset_has_a_trace_of_its_original():
  assert sorted(systems.SYSTEMS) == traces.SYSTEMS


@pytest.mark.parametrize(
  "system", support.slow_but(UNLIKE.split(), systems.SYSTEMS)
)
def test_a_preset_moves_s_saves_and_resumes_as_the_original_did(system):
  compared = []
  for runs in traces.groups(system):
    compared += traces.follow(system, runs)
  version = traces.load(system)["version"]
  row = f"`{system}`", version, str(len(compared)), str(sum(compared)), "0"
  guide = documents.read("docs/porting/README.md")
  comparison = documents.section(guide, "How this was compared")
  assert f"| {' | '.join(row)} |" in comparison.splitlines()


@pytest.mark.parametrize(("refill", "halvings"), [("growth", 1), ("clean", 0)])
def test_megatron_counts_overflows_as_its_code_does_or_its_documentation(
  refill, halvings
):
  rule = presets.megatron(initial_scale=8.0, refill=refill)
  state = rule.init()
  for overflow in (True, False, True):
    state = rule.update(state, overflow)
  assert state.loss_scale == 8.0 / 2**halvings


@pytest.mark.parametrize("rate", [0.05, 0.9])
def test_deepspeed_without_zero_has_the_preset_that_the_page_names(rate):
  page = documents.read("docs/porting/megatron_deepspeed.md")
  words = "delayed_shift=1, raise_error_at_min_scale=False"
  sentence = (
    "Without ZeRO, the rule of DeepSpeed 0.19.8 is `ols.presets.deepspeed"
  )
  assert f"{sentence}({words})`" in documents.one_line(page)
  arguments = eval(f"dict({words})")
  rule = presets.deepspeed(init_scale=64.0, scale_window=3, **arguments)
  overflows = np.random.default_rng(0).random(200) < rate
  (states,) = traces.replay(rule, [rule.init()], [overflows])
  # `_update_scale` of FP16_Optimizer, DeepSpeed 0.19.8.
  scale, last, expected = 64.0, -1, []
  for step, overflow in enumerate(overflows):
    stable = step - last - 1
    if overflow:
      scale, last = max(scale / 2, 1.0), step
    elif stable > 0 and stable % 3 == 0:
      scale *= 2
    expected.append(scale)
  np.testing.assert_array_equal(states.loss_scale, expected)
  assert len({*expected}) > 4 and not states.failure.any()


# Systems that compare the count of clean steps with the interval by ==, so that
# S never grows once the count is past a new interval, and systems that do not.
EQUAL = "torch torch_sharded megatron colossalai apex apex_hysteresis flax"
EQUAL += " paddle paddle_op keras"
NOT_EQUAL = "deepspeed deepspeed_legacy fairseq tensorflow tf_exponential"
NOT_EQUAL += " npu_exponential mindspore mindspore_cell"


@pytest.mark.parametrize("system", [*EQUAL.split(), *NOT_EQUAL.split()])
def test_a_count_past_a_new_interval_is_compared_as_the_system_does(system):
  interval = declaration.PRESETS[system].columns["growth_interval"].name
  rule = systems.make(system, **{interval: 3})
  first = rule.init()
  state = first._replace(clean_steps=jnp.int32(5))
  for _ in range(5):
    state = rule.update(state, False)
  grows = system in NOT_EQUAL.split()
  assert (state.loss_scale > first.loss_scale) == grows


def test_an_interval_that_moves_with_s_is_part_of_the_state():
  state = first = presets.metaseq(scale_window=8).init()
  changed = presets.metaseq(scale_window=2)
  grown = []
  for _ in range(8):
    state = changed.update(state, False)
    grown.append(float(state.loss_scale / first.loss_scale))
  assert grown == [1.0] * 7 + [2.0]


# Steps that overflow are `x`; `!` is a step after which the run has failed.
# `counts` are those of the first state.
_AT_MINIMUM = "overflowed with the loss scale at its minimum.*DeepSpeed"
_BELOW = "to `min_loss_scale` or below.*fairseq"
ENDS = {
  "deepspeed, at a minimum that float32 rounds": (
    presets.deepspeed(init_scale=0.5, min_scale=0.3, delayed_shift=1),
    ({}, "xx", "-!", _AT_MINIMUM),
  ),
  "deepspeed, and S grows again": (
    presets.deepspeed(init_scale=1.0, delayed_shift=1, scale_window=1),
    ({}, "x...x", "!!!!!", _AT_MINIMUM),
  ),
  "fairseq, with a minimum just below a value of S": (
    presets.fairseq(init_scale=4.0, min_loss_scale=1 - 2.0**-24),
    ({}, ".xxx", "---!", _BELOW),
  ),
  "mindspore, on the 1001st overflow in a row": (
    presets.mindspore(),
    ({"overflows": 999}, "xx", "-!", "1000 steps in a row.*MindSpore"),
  ),
}


def in_optimizer(rule, state):
  opt_state = ols.loss_scaling(optax.sgd(0.1), rule).init(jnp.ones(1))
  return optax.tree.set(opt_state, loss_scale_state=state)


@pytest.mark.parametrize(("rule", "run"), ENDS.values(), ids=ENDS)
def test_the_end_of_a_run_is_noted_on_its_step_and_stays(rule, run):
  counts, steps, expected, words = run
  counts = {name: jnp.int32(count) for name, count in counts.items()}
  state = rule.init()._replace(**counts)
  failed = ""
  for step in steps:
    state = rule.update(state, step == "x")
    failed += "-!"[int(state.failure != 0)]
  assert failed == expected
  with pytest.raises(FloatingPointError, match=words):
    ols.raise_if_failed(in_optimizer(rule, state))


def test_a_failure_is_forgotten_if_the_rule_no_longer_ends_runs():
  arguments = {"init_scale": 1.0, "delayed_shift": 1}
  raising = presets.deepspeed(**arguments)
  silent = presets.deepspeed(**arguments, raise_error_at_min_scale=False)
  failed = raising.update(raising.init(), True)
  state = silent.update(failed, True)
  ols.raise_if_failed(in_optimizer(silent, state))


# Arguments that may change during a run.
CHANGEABLE = {
  "deepspeed": {"raise_error_at_min_scale": False},
  "fairseq": {"tolerance": 0.25},
  "metaseq": {"scale_factor": 4.0},
}


@each_system
@pytest.mark.usefixtures("strict_promotion")
def test_a_step_keeps_the_structure_and_the_types_of_the_state(system):
  rule = systems.make(system)
  assert rule.skip is True
  state = rule.init()
  before = support.describe(state)
  assert not any(weak for _, _, weak in before[1])
  assert support.describe(rule.update(state, True)) == before
  assert support.describe(jax.eval_shape(rule.update, state, True)) == before
  changed = systems.make(system, **CHANGEABLE.get(system, {}))
  assert support.describe(changed.init()) == before


# Rules that do not move S: the rule, its S, and whether it skips steps.
FIXED = [
  (presets.torch(enabled=False), 1.0, False),
  (presets.torch_sharded(enabled=False), 1.0, False),
  (presets.paddle(enable=False), 1.0, False),
  (presets.paddle(use_dynamic_loss_scaling=False), 2.0**16, True),
  (presets.apex(loss_scale=128.0), 128.0, False),
  (presets.megatron_constant(initial_scale=8.0), 8.0, True),
  (presets.mindspore_fixed(), 128.0, True),
  (presets.mindspore_fixed(drop_overflow_update=False), 128.0, False),
  (presets.npu_fixed(loss_scale=8.0), 8.0, True),
  (presets.npu_fixed(loss_scale=8.0, enable_overflow_check=False), 8.0, False),
]


@pytest.mark.parametrize(
  ("rule", "scale", "skip"), FIXED, ids=[repr(row[0]) for row in FIXED]
)
def test_a_preset_that_never_moves_s_stalls_on_overflow(rule, scale, skip):
  assert rule.skip is skip
  state = rule.init()
  for overflow in (True, False):
    assert rule.stalled(state, overflow) == overflow
    state = rule.update(state, overflow)
    assert state.loss_scale == scale


# The signatures and docstrings.


def test_the_declared_presets_are_exported():
  others = {"PresetLossScale", "accelerate_train_mode", "from_state_dict"}
  others |= {"npu_loss_scale_optimizer", "to_state_dict"}
  assert presets.__all__ == sorted(others | set(declaration.PRESETS))
  assert presets.__all__ == dir(presets)
  for name, preset in declaration.PRESETS.items():
    assert getattr(presets, name) is preset.function


@each_system
def test_the_docstring_has_every_section_and_describes_every_argument(system):
  text = inspect.getdoc(getattr(presets, system))
  parts = re.split(r"^([A-Z]\w+):$", text, flags=re.MULTILINE)[1:]
  names = ["Args", "Returns", "Raises", "Examples", "References"]
  assert parts[::2] == names
  assert all(part.strip() for part in parts[1::2])
  args = textwrap.dedent(parts[1].strip("\n"))
  described = re.findall(r"^(\w+): \S", args, re.MULTILINE)
  assert described == list(systems.parameters(system))
  assert f"ols.presets.{system}(" in parts[7]


def test_a_declaration_is_all_that_a_preset_needs(monkeypatch):
  monkeypatch.setattr(declaration, "PRESETS", dict(declaration.PRESETS))
  argument = declaration.Argument

  @declaration.preset(
    init_scale=argument("first"),
    growth_factor=2.0,
    growth_interval=argument("window"),
    saves={"s": _keys.Key("S", float), "window": int},
  )
  def toy(*, first=8.0, window):
    """A toy."""

  assert (toy.__name__, toy.__doc__) == ("toy", "A toy.")
  rule = toy(window=1)
  assert repr(rule) == "presets.toy(first=8.0, window=1)"
  saved = presets.to_state_dict(rule, rule.update(rule.init(), True))
  assert saved == {"s": 4.0, "window": 1}
  rule, state = presets.from_state_dict("toy", saved)
  assert rule.update(state, False).loss_scale == 8.0


# Refused arguments.


@pytest.mark.parametrize(
  ("call", "message"),
  [
    (
      lambda: presets.keras(8.0, 2),
      "`keras` takes its arguments by name, got 2 by position; write "
      "keras(initial_scale=..., dynamic_growth_steps=...).",
    ),
    (
      lambda: presets.keras(initial_scalex=3),
      "`keras` takes the arguments initial_scale, dynamic_growth_steps, got "
      "'initial_scalex'; did you mean `initial_scale`?",
    ),
    (
      lambda: presets.keras(qqq=3),
      "`keras` takes the arguments initial_scale, dynamic_growth_steps, got "
      "'qqq'.",
    ),
    (
      lambda: presets.mindspore_amp(scale_factor=2),
      "`mindspore_amp` must be given the arguments that have no default, got a "
      "call missing 'scale_value', 'scale_window'; pass scale_value=..., "
      "scale_window=....",
    ),
  ],
  ids=["by position", "misspelt", "unknown", "missing"],
)
def test_a_wrong_call_gets_the_right_one_as_an_answer(call, message):
  with pytest.raises(TypeError, match=f"^{re.escape(message)}$"):
    call()


def refused(error, name, value):
  """Expects an error with the argument's name, the rule and the value."""
  came = re.escape(repr(value)[:100])
  match = rf"(?s)(?=.*`{name}` must )(?=.*got .*{came})"
  return pytest.raises(error, match=match)


@each_system
def test_each_argument_takes_its_range_and_refuses_the_rest(system):
  # Megatron refuses a first S below its floor, which is 1 by default.
  floor = {"min_scale": support.SMALLEST} if system == "megatron" else {}
  for name, kind in systems.kinds(system).items():
    values = systems.KINDS[kind]
    for value in (*values.allowed, values.other):
      rule = systems.make(system, **floor | {name: value})
      assert dict(rule.arguments)[name] == value
      if value == 2**31 - 1:  # The state can count that far.
        jax.eval_shape(rule.update, rule.init(), True)
    # Otherwise jit would take one rule for another.
    assert kind in ("flag", "two") or rule != systems.make(system, **floor)
    for value in values.out_of_range:
      with refused(ValueError, name, value):
        systems.make(system, **{name: value})
    for value in values.wrong:
      with refused(TypeError, name, value):
        systems.make(system, **{name: value})


@pytest.mark.parametrize(
  ("system", "bounds"),
  [
    ("megatron", {"min_scale": 16.0}),
    ("colossalai", {"min_scale": 16.0}),
    ("colossalai", {"max_scale": 4.0}),
  ],
)
def test_a_first_scale_out_of_bounds_is_refused(system, bounds):
  ((name, bound),) = bounds.items()
  with refused(ValueError, name, bound) as error:
    systems.make(system, initial_scale=8.0, **bounds)
  assert "`initial_scale`=8.0" in str(error.value)
  systems.make(system, initial_scale=bound, **bounds)


# The rule as a value.


@each_system
def test_repr_and_pickle_make_the_same_rule(system):
  arguments = {
    name: systems.KINDS[kind].other
    for name, kind in systems.kinds(system).items()
    if "scale" not in kind  # Others could be out of bounds.
  }
  rule = systems.make(system, **arguments)
  for same in (
    systems.make(system, **arguments),
    eval(repr(rule), {"presets": presets}),
    pickle.loads(pickle.dumps(rule)),
  ):
    assert (same, repr(same), hash(same)) == (rule, repr(rule), hash(rule))


def test_the_system_is_part_of_the_rule():
  assert presets.torch() != presets.torch_sharded()
