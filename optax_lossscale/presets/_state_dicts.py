"""Conversion of a scaler's state from another system, and back."""

from collections.abc import Collection
from collections.abc import Iterable
from collections.abc import Mapping
from typing import Any
from typing import TypeGuard

import jax
import jax.numpy as jnp
import numpy as np

from optax_lossscale._base import arguments as _arguments
from optax_lossscale._base import leaves
from optax_lossscale._base import switches
from optax_lossscale._base.arguments import shown
from optax_lossscale._rules import base
from optax_lossscale._rules import fixed
from optax_lossscale._step import states
from optax_lossscale.presets import _keys
from optax_lossscale.presets import declaration
from optax_lossscale.rules import WarmStart

# The most problems that an error lists.
_MOST_PROBLEMS = 20


@switches.lifted()
def to_state_dict(rule: base.LossScale, state: Any) -> dict[str, Any]:
  """Returns a rule's state as the rule's system would save it.

  The keys and types are the system's own, with NumPy arrays where it saves
  tensors. For a rule that no preset made, the keys are the names of its state's
  fields. A `WarmStart` of a preset's rule is saved as that rule.

  Args:
    rule: the rule, whether or not a preset made it.
    state: the rule's state, the `loss_scale_state` in an optimizer's state.

  Returns:
    A new dictionary; {} if the system saves nothing.

  Raises:
    TypeError: if the state is traced (call it outside jit), or is the whole
      state of the optimizer.
    ValueError: if the state is not this rule's, or a `WarmStart` is still
      probing.

  Examples:
    >>> import optax_lossscale as ols
    >>> rule = ols.presets.apex(init_scale=8.0)
    >>> ols.presets.to_state_dict(rule, rule.init())
    {'loss_scaler0': {'loss_scale': 8.0, 'unskipped': 0}}
    >>> rule = ols.DynamicLossScale(8.0)
    >>> sorted(ols.presets.to_state_dict(rule, rule.init()))
    ['clean_steps', 'loss_scale', 'overflows']
  """
  if not isinstance(rule, base.LossScale):
    raise TypeError(f"`rule` must be a LossScale, got {shown(rule)}.")
  written = _write(rule, state)
  if not _starts_preset(rule):
    return written
  if not state.is_warm:
    raise ValueError(
      "`state` must be that of a WarmStart that has found its first S, got one "
      "that still probes, which the rule's system does not save; make a step "
      "with gradients first, or save the optimizer's state itself."
    )
  return _write(rule.rule, state.rule_state)


@switches.lifted()
def from_state_dict(
  system: str | base.LossScale,
  state_dict: Mapping[str, object],
  /,
  **arguments: object,
) -> tuple[base.LossScale, Any]:
  """Returns the rule and the state that a system's dictionary describes.

  Some dictionaries hold the system's arguments (torch, DeepSpeed, Paddle, the
  `vars` of a scaler of Flax or jmp). Others do not (Megatron, Keras): pass
  every argument that was not at its default.

  Args:
    system: the preset's name, or a rule.
    state_dict: the dictionary, with the system's own keys and perhaps its
      arguments. Values may be numbers, or NumPy arrays or CPU tensors with one
      element.
    **arguments: the preset's arguments. These, or the rule's, override those in
      the dictionary.

  Returns:
    The rule that the preset returns, and the rule's state. Set the state in the
    optimizer's state as shown below.

  Raises:
    TypeError: if `state_dict` is not a dictionary, or is traced, or an argument
      has the wrong type.
    ValueError: if keys are missing or unknown, or values have the wrong type or
      are not finite (up to twenty are listed); or if `system` is unknown.

  Examples:
    >>> import jax.numpy as jnp
    >>> import optax
    >>> import optax_lossscale as ols
    >>> saved = {"fin_steps": 3, "scale": 65536.0}
    >>> rule, state = ols.presets.from_state_dict("flax", saved)
    >>> opt_state = ols.loss_scaling(optax.sgd(0.1), rule).init(jnp.ones(2))
    >>> opt_state = optax.tree.set(opt_state, loss_scale_state=state)
    >>> print(ols.get_loss_scale(opt_state), state.clean_steps)
    65536.0 3
  """
  if isinstance(system, base.LossScale):
    if arguments:
      raise TypeError(
        f"arguments are for a preset's name, got {', '.join(arguments)} with "
        f"the rule {system!r}, which has its arguments already."
      )
    return system, _restore(system, state_dict)
  presets = declaration.PRESETS
  if not isinstance(system, str) or system not in presets:
    hint = _arguments.did_you_mean(system, presets) or "."
    raise ValueError(
      f"`system` must be a rule or one of {', '.join(sorted(presets))}, got "
      f"{shown(system)}{hint}"
    )
  preset = presets[system]
  if preset.is_off(arguments):
    rule = preset.function(**arguments)
    return rule, rule.init()  # A scaler that is off reads nothing.
  try:
    numbers = _read_numbers(system, preset.saves, state_dict)
  except ValueError as error:
    if state_dict or preset.off_switch is None:
      raise
    raise ValueError(
      f"{error} A scaler that is switched off saves nothing: pass "
      f"{preset.off_switch}=False."
    ) from None
  saved = {x: numbers[x] for x in preset.parameters if x in numbers}
  first = preset.columns.get("init_scale")
  if first and first.name in preset.required:
    saved[first.name] = numbers["S"]
  rule = preset.function(**(saved | arguments))
  return rule, _fill(rule, numbers)


