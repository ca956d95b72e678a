"""The presets' arguments: their names, what is refused, and the rule's repr."""

import ast
import doctest
import inspect
import math
import pickle
import re
import textwrap

import jax
import numpy as np
import pytest

from optax_lossscale import presets
from optax_lossscale.presets import _keys
from optax_lossscale.presets import declaration
from tests import reference
from tests import support

SYSTEMS = list(reference.MODELS)

# What kind of value each argument takes.
KINDS = {
  "torch": {
    "init_scale": "scale",
    "growth_factor": "growth",
    "backoff_factor": "backoff",
    "growth_interval": "count",
    "enabled": "flag",
  },
  "torch_sharded": {
    "init_scale": "scale",
    "backoff_factor": "backoff",
    "growth_factor": "growth",
    "growth_interval": "count",
    "enabled": "flag",
  },
  "megatron": {
    "initial_scale": "scale",
    "min_scale": "bound",
    "growth_factor": "growth",
    "backoff_factor": "backoff",
    "growth_interval": "count",
    "hysteresis": "count",
    "refill": "refill",
  },
  "megatron_constant": {"initial_scale": "scale"},
  "deepspeed": {
    "init_scale": "scale",
    "scale_window": "count",
    "min_scale": "bound",
    "delayed_shift": "count",
    "consecutive_hysteresis": "flag",
    "raise_error_at_min_scale": "flag",
  },
  "deepspeed_legacy": {
    "init_scale": "scale",
    "scale_factor": "growth",
    "scale_window": "count",
    "min_scale": "bound",
    "delayed_shift": "count",
    "consecutive_hysteresis": "flag",
    "raise_error_at_min_scale": "flag",
  },
  "apex": {
    "loss_scale": "dynamic or scale",
    "init_scale": "scale",
    "scale_factor": "two",
    "scale_window": "count",
    "min_loss_scale": "bound or none",
    "max_loss_scale": "ceiling",
  },
  "apex_hysteresis": {
    "init_scale": "scale",
    "growth_factor": "growth",
    "backoff_factor": "backoff",
    "growth_interval": "count",
    "hysteresis": "count",
  },
  "fairseq": {
    "init_scale": "scale",
    "scale_factor": "growth",
    "scale_window": "count",
    "tolerance": "share",
    "threshold": "bound or none",
    "min_loss_scale": "bound",
  },
  "metaseq": {
    "init_scale": "scale",
    "scale_factor": "growth",
    "scale_window": "count",
    "tolerance": "share",
    "threshold": "bound or none",
    "min_loss_scale": "bound",
  },
  "colossalai": {
    "initial_scale": "scale",
    "growth_factor": "growth",
    "backoff_factor": "backoff",
    "growth_interval": "count",
    "min_scale": "bound or none",
    "max_scale": "ceiling or none",
    "hysteresis": "count",
  },
  "npu_exponential": {
    "init_loss_scale": "scale",
    "incr_every_n_steps": "count",
    "decr_every_n_nan_or_inf": "count",
    "incr_ratio": "growth",
    "decr_ratio": "backoff",
  },
  "npu_fixed": {
    "loss_scale": "scale from one",
    "enable_overflow_check": "flag",
  },
  "tf_exponential": {
    "init_loss_scale": "scale",
    "incr_every_n_steps": "count",
    "decr_every_n_nan_or_inf": "count",
    "incr_ratio": "growth",
    "decr_ratio": "backoff",
  },
  "tensorflow": {
    "initial_loss_scale": "scale",
    "increment_period": "count",
    "multiplier": "growth",
  },
  "keras": {"initial_scale": "scale", "dynamic_growth_steps": "count"},
  "mindspore": {
    "init_loss_scale": "scale from one",
    "scale_factor": "growth",
    "scale_window": "count",
  },
  "mindspore_fixed": {
    "loss_scale": "scale from one",
    "drop_overflow_update": "flag",
  },
  "mindspore_amp": {
    "scale_value": "scale from one",
    "scale_factor": "growth",
    "scale_window": "count",
  },
  "mindspore_cell": {
    "loss_scale_value": "scale",
    "scale_factor": "growth",
    "scale_window": "count",
  },
  "paddle": {
    "enable": "flag",
    "init_loss_scaling": "scale",
    "incr_ratio": "growth",
    "decr_ratio": "backoff",
    "incr_every_n_steps": "count",
    "decr_every_n_nan_or_inf": "count",
    "use_dynamic_loss_scaling": "flag",
  },
  "paddle_op": {
    "init_loss_scaling": "scale",
    "incr_every_n_steps": "count",
    "decr_every_n_nan_or_inf": "count",
    "incr_ratio": "growth",
    "decr_ratio": "backoff",
  },
  "flax": {
    "scale": "scale",
    "growth_factor": "growth",
    "backoff_factor": "backoff",
    "growth_interval": "count",
    "minimum_scale": "bound or none",
  },
  "jmp": {
    "loss_scale": "scale",
    "period": "count",
    "factor": "growth",
    "min_loss_scale": "bound",
  },
}

