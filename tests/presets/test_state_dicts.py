"""State dictionaries: recorded from the originals, in and out again."""

import dataclasses
import re
from typing import Any
from typing import NamedTuple

from flax.training.dynamic_scale import DynamicScale
import jax
import jax.numpy as jnp
import jmp
import numpy as np
import optax
import pytest

import optax_lossscale as ols
from optax_lossscale import presets
from optax_lossscale import rules
from optax_lossscale.presets import declaration
from tests.presets import systems
from tests.presets import traces
from tests.support import assert_same_bits


def nested(values):
  """Returns the dictionary that has these values at these paths."""
  dictionary = {}
  for path, value in values.items():
    *outer, key = path.split("/")
    inside = dictionary
    for name in outer:
      inside = inside.setdefault(name, {})
    inside[key] = value
  return dictionary


def saved_by(system, **arguments):
  """Returns what a preset saves before its first step."""
  rule = systems.make(system, **arguments)
  return presets.to_state_dict(rule, rule.init())


def assert_same(a, b):
  """Asserts equal bits and types, weak ones included."""
  assert_same_bits(a, b)
  assert jax.tree.map(jax.typeof, a) == jax.tree.map(jax.typeof, b)


def rule_name(value):
  """Returns a test id; for a rule, the name of its system or class."""
  if isinstance(value, ols.LossScale):
    return getattr(value, "system", type(value).__name__)
  return str(value)


# In and out.


@pytest.mark.parametrize(
  "rule",
  [
    presets.torch(enabled=False),
    presets.paddle(enable=False),
    presets.megatron_constant(initial_scale=8.0),
    presets.npu_fixed(loss_scale=8.0),
    presets.mindspore_fixed(),
  ],
  ids=rule_name,
)
def test_a_scaler_that_is_off_or_constant_saves_nothing(rule):
  assert presets.to_state_dict(rule, rule.init()) == {}
  assert presets.from_state_dict(rule, {}) == (rule, rule.init())
  arguments = dict(rule.arguments)
  again, state = presets.from_state_dict(rule.system, {}, **arguments)
  assert (again, state) == (rule, rule.init())


# The arguments beside a dictionary.

EXPLICIT = {
  "torch": {"growth_interval": 3},
  "apex_hysteresis": {"growth_factor": 8.0, "backoff_factor": 0.25},
  "deepspeed": {"raise_error_at_min_scale": False, "min_scale": 0.5},
  "deepspeed_legacy": {"scale_factor": 8.0},
  "colossalai": {"growth_factor": 8.0, "hysteresis": 5},
  "mindspore": {"scale_window": 11},
  "paddle": {"incr_every_n_steps": 11, "decr_ratio": 0.25},
}


@pytest.mark.parametrize("system", EXPLICIT)
def test_arguments_come_from_the_dictionary_unless_they_are_passed(system):
  explicit = EXPLICIT[system]
  rule, _ = presets.from_state_dict(system, saved_by(system, **explicit))
  assert dict(rule.arguments).items() >= explicit.items()
  rule, state = presets.from_state_dict(system, saved_by(system), **explicit)
  assert dict(rule.arguments).items() >= explicit.items()
  assert presets.to_state_dict(rule, state).items() >= explicit.items()


@pytest.mark.parametrize(
  ("system", "arguments"),
  [
    ("tf_exponential", {"incr_every_n_steps": 7}),
    ("mindspore_cell", {"scale_factor": 2, "scale_window": 7}),
  ],
)
def test_the_first_scale_is_read_from_a_dictionary(system, arguments):
  saved = saved_by(system, **arguments)
  rule, state = presets.from_state_dict(system, saved, **arguments)
  assert rule.init().loss_scale == state.loss_scale == 8.0


def test_an_argument_without_default_must_be_passed_beside_a_dictionary():
  saved = saved_by("mindspore_amp")
  with pytest.raises(TypeError, match="missing 'scale_window'; pass"):
    presets.from_state_dict("mindspore_amp", saved, scale_factor=2)


def test_arguments_beside_a_rule_are_refused():
  match = r"growth_interval with the rule presets\.torch"
  with pytest.raises(TypeError, match=match):
    presets.from_state_dict(
      presets.torch(), saved_by("torch"), growth_interval=3
    )


