"""State dictionaries: recorded from the originals, in and out again."""

import dataclasses
import inspect
import json
import pathlib
import pickle
import re
import subprocess
import sys
import textwrap
from typing import Any
from typing import NamedTuple

from flax import serialization
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_lossscale as ols
from optax_lossscale import presets
from optax_lossscale import rules
from tests.presets import traces
from tests.support import assert_same_bits

pytestmark = pytest.mark.slow

# These save nothing, or nothing but their arguments.
WITHOUT_STATE = {"megatron_constant", "mindspore_fixed", "npu_fixed"}
WITH_STATE = [x for x in traces.SYSTEMS if x not in WITHOUT_STATE]

# The key that holds S.
SCALE_KEYS = {
  "apex": "loss_scaler0/loss_scale",
  "apex_hysteresis": "scale",
  "colossalai": "scale",
  "deepspeed": "cur_scale",
  "deepspeed_legacy": "cur_scale",
  "fairseq": "loss_scale",
  "flax": "scale",
  "jmp": "loss_scale",
  "keras": "dynamic_scale",
  "megatron": "scale",
  "metaseq": "loss_scale",
  "mindspore": "loss_scale",
  "mindspore_amp": "scale_value",
  "mindspore_cell": "scale_sense",
  "npu_exponential": "loss_scale",
  "paddle": "scale",
  "paddle_op": "loss_scaling_0",
  "tensorflow": "current_loss_scale",
  "tf_exponential": "loss_scale",
  "torch": "scale",
  "torch_sharded": "scale",
}


# What of a dictionary does not come out as it went in. Everything else does.


def _excepted(system, path, went_in, arguments):
  """Returns what comes out of a dictionary in the place of `went_in`."""
  if path == SCALE_KEYS.get(system) and isinstance(went_in, (int, float)):
    # The original's S is a double, here it is a float32. MindSpore's
    # max(S, 1) makes it an int at the floor, from where it stays one.
    return float(np.float32(went_in))
  if system == "apex_hysteresis" and path == "_hysteresis_tracker":
    # NeMo saves this counter, but misspells its key where it would read it.
    return np.array([arguments.get("hysteresis", 1)], np.int32)
  if path == "loss_scaler0/unskipped" and "loss_scale" in arguments:
    return 0  # Apex counts on where S does not move; here nothing does.
  return went_in


def _rule_name(value):
  """Returns a test id, of a rule the name of its system or class."""
  if isinstance(value, ols.LossScale):
    return getattr(value, "system", type(value).__name__)
  return str(value)


def _flat(dictionary, prefix=""):
  """Returns the values by their paths."""
  flat = {}
  for key, value in dictionary.items():
    if isinstance(value, dict):
      flat |= _flat(value, f"{prefix}{key}/")
    else:
      flat[prefix + key] = value
  return flat


def _nested(flat):
  """Returns the dictionary of values by their paths."""
  nested = {}
  for path, value in flat.items():
    *outer, key = path.split("/")
    inside = nested
    for name in outer:
      inside = inside.setdefault(name, {})
    inside[key] = value
  return nested


def _described(value):
  """Returns a value with its type, dtype and shape, so that == compares all."""
  if isinstance(value, (np.ndarray, np.generic)):
    return type(value), value.dtype, value.shape, value.tolist()
  return type(value), value


def _comparable(dictionary):
  return {key: _described(x) for key, x in _flat(dictionary).items()}


def _runs(system):
  """Returns the runs of a trace whose dictionaries can be imported."""
  runs = traces.load(system)["runs"]
  return [run for run in runs if traces.is_importable(system, run)]


def _saved(system):
  """Returns arguments and a dictionary that the original saved."""
  run = _runs(system)[0]
  return run["arguments"], traces.saved_dict(system, run)


def _import(system, dictionary=None, **more):
  arguments, saved = _saved(system)
  dictionary = saved if dictionary is None else dictionary
  return presets.from_state_dict(system, dictionary, **(arguments | more))


# The originals' dictionaries.


@pytest.mark.parametrize("system", traces.SYSTEMS)
def test_a_dictionary_of_the_original_goes_in_and_out_unchanged(system):
  for run in _runs(system):
    saved, arguments = traces.saved_dict(system, run), run["arguments"]
    rule, state = presets.from_state_dict(system, saved, **arguments)
    expected = {
      path: _described(_excepted(system, path, value, arguments))
      for path, value in _flat(saved).items()
    }
    assert _comparable(presets.to_state_dict(rule, state)) == expected