# Arguments that the reference models leave out: they switch the scaler off, or
# the system itself does not use them.
NOT_IN_MODEL = {
  "torch": {"enabled": True},
  "torch_sharded": {"enabled": True},
  "paddle": {"enable": True},
  "apex": {"scale_factor": 2.0},
}

# A value for each kind, in range and, but for flags, not the default.
OTHER = {
  "scale": 8.0,
  "scale from one": 8,
  "dynamic or scale": 128.0,
  "growth": 4.0,
  "backoff": 0.25,
  "count": 7,
  "bound": 2.0,
  "bound or none": 0.25,
  "ceiling": 2.0**20,
  "ceiling or none": 2.0**20,
  "share": 0.5,
  "flag": False,
  "refill": "clean",
  "two": 2,
}

_NAN_AND_INF = [math.nan, math.inf, -math.inf]
_NOT_NUMBERS = ["8", "yes", True, np.True_, [8.0], 1j]
_NOT_SCALES = [0, 0.0, -1.0, *_NAN_AND_INF, 2.0**-127, 2.0**-149, 2.0**128]
_NOT_BOUNDS = [-1.0, *_NAN_AND_INF, 2.0**128]
_NOT_SHARES = [-0.1, 1.1, *_NAN_AND_INF]

OUT_OF_RANGE = {
  "scale": _NOT_SCALES,
  "scale from one": [*_NOT_SCALES, 0.5, 1 - 2.0**-24],
  "dynamic or scale": _NOT_SCALES,
  "growth": [1, 1.0, 0.5, 0, -2.0, 1.00000001, 2.0**128, *_NAN_AND_INF],
  "backoff": [
    0,
    1,
    1.0,
    2.0,
    -0.5,
    0.99999999,
    1e-50,
    2.0**-127,
    *_NAN_AND_INF,
  ],
  "count": [0, -1, 2**31, 10**400],
  "bound": _NOT_BOUNDS,
  "bound or none": _NOT_BOUNDS,
  "ceiling": _NOT_SCALES,
  "ceiling or none": _NOT_SCALES[2:],  # 0 is none.
  "share": _NOT_SHARES,
  "flag": [],
  "refill": ["never", "growth, clean", "", None, True, ["growth"]],
  "two": [3, 1.0, 2.5, 0, math.nan],
}
OF_ANOTHER_KIND = {
  "scale": [*_NOT_NUMBERS, None],
  "scale from one": [*_NOT_NUMBERS, None],
  "dynamic or scale": [*_NOT_NUMBERS, None, "static", "Dynamic"],
  "growth": [*_NOT_NUMBERS, None],
  "backoff": [*_NOT_NUMBERS, None],
  "count": [1.5, True, np.True_, "2", None, [2]],
  "bound": [*_NOT_NUMBERS, None],
  "bound or none": _NOT_NUMBERS,
  "ceiling": [*_NOT_NUMBERS, None],
  "ceiling or none": _NOT_NUMBERS,
  "share": [*_NOT_NUMBERS, None],
  "flag": [0, 1, 1.0, "yes", None, [True]],
  "refill": [],
  "two": ["2", None],
}


def _arguments(kinds):
  """Returns (system, argument) of the kinds, for parametrize."""
  kinds = set(kinds)
  return [
    pytest.param(system, name, id=f"{system}-{name}")
    for system in SYSTEMS
    for name, kind in KINDS[system].items()
    if kind in kinds
  ]


def _required(system):
  """Returns values for the arguments that have no default."""
  return {
    name: OTHER[KINDS[system][name]]
    for name, parameter in _parameters(system).items()
    if parameter.default is parameter.empty
  }


def _parameters(system):
  return dict(inspect.signature(getattr(presets, system)).parameters)


def _make(system, **arguments):
  return getattr(presets, system)(**(_required(system) | arguments))


def _refused(error, name, value):
  """Expects an error: the argument's name, the rule, and what came."""
  came = re.escape(repr(value)[:100])
  match = rf"(?s)(?=.*`{name}` must )(?=.*got .*{came})"
  return pytest.raises(error, match=match)


# Names and documentation.