# A saved counter may be past a shorter window or a smaller hysteresis. What it
# does then depends on how the system tests it. `x` overflows; S is 8 at first.
OTHER_ARGUMENTS = [
  # These count in a circle: 9 becomes 0, and then a whole window has to pass.
  ("jmp", {"counter": 9}, {"period": 5}, "." * 7, [8] * 5 + [16] * 2),
  ("jmp", {"counter": 7}, {"period": 5}, "....", [8, 8, 16, 16]),
  # Megatron counts down to 0, and further.
  ("megatron", {"hysteresis_tracker": 2}, {"hysteresis": 1}, "xx", [8, 4]),
  ("megatron", {"hysteresis_tracker": 1}, {"hysteresis": 3}, "xx", [4, 2]),
  ("megatron", {"hysteresis_tracker": 1 - 2**31}, {}, "x", [4]),
  # DeepSpeed counts down to 1, and ignores the count if it never had more.
  ("deepspeed", {"cur_hysteresis": 2}, {"delayed_shift": 1}, "xx", [4, 2]),
  ("deepspeed", {"cur_hysteresis": 3}, {"delayed_shift": 2}, "xxx", [8, 8, 4]),
  ("deepspeed", {"cur_hysteresis": 1}, {"delayed_shift": 3}, "xx", [4, 2]),
  # Paddle compares with ==, and a clean step resets the count.
  (
    "paddle",
    {"decr_count": 3},
    {"decr_every_n_nan_or_inf": 2},
    "xxx.xx",
    [8] * 5 + [4],
  ),
  # An attribute of DeepSpeed's scaler that is not needed.
  ("deepspeed", {"dtype": object()}, {"delayed_shift": 1}, "x", [4]),
]


@pytest.mark.parametrize(
  ("system", "changes", "arguments", "steps", "expected"),
  OTHER_ARGUMENTS,
)
def test_a_saved_counter_meets_other_arguments(
  system, changes, arguments, steps, expected
):
  first = declaration.PRESETS[system].columns["init_scale"].name
  saved = saved_by(system, **{first: 8.0}, **arguments) | changes
  rule, state = presets.from_state_dict(system, saved, **arguments)
  scales = []
  for step in steps:
    state = rule.update(state, step == "x")
    scales.append(float(state.loss_scale))
  assert scales == expected


# The values that a dictionary may hold.


class Tensor:
  """Like a framework's tensor: it has `__array__` and nothing else."""

  def __init__(self, value):
    self.value = np.asarray(value)

  def __array__(self, dtype=None, copy=None):
    del copy
    return self.value if dtype is None else self.value.astype(dtype)


@pytest.mark.parametrize(
  "wrap",
  [
    lambda x: Tensor(np.asarray(x).reshape(())),
    lambda x: Tensor(np.asarray(x).reshape(1)),
    lambda x: np.asarray(x).reshape(1, 1),
    lambda x: np.asarray(x).reshape(())[()],
    lambda x: np.asarray(x).item(),
    jnp.asarray,
  ],
  ids=["tensor[]", "tensor[1]", "array[1,1]", "numpy", "python", "jax"],
)
def test_a_value_of_one_element_is_read(wrap):
  saved = traces.flat(saved_by("deepspeed"))
  wrapped = {path: wrap(x) for path, x in saved.items()}
  rule, state = presets.from_state_dict("deepspeed", wrapped)
  assert rule == presets.deepspeed()
  assert_same(state, rule.init())
  assert all(isinstance(x, jax.Array) for x in jax.tree.leaves(state))


# Refused dictionaries.


def assert_lists(error, problems):
  """Asserts that an error lists these problems by path, and no others."""
  _, _, listed = str(error.value).partition(": ")
  for path, words in problems.items():
    assert re.search(rf"(?:^|; ){re.escape(repr(path))} {words}", listed)
  assert len(re.findall(r"(?:^|; )'[^']*' (?:is|must)", listed)) == len(
    problems
  )