@pytest.mark.parametrize("system", traces.SYSTEMS)
def test_a_rule_run_here_writes_what_the_original_wrote(system):
  for runs in _exact_groups(system):
    arguments = runs[0]["arguments"]
    rule = getattr(presets, system)(**arguments)
    overflows = np.stack([traces.overflows_of(run) for run in runs])
    overflows = overflows[:, : overflows.shape[1] // 2]
    first = jax.tree.map(lambda *x: jnp.stack(x), *[rule.init()] * len(runs))
    states, _ = traces.trajectories(rule)(first, overflows)
    states = jax.device_get(states)
    for i, run in enumerate(runs):
      state = jax.tree.map(lambda x, i=i: x[i], states)
      saved = _flat(traces.saved_dict(system, run))
      if "_hysteresis_tracker" not in saved:  # Which is written as it is.
        saved = {
          path: _excepted(system, path, value, arguments)
          for path, value in saved.items()
        }
      expected = {path: _described(value) for path, value in saved.items()}
      assert _comparable(presets.to_state_dict(rule, state)) == expected


def _exact_groups(system):
  """Returns two groups of runs: the first, and that of the most arguments.

  Each is a compilation, so not all.
  """
  groups = {}
  for run in _runs(system):
    if traces.is_exact(system, run["arguments"]):
      key = json.dumps([run["arguments"], len(run["overflows"])])
      groups.setdefault(key, []).append(run)
  groups = list(groups.values())
  most = max(groups, key=lambda runs: len(runs[0]["arguments"]))
  return [groups[0]] if most is groups[0] else [groups[0], most]


@pytest.mark.parametrize("system", traces.SYSTEMS)
def test_the_first_state_goes_out_and_in_unchanged(system):
  rule, _ = _import(system)
  state = rule.init()
  same, imported = presets.from_state_dict(
    rule, presets.to_state_dict(rule, state)
  )
  assert same is rule
  _assert_same(imported, state)


@pytest.mark.parametrize("system", traces.SYSTEMS)
def test_an_imported_state_has_the_avals_of_the_first_one(system):
  rule, state = _import(system)
  assert jax.tree.map(jax.typeof, state) == jax.tree.map(
    jax.typeof, rule.init()
  )
  leaves = jax.tree.leaves(state)
  assert [x.weak_type for x in leaves] == [False] * len(leaves)
  assert all(isinstance(x, jax.Array) for x in leaves)


@pytest.mark.parametrize("system", traces.SYSTEMS)
def test_a_dictionary_is_neither_kept_nor_changed(system):
  _, saved = _saved(system)
  before = pickle.dumps(saved)
  rule, state = _import(system, saved)
  presets.to_state_dict(rule, state).clear()
  assert pickle.dumps(saved) == before
  assert (
    _comparable(presets.to_state_dict(rule, state)).keys()
    == _flat(saved).keys()
  )


def _assert_same(a, b):
  """Asserts equal types as well, weak ones and shardings among them."""
  assert_same_bits(a, b)
  assert jax.tree.map(jax.typeof, a) == jax.tree.map(jax.typeof, b)


# What a dictionary lacks.


@pytest.mark.parametrize(
  "system", ["megatron_constant", "npu_fixed", "mindspore_fixed"]
)
def test_a_constant_scale_saves_nothing(system):
  rule, state = _import(system)
  assert presets.to_state_dict(rule, state) == {}
  assert state.loss_scale == rule.init().loss_scale


@pytest.mark.parametrize(
  "rule",
  [presets.torch(enabled=False), presets.paddle(enable=False)],
  ids=_rule_name,
)
def test_a_scaler_that_is_off_saves_nothing(rule):
  assert presets.to_state_dict(rule, rule.init()) == {}
  assert presets.from_state_dict(rule, {}) == (rule, rule.init())
  off = {name: x for name, x in rule.arguments if x is False}
  again, _ = presets.from_state_dict(rule.system, {}, **off)
  assert again == rule


# The arguments beside a dictionary.

_EXPLICIT = {
  "torch": {"growth_interval": 3},
  "torch_sharded": {"growth_factor": 4.0},
  "apex_hysteresis": {"backoff_factor": 0.25},
  "deepspeed": {"raise_error_at_min_scale": False, "min_scale": 0.5},
  "deepspeed_legacy": {"scale_factor": 8.0},
  "colossalai": {"growth_factor": 8.0, "hysteresis": 5},
  "mindspore": {"scale_window": 11},
  "paddle": {"incr_every_n_steps": 11, "decr_ratio": 0.25},
}


@pytest.mark.parametrize("system", _EXPLICIT)
def test_explicit_arguments_go_before_the_dictionary(system):
  explicit = _EXPLICIT[system]
  written = presets.to_state_dict(*_import(system))
  assert all(written[name] != value for name, value in explicit.items())
  rule, state = _import(system, written, **explicit)
  assert dict(rule.arguments).items() >= explicit.items()
  assert presets.to_state_dict(rule, state).items() >= explicit.items()


@pytest.mark.parametrize("system", _EXPLICIT)
def test_the_arguments_in_the_dictionary_make_the_rule(system):
  original = getattr(presets, system)(**_EXPLICIT[system])
  written = presets.to_state_dict(original, original.init())
  rule, _ = presets.from_state_dict(system, written)
  for name, value in _EXPLICIT[system].items():
    assert dict(rule.arguments)[name] == value


_WITHOUT_FIRST_SCALE = {
  "tf_exponential": {"incr_every_n_steps": 7},
  "npu_exponential": {"incr_every_n_steps": 7},
  "mindspore_amp": {"scale_factor": 2, "scale_window": 7},
  "mindspore_cell": {"scale_factor": 2, "scale_window": 7},
  "jmp": {"period": 7},
}


@pytest.mark.parametrize("system", _WITHOUT_FIRST_SCALE)
def test_the_first_scale_need_not_be_given_with_a_dictionary(system):
  arguments, saved = _saved(system)
  given = _WITHOUT_FIRST_SCALE[system]
  assert arguments.items() >= given.items()
  rule, state = presets.from_state_dict(system, saved, **given)
  assert state == _import(system)[1]
  assert rule.init().loss_scale == state.loss_scale


@pytest.mark.parametrize(
  "system, name",
  [
    ("npu_exponential", "incr_every_n_steps"),
    ("mindspore_amp", "scale_window"),
    ("megatron_constant", "initial_scale"),
  ],
)
def test_an_argument_that_no_dictionary_holds_must_be_given(system, name):
  _, saved = _saved(system)
  with pytest.raises(TypeError, match=f"missing .*'{name}'"):
    presets.from_state_dict(system, saved)


def test_a_bad_argument_beside_a_dictionary_is_named():
  with pytest.raises(ValueError, match="`growth_interval` must .*got 0"):
    _import("megatron", growth_interval=0)
  with pytest.raises(TypeError, match="'grow_interval'"):
    _import("megatron", grow_interval=3)


def test_a_bad_argument_inside_a_dictionary_is_named():
  _, saved = _saved("torch")
  with pytest.raises(ValueError, match="`growth_factor` must .*got 0.5"):
    presets.from_state_dict("torch", saved | {"growth_factor": 0.5})


def test_arguments_beside_a_rule_are_refused():
  rule = presets.torch()
  written = presets.to_state_dict(rule, rule.init())
  with pytest.raises(TypeError, match=r"(?s)growth_interval.*rule presets\.t"):
    presets.from_state_dict(rule, written, growth_interval=3)


# The values that a dictionary may hold.


class Tensor:
  """As a framework's tensor: nothing but `__array__`."""

  def __init__(self, value):
    self.value = np.asarray(value)

  def __array__(self, dtype=None, copy=None):
    del copy
    return self.value if dtype is None else self.value.astype(dtype)


_WRAPPERS = {
  "tensor[]": lambda x: Tensor(np.asarray(x).reshape(())),
  "tensor[1]": lambda x: Tensor(np.asarray(x).reshape(1)),
  "array[]": lambda x: np.asarray(x).reshape(()),
  "array[1,1]": lambda x: np.asarray(x).reshape(1, 1),
  "numpy": lambda x: np.asarray(x).reshape(())[()],
  "python": lambda x: np.asarray(x).item(),
}


@pytest.mark.parametrize("wrapper", _WRAPPERS)
@pytest.mark.parametrize("system", WITH_STATE)
def test_a_value_of_one_element_is_read(system, wrapper):
  _, saved = _saved(system)
  wrapped = {path: _WRAPPERS[wrapper](x) for path, x in _flat(saved).items()}
  rule, state = _import(system, _nested(wrapped))
  expected_rule, expected_state = _import(system)
  assert rule == expected_rule
  _assert_same(state, expected_state)


def test_a_jax_array_is_read():
  _, saved = _saved("megatron")
  saved = {name: jnp.asarray(value) for name, value in saved.items()}
  _assert_same(_import("megatron", saved)[1], _import("megatron")[1])


@pytest.mark.parametrize("system", WITH_STATE)
def test_a_value_of_two_elements_is_refused(system):
  _, saved = _saved(system)
  flat = {path: Tensor(np.stack([x, x])) for path, x in _flat(saved).items()}
  with pytest.raises(ValueError, match="Tensor") as error:
    _import(system, _nested(flat))
  _assert_lists(error, dict.fromkeys(flat, "must be"))


# Dictionaries that are refused.


def _assert_lists(error, problems):
  """Asserts that an error lists problems by their paths, and nothing else."""
  _, _, listed = str(error.value).partition(": ")
  for path, words in problems.items():
    assert re.search(rf"{re.escape(repr(path))} {words}", listed)
  names = "|".join(re.escape(repr(path)) for path in problems)
  assert len(re.findall(rf"(?:^|; )(?:{names}) ", listed)) == len(problems)
  assert len(re.findall(r"(?:^|; )'[^']*' (?:is|must)", listed)) == len(
    problems
  )


@pytest.mark.parametrize("system", WITH_STATE)
def test_all_missing_keys_are_listed(system):
  with pytest.raises(ValueError, match=f"`state_dict` of {system} ") as error:
    _import(system, {})
  _, saved = _saved(system)
  _assert_lists(error, dict.fromkeys(_flat(saved), "is missing"))


@pytest.mark.parametrize("value", ["x", None, {}], ids=repr)
@pytest.mark.parametrize("system", WITH_STATE)
def test_all_values_of_another_type_are_listed(system, value):
  _, saved = _saved(system)
  wrong = dict.fromkeys(_flat(saved), value)
  with pytest.raises(ValueError, match=f"`state_dict` of {system} ") as error:
    _import(system, _nested(wrong))
  _assert_lists(
    error,
    {path: rf"must be .*got {re.escape(repr(value))}" for path in wrong},
  )


@pytest.mark.parametrize("system", traces.SYSTEMS)
def test_all_unknown_keys_are_listed(system):
  _, saved = _saved(system)
  with pytest.raises(ValueError, match=f"`state_dict` of {system} ") as error:
    _import(system, saved | {"other": 1.0, "another": 2})
  _assert_lists(error, {"other": "is unknown", "another": "is unknown"})


@pytest.mark.parametrize("system", WITH_STATE)
def test_what_is_missing_unknown_and_of_another_type_is_one_list(system):
  _, saved = _saved(system)
  flat = _flat(saved)
  first, *others = flat
  problems = {"other": "is unknown", first: "must be"}
  flat[first] = "x"
  if others:
    problems[others[-1]] = "is missing"
    del flat[others[-1]]
  with pytest.raises(ValueError, match=f"`state_dict` of {system} ") as error:
    _import(system, _nested(flat | {"other": 1}))
  _assert_lists(error, problems)


def test_the_keys_of_a_nested_dictionary_are_listed_by_their_paths():
  nested = {"loss_scaler0": {"unskipped": 1.5, "other": 1}, "loss_scaler1": {}}
  with pytest.raises(ValueError, match="apex") as error:
    presets.from_state_dict("apex", nested)
  _assert_lists(
    error,
    {
      "loss_scaler0/loss_scale": "is missing",
      "loss_scaler0/unskipped": "must be an integer, got 1.5",
      "loss_scaler0/other": "is unknown",
      "loss_scaler1": "is unknown",
    },
  )


@pytest.mark.parametrize("value", [True, 1.5, 2.0, 2**31, "3", None])
@pytest.mark.parametrize(
  "system, name",
  [
    ("torch", "_growth_tracker"),
    ("megatron", "hysteresis_tracker"),
    ("deepspeed", "cur_iter"),
    ("keras", "step_counter"),
  ],
)
def test_a_counter_that_is_no_int32_is_refused(system, name, value):
  _, saved = _saved(system)
  match = rf"'{name}' must .*, got {re.escape(repr(value))}"
  with pytest.raises(ValueError, match=match):
    _import(system, saved | {name: value})


@pytest.mark.parametrize("value", [1, 0, 1.0, "True", None])
def test_a_flag_that_is_no_bool_is_refused(value):
  match = rf"'consecutive_hysteresis' must .*, got {re.escape(repr(value))}"
  _, saved = _saved("deepspeed")
  with pytest.raises(ValueError, match=match):
    _import("deepspeed", saved | {"consecutive_hysteresis": value})


@pytest.mark.parametrize(
  "name, value",
  [("scale_factor", 4.0), ("dynamic", False), ("dynamic", np.ones(2, bool))],
  ids=["scale_factor", "dynamic", "array"],
)
def test_a_constant_of_another_value_is_refused(name, value):
  _, saved = _saved("deepspeed")
  with pytest.raises(ValueError, match=f"'{name}' must be .*, got "):
    _import("deepspeed", saved | {name: value})


@pytest.mark.parametrize(
  "value",
  [0.0, -1.0, np.inf, -np.inf, np.nan, 1e-300, 2.0**-127, 2.0**128],
  ids=repr,
)
@pytest.mark.parametrize("system", SCALE_KEYS)
def test_an_unusable_scale_is_refused_by_its_name(system, value):
  _, saved = _saved(system)
  path = SCALE_KEYS[system]
  flat = _flat(saved) | {path: value}
  with pytest.raises(ValueError, match="`state_dict`") as error:
    _import(system, _nested(flat))
  _assert_lists(error, {path: rf"must .*got {re.escape(repr(value))}"})


@pytest.mark.parametrize(
  "dictionary",
  [None, 8.0, [("scale", 8.0)], object()],
  ids=lambda x: type(x).__name__,
)
@pytest.mark.parametrize(
  "system", ["torch", presets.torch(), ols.DynamicLossScale()], ids=_rule_name
)
def test_what_is_no_dictionary_is_refused_with_a_remedy(system, dictionary):
  name = type(dictionary).__name__
  match = rf"`state_dict` must be a dictionary, got {name}; .*vars\("
  with pytest.raises(TypeError, match=match):
    presets.from_state_dict(system, dictionary)


def test_an_object_is_read_through_its_vars():
  class DynamicLossScaler:
    pass

  _, saved = _saved("deepspeed")
  scaler = DynamicLossScaler()
  vars(scaler).update(saved)
  _assert_same(_import("deepspeed", vars(scaler))[1], _import("deepspeed")[1])


@pytest.mark.parametrize(
  "system",
  ["pytorch", "", None, 3, presets.torch],
  ids=["pytorch", "empty", "None", "3", "function"],
)
def test_an_unknown_system_is_told_the_names(system):
  with pytest.raises(ValueError, match="`system` must be") as error:
    presets.from_state_dict(system, {})
  assert f"got {system!r}" in str(error.value)
  assert all(name in str(error.value) for name in traces.SYSTEMS)


# States that are refused.


def test_the_state_of_the_optimizer_is_refused_with_the_remedy():
  rule = presets.torch()
  opt_state = ols.loss_scaling(optax.sgd(0.1), rule).init(jnp.ones(2))
  with pytest.raises(TypeError, match="`state` must .*`loss_scale_state`"):
    presets.to_state_dict(rule, opt_state)
  presets.to_state_dict(rule, opt_state.loss_scale_state)


@pytest.mark.parametrize(
  "rule, other",
  [
    (presets.torch(), presets.deepspeed()),
    (presets.deepspeed(), presets.torch()),
    (presets.fairseq(), presets.metaseq()),
    (presets.torch(), presets.torch(enabled=False)),
    (presets.megatron_constant(initial_scale=8.0), presets.megatron()),
    (ols.DynamicLossScale(), ols.FixedLossScale()),
  ],
  ids=_rule_name,
)
def test_the_state_of_another_rule_is_refused_with_the_remedy(rule, other):
  with pytest.raises(ValueError, match="`state` must be .* `rule`: .*got "):
    presets.to_state_dict(rule, other.init())


@pytest.mark.parametrize("state", [None, {}, 8.0], ids=repr)
def test_what_is_no_state_is_refused(state):
  with pytest.raises(ValueError, match="`state` must be "):
    presets.to_state_dict(presets.torch(), state)


def test_a_stack_of_states_is_refused():
  rule = presets.torch()
  states = jax.tree.map(lambda x: jnp.stack([x, x]), rule.init())
  with pytest.raises(ValueError, match=r"`state` must be .*got shape \(2,\)"):
    presets.to_state_dict(rule, states)


@pytest.mark.parametrize(
  "rule", [presets.torch(), ols.FixedLossScale()], ids=_rule_name
)
def test_a_traced_state_is_refused_with_the_remedy(rule):
  def write(state):
    presets.to_state_dict(rule, state)

  with pytest.raises(TypeError, match="`state` must .* traced .* outside jit"):
    jax.eval_shape(write, rule.init())


@pytest.mark.parametrize(
  "rule", ["torch", presets.torch, None], ids=["name", "function", "None"]
)
def test_what_is_no_rule_is_refused(rule):
  with pytest.raises(TypeError, match="`rule` must be a LossScale, got "):
    presets.to_state_dict(rule, presets.torch().init())


# Rules that no preset made.


class Counters(NamedTuple):
  mean: jax.Array
  seen: Any
  missing: Any = None


class CountingState(NamedTuple):
  loss_scale: jax.Array
  counters: Counters


@dataclasses.dataclass(frozen=True)
class Counting(ols.LossScale):
  def init(self):
    return CountingState(
      loss_scale=jnp.float32(8.0),
      counters=Counters(
        mean=jnp.zeros(3, jnp.float16),
        seen={"nan": jnp.int32(0), "inf": (jnp.full((), False),)},
      ),
    )

  def update(self, state, overflow, *, amax=None):
    return state._replace(
      loss_scale=state.loss_scale * 2,
      counters=state.counters._replace(
        mean=state.counters.mean + jnp.array([1, 2, 3], jnp.float16),
        seen={
          "nan": state.counters.seen["nan"] + 1,
          "inf": (jnp.asarray(overflow, bool),),
        },
      ),
    )


_OWN_RULES = [ols.DynamicLossScale(8.0), ols.FixedLossScale(8.0), Counting()]


@pytest.mark.parametrize("rule", _OWN_RULES, ids=_rule_name)
def test_an_own_rule_goes_out_and_in_unchanged(rule):
  state = rule.init()
  for overflow in (True, False, True):
    state = rule.update(state, overflow)
  written = presets.to_state_dict(rule, state)
  same, imported = presets.from_state_dict(rule, written)
  assert same is rule
  _assert_same(imported, state)
  _, imported = presets.from_state_dict(
    rule, pickle.loads(pickle.dumps(written))
  )
  _assert_same(imported, state)


def test_other_widths_become_those_of_an_own_rule():
  rule = Counting()
  state = rule.update(rule.init(), True)
  written = presets.to_state_dict(rule, state)
  wide = {
    "loss_scale": float(written["loss_scale"]),
    "counters/mean": written["counters/mean"].astype(np.float64),
    "counters/seen/nan": np.int64(written["counters/seen/nan"]),
  }
  _assert_same(presets.from_state_dict(rule, written | wide)[1], state)


def test_the_keys_of_an_own_rule_are_the_names_in_its_state():
  def keys(rule):
    return set(presets.to_state_dict(rule, rule.init()))

  dynamic = {"loss_scale", "clean_steps", "overflows"}
  assert keys(ols.DynamicLossScale()) == dynamic
  assert keys(ols.FixedLossScale()) == {"loss_scale"}
  assert keys(Counting()) == {
    "loss_scale",
    "counters/mean",
    "counters/seen/nan",
    "counters/seen/inf/0",
  }


def test_the_values_of_an_own_rule_are_numpy():
  rule = Counting()
  written = presets.to_state_dict(rule, rule.init())
  assert type(written["loss_scale"]) is np.float32
  assert type(written["counters/seen/nan"]) is np.int32
  assert written["counters/mean"].dtype == np.float16
  assert not any(isinstance(x, jax.Array) for x in written.values())


def test_the_dictionary_of_an_own_rule_is_checked():
  rule = Counting()
  written = presets.to_state_dict(rule, rule.init())
  del written["loss_scale"]
  wrong = {"counters/mean": np.zeros(2), "counters/seen/nan": 1.5, "other": 1}
  with pytest.raises(ValueError, match="`state_dict` of Counting ") as error:
    presets.from_state_dict(rule, written | wrong)
  _assert_lists(
    error,
    {
      "loss_scale": "is missing",
      "counters/mean": "must be float16",
      "counters/seen/nan": "must be int32",
      "other": "is unknown",
    },
  )


@pytest.mark.parametrize(
  "value", [0.0, -1.0, np.inf, np.nan, 1e-300, np.float32(0)], ids=repr
)
@pytest.mark.parametrize("rule", _OWN_RULES, ids=_rule_name)
def test_an_unusable_scale_of_an_own_rule_is_refused(rule, value):
  written = presets.to_state_dict(rule, rule.init())
  match = rf"'loss_scale' must .*got {re.escape(repr(value))}"
  with pytest.raises(ValueError, match=match):
    presets.from_state_dict(rule, written | {"loss_scale": value})


@pytest.mark.parametrize("value", [np.nan, 0.0, -1.0, np.inf], ids=repr)
@pytest.mark.parametrize("inner", [ols.DynamicLossScale(), presets.torch()])
def test_an_unusable_scale_inside_of_a_warm_start_is_refused(inner, value):
  rule = rules.WarmStart(inner)
  key = "rule_state/loss_scale"
  written = {
    "is_warm": True,
    key: value,
    "rule_state/clean_steps": 0,
    "rule_state/overflows": 0,
  }
  with pytest.raises(ValueError, match=rf"'{key}' must .*got {value!r}"):
    presets.from_state_dict(rule, written)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 1e300], ids=repr)
