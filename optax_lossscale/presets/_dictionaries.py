"""State dictionaries: a rule's state as its system saves it, and back."""

from collections.abc import Iterator
from collections.abc import Mapping
from typing import Any
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from optax_lossscale import _engine
from optax_lossscale import _rules
from optax_lossscale import _select
from optax_lossscale.presets import _layouts
from optax_lossscale.presets import _preset


def write(rule: _rules.LossScale, state: Any) -> dict[str, Any]:
  """Returns a rule's state under the keys of the rule's system.

  Args:
    rule: the rule.
    state: its state.

  Raises:
    TypeError: if the state is traced.
    ValueError: if it is not a state of this rule.
  """
  if any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(state)):
    raise TypeError(
      "`state` must have values, got a traced one; call to_state_dict outside "
      "jit."
    )
  _select.check_structure(
    "`state` must be the state of `rule`: of an optimizer's state the "
    "`loss_scale_state`",
    state,
    jax.eval_shape(rule.init),
  )
  state = jax.device_get(state)
  if isinstance(rule, _preset.PresetLossScale):
    keys = _layouts.layout(rule.system, dict(rule.arguments))
    return _nest(
      {
        path: _value(key, rule, state)
        for path, key in keys.items()
        if not isinstance(key, _layouts.Unneeded)
      }
    )
  return {path: np.asarray(x)[()] for path, x in _own_leaves(state).items()}


class Saved(NamedTuple):
  """What a system's dictionary held.

  Attributes:
    arguments: the system's arguments.
    held: what belongs into the state, by what `Key` says it holds.
  """

  arguments: dict[str, Any]
  held: dict[str, Any]


def parse(
  system: str, keys: _layouts.Layout, dictionary: Mapping[str, Any]
) -> Saved:
  """Returns what a system's dictionary holds.

  Args:
    system: the system's name, for the error.
    keys: what it saves.
    dictionary: what came.

  Raises:
    TypeError: if it is no dictionary.
    ValueError: if keys are missing, unknown or of another type; all are listed.
  """
  values = _read(system, keys, dictionary)
  saved = Saved({}, {})
  for path, key in keys.items():
    match key:
      case _layouts.Argument(name):
        saved.arguments[name] = values[path]
      case _layouts.Key(holds, first=first, is_lost=False):
        saved.held[holds] = values[path] - first
  return saved


def fill(rule: _preset.PresetLossScale, held: Mapping[str, Any]) -> Any:
  """Returns the state of a rule, with what a dictionary held in its place.

  Args:
    rule: the rule. What was not held is as in its first state.
    held: as in `Saved`.
  """
  state = rule.init()
  if "loss_scale" in held:
    state = state._replace(loss_scale=jnp.float32(held["loss_scale"]))
  engine = rule.machine
  if isinstance(engine, _rules.FixedLossScale):
    return state  # Nothing is counted where S does not move.
  counts = {}
  if "clean_steps" in held:
    counts["clean_steps"] = held["clean_steps"]
  if "window_steps" in held:
    counts["clean_steps"] = held["window_steps"]
  if "overflows" in held:
    counts["overflows"] = held["overflows"]
  if "hysteresis_left" in held:
    counts["overflows"] = engine.hysteresis - held["hysteresis_left"]
  if "steps" in held:
    counts["total_steps"] = held["steps"]
    counts["clean_steps"] = (
      held["steps"] - held["last_overflow"] - 1 + engine.initial_clean_steps
    )
  return state._replace(
    **{name: jnp.asarray(count, jnp.int32) for name, count in counts.items()}
  )


