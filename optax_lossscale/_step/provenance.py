"""Records the origin of gradients, which `update` and `unscale` then check."""

from collections.abc import Callable
from typing import Any
from typing import SupportsFloat
import weakref

import jax
import numpy as np

from optax_lossscale._base import arguments
from optax_lossscale._base import leaves
from optax_lossscale._rules import base
from optax_lossscale._rules import fixed
from optax_lossscale._step import reasons

# Maps an array's id to a kind and S, while the array exists. A jitted function
# returns new arrays, whose origin is unknown, so they cause no warning.
# Gradients are "scaled" by S, "dropping" (if micro-batches may be left out) or
# "unscaled". The scale after S is "next", and a loss that was scaled is a
# "loss".
_ORIGINS: dict[int, tuple[str, Callable[[], SupportsFloat | None]]] = {}


def note(
  tree: object, kind: str, scale: SupportsFloat | None, passed: object = None
) -> None:
  """Records the origin of arrays; `passed` is the caller's state or number."""
  if isinstance(passed, (int, float, np.ndarray, np.generic)):
    scale = float(passed)  # Under jit an array would be a tracer.
  # No tracer may outlive its trace, and no S may keep all earlier ones alive.
  is_weak = kind == "next" or isinstance(scale, jax.core.Tracer)
  get_scale = weakref.ref(scale) if is_weak else lambda: scale
  for x in filter(leaves.is_gradient, jax.tree.leaves(tree)):
    if isinstance(x, jax.Array):
      _ORIGINS[id(x)] = kind, get_scale
      weakref.finalize(x, _ORIGINS.pop, id(x), None)


def check_update(
  scaled_grads: object,
  loss_scale: SupportsFloat,
  rule: base.LossScale,
  overflow: object,
) -> None:
  """Warns if `update` gets gradients of the wrong origin."""
  kind, used = _origin(scaled_grads)
  # A compiled step would scale by such a number for ever, while S moves on.
  traced = [
    any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(tree))
    for tree in (scaled_grads, loss_scale, used)
  ]
  is_frozen = used is not None and traced == [True, True, False]
  machine: Any = getattr(rule, "_machine", rule)  # That of a preset.
  is_fixed = isinstance(machine, fixed.FixedLossScale)
  known = machine.scale if is_fixed else None
  if kind == "unscaled" and known != 1:
    arguments.warn(
      "`update` takes the gradients scaled, got some that `unscale` has "
      "divided by S already: the model would not learn. Leave the line with "
      "`unscale` out, or use what it returns for looking alone."
    )
  elif kind == "dropping" and not _has_window(overflow):
    got = (
      "none: S would stay where it is while micro-batches are dropped"
      if overflow is False
      else "a flag alone: it skips the step, so nothing would be dropped"
    )
    arguments.warn(
      "`overflow` must be passed to `update` unchanged after accumulate"
      f"(..., drop=True), got {got}. Write tx.update(scaled_grads, opt_state, "
      "params, overflow=overflow)."
    )
  elif _is_another(used, loss_scale) or (
    is_frozen and (known is None or not _equal(used, known))
  ):
    got = f"the number {used}" if isinstance(used, float) else "another S"
    arguments.warn(
      "`update` takes the opt_state that the gradients were scaled with, got "
      f"gradients scaled by {got}. Call scaled_value_and_grad(loss_fn, "
      "opt_state) anew in each step, with the opt_state that goes to `update`."
    )


def check_loss(loss: object) -> None:
  """Warns if a loss that is to be scaled was scaled already."""
  if _origin(loss)[0] == "loss":
    arguments.warn(
      "`fun` must return the true loss, got one that `scale_loss` has "
      "multiplied by S: gradients would be S times too large. Leave "
      "`scale_loss` out, since scaled_value_and_grad scales the loss."
    )


def check_unscale(scaled_grads: object, loss_scale: jax.Array) -> None:
  """Warns if `unscale` gets gradients that a different S has scaled."""
  if _is_another(_origin(scaled_grads)[1], loss_scale):
    arguments.warn(
      "`unscale` takes the opt_state from before `update`, got gradients "
      "scaled by another S. Call `unscale` before `update`, or keep the old "
      "opt_state."
    )


def _has_window(overflow: object) -> bool:
  """Returns whether `overflow=` holds that of a window, or is not used."""
  passed = reasons.listed(overflow)
  return any(isinstance(x, reasons.WindowOverflow | None) for x in passed)


def _origin(tree: object) -> tuple[str, SupportsFloat | None]:
  """Returns the kind and S of the first leaf whose origin is known."""
  found = (_ORIGINS.get(id(x)) for x in jax.tree.leaves(tree))
  kind, get_scale = next(filter(None, found), ("", lambda: None))
  return kind, get_scale()


def _is_another(used: SupportsFloat | None, loss_scale: SupportsFloat) -> bool:
  """Returns whether S is known to differ from the one that was used."""
  if used is None or used is loss_scale:
    return False
  is_next = _origin(loss_scale)[1] is used
  return is_next or _equal(used, loss_scale) is False


def _equal(x: SupportsFloat | None, y: SupportsFloat) -> bool | None:
  """Returns whether two scales are equal; None if that is unknown."""
  try:
    # A user's transfer guard is meant for the steps, not for this comparison.
    with jax.transfer_guard("allow"):
      return bool(np.float32(x) == np.float32(y))
  except Exception:  # A scale may be traced, donated, or on other hosts.
    return None