@pytest.mark.parametrize("system", ["torch", "apex", "mindspore_fixed"])
def test_missing_unknown_and_wrong_keys_are_one_list(system):
  saved = traces.flat(saved_by(system))
  wrong, *others = [*saved, None]
  problems, values = {"other": "is unknown"}, {"other": 1}
  if wrong is not None:
    problems |= {wrong: "must be .*got 'x'", **dict.fromkeys(others[:-1], "is")}
    values[wrong] = "x"
  with pytest.raises(ValueError, match=f"`state_dict` of {system} ") as error:
    arguments = dict(systems.make(system).arguments)
    presets.from_state_dict(system, nested(values), **arguments)
  assert_lists(error, problems)


NO_INTEGERS = [True, 1.5, 2.0, 2**31, -(2**40), "3", None, {}, b"3"]
NO_SCALES = [0.0, -1.0, np.inf, np.nan, 1e-300, 2.0**-127, 2.0**128, True]


@pytest.mark.parametrize(
  ("system", "key", "values"),
  [
    ("torch", "_growth_tracker", NO_INTEGERS),
    ("torch", "growth_interval", NO_INTEGERS[:3]),
    ("deepspeed", "cur_iter", NO_INTEGERS),
    ("torch", "scale", [*NO_SCALES, "x", None, {}, 10**400, -(10**400)]),
    ("apex", "loss_scaler0/loss_scale", NO_SCALES),
    ("torch", "growth_factor", ["x", None, True, 10**400]),
    ("deepspeed", "consecutive_hysteresis", [1, 0, 1.0, "True", None]),
    ("deepspeed", "min_scale", ["x", None, True, 10**400]),
    ("deepspeed", "scale_factor", [4.0, "2"]),
    ("deepspeed", "dynamic", [False, "True"]),
    ("deepspeed", "dynamic", [np.ones(2, bool), Tensor([True, True])]),
    ("megatron", "scale", [bytearray(b"8"), np.timedelta64(5, "s")]),
    ("megatron", "scale", [np.full(2, 8.0), Tensor([8.0, 8.0])]),
  ],
)
def test_a_value_that_a_key_cannot_hold_is_refused_by_its_name(
  system, key, values
):
  saved = traces.flat(saved_by(system))
  for value in values:
    with pytest.raises(ValueError, match="`state_dict`") as error:
      presets.from_state_dict(system, nested(saved | {key: value}))
    assert_lists(error, {key: r"must .*, got "})
    if isinstance(value, (bool, float, str)):
      assert f"got {value!r}" in str(error.value)


def move_flax(scaler, overflow):
  slope = jnp.inf if overflow else 1.0
  return scaler.value_and_grad(lambda x: slope * x)(1.0)[0]


@pytest.mark.parametrize(
  ("system", "name", "scaler", "move"),
  [
    (
      "flax",
      "scale",
      DynamicScale(growth_interval=2, growth_factor=4.0, scale=8.0),
      move_flax,
    ),
    (
      "jmp",
      "loss_scale",
      jmp.DynamicLossScale(jnp.float32(8), period=3, factor=4),
      lambda scaler, overflow: scaler.adjust(jnp.array(not overflow)),
    ),
  ],
)
def test_the_attributes_of_a_scaler_hold_its_arguments(
  system, name, scaler, move
):
  steps = [False, True, False, False, False, False, False, True, False]
  for overflow in steps[:4]:
    scaler = move(scaler, overflow)
  with pytest.raises(TypeError, match=r"pass its .*vars\(\.\.\.\)\."):
    presets.from_state_dict(system, scaler)
  rule, state = presets.from_state_dict(system, vars(scaler))
  _, again = presets.from_state_dict(rule, vars(scaler))
  assert_same(again, state)
  scales = []
  for overflow in steps[4:]:
    scaler, state = move(scaler, overflow), rule.update(state, overflow)
    scales.append(state.loss_scale)
    assert scales[-1] == getattr(scaler, name)
  assert len({*map(float, scales)}) > 1


