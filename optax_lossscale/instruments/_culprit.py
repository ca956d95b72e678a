"""Amax and headroom of each leaf, and the gradient that overflows first."""

import math
from typing import NamedTuple

from chex import ArrayTree
import jax
import jax.numpy as jnp
import optax

from optax_lossscale._base import bits
from optax_lossscale._base import leaves
from optax_lossscale._step import checks
from optax_lossscale._step import findings
from optax_lossscale._step import requirements
from optax_lossscale.instruments import _elements


class CulpritLeaf(NamedTuple):
  """The gradient with the least headroom.

  Attributes:
    path: the path of its leaf, such as "Dense_0/kernel".
    amax: its largest absolute value.
    headroom: how many more times S could have doubled, in bits; -inf if `amax`
      is inf, and NaN if `amax` is NaN.
  """

  path: str
  amax: float
  headroom: float


def amax_by_leaf(tree: ArrayTree) -> dict[str, jax.Array]:
  """Returns the largest absolute value of each leaf.

  Usable inside jit.

  Args:
    tree: gradients. Leaves that are not floating or complex are left out, and
      so is Flax's `_overwrite_with_gradient`. The magnitude of a complex number
      is that of its larger part.

  Returns:
    A dict from the path of each leaf, such as "Dense_0/kernel", to a float32[].
    The number is inf or NaN if the leaf holds one, and NaN if it holds both.

  Examples:
    >>> import jax.numpy as jnp
    >>> import optax_lossscale as ols
    >>> gradients = {"a": {"bias": jnp.ones(2)}, "b": jnp.array([-3.0, 2.0])}
    >>> for path, amax in ols.instruments.amax_by_leaf(gradients).items():
    ...   print(path, amax)
    a/bias 1.0
    b 3.0
  """
  return {
    path: findings.to_float32(largest)
    for path, largest in _amaxes(_elements.named(tree)).items()
  }


def culprit(
  scaled_grads: optax.Updates,
  check: checks.Check = checks.nonfinite(),
) -> CulpritLeaf:
  """Returns the gradient that overflowed, or that will overflow next.

  This gradient keeps S down, so its layer is the one to compute in float32 or
  to check for a fault. An inf takes precedence over a NaN, because a backward
  pass turns inf into NaN in all earlier layers, but never NaN into inf. The
  call waits for the gradients, so make it only now and then, outside of jit.

  If several gradients overflowed, it returns the first in the tree, which need
  not be the one that overflowed first. To find that one, pass the gradients of
  a clean step, which give the leaf with the least headroom. Or halve S and
  compute the gradients of the step again until only one leaf has an inf.

  Args:
    scaled_grads: the pytree to pass to the `update` of `loss_scaling`.
    check: the check of `loss_scaling`, which names the computation's dtypes.

  Returns:
    The leaf's path, amax and headroom.

  Raises:
    TypeError: if it is called under jit, or if `check` is not a check.
    ValueError: if `scaled_grads` holds no gradients, or if the check's tree of
      dtypes does not fit them.

  Examples:
    >>> import jax.numpy as jnp
    >>> import optax_lossscale as ols
    >>> scaled_grads = {"bias": jnp.ones(2), "kernel": jnp.array([16376.0])}
    >>> check = ols.nonfinite(jnp.float16)
    >>> ols.instruments.culprit(scaled_grads, check)
    CulpritLeaf(path='kernel', amax=16376.0, headroom=2.0)
  """
  requirements.check_check(check)
  scaled_grads = leaves.as_arrays(scaled_grads)
  named = _elements.named(scaled_grads)
  if not named:
    raise ValueError(
      "`scaled_grads` must have a floating or complex leaf, got "
      f"{jax.tree.structure(scaled_grads)}."
    )
  if any(isinstance(x, jax.core.Tracer) for x in named.values()):
    raise TypeError(
      "`scaled_grads` must be arrays that are known, got traced ones; call "
      "culprit outside of jit, or amax_by_leaf inside."
    )
  mask = leaves.are_gradients(scaled_grads)
  dtypes = checks.with_computation_dtypes(
    check, leaves.leave_out(mask, scaled_grads)
  )
  amaxes = jax.device_get(_amaxes(named))
  found = []
  for (path, x), (_, dtype) in zip(named.items(), dtypes, strict=True):
    limit = bits.limit(jnp.finfo(x.dtype).dtype, dtype)
    amax = float(amaxes[path])
    found.append(CulpritLeaf(path, amax, _headroom(amax, limit)))
  # An inf comes first, then NaN, then the least headroom.
  return min(
    found,
    key=lambda x: (
      not math.isinf(x.amax),
      -math.inf if math.isnan(x.amax) else x.headroom,
    ),
  )


def _headroom(amax: float, limit: float) -> float:
  """Returns log2(limit / amax), exact for powers of two."""
  if amax == 0:
    return math.inf
  if not math.isfinite(amax):
    return -amax
  fraction, exponent = math.frexp(amax)
  largest, largest_exponent = math.frexp(limit)
  return largest_exponent - exponent + math.log2(largest / fraction)


# Jitted, since each operation would otherwise write as much as it reads.
@jax.jit
def _amaxes(named: dict[str, jax.Array]) -> dict[str, jax.Array]:
  """Returns the amax of each array, in the array's dtype or a wider one."""
  return {path: bits.amax(bits.parts(x)) for path, x in named.items()}