@pytest.mark.parametrize("key", rules.LogMaxLossScale().init()._fields)
def test_a_statistic_that_is_not_finite_is_refused_by_its_name(key, value):
  rule = rules.LogMaxLossScale()
  written = presets.to_state_dict(rule, rule.init())
  match = rf"'{key}' must .*got {re.escape(repr(value))}"
  with pytest.raises(ValueError, match=match):
    presets.from_state_dict(rule, written | {key: value})


class SeenState(NamedTuple):
  loss_scale: jax.Array
  least_seen: jax.Array
  share: jax.Array


class Seen(ols.LossScale):
  def init(self):
    one = jnp.float32(1)
    return SeenState(one, least_seen=jnp.float32(jnp.inf), share=one)

  def update(self, state, overflow, *, amax=None):
    return state


@pytest.mark.parametrize("least", [np.inf, 2.0])
def test_a_field_that_begins_with_inf_may_hold_it(least):
  rule = Seen()
  written = presets.to_state_dict(rule, rule.init())
  _, state = presets.from_state_dict(
    rule, written | {"least_seen": least, "share": 0.0}
  )
  assert (state.least_seen, state.share) == (least, 0)


@pytest.mark.parametrize(
  "value", [10**400, -(10**400), 10**30000], ids=int.bit_length
)
@pytest.mark.parametrize("system", SCALE_KEYS)
def test_an_integer_beyond_every_float_is_refused_by_its_name(system, value):
  _, saved = _saved(system)
  path = SCALE_KEYS[system]
  with pytest.raises(ValueError, match="`state_dict`") as error:
    _import(system, _nested(_flat(saved) | {path: value}))
  _assert_lists(error, {path: "must be finite in float32, got "})