@pytest.mark.parametrize(
  "system", ["torch", presets.torch(), ols.DynamicLossScale()], ids=rule_name
)
def test_anything_but_a_dictionary_is_refused_with_a_remedy(system):
  for saved in (None, 8.0, [("scale", 8.0)]):
    name = type(saved).__name__
    match = rf"`state_dict` must be a dictionary, got {name}; .*vars\("
    with pytest.raises(TypeError, match=match):
      presets.from_state_dict(system, saved)


@pytest.mark.parametrize(
  ("system", "end"),
  [
    ("megatorn", r"'megatorn'; did you mean 'megatron'\?"),
    ("", r"''\."),
    (3, r"3\."),
    (presets.torch, r"<function.*"),
  ],
)
def test_an_unknown_system_gets_the_names_as_an_answer(system, end):
  with pytest.raises(ValueError, match=f"`system` must .*got {end}") as error:
    presets.from_state_dict(system, {})
  assert all(name in str(error.value) for name in traces.SYSTEMS)


def test_a_whole_checkpoint_gets_a_hint():
  checkpoint = {"scaler": saved_by("torch"), "epoch": 3}
  with pytest.raises(ValueError, match=r"state_dict\['scaler'\]: pass that"):
    presets.from_state_dict("torch", checkpoint)
  with pytest.raises(ValueError, match=r"is unknown\.$"):
    presets.from_state_dict("torch", saved_by("torch") | {"epoch": {}})


def test_an_empty_dictionary_gets_a_hint_if_the_scaler_has_a_switch():
  with pytest.raises(ValueError, match="saves nothing: pass enabled=False"):
    presets.from_state_dict("torch", {})
  for system, saved in (("torch", {"x": 1}), ("megatron", {})):
    with pytest.raises(ValueError, match=r"is (missing|unknown)\.$"):
      presets.from_state_dict(system, saved)


def test_only_a_few_keys_of_a_whole_model_are_listed():
  weights = {f"layer {i}": np.zeros(3) for i in range(1000)}
  with pytest.raises(ValueError, match=r"; and 98\d more\.$") as error:
    presets.from_state_dict("torch", weights)
  assert len(str(error.value)) < 1000


def test_traced_values_are_refused_with_the_remedy():
  rule, saved = presets.torch(), saved_by("torch")
  match = "must have values, got a traced one.* outside jit"
  with pytest.raises(TypeError, match=f"`state_dict` {match}"):
    jax.eval_shape(
      lambda x: presets.from_state_dict(rule, saved | {"scale": x}), 1.0
    )
  with pytest.raises(TypeError, match=f"`state` {match}"):
    jax.eval_shape(lambda x: presets.to_state_dict(rule, x), rule.init())


# Refused states.


NOT_ITS = "`state` must be .* `rule`: .*"
OPT_STATE = ols.loss_scaling(optax.sgd(0.1), presets.torch()).init(0.0)
STACKED = jax.tree.map(lambda x: jnp.stack([x, x]), presets.torch().init())


@pytest.mark.parametrize(
  ("rule", "state", "match"),
  [
    (presets.torch(), presets.deepspeed().init(), f"{NOT_ITS}got "),
    (ols.DynamicLossScale(), ols.FixedLossScale().init(), f"{NOT_ITS}got "),
    (presets.torch(), None, f"{NOT_ITS}got nothing"),
    (presets.torch(), STACKED, rf"{NOT_ITS}got shape \(2,\)"),
    (presets.torch(), OPT_STATE, "`state` must .*`loss_scale_state`"),
    (presets.torch, OPT_STATE, "`rule` must be a LossScale, got "),
  ],
  ids=["torch", "dynamic", "None", "stacked", "the optimizer's", "no rule"],
)
def test_what_is_no_rule_with_its_state_is_refused(rule, state, match):
  with pytest.raises((TypeError, ValueError), match=match):
    presets.to_state_dict(rule, state)


# Rules that no preset made.


class CountingState(NamedTuple):
  loss_scale: jax.Array
  mean: jax.Array
  least: jax.Array
  share: jax.Array
  seen: Any
  missing: Any = None