def read(rule: _rules.LossScale, dictionary: Mapping[str, Any]) -> Any:
  """Returns the state of a rule that a dictionary holds.

  Args:
    rule: the rule; what the dictionary holds of a preset's arguments is the
      rule's already.
    dictionary: what came.

  Raises:
    TypeError: if it is no dictionary.
    ValueError: if keys are missing, unknown or of another type; all are listed.
  """
  if isinstance(rule, _preset.PresetLossScale):
    keys = _layouts.layout(rule.system, dict(rule.arguments))
    return fill(rule, parse(rule.system, keys, dictionary).held)
  state = rule.init()
  leaves = _own_leaves(state)
  values = _read(
    type(rule).__name__,
    {
      (path,): _layouts.Own(x.dtype, x.shape, path == "loss_scale")
      for path, x in leaves.items()
    },
    dictionary,
  )
  return jax.tree.unflatten(
    jax.tree.structure(state),
    [jnp.asarray(values[path,], x.dtype) for path, x in leaves.items()],
  )


def _value(key: Any, rule: _preset.PresetLossScale, state: Any) -> Any:
  match key:
    case _layouts.Constant(value):
      return value
    case _layouts.Argument(name, make) | _layouts.Derived(name, make):
      return make(dict(rule.arguments)[name])
    case _layouts.Key("loss_scale", make):
      return make(float(state.loss_scale))
  if isinstance(rule.machine, _rules.FixedLossScale):
    return key.make(0)  # Nothing is counted where S does not move.
  count = _count(key.holds, rule.machine, state)
  return key.make(max(count + key.first, key.least))


def _count(holds: str, engine: _engine.Engine, state: Any) -> int:
  match holds:
    case "window_steps":
      return int(state.clean_steps) % engine.growth_interval
    case "hysteresis_left":
      return engine.hysteresis - int(state.overflows)
    case "steps":
      return int(state.total_steps)
    case "last_overflow":
      clean_steps = int(state.clean_steps) - engine.initial_clean_steps
      return int(state.total_steps) - 1 - clean_steps
  return int(getattr(state, holds))


def _own_leaves(state: Any) -> dict[str, Any]:
  return {
    jax.tree_util.keystr(path, simple=True, separator="/"): leaf
    for path, leaf in jax.tree.leaves_with_path(state)
  }


def _read(
  system: str, keys: _layouts.Layout, dictionary: Mapping[str, Any]
) -> dict[tuple[str, ...], Any]:
  """Returns the values of a dictionary by their paths, or lists what is wrong.

  The numbers are plain Python, whatever they came in.
  """
  if not isinstance(dictionary, Mapping):
    raise TypeError(
      f"`state_dict` must be a dictionary, got a {type(dictionary).__name__}; "
      "of an object pass vars(object)."
    )
  came = dict(_flatten(dictionary, keys))
  values, problems = {}, []
  for path, key in keys.items():
    if path not in came:
      if isinstance(key, _layouts.Unneeded):
        continue
      problems.append(f"{_name(path)} is missing")
      continue
    try:
      values[path] = key.read(came[path])
    except (TypeError, ValueError) as error:
      problems.append(f"{_name(path)} {error}")
  problems += [f"{_name(path)} is unknown" for path in came if path not in keys]
  if problems:
    names = ", ".join(
      _name(path)
      for path, key in keys.items()
      if not isinstance(key, _layouts.Unneeded)
    )
    raise ValueError(
      f"`state_dict` of {system} must hold {names or 'nothing'}: "
      f"{'; '.join(problems)}."
    )
  return values


def _flatten(
  dictionary: Mapping[Any, Any], keys: _layouts.Layout
) -> Iterator[tuple[tuple[Any, ...], Any]]:
  """Yields the values by their paths, two levels deep where the keys are."""
  outer = {path[0] for path in keys if len(path) == 2}
  for name, value in dictionary.items():
    if name in outer and isinstance(value, Mapping):
      yield from (((name, inner), x) for inner, x in value.items())
    else:
      yield (name,), value


def _nest(values: Mapping[tuple[str, ...], Any]) -> dict[str, Any]:
  nested: dict[str, Any] = {}
  for path, value in values.items():
    if len(path) == 1:
      nested[path[0]] = value
    else:
      nested.setdefault(path[0], {})[path[1]] = value
  return nested


def _name(path: tuple[Any, ...]) -> str:
  return repr(path[0] if len(path) == 1 else "/".join(map(str, path)))