def test_every_preset_is_tested_here():
  assert set(SYSTEMS) == set(declaration.PRESETS)
  assert {x: list(KINDS[x]) for x in SYSTEMS} == {
    x: list(_parameters(x)) for x in SYSTEMS
  }


def test_what_is_exported_is_what_was_declared():
  others = {"PresetLossScale", "accelerate_train_mode", "from_state_dict"}
  others |= {"npu_loss_scale_optimizer", "to_state_dict"}
  assert presets.__all__ == sorted(others | set(declaration.PRESETS))
  assert presets.__all__ == dir(presets)
  for name, preset in declaration.PRESETS.items():
    assert getattr(presets, name) is preset.function


@pytest.mark.parametrize("system", SYSTEMS)
def test_the_docstring_of_a_preset_has_each_part_once_and_in_order(system):
  lines = getattr(presets, system).__doc__.splitlines()
  ends = ("Args:", "Returns:", "Raises:", "Examples:", "References:")
  assert tuple(x for x in lines if x in ends) == ends


@pytest.mark.parametrize("system", SYSTEMS)
def test_a_declaration_is_of_the_arguments_of_the_signature(system):
  preset = declaration.PRESETS[system]
  names = {
    cell.name
    for cell in (*preset.columns.values(), *preset.switches.values())
    if isinstance(cell, declaration.Argument)
  }
  assert names == set(_parameters(system))


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


@pytest.mark.parametrize("system", SYSTEMS)
def test_arguments_by_position_are_told_the_names(system):
  parameters = _parameters(system)
  assert {x.kind for x in parameters.values()} == {
    inspect.Parameter.KEYWORD_ONLY
  }
  arguments = ", ".join(f"{name}=..." for name in parameters)
  message = (
    f"`{system}` takes its arguments by name, got 2 by position; write "
    f"{system}({arguments})."
  )
  with pytest.raises(TypeError, match=f"^{re.escape(message)}$"):
    getattr(presets, system)(8.0, 2, **_required(system))


@pytest.mark.parametrize("system", SYSTEMS)
def test_names_order_and_defaults_are_those_of_the_original(system):
  model = inspect.signature(reference.MODELS[system]).parameters.values()
  theirs = [
    (parameter.name, parameter.default)
    for parameter in model
    # What a model is told apart from its own system by.
    if parameter.kind is not parameter.KEYWORD_ONLY
  ]
  extra = NOT_IN_MODEL.get(system, {})
  ours = {name: x.default for name, x in _parameters(system).items()}
  assert {name: ours.pop(name) for name in extra} == extra
  assert list(ours.items()) == theirs


@pytest.mark.parametrize("system", SYSTEMS)
def test_an_unknown_argument_is_told_the_one_that_is_meant(system):
  for name in _parameters(system):
    message = (
      f"`{system}` takes the arguments {', '.join(_parameters(system))}, got "
      f"'{name}x'; did you mean `{name}`?"
    )
    with pytest.raises(TypeError, match=f"^{re.escape(message)}$"):
      _make(system, **{f"{name}x": 3})


def test_an_unknown_argument_that_resembles_none_is_told_them_all():
  message = "`keras` takes the arguments .*, dynamic_growth_steps, got 'qqq'.$"
  with pytest.raises(TypeError, match=message):
    presets.keras(qqq=3)


@pytest.mark.parametrize(
  ("system", "end"),
  [("megatorn", "'megatorn'; did you mean 'megatron'?"), ("qqq", "'qqq'.")],
)
def test_an_unknown_system_of_a_dictionary_is_told_the_one_that_is_meant(
  system, end
):
  with pytest.raises(ValueError, match=f"got {re.escape(end)}$"):
    presets.from_state_dict(system, {})


@pytest.mark.parametrize(
  "system", [system for system in SYSTEMS if _required(system)]
)
def test_a_missing_argument_is_named(system):
  for name in _required(system):
    others = {k: x for k, x in _required(system).items() if k != name}
    message = f"`{system}` must be .* missing '{name}'; pass {name}=...\\.$"
    with pytest.raises(TypeError, match=message):
      getattr(presets, system)(**others)


def test_all_missing_arguments_are_named():
  message = "missing 'scale_value', 'scale_window'; pass scale_value=..., sca"
  with pytest.raises(TypeError, match=message):
    presets.mindspore_amp(scale_factor=2)


@pytest.mark.parametrize("system", SYSTEMS)
def test_the_docstring_describes_every_argument(system):
  sections = _sections(getattr(presets, system))
  described = re.findall(r"^(\w+): \S", sections["Args"], re.MULTILINE)
  assert described == list(_parameters(system))


