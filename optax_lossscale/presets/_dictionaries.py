"""State dictionaries: a rule's state as its system saves it, and back."""

from collections.abc import Iterable
from collections.abc import Iterator
from collections.abc import Mapping
from typing import Any
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from optax_lossscale._base import arguments as _arguments
from optax_lossscale._base import trees
from optax_lossscale._rules import base
from optax_lossscale._rules import engine as _engine
from optax_lossscale._rules import loss_scales
from optax_lossscale._step import states
from optax_lossscale.presets import _keys
from optax_lossscale.presets import _layouts
from optax_lossscale.presets import _preset


def write(rule: base.LossScale, state: Any) -> dict[str, Any]:
  """Returns a rule's state under the keys of the rule's system."""
  if isinstance(state, states.LossScalingState):
    raise TypeError(
      "`state` must be the state of `rule`, got the optimizer's whole "
      "LossScalingState; pass its `loss_scale_state`."
    )
  _refuse_traced("state", jax.tree.leaves(state), "to_state_dict")
  trees.check_structure(
    "`state` must be the state of `rule`: of an optimizer's state the "
    "`loss_scale_state`",
    state,
    jax.eval_shape(rule.init),
  )
  state = jax.device_get(state)
  if isinstance(rule, _preset.PresetLossScale):
    return _nest(
      {
        path: _value(key, rule, state)
        for path, key in layout(rule).items()
        if not isinstance(key, _keys.UnneededKey)
      }
    )
  return {path: np.asarray(x)[()] for path, x in _own_leaves(state).items()}


def layout(rule: _preset.PresetLossScale) -> _layouts.Layout:
  """Returns the keys that a rule's system saves."""
  return _layouts.layout(rule.system, dict(rule.arguments))


class Saved(NamedTuple):
  """What a system's dictionary held.

  Attributes:
    arguments: the system's arguments.
    held: what belongs into the state, by what a `StateKey` says it holds.
  """

  arguments: dict[str, Any]
  held: dict[str, Any]


def parse(
  system: str, keys: _layouts.Layout, dictionary: Mapping[str, Any]
) -> Saved:
  """Returns what a system's dictionary holds."""
  values = _read(system, keys, dictionary)
  saved = Saved({}, {})
  for path, key in keys.items():
    match key:
      case _keys.ArgumentKey(name):
        saved.arguments[name] = values[path]
      case _keys.StateKey(holds, first=first, is_lost=False):
        saved.held[holds] = values[path] - first
  return saved


def fill(rule: _preset.PresetLossScale, held: Mapping[str, Any]) -> Any:
  """Returns the state of a rule, with what a dictionary held in its place."""
  state = rule.init()
  if "loss_scale" in held:
    state = state._replace(loss_scale=jnp.float32(held["loss_scale"]))
  if isinstance(rule.machine, loss_scales.FixedLossScale):
    return state  # Nothing is counted where S does not move.
  largest = _arguments.LARGEST_COUNT
  return state._replace(
    **{
      name: jnp.int32(np.clip(count, -largest, largest))
      for name, count in _counters(rule.machine, held).items()
    }
  )