def _starts_preset(rule: object) -> TypeGuard[WarmStart]:
  return isinstance(rule, WarmStart) and isinstance(
    rule.rule, declaration.PresetLossScale
  )


def _keys_of(rule: declaration.PresetLossScale) -> _keys.Keys:
  """Returns the keys that a rule's system saves."""
  preset = declaration.PRESETS[rule.system]
  return {} if preset.is_off(dict(rule.arguments)) else preset.saves


def _write(rule: base.LossScale, state: Any) -> dict[str, Any]:
  """Returns a rule's state under the keys of its system."""
  if isinstance(state, states.LossScalingState):
    raise TypeError(
      "`state` must be the state of `rule`, got the optimizer's whole "
      "LossScalingState; pass its `loss_scale_state`."
    )
  _refuse_traced("state", jax.tree.leaves(state), "to_state_dict")
  leaves.check_structure(
    "`state` must be the state of `rule`: of an optimizer's state the "
    "`loss_scale_state`",
    state,
    jax.eval_shape(rule.init),
  )
  state = jax.device_get(state)
  if not isinstance(rule, declaration.PresetLossScale):
    return {name: np.asarray(x)[()] for name, x in _own_leaves(state).items()}
  numbers = {**dict(rule.arguments), "S": float(state.loss_scale)}
  if isinstance(rule._machine, fixed.FixedLossScale):
    numbers |= dict.fromkeys(_keys.COUNTS, 0)  # A fixed S has no counts.
  else:
    numbers |= _keys.counts(rule._machine, state)
  written: dict[str, Any] = {}
  for path, key in _keys_of(rule).items():
    if key is not None:
      outer, _, name = path.rpartition("/")
      inside = written.setdefault(outer, {}) if outer else written
      inside[name] = key.write(numbers)
  return written


def _restore(rule: base.LossScale, dictionary: Mapping[str, object]) -> Any:
  """Returns a rule's state, read from a dictionary."""
  if isinstance(rule, declaration.PresetLossScale):
    keys = _keys_of(rule)
    return _fill(rule, _read_numbers(rule.system, keys, dictionary))
  # A dictionary with `is_warm` holds the state of the `WarmStart` itself.
  is_own = isinstance(dictionary, Mapping) and "is_warm" in dictionary
  if _starts_preset(rule) and not is_own:
    rule_state = _restore(rule.rule, dictionary)
    return rule.init()._replace(
      rule_state=rule_state, is_warm=jnp.full((), True)
    )
  # Copy the leaves, because several of them may be the same array.
  state = jax.tree.map(jnp.copy, rule.init())
  own = {
    name: _keys.LeafKey(leaf, leaf is state.loss_scale)
    for name, leaf in _own_leaves(state).items()
  }
  values = _read(type(rule).__name__, own, dictionary)
  structure = jax.tree.structure(state)
  return jax.tree.unflatten(structure, map(jnp.asarray, values.values()))


