"""A scaler's state carried over from another system, and back."""

from collections.abc import Callable
from collections.abc import Mapping
import inspect
from typing import Any
from typing import TypeGuard

import jax.numpy as jnp

from optax_lossscale._rules import base
from optax_lossscale.presets import _dictionaries
from optax_lossscale.presets import _fairseq
from optax_lossscale.presets import _jax
from optax_lossscale.presets import _layouts
from optax_lossscale.presets import _megatron
from optax_lossscale.presets import _mindspore
from optax_lossscale.presets import _paddle
from optax_lossscale.presets import _preset
from optax_lossscale.presets import _pytorch
from optax_lossscale.presets import _table
from optax_lossscale.presets import _tensorflow
from optax_lossscale.rules import _warm_start

PRESETS: dict[str, Callable[..., _preset.PresetLossScale]] = {
  preset.__name__: preset
  for family in (
    _pytorch,
    _megatron,
    _fairseq,
    _tensorflow,
    _mindspore,
    _paddle,
    _jax,
  )
  for preset in family.PRESETS
}


def to_state_dict(rule: base.LossScale, state: Any) -> dict[str, Any]:
  """Returns a rule's state as the rule's system would save it.

  The keys and the types of the values are the system's own: Python and NumPy
  values, NumPy arrays where it saves tensors. A rule that no preset made has
  this library's own keys, the names of its state's fields. A `WarmStart` of a
  preset's rule is saved as that rule, so after its first S has been found.

  Args:
    rule: the rule, made by a preset or not.
    state: the rule's state; in an optimizer's state, `loss_scale_state`.

  Returns:
    A new dictionary; {} for a system that saves nothing.

  Raises:
    TypeError: if the state is traced (call it outside jit), or is the whole
      state of the optimizer.
    ValueError: if the state is not one of this rule, or that of a `WarmStart`
      that still probes.

  Examples:
    >>> import optax_lossscale as ols
    >>> rule = ols.presets.torch(init_scale=8.0)
    >>> state = rule.update(rule.init(), overflow=False)
    >>> for item in ols.presets.to_state_dict(rule, state).items():
    ...   print(*item)
    scale 8.0
    growth_factor 2.0
    backoff_factor 0.5
    growth_interval 2000
    _growth_tracker 1
    >>> rule = ols.DynamicLossScale(8.0)
    >>> sorted(ols.presets.to_state_dict(rule, rule.init()))
    ['clean_steps', 'loss_scale', 'overflows']
  """
  _check_rule(rule)
  written = _dictionaries.write(rule, state)
  if not _starts_preset(rule):
    return written
  if not state.is_warm:
    raise ValueError(
      "`state` must be that of a WarmStart that has found its first S, got one "
      "that still probes, which the rule's system does not save; make a step "
      "with gradients first, or save the optimizer's state itself."
    )
  return _dictionaries.write(rule.rule, state.rule_state)


def from_state_dict(
  system: str | base.LossScale,
  state_dict: Mapping[str, Any],
  /,
  **arguments: Any,
) -> tuple[base.LossScale, Any]:
  """Returns the rule and the state that a system's dictionary stands for.

  S then moves as it would have moved in the system. Some dictionaries hold the
  system's arguments (torch, DeepSpeed, Paddle), others do not (Megatron,
  MindSpore): give those that were not the default, as to the preset. What you
  give goes before what the dictionary holds. fairseq, metaseq and ColossalAI
  lose their counters at a restart; so does this.

  Args:
    system: the preset's name; or a rule, whose arguments then go before what
      the dictionary holds.
    state_dict: the system's own keys. Values may be numbers, NumPy arrays, or
      tensors on the CPU, of one element.
    **arguments: of the preset.

  Returns:
    rule: as the preset returns it.
    state: its state, to be set into that of the optimizer as below. (Of several
      optimizers do it with the state of the one.)

  Raises:
    TypeError: if `state_dict` is no dictionary, or traced, or an argument is
      not of its kind.
    ValueError: if keys are missing, unknown or of another type, of which all
      are listed; or if `system` is unknown.

  Examples:
    >>> import jax.numpy as jnp
    >>> import numpy as np
    >>> import optax
    >>> import optax_lossscale as ols
    >>> rule, state = ols.presets.from_state_dict(
    ...   "megatron",
    ...   {
    ...     "scale": np.array([65536.0], np.float32),
    ...     "growth_tracker": 999,
    ...     "hysteresis_tracker": 1,
    ...   },
    ...   growth_interval=1000,
    ... )
    >>> tx = ols.loss_scaling(optax.sgd(0.1), rule)
    >>> params = jnp.ones(2)
    >>> opt_state = tx.init(params)
    >>> opt_state = optax.tree.set(opt_state, loss_scale_state=state)
    >>> _, opt_state = tx.update(params, opt_state)
    >>> print(ols.get_loss_scale(opt_state))
    131072.0
  """
  if isinstance(system, base.LossScale):
    if arguments:
      raise TypeError(
        f"arguments are for a preset's name, got {', '.join(arguments)} with "
        f"the rule {system!r}, which has its arguments already."
      )
    # One that holds `is_warm` is the state under its own keys.
    is_own = isinstance(state_dict, Mapping) and "is_warm" in state_dict
    if _starts_preset(system) and not is_own:
      rule_state = _dictionaries.read(system.rule, state_dict)
      return system, _warm_start.WarmStartState(rule_state, jnp.full((), True))
    return system, _dictionaries.read(system, state_dict)
  if not isinstance(system, str) or system not in PRESETS:
    raise ValueError(
      f"`system` must be a rule or one of {', '.join(PRESETS)}, got {system!r}."
    )
  preset = PRESETS[system]
  if _layouts.is_switched_off(arguments):
    rule = preset(**arguments)
    return rule, rule.init()  # As the system, which then reads nothing.
  keys = _layouts.layout(system, arguments)
  try:
    saved = _dictionaries.parse(system, keys, state_dict)
  except ValueError as error:
    switch = {"enabled", "enable"} & set(inspect.signature(preset).parameters)
    if state_dict or not switch:
      raise
    raise ValueError(
      f"{error} A scaler that is switched off saves nothing: pass "
      f"{switch.pop()}=False."
    ) from None
  arguments = saved.arguments | arguments
  first_scale = _first_scale(system)
  if first_scale is not None and "loss_scale" in saved.held:
    arguments.setdefault(first_scale, saved.held["loss_scale"])
  rule = preset(**arguments)
  return rule, _dictionaries.fill(rule, saved.held)


def _first_scale(system: str) -> str | None:
  """Returns the argument that is the first S, if it has no default."""
  if system not in _table.SYSTEMS:
    return None
  name: str = _table.SYSTEMS[system].columns["init_scale"].name
  parameter = inspect.signature(PRESETS[system]).parameters[name]
  return name if parameter.default is parameter.empty else None


def _starts_preset(rule: Any) -> TypeGuard[_warm_start.WarmStart]:
  return isinstance(rule, _warm_start.WarmStart) and isinstance(
    rule.rule, _preset.PresetLossScale
  )


def _check_rule(rule: Any) -> None:
  if not isinstance(rule, base.LossScale):
    raise TypeError(f"`rule` must be a LossScale, got {rule!r}.")