@pytest.mark.parametrize(
  "value",
  [bytearray(b"8"), memoryview(b"8"), np.timedelta64(5, "s")],
  ids=lambda x: type(x).__name__,
)
def test_what_is_no_number_is_none_in_a_dictionary(value):
  names = ["scale", "growth_tracker", "hysteresis_tracker"]
  with pytest.raises(ValueError, match="`state_dict`") as error:
    _import("megatron", dict.fromkeys(names, value))
  _assert_lists(error, dict.fromkeys(names, "must be .*, got "))
  rule = ols.DynamicLossScale()
  written = presets.to_state_dict(rule, rule.init())
  with pytest.raises(ValueError, match="'clean_steps' must be int32"):
    presets.from_state_dict(rule, written | {"clean_steps": value})


@pytest.mark.parametrize("value", [2**31, 2**40, -(2**40)])
def test_a_counter_of_an_own_rule_beyond_int32_is_refused(value):
  rule = ols.DynamicLossScale()
  written = presets.to_state_dict(rule, rule.init())
  with pytest.raises(ValueError, match=f"'clean_steps' must .*got {value}"):
    presets.from_state_dict(rule, written | {"clean_steps": value})


# Back into training.

# Each of another structure of the state, or way to lose counters.
_TRAINED = [
  "apex",
  "colossalai",
  "deepspeed",
  "fairseq",
  "flax",
  "megatron",
  "metaseq",
  "mindspore",
  "torch",
]