def read(rule: base.LossScale, dictionary: Mapping[str, Any]) -> Any:
  """Returns the state of a rule that a dictionary holds."""
  if isinstance(rule, _preset.PresetLossScale):
    return fill(rule, parse(rule.system, layout(rule), dictionary).held)
  state = rule.init()
  leaves = _own_leaves(state)
  values = _read(
    type(rule).__name__,
    {
      (path,): _keys.OwnKey(x.dtype, x.shape, path == "loss_scale")
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
    case _keys.ConstantKey(value):
      return value
    case _keys.ArgumentKey(name, make) | _keys.DerivedKey(name, make):
      return make(dict(rule.arguments)[name])
    case _keys.StateKey("loss_scale", make):
      return make(float(state.loss_scale))
  if isinstance(rule.machine, loss_scales.FixedLossScale):
    return key.make(0)  # Nothing is counted where S does not move.
  return key.make(_count(key.holds, rule.machine, state) + key.first)


def _count(holds: str, engine: _engine.Engine, state: Any) -> int:
  """Returns the number that a `StateKey` holds; `_counters` undoes it."""
  match holds:
    case "window_steps":
      return max(int(state.clean_steps), 0) % engine.growth_interval
    case "hysteresis_left":
      return engine.hysteresis - int(state.overflows)
    case "overflows_to_shrink":
      return max(engine.hysteresis - int(state.overflows), 1)
    case "steps":
      return int(state.total_steps)
    case "last_overflow":
      clean_steps = int(state.clean_steps) - engine.initial_clean_steps
      return int(state.total_steps) - 1 - clean_steps
  return int(getattr(state, holds))


def _counters(
  engine: _engine.Engine, held: Mapping[str, Any]
) -> dict[str, int]:
  """Returns the counters of a state, of the numbers that `StateKey`s hold."""
  counters: dict[str, int] = {}
  for holds, number in held.items():
    match holds:
      case "clean_steps" | "overflows":
        counters[holds] = number
      case "window_steps":
        counters["clean_steps"] = _unwrap(number, engine.growth_interval)
      case "hysteresis_left":
        counters["overflows"] = engine.hysteresis - number
      case "overflows_to_shrink":
        # A hysteresis of 1 shrinks S whatever the count was.
        is_counted = engine.hysteresis > 1
        counters["overflows"] = engine.hysteresis - number if is_counted else 0
      case "steps":
        counters["total_steps"] = number
        counters["clean_steps"] = (
          number - held["last_overflow"] - 1 + engine.initial_clean_steps
        )
  return counters


def _unwrap(steps: int, interval: int) -> int:
  """Returns the clean steps that a count stands for which starts over.

  A count past the interval, which has become shorter, starts over without a
  growth: at 0 on the next step, where `interval` clean steps would grow S.
  """
  if steps < interval:
    return steps
  return (steps + 1) % interval - 1


def _own_leaves(state: Any) -> dict[str, Any]:
  return {
    jax.tree_util.keystr(path, simple=True, separator="/"): leaf
    for path, leaf in jax.tree.leaves_with_path(state)
  }


def _read(
  system: str, keys: Mapping[tuple[str, ...], Any], dictionary: Any
) -> dict[tuple[str, ...], Any]:
  """Returns the values of a dictionary by their paths, or lists what is wrong.

  The numbers are plain Python, whatever they came in.
  """
  if not isinstance(dictionary, Mapping):
    raise TypeError(
      f"`state_dict` must be a dictionary, got {type(dictionary).__name__}; of "
      "an object pass its vars(...)."
    )
  came = dict(_flatten(dictionary, keys))
  _refuse_traced("state_dict", came.values(), "from_state_dict")
  values, problems = {}, []
  for path, key in keys.items():
    if path in came:
      try:
        values[path] = key.read(came[path])
      except (TypeError, ValueError) as error:
        problems.append(f"{_name(path)} {str(error).rstrip('.')}")
    elif not isinstance(key, _keys.UnneededKey):
      problems.append(f"{_name(path)} is missing")
  problems += [f"{_name(path)} is unknown" for path in came if path not in keys]
  if problems:
    raise ValueError(
      f"`state_dict` of {system} must hold {_list_names(keys)}: "
      f"{'; '.join(problems)}.{_hint(keys, dictionary)}"
    )
  return values


def _hint(
  keys: Mapping[tuple[str, ...], Any], dictionary: Mapping[Any, Any]
) -> str:
  """Returns where the dictionary is, if a whole checkpoint came."""
  wanted = {
    path[0]
    for path, key in keys.items()
    if not isinstance(key, _keys.UnneededKey)
  }
  for name, value in dictionary.items():
    if isinstance(value, Mapping) and wanted and wanted <= set(value):
      return f" All of them are in state_dict[{name!r}]: pass that."
  return ""


def _list_names(keys: Mapping[tuple[str, ...], Any]) -> str:
  names = [
    _name(path)
    for path, key in keys.items()
    if not isinstance(key, _keys.UnneededKey)
  ]
  return ", ".join(names) or "nothing"


def _refuse_traced(name: str, values: Iterable[Any], function: str) -> None:
  if any(isinstance(x, jax.core.Tracer) for x in values):
    raise TypeError(
      f"`{name}` must have values, got a traced one; call {function} outside "
      "jit."
    )


def _flatten(
  dictionary: Mapping[Any, Any], keys: Mapping[tuple[str, ...], Any]
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