@dataclasses.dataclass(frozen=True)
class Counting(ols.LossScale):
  def init(self):
    scale = jnp.float32(8.0)
    return CountingState(
      scale,
      mean=jnp.zeros(3, jnp.float16),
      least=jnp.float32(jnp.inf),
      share=scale,  # The same array as S.
      seen={"nan": jnp.int32(0), "inf": (jnp.full((), False),)},
    )

  def update(self, state, overflow, *, amax=None):
    return state._replace(
      loss_scale=state.loss_scale * 2,
      mean=state.mean + jnp.array([1, 2, 3], jnp.float16),
      seen={"nan": jnp.int32(1), "inf": (jnp.asarray(overflow, bool),)},
    )


def test_an_own_rule_is_saved_under_the_names_in_its_state():
  rule = Counting()
  state = rule.update(rule.init(), True)
  written = presets.to_state_dict(rule, state)
  assert {key: (x.dtype.name, x.tolist()) for key, x in written.items()} == {
    "loss_scale": ("float32", 16.0),
    "mean": ("float16", [1.0, 2.0, 3.0]),
    "least": ("float32", np.inf),
    "share": ("float32", 8.0),
    "seen/nan": ("int32", 1),
    "seen/inf/0": ("bool", True),
  }
  assert not any(isinstance(x, jax.Array) for x in written.values())
  wide = {"loss_scale": 16.0, "mean": np.arange(1.0, 4.0)}
  wide["seen/nan"] = np.int64(1)
  for saved in (written, written | wide):
    same, imported = presets.from_state_dict(rule, saved)
    assert same is rule
    assert_same(imported, state)


LOG_MAX = rules.LogMaxLossScale()


@pytest.mark.parametrize(
  ("rule", "key", "values"),
  [
    (Counting(), "loss_scale", NO_SCALES[:-1]),
    (Counting(), "mean", [np.zeros(2), 0.0, None, "x"]),
    (Counting(), "seen/nan", [1.5, 2**31, -(2**40), bytearray(b"8")]),
    (LOG_MAX, "variance", [np.nan, np.inf, 1e300]),
    (rules.WarmStart(Counting()), "rule_state/loss_scale", NO_SCALES[:-1]),
  ],
  ids=rule_name,
)
def test_a_value_that_an_own_rule_cannot_hold_is_refused(rule, key, values):
  written = presets.to_state_dict(rule, rule.init())
  for value in values:
    with pytest.raises(ValueError, match="`state_dict` of ") as error:
      presets.from_state_dict(rule, written | {key: value})
    assert_lists(error, {key: "must .*, got "})
  del written[key]
  with pytest.raises(ValueError, match=f"'{key}' is missing"):
    presets.from_state_dict(rule, written)


@pytest.mark.parametrize(
  ("name", "value"), [("least", np.inf), ("least", 2.0), ("share", 0.0)]
)
def test_a_field_may_hold_its_first_inf_or_an_s_that_is_unusable(name, value):
  rule = Counting()
  written = presets.to_state_dict(rule, rule.init())
  _, state = presets.from_state_dict(rule, written | {name: value})
  assert getattr(state, name) == value


# Warm starts.


def test_a_warm_start_of_a_preset_is_saved_as_the_preset():
  rule = rules.WarmStart(presets.megatron())
  state = rule.update(rule.init(), False, amax=1.0)
  state = rule.update(state, True, amax=jnp.inf)
  saved = presets.to_state_dict(rule, state)
  assert saved == presets.to_state_dict(rule.rule, state.rule_state)
  assert saved["hysteresis_tracker"] == 1
  same, restored = presets.from_state_dict(rule, saved)
  assert same is rule
  assert_same(restored, state)
  with pytest.raises(ValueError, match="one that still probes"):
    presets.to_state_dict(rule, rule.init())


@pytest.mark.parametrize("inner", [ols.DynamicLossScale(), presets.torch()])
def test_a_warm_start_is_read_from_its_own_keys(inner):
  rule = rules.WarmStart(inner, probe_scale=4.0)
  saved = {
    "is_warm": False,
    "rule_state/loss_scale": 4.0,
    "rule_state/clean_steps": 0,
    "rule_state/overflows": 0,
  }
  _, state = presets.from_state_dict(rule, saved)
  assert_same(state, rule.init())
  if isinstance(inner, ols.DynamicLossScale):
    assert presets.to_state_dict(rule, state) == saved