def _fill(
  rule: declaration.PresetLossScale, numbers: Mapping[str, Any]
) -> declaration.PresetState:
  """Returns a rule's first state, updated with the numbers that were saved."""
  state = rule.init()
  if "S" in numbers:
    state = state._replace(loss_scale=jnp.float32(numbers["S"]))
  if isinstance(rule._machine, fixed.FixedLossScale):
    return state
  return state._replace(**_keys.counters(rule._machine, numbers))


def _own_leaves(state: object) -> dict[str, jax.Array]:
  """Returns the leaves of a state by path."""
  return {
    leaves.path_name(path): leaf
    for path, leaf in jax.tree.leaves_with_path(state)
  }


def _read_numbers(
  system: str, keys: _keys.Keys, dictionary: Mapping[str, object]
) -> dict[str, Any]:
  """Returns what a system's dictionary holds, by what its keys hold."""
  # The attributes of an object, such as Flax's, also hold its arguments.
  parameters = declaration.PRESETS[system].parameters.keys() - keys
  values = _read(system, keys, dictionary, ignored=parameters)
  given = {x: y for x, y in dictionary.items() if x in parameters}
  return given | {
    key.holds: values[name]
    for name, key in keys.items()
    if isinstance(key, _keys.Key) and key.is_read
  }


def _read(
  system: str,
  keys: _keys.Keys | Mapping[str, _keys.LeafKey],
  dictionary: Mapping[str, object],
  ignored: Collection[str] = (),
) -> dict[str, Any]:
  """Returns a dictionary's values by key, or raises and lists its problems."""
  if not isinstance(dictionary, Mapping):
    raise TypeError(
      "`state_dict` must be a dictionary, got "
      f"{_arguments.kind_of(dictionary)}; of an object pass its state_dict() "
      "or, if it has none, its vars(...)."
    )
  dictionary = {x: y for x, y in dictionary.items() if x not in ignored}
  came = _flatten(dictionary, keys)
  _refuse_traced("state_dict", came.values(), "from_state_dict")
  needed = {name: key for name, key in keys.items() if key is not None}
  values, problems = {}, []
  for name, key in needed.items():
    if name not in came:
      problems.append(f"{name!r} is missing")
      continue
    try:
      values[name] = key.read(came[name])
    except (TypeError, ValueError) as error:
      got = shown(came[name])
      problems.append(f"{name!r} {str(error).rstrip('.')}, got {got}")
  problems += [f"{shown(name)} is unknown" for name in came if name not in keys]
  if len(problems) > _MOST_PROBLEMS:  # A whole model has many keys.
    problems[_MOST_PROBLEMS:] = [f"and {len(problems) - _MOST_PROBLEMS} more"]
  if problems:
    raise ValueError(
      f"`state_dict` of {system} must hold "
      f"{', '.join(map(repr, needed)) or 'nothing'}: "
      f"{'; '.join(problems)}.{_hint(needed, dictionary)}"
    )
  return values


def _flatten(
  dictionary: Mapping[str, object], names: Iterable[str]
) -> dict[str, object]:
  """Returns a dictionary's values by path, two levels deep if `names` are."""
  outer = {name.partition("/")[0] for name in names if "/" in name}
  flat: dict[str, object] = {}
  for name, value in dictionary.items():
    if name in outer and isinstance(value, Mapping):
      flat |= {f"{name}/{inner}": x for inner, x in value.items()}
    else:
      flat[name] = value
  return flat


def _hint(needed: Iterable[str], dictionary: Mapping[str, object]) -> str:
  """Returns a hint that names the right entry of a whole checkpoint, if any."""
  wanted = set(needed)
  for name, value in dictionary.items():
    inside = _flatten(value, wanted) if isinstance(value, Mapping) else {}
    if wanted and wanted <= inside.keys():
      return f" All of them are in state_dict[{name!r}]: pass that."
  return ""


def _refuse_traced(name: str, values: Iterable[object], function: str) -> None:
  if any(isinstance(x, jax.core.Tracer) for x in values):
    raise TypeError(
      f"`{name}` must have values, got a traced one; call {function} outside "
      "jit."
    )
