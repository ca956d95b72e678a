"""Every preset: how it moves S, its arguments, and its rule as a value."""

import copy
import inspect
import pickle
import re
import textwrap

from hypothesis import assume
from hypothesis import given
from hypothesis import settings
from hypothesis import strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_lossscale as ols
from optax_lossscale import presets
from optax_lossscale.presets import _keys
from optax_lossscale.presets import declaration
from tests import reference
from tests import support
from tests.presets import systems
from tests.presets import traces

each_system = pytest.mark.parametrize("system", systems.SYSTEMS)

# How S moves, compared with the models.

SEQUENCES = support.every_sequence(7)
# Values for systems that compute in float32, as the engine does.
IN_FLOAT32 = {
  "scale": st.floats(2.0**-100, 2.0**100),
  "growth": st.floats(1.001, 9.0),
  "backoff": st.floats(0.1, 0.999),
}


@st.composite
def arguments_of(draw, system):
  """Returns arguments whose effect short sequences show."""
  arguments = {}
  for name in inspect.signature(reference.MODELS[system]).parameters:
    kind = systems.kinds(system)[name]
    values = systems.KINDS[kind].drawn
    if system in traces.FLOAT32 and kind in IN_FLOAT32:
      values |= IN_FLOAT32[kind]
    arguments[name] = draw(values)
  # Below its minimum fairseq ends a run even if it tolerates the overflow; the
  # preset ends the run when S is to shrink.
  if system == "fairseq":
    assume(arguments["init_scale"] > arguments["min_loss_scale"])
  return arguments


def follow(rule, state, models):
  """Runs a rule and models over every sequence, and compares them.

  Returns the last state, and which sequences have not left float32.
  """
  is_normal = np.full(len(models), True)
  for overflows in SEQUENCES.T:
    # The rule works elementwise, so one call moves every sequence.
    state = rule.update(state, overflows)
    for model, overflow in zip(models, overflows.tolist(), strict=True):
      model.update(overflow)
    expected = np.array([model.scale for model in models])
    # The library holds S if the original's S leaves the normal numbers.
    is_normal &= (expected >= traces.SMALLEST) & (expected <= traces.LARGEST)
    loss_scale = np.broadcast_to(state.loss_scale, len(models))
    np.testing.assert_array_equal(loss_scale[is_normal], expected[is_normal])
    failure = getattr(state, "failure", None)
    failed = np.zeros(len(models), bool) if failure is None else failure != 0
    expected = np.array([model.failed for model in models])
    np.testing.assert_array_equal(failed[is_normal], expected[is_normal])
  return state, is_normal


def spread(state):
  return jax.tree.map(lambda x: jnp.full(len(SEQUENCES), x), state)


@each_system
@given(st.data())
@settings(max_examples=6)
def test_a_preset_moves_s_and_resumes_like_its_model(system, data):
  arguments = data.draw(arguments_of(system))
  try:
    rule = getattr(presets, system)(**arguments)
  except ValueError:  # The first S may be out of bounds.
    if not declaration.PRESETS[system].starts_within_bounds:
      raise
    assume(False)
  models = [reference.MODELS[system](**arguments) for _ in SEQUENCES]
  states, is_normal = follow(rule, spread(rule.init()), models)

  assume(is_normal.any())
  i = data.draw(st.sampled_from(np.flatnonzero(is_normal)))
  state = jax.tree.map(lambda x: x if x.ndim == 0 else x[i], states)
  saved, model = presets.to_state_dict(rule, state), models[i]
  _, resumed = presets.from_state_dict(rule, saved)
  if system != "apex_hysteresis":  # NeMo does not read a count that it saves.
    assert presets.to_state_dict(rule, resumed) == saved
  if hasattr(model, "resume"):  # A restart loses counts.
    model.resume()
  model.failed = False
  follow(rule, spread(resumed), [copy.copy(model) for _ in SEQUENCES])


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
  "fairseq, where S would reach the minimum": (
    presets.fairseq(init_scale=4.0, min_loss_scale=1.0),
    ({}, ".xx", "--!", _BELOW),
  ),
  "fairseq, where S would fall below the minimum": (
    presets.fairseq(init_scale=4.0, min_loss_scale=1.5),
    ({}, ".xx", "--!", _BELOW),
  ),
  "fairseq, with a minimum just below a value of S": (
    presets.fairseq(init_scale=4.0, min_loss_scale=1 - 2.0**-24),
    ({}, ".xxx", "---!", _BELOW),
  ),
  "fairseq, and S grows again": (
    presets.fairseq(init_scale=1.0, min_loss_scale=0.5, scale_window=1),
    ({}, "x...x", "!!!!!", _BELOW),
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
  assert set(declaration.PRESETS) == set(systems.SYSTEMS)
  assert presets.__all__ == sorted(others | set(declaration.PRESETS))
  assert presets.__all__ == dir(presets)
  for name, preset in declaration.PRESETS.items():
    assert getattr(presets, name) is preset.function


# Arguments without effect on a model: most of them switch the scaler off.
NOT_IN_MODEL = {
  "torch": {"enabled": True},
  "torch_sharded": {"enabled": True},
  "paddle": {"enable": True},
  "apex": {"scale_factor": 2.0},
}


@each_system
def test_names_order_and_defaults_are_those_of_the_original(system):
  model = inspect.signature(reference.MODELS[system]).parameters.values()
  ours = systems.parameters(system)
  assert {x.kind for x in ours.values()} == {inspect.Parameter.KEYWORD_ONLY}
  assert systems.make(system).skip is True
  defaults = {name: x.default for name, x in ours.items()}
  extra = NOT_IN_MODEL.get(system, {})
  assert {name: defaults.pop(name) for name in extra} == extra
  assert list(defaults.items()) == [(x.name, x.default) for x in model]


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
def test_each_argument_refuses_values_that_it_cannot_take(system):
  for name, kind in systems.kinds(system).items():
    values = systems.KINDS[kind]
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
def test_each_argument_is_kept_and_repr_and_pickle_make_the_same_rule(system):
  for name, kind in systems.kinds(system).items():
    values = systems.KINDS[kind]
    for value in (*values.allowed, values.other):
      # Megatron refuses a first S below its floor, which is 1 by default.
      floor = {"min_scale": support.SMALLEST} if system == "megatron" else {}
      arguments = floor | {name: value}
      rule = systems.make(system, **arguments)
      assert dict(rule.arguments)[name] == value
      if kind == "count":  # The state can count that far.
        jax.eval_shape(rule.update, rule.init(), True)
      for same in (
        systems.make(system, **arguments),
        eval(repr(rule), {"presets": presets}),
        pickle.loads(pickle.dumps(rule)),
      ):
        assert (same, repr(same), hash(same)) == (rule, repr(rule), hash(rule))
    # Otherwise jit would take one rule for another.
    assert kind in ("flag", "two") or rule != systems.make(system)


def test_the_system_is_part_of_the_rule():
  assert presets.torch() != presets.torch_sharded()
