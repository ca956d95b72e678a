"""Whether gradients, parameters and the optimizer's state fit together."""

from collections.abc import Iterator
import contextlib
from typing import Any

import jax
import optax

from optax_lossscale._base import leaves
from optax_lossscale._base import trees


def check_gradients(gradients: Any, params: Any) -> None:
  """Raises if gradients would be broadcast to their parameters."""
  found = params is not None and trees.mismatched_shape(
    params, gradients, trees.is_for_each_example
  )
  if found:
    raise ValueError(
      f"`updates` must have the shapes of the parameters, got {found}."
    )


def narrow_updates(updates: Any, gradients: Any, params: Any) -> Any:
  """Returns what an optimizer made, in the dtypes of the parameters."""
  updates = leaves.as_arrays(updates)
  if params is None:
    return updates
  try:
    narrow = leaves.narrow_like(updates, params)
  except ValueError as error:
    found = trees.difference(params, gradients)
    if found is None:
      raise
    raise ValueError(
      f"`updates` must be gradients that fit the parameters, got {found}."
    ) from error
  # One that only unscales gradients of examples may hand them on.
  of_examples = trees.mismatched_shape(params, gradients) is not None
  found = None if of_examples else trees.mismatched_shape(params, narrow)
  if found:
    raise ValueError(
      "the updates of `inner` must have the shapes of the parameters, got "
      f"{found}."
    )
  return narrow


@contextlib.contextmanager
def explained(
  inner: optax.GradientTransformation,
  gradients: Any,
  inner_state: Any,
  params: Any,
) -> Iterator[None]:
  """Says what does not fit where an optimizer fails on what it is given.

  Only where it fails: what an optimizer takes need not look like its
  parameters, as with `optax.lookahead`.
  """
  try:
    yield
  except (AttributeError, TypeError, ValueError) as error:
    reason = _explain(inner, gradients, inner_state, params)
    if reason is None:
      raise
    raise ValueError(reason) from error


def _explain(
  inner: optax.GradientTransformation,
  gradients: Any,
  inner_state: Any,
  params: Any,
) -> str | None:
  """Returns what does not fit; None if it is something else that is wrong."""
  fits = trees.is_for_each_example
  of_gradients = _init_shapes(inner, gradients)
  misfit = None
  if of_gradients is not None:
    misfit = trees.difference(inner_state, of_gradients, fits)
  if params is None:
    return misfit and (
      f"`updates` must be gradients that fit the state, got {misfit}."
    )
  of_params = _init_shapes(inner, params)
  if of_params is not None:
    found = trees.difference(of_params, inner_state)
    if found is not None:
      return (
        "`state` must be that of this optimizer for these parameters, got "
        f"{found}."
      )
  # Gradients that the state was made for need not look like the parameters.
  found = misfit and trees.difference(params, gradients, fits)
  return found and (
    f"`updates` must be gradients that fit the parameters, got {found}."
  )


def _init_shapes(inner: optax.GradientTransformation, tree: Any) -> Any:
  """Returns the state that an optimizer makes, None if it makes none."""
  try:
    return jax.eval_shape(inner.init, leaves.widen(tree))
  except Exception:  # It may ask anything of its parameters.
    return None
