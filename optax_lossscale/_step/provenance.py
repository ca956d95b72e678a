"""Where gradients come from: noted beside them, and looked up by `update`.

The gradients are plain arrays, so nothing in them says by which S they were
scaled. A table beside them does, for as long as they live. What comes out of
jit is other arrays, of which nothing is known, and nothing is said.
"""

from collections.abc import Callable
import functools
from typing import Any
from typing import NamedTuple
import weakref

import jax
import numpy as np

from optax_lossscale._base import leaves
from optax_lossscale._base import wiring
from optax_lossscale._rules import base
from optax_lossscale._rules import loss_scales


class Origin(NamedTuple):
  """What is known of an array; a function returns None for what is not."""

  scale: Callable[[], Any] = lambda: None  # What it was scaled by.
  is_unscaled: bool = False
  may_lack: bool = False  # Micro-batches may have been dropped.
  follows: Callable[[], Any] = lambda: None  # For an S: the S before it.


# By the id of an array, with a weak reference to it: a tracer must not be kept.
_ORIGINS: dict[int, tuple[weakref.ref[Any], Origin]] = {}


def note(tree: Any, origin: Origin) -> None:
  """Notes where the floating arrays of a tree come from."""
  for x in jax.tree.leaves(tree):
    if isinstance(x, jax.Array) and leaves.is_gradient(x):
      forget = functools.partial(_forget, id(x))
      _ORIGINS[id(x)] = weakref.ref(x, forget), origin


def _forget(key: int, _: Any) -> None:
  _ORIGINS.pop(key, None)


def scaled_by(scale: Any, loss_scale: jax.Array) -> Origin:
  """Returns the origin of gradients: `scale` as passed, `loss_scale` as S."""
  if isinstance(scale, (int, float, np.ndarray, np.generic)):
    return Origin(lambda: float(scale))
  is_traced = isinstance(loss_scale, jax.core.Tracer)
  return Origin(weakref.ref(loss_scale) if is_traced else lambda: loss_scale)


def note_move(rule: base.LossScale, old: Any, new: Any) -> None:
  """Notes that one S comes after another, unless the rule keeps S."""
  if isinstance(old, jax.Array) and _fixed(rule) is None:
    note(new, Origin(follows=weakref.ref(old)))


def check_update(
  gradients: Any, loss_scale: jax.Array, rule: base.LossScale, overflow: Any
) -> None:
  """Warns if `update` is given gradients that are not what it takes."""
  origin, fixed = _origin(gradients), _fixed(rule)
  used = origin.scale()
  is_frozen = _is_known(used) and not _is_known(loss_scale)
  if origin.is_unscaled and fixed != 1 and not _equal(loss_scale, 1):
    wiring.warn(
      "`update` takes the gradients scaled, got some that `unscale` has "
      "divided by S already: the model would not learn. Leave the line with "
      "`unscale` out, or use what it returns for looking alone."
    )
  elif origin.may_lack and overflow is False:
    wiring.warn(
      "`overflow` must be passed to `update` after accumulated_value_and_grad"
      "(..., drop=True), got none: S would stay where it is while "
      "micro-batches are dropped. Write tx.update(grads, opt_state, params, "
      "overflow=overflow)."
    )
  elif _is_another(used, loss_scale) or (is_frozen and not _equal(used, fixed)):
    wiring.warn(
      "`update` takes the opt_state that the gradients were scaled with, got "
      f"gradients scaled by {_shown(used)}. Call scaled_value_and_grad("
      "loss_fn, opt_state) anew in each step, with the opt_state that goes to "
      "`update`."
    )


def check_unscale(gradients: Any, loss_scale: jax.Array) -> None:
  """Warns if `unscale` is given another S than gradients were scaled by."""
  used = _origin(gradients).scale()
  if _is_another(used, loss_scale):
    wiring.warn(
      "`unscale` takes the opt_state from before `update`, got gradients "
      f"scaled by {_shown(used)}. Call `unscale` before `update`, or keep the "
      "old opt_state."
    )


def _origin(tree: Any) -> Origin:
  """Returns what is known of the first leaf of which anything is."""
  for x in jax.tree.leaves(tree):
    found = _ORIGINS.get(id(x))
    if found is not None and found[0]() is x:
      return found[1]
  return Origin()


def _is_another(used: Any, loss_scale: jax.Array) -> bool:
  """Returns whether S is certainly not the one that was used."""
  if used is None or used is loss_scale:
    return False
  is_next = _origin(loss_scale).follows() is used
  return is_next or _equal(used, loss_scale) is False


def _is_known(scale: Any) -> bool:
  return scale is not None and not isinstance(scale, jax.core.Tracer)


def _equal(x: Any, y: Any) -> bool | None:
  """Returns whether two scales are equal; None if that cannot be known."""
  if not (_is_known(x) and _is_known(y)):
    return None
  try:
    # On the host, also where a program forbids transfers: those of its steps.
    with jax.transfer_guard("allow"):
      return bool(np.float32(x) == np.float32(y))
  except Exception:  # An array that was donated, or is on other hosts.
    return None


def _fixed(rule: base.LossScale) -> float | None:
  """Returns the S of a rule that never moves it; a preset may hold one."""
  machine: Any = getattr(rule, "machine", rule)
  is_fixed = isinstance(machine, loss_scales.FixedLossScale)
  return machine.scale if is_fixed else None


def _shown(used: Any) -> str:
  return f"the number {used}" if isinstance(used, float) else "another S"