@pytest.mark.parametrize("system", SYSTEMS)
def test_the_docstring_has_every_section(system):
  sections = _sections(getattr(presets, system))
  assert list(sections) == [
    "Args",
    "Returns",
    "Raises",
    "Examples",
    "References",
  ]
  assert all(sections.values())
  assert f"ols.presets.{system}(" in sections["Examples"]
  assert "TypeError" in sections["Raises"]
  assert "ValueError" in sections["Raises"]


@pytest.mark.parametrize("system", SYSTEMS)
def test_the_examples_are_found_by_doctest(system):
  # It looks for the module of a function, which a decorator may hide.
  module = inspect.getmodule(getattr(presets, system))
  found = doctest.DocTestFinder().find(module)
  examples = {test.name: test.examples for test in found}
  assert examples[f"{module.__name__}.{system}"]


def _sections(function):
  doc = inspect.getdoc(function)
  parts = re.split(r"^([A-Z]\w+):$", doc, flags=re.MULTILINE)[1:]
  texts = [textwrap.dedent(text.strip("\n")) for text in parts[1::2]]
  return dict(zip(parts[::2], texts, strict=True))


# What is refused.


@pytest.mark.parametrize(
  "system, name", _arguments(kind for kind in OTHER if OUT_OF_RANGE[kind])
)
def test_a_value_out_of_range_is_refused(system, name):
  for value in OUT_OF_RANGE[KINDS[system][name]]:
    with _refused(ValueError, name, value):
      _make(system, **{name: value})


@pytest.mark.parametrize(
  "system, name", _arguments(kind for kind in OTHER if OF_ANOTHER_KIND[kind])
)
def test_a_value_of_another_kind_is_refused(system, name):
  for value in OF_ANOTHER_KIND[KINDS[system][name]]:
    with _refused(TypeError, name, value):
      _make(system, **{name: value})


@pytest.mark.slow
@pytest.mark.parametrize(
  "system, name", _arguments(set(OTHER) - {"refill", "two"})
)
def test_a_traced_value_is_refused(system, name):
  def make(value):
    return _make(system, **{name: value}).init()

  with pytest.raises(TypeError, match=f"`{name}`"):
    jax.eval_shape(make, jax.ShapeDtypeStruct((), np.float32))


def test_a_scale_that_apex_does_not_know_is_told_what_there_is():
  with pytest.raises(TypeError, match=r"`loss_scale` must .*'dynamic'"):
    presets.apex(loss_scale="static")


@pytest.mark.parametrize(
  "system, first, floor",
  [
    ("megatron", "initial_scale", "min_scale"),
    ("colossalai", "initial_scale", "min_scale"),
  ],
)
def test_a_floor_above_the_first_scale_is_refused(system, first, floor):
  with _refused(ValueError, floor, 16.0) as error:
    _make(system, **{first: 8.0, floor: 16.0})
  assert f"`{first}`=8.0" in str(error.value)
  _make(system, **{first: 8.0, floor: 8.0})


def test_a_ceiling_below_the_first_scale_is_refused():
  with _refused(ValueError, "max_scale", 4.0):
    presets.colossalai(initial_scale=8.0, max_scale=4.0)
  presets.colossalai(initial_scale=8.0, max_scale=8.0)


def test_megatron_refuses_a_floor_of_zero():
  with _refused(ValueError, "min_scale", 0.0):
    presets.megatron(min_scale=0.0)


# What is allowed.


@pytest.mark.parametrize("system, name", _arguments(OTHER))
def test_the_ends_of_the_range_are_allowed(system, name):
  ends = {
    "scale": [support.SMALLEST, 2.0**127, 1, np.float32(8), np.int64(8)],
    "scale from one": [1, 1.0, 2.0**127],
    "dynamic or scale": ["dynamic", support.SMALLEST, 2.0**127],
    "growth": [1 + 2.0**-23, 2.0**100, 2],
    "backoff": [2.0**-100, 1 - 2.0**-24],
    "count": [1, 2**31 - 1, np.int32(3), 2.0],
    "bound": [2.0**-20],
    "bound or none": [None, 0.0, 0],
    "ceiling": [2.0**24, 2.0**127],
    "ceiling or none": [None, 0, 2.0**127],
    "share": [0, 0.0, 1, 1.0],
    "flag": [True, False, np.True_],
    "refill": ["growth", "clean"],
    "two": [2, 2.0],
  }
  kind = KINDS[system][name]
  for value in ends[kind]:
    # Megatron refuses a first S below its floor, which is 1.
    lower = {"min_scale": support.SMALLEST} if system == "megatron" else {}
    rule = _make(system, **(lower | {name: value}))
    assert dict(rule.arguments)[name] == value