@pytest.mark.parametrize("system", _TRAINED)
def test_training_goes_on_as_the_original_did_without_compiling_again(system):
  run = max(
    (run for run in _runs(system) if _is_exact_but_for_tolerance(system, run)),
    key=lambda run: len(run["resumed"]["scales"]),
  )
  rule, state = presets.from_state_dict(
    system, traces.saved_dict(system, run), **run["arguments"]
  )
  tx = optax.chain(optax.identity(), ols.loss_scaling(optax.adam(0.1), rule))
  traced = []

  @jax.jit
  def step(opt_state, overflow):
    traced.append(1)
    scaled_grads = {"w": jnp.where(overflow, jnp.inf, jnp.ones(2))}
    _, opt_state = tx.update(scaled_grads, opt_state, params)
    return opt_state

  params = {"w": jnp.ones(2)}
  opt_state = step(tx.init(params), False)
  opt_state = optax.tree.set(opt_state, loss_scale_state=state)
  assert ols.get_loss_scale(opt_state) == state.loss_scale

  overflows = traces.overflows_of(run)
  overflows = overflows[len(overflows) // 2 :]
  expected = traces.scales(run["resumed"]["scales"], len(overflows))
  steps = traces.comparable(expected, run["resumed"]["raised"])
  scales = []
  for overflow in overflows[:steps]:
    opt_state = step(opt_state, bool(overflow))
    scales.append(ols.get_loss_scale(opt_state))
  assert len(traced) == 1
  assert len(set(expected[:steps])) > 1
  np.testing.assert_array_equal(np.stack(scales), expected[:steps])


def _is_exact_but_for_tolerance(system, run):
  arguments = {k: x for k, x in run["arguments"].items() if k != "tolerance"}
  return traces.is_exact(system, arguments)


def test_a_state_is_set_inside_jit_too():
  rule, state = _import("deepspeed")
  tx = optax.chain(ols.loss_scaling(optax.sgd(0.1), rule))
  opt_state = tx.init(jnp.ones(2))
  set_state = jax.jit(
    lambda opt_state, state: optax.tree.set(opt_state, loss_scale_state=state)
  )
  resumed = set_state(opt_state, state)
  _assert_same(resumed, optax.tree.set(opt_state, loss_scale_state=state))


# Other ways to save the optimizer's state, in which unused fields are None.

_SERIALIZED = [
  presets.torch(),
  presets.deepspeed(),
  presets.metaseq(tolerance=0.5),
  presets.mindspore_fixed(),
]


def _opt_state(rule):
  tx = ols.loss_scaling(optax.adam(0.1), rule)
  params = {"w": jnp.ones(2)}
  _, opt_state = tx.update({"w": jnp.array([jnp.inf, 1])}, tx.init(params))
  return tx.init(params), opt_state


@pytest.mark.parametrize("rule", _SERIALIZED, ids=_rule_name)
def test_flax_serializes_the_state(rule):
  first, opt_state = _opt_state(rule)
  assert_same_bits(
    serialization.from_bytes(first, serialization.to_bytes(opt_state)),
    opt_state,
  )
  assert_same_bits(
    serialization.from_state_dict(
      first, serialization.to_state_dict(opt_state)
    ),
    opt_state,
  )


@pytest.mark.parametrize("rule", _SERIALIZED, ids=_rule_name)
def test_the_state_pickles(rule):
  _, opt_state = _opt_state(rule)
  assert_same_bits(pickle.loads(pickle.dumps(opt_state)), opt_state)


@pytest.mark.parametrize("rule", _SERIALIZED, ids=_rule_name)
def test_orbax_saves_the_state(rule, tmp_path):
  orbax = pytest.importorskip("orbax.checkpoint")
  first, opt_state = _opt_state(rule)
  with orbax.StandardCheckpointer() as checkpointer:
    checkpointer.save(tmp_path / "state", opt_state)
    checkpointer.wait_until_finished()
    assert_same_bits(checkpointer.restore(tmp_path / "state", first), opt_state)


# Nothing else is needed.


def test_no_framework_is_imported():
  program = """
    import sys

    FRAMEWORKS = {
      "apex", "colossalai", "deepspeed", "fairseq", "flax", "jmp", "keras",
      "megatron", "metaseq", "mindspore", "nemo", "npu_bridge", "paddle",
      "tensorflow", "torch",
    }

    class Watch:
      wanted = set()

      def find_spec(self, name, path=None, target=None):
        self.wanted |= {name.partition(".")[0]} & FRAMEWORKS

    import optax

    sys.meta_path.insert(0, Watch())
    already = FRAMEWORKS & set(sys.modules)
    import optax_lossscale as ols
    from tests.presets import traces

    for system in traces.SYSTEMS:
      run = next(
        run for run in traces.load(system)["runs"]
        if traces.is_importable(system, run)
      )
      saved = traces.saved_dict(system, run)
      rule, state = ols.presets.from_state_dict(
        system, saved, **run["arguments"]
      )
      ols.presets.to_state_dict(rule, rule.update(state, True))
    print(sorted(Watch.wanted | (FRAMEWORKS & set(sys.modules)) - already))
    """
  output = subprocess.run(
    [sys.executable, "-W", "error", "-c", textwrap.dedent(program)],
    check=True,
    capture_output=True,
    text=True,
    cwd=pathlib.Path(__file__).parents[2],
  )
  assert output.stdout == "[]\n"


# What a shorter window or a smaller hysteresis makes of a saved counter, by
# each system's own test of it. S is 8 at first.
OTHER_ARGUMENTS = [
  # The tracker is compared with ==: past the window S never grows.
  ("torch", "_growth_tracker", 9, {"growth_interval": 5}, "c" * 8, [8] * 8),
  ("megatron", "growth_tracker", 9, {"growth_interval": 5}, "c" * 8, [8] * 8),
  ("keras", "step_counter", 9, {"dynamic_growth_steps": 5}, "c" * 8, [8] * 8),
  # With >= it grows at once.
  ("tensorflow", "good_steps", 9, {"increment_period": 5}, "cc", [16, 16]),
  # These count in a circle: 9 becomes 0, and then a whole window has to pass.
  ("jmp", "counter", 9, {"period": 5}, "c" * 7, [8] * 5 + [16] * 2),
  ("jmp", "counter", 7, {"period": 5}, "c" * 4, [8, 8, 16, 16]),
  (
    "mindspore_amp",
    "counter",
    9,
    {"scale_window": 5, "scale_factor": 2},
    "c" * 7,
    [8] * 5 + [16] * 2,
  ),
  # Megatron counts down, to 0.
  ("megatron", "hysteresis_tracker", 2, {"hysteresis": 1}, "xxx", [8, 4, 2]),
  ("megatron", "hysteresis_tracker", 1, {"hysteresis": 3}, "xx", [4, 2]),
  # DeepSpeed to 1, which it does not look at where it never had more.
  ("deepspeed", "cur_hysteresis", 2, {"delayed_shift": 1}, "xx", [4, 2]),
  (
    "deepspeed",
    "cur_hysteresis",
    3,
    {"delayed_shift": 2},
    "xxxx",
    [8, 8, 4, 2],
  ),
  ("deepspeed", "cur_hysteresis", 1, {"delayed_shift": 3}, "xx", [4, 2]),
  # Paddle compares with ==, and forgives on a clean step.
  (
    "paddle",
    "decr_count",
    3,
    {"decr_every_n_nan_or_inf": 2},
    "xxxcxx",
    [8, 8, 8, 8, 8, 4],
  ),
  (
    "paddle_op",
    "num_bad_steps_0",
    3,
    {"decr_every_n_nan_or_inf": 2},
    "xxxcxx",
    [8, 8, 8, 8, 8, 4],
  ),
]


@pytest.mark.parametrize(
  ("system", "key", "count", "arguments", "steps", "expected"), OTHER_ARGUMENTS
)
def test_a_saved_counter_meets_other_arguments(
  system, key, count, arguments, steps, expected
):
  first = _first_scale(system)
  rule = getattr(presets, system)(**{first: 8.0}, **arguments)
  saved = presets.to_state_dict(rule, rule.init())
  saved[key] = type(saved[key])(count) if np.ndim(saved[key]) == 0 else [count]
  rule, state = presets.from_state_dict(system, saved, **arguments)
  scales = []
  for step in steps:
    state = rule.update(state, step == "x")
    scales.append(float(state.loss_scale))
  assert scales == expected


def _first_scale(system):
  names = inspect.signature(getattr(presets, system)).parameters
  return next(name for name in names if "scal" in name and name != "factor")


@pytest.mark.parametrize(
  ("system", "one", "other"),
  [
    (
      "deepspeed",
      {"raise_error_at_min_scale": True},
      {"raise_error_at_min_scale": False},
    ),
    ("fairseq", {"tolerance": 0.0}, {"tolerance": 0.25}),
    ("metaseq", {"scale_factor": 2.0}, {"scale_factor": 4.0}),
  ],
)
def test_other_arguments_leave_the_structure_of_a_state(system, one, other):
  preset = getattr(presets, system)
  structures = [
    jax.tree.structure(preset(**arguments).init()) for arguments in (one, other)
  ]
  assert structures[0] == structures[1]


def test_a_whole_checkpoint_gets_a_hint():
  rule = presets.torch()
  checkpoint = {"scaler": presets.to_state_dict(rule, rule.init()), "epoch": 3}
  with pytest.raises(ValueError, match=r"state_dict\['scaler'\]: pass that"):
    presets.from_state_dict("torch", checkpoint)


def test_of_a_whole_model_a_few_keys_are_listed():
  weights = {f"layer {i}": np.zeros(3) for i in range(1000)}
  with pytest.raises(ValueError, match=r"; and 98\d more\.$") as error:
    _import("torch", weights)
  assert len(str(error.value)) < 1000


def test_a_traced_dictionary_is_refused():
  def load(scale):
    saved = {"scale": scale, "growth_tracker": 0, "hysteresis_tracker": 2}
    return presets.from_state_dict("megatron", saved)[1]

  with pytest.raises(TypeError, match="`state_dict` must have values.*outside"):
    jax.jit(load)(jnp.ones(1))


def test_the_attributes_of_a_deepspeed_scaler_may_hold_its_dtype():
  rule = presets.deepspeed()
  saved = presets.to_state_dict(rule, rule.init())
  assert "dtype" not in saved
  _, state = presets.from_state_dict("deepspeed", saved | {"dtype": object()})
  assert state == rule.init()


def test_a_counter_at_the_end_of_int32_is_read():
  saved = {
    "scale": 8.0,
    "growth_tracker": 0,
    "hysteresis_tracker": -(2**31) + 1,
  }
  rule, state = presets.from_state_dict("megatron", saved)
  assert rule.update(state, True).loss_scale == 4.0