@pytest.mark.parametrize("system, name", _arguments({"count"}))
def test_a_rule_with_the_largest_count_runs(system, name):
  rule = _make(system, **{name: 2**31 - 1})
  state = rule.init()
  state = jax.eval_shape(rule.update, state, True)
  assert state.loss_scale.shape == ()


@pytest.mark.parametrize("system", ["torch", "torch_sharded", "paddle"])
def test_a_scaler_that_is_off_leaves_s_at_one(system):
  name = {"paddle": "enable"}.get(system, "enabled")
  rule = _make(system, **{name: False})
  assert rule.init().loss_scale == 1.0
  assert rule.update(rule.init(), True).loss_scale == 1.0


# The rule as a value.


def _rules(system):
  """Returns rules of one system, one for each argument that is changed."""
  rules = [_make(system)]
  for name, parameter in _parameters(system).items():
    kind = KINDS[system][name]
    if kind == "flag":
      rules.append(_make(system, **{name: not parameter.default}))
    elif kind.startswith("scale"):
      rules.append(_make(system, **{name: 2.0**30 / 3}))
    elif kind != "two" and name not in _required(system):
      rules.append(_make(system, **{name: OTHER[kind]}))
  return rules


@pytest.mark.parametrize("system", SYSTEMS)
def test_equal_arguments_make_equal_rules(system):
  for rule, same in zip(_rules(system), _rules(system), strict=True):
    assert rule is not same
    assert rule == same
    assert hash(rule) == hash(same)


@pytest.mark.parametrize("system", SYSTEMS)
def test_other_arguments_make_other_rules(system):
  rules = _rules(system)
  assert len(rules) > 1
  assert len(set(rules)) == len(rules)


def test_other_systems_make_other_rules():
  assert len({_make(system) for system in SYSTEMS}) == len(SYSTEMS)
  assert presets.torch() != presets.torch_sharded()


@pytest.mark.parametrize("system", SYSTEMS)
def test_a_rule_pickles(system):
  for rule in _rules(system):
    loaded = pickle.loads(pickle.dumps(rule))
    assert loaded == rule
    assert hash(loaded) == hash(rule)
    assert repr(loaded) == repr(rule)


@pytest.mark.parametrize("system", SYSTEMS)
def test_the_repr_evaluates_to_the_rule(system):
  for rule in _rules(system):
    assert eval(repr(rule), {"presets": presets}) == rule


@pytest.mark.parametrize("system", SYSTEMS)
def test_the_repr_names_the_arguments(system):
  call = ast.parse(repr(_make(system)), mode="eval").body
  assert ast.unparse(call.func) == f"presets.{system}"
  assert [x.arg for x in call.keywords] == list(_parameters(system))


@pytest.mark.parametrize("system, name", _arguments(set(OTHER) - {"refill"}))
def test_the_repr_of_a_numpy_argument_evaluates_to_the_rule(system, name):
  value = OTHER[KINDS[system][name]]
  rule = _make(system, **{name: np.asarray(value)[()]})
  assert eval(repr(rule), {"presets": presets}) == rule
  assert rule == _make(system, **{name: value})


def test_a_rule_reads_as_it_is_called():
  rule = presets.keras(initial_scale=8, dynamic_growth_steps=100)
  assert (
    repr(rule) == "presets.keras(initial_scale=8, dynamic_growth_steps=100)"
  )


# Whether an overflow skips the step.


@pytest.mark.parametrize(
  "rule",
  [
    presets.torch(enabled=False),
    presets.torch_sharded(enabled=False),
    presets.paddle(enable=False),
    presets.apex(loss_scale=128.0),
    presets.mindspore_fixed(drop_overflow_update=False),
    presets.npu_fixed(loss_scale=8.0, enable_overflow_check=False),
  ],
  ids=lambda rule: rule.system,
)
def test_a_scaler_that_does_not_look_does_not_skip(rule):
  assert rule.skip is False


@pytest.mark.parametrize("system", SYSTEMS)
def test_the_defaults_skip(system):
  assert _make(system).skip is True


def test_paddle_without_dynamic_scaling_skips():
  rule = presets.paddle(use_dynamic_loss_scaling=False, init_loss_scaling=8.0)
  assert rule.skip is True
  assert rule.update(rule.init(), True).loss_scale == 8.0


def test_apex_with_a_number_holds_it():
  rule = presets.apex(loss_scale=128.0)
  assert rule.update(rule.init(), True).loss_scale == 128.0


def test_apex_starts_at_its_ceiling_at_the_most():
  assert presets.apex(init_scale=2.0**30).init().loss_scale == 2.0**24
