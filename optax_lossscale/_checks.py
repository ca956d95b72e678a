"""What counts as an overflow, and how devices agree on it."""

import dataclasses
from typing import Any
from typing import NamedTuple

import jax
from jax import lax
import jax.numpy as jnp

from optax_lossscale import _amax
from optax_lossscale import _leaves


@dataclasses.dataclass(frozen=True)
class Check:
  """Which gradients count as an overflow. Made by `nonfinite` or `saturated`.

  Attributes:
    saturating: whether the largest finite value already counts.
    dtype: the computation's dtype; None stands for each leaf's own.
  """

  saturating: bool
  dtype: Any = None

  def __post_init__(self) -> None:
    if self.dtype is None:
      return
    try:
      dtype = jnp.dtype(self.dtype)
    except TypeError as error:
      raise TypeError(
        "`dtype` must be a floating-point dtype such as jnp.float16, got "
        f"{self.dtype!r}."
      ) from error
    # NumPy reads "f16" as 16 bytes, a float128 that JAX does not have.
    if not jnp.issubdtype(dtype, jnp.floating) or dtype.itemsize > 8:
      raise TypeError(
        "`dtype` must be a floating-point dtype such as jnp.float16, got "
        f"{dtype.name}."
      )
    object.__setattr__(self, "dtype", dtype)

  def limit(self, leaf_dtype: Any) -> float:
    """Returns the largest finite value that a leaf of this dtype may show."""
    own = float(jnp.finfo(leaf_dtype).max)
    if self.dtype is None:
      return own
    # A leaf narrower than the computation clips or overflows at its own limit.
    return min(own, float(jnp.finfo(self.dtype).max))


def nonfinite(dtype: Any = None) -> Check:
  """Returns the check for hardware that produces inf and NaN (IEEE 754).

  A step overflows if a scaled gradient is NaN, infinite, or beyond the largest
  finite value of the dtype in which it was computed.

  Args:
    dtype: the computation's dtype, for gradients that are stored wider than
      they were computed; without it each leaf's own.

  Returns:
    A check for `loss_scaling`.

  Raises:
    TypeError: if `dtype` is not a floating-point dtype.

  Examples:
    >>> import jax.numpy as jnp
    >>> import optax
    >>> import optax_lossscale as ols
    >>> check = ols.nonfinite()
    >>> tx = ols.loss_scaling(optax.sgd(1.0), ols.FixedLossScale(), check=check)
    >>> state = tx.init({"w": jnp.zeros(2)})
    >>> _, state = tx.update({"w": jnp.array([jnp.nan, 0.0])}, state)
    >>> print(state.overflow, state.nan)
    True True
  """
  return Check(saturating=False, dtype=dtype)


def saturated(dtype: Any = None) -> Check:
  """Returns the check for hardware that clips instead of producing inf.

  In saturation mode an overflow leaves the largest finite value behind, 65504
  in float16, and no inf. So a step overflows if a scaled gradient reaches that
  value; NaN and inf count as well.

  Args:
    dtype: the computation's dtype. Float32 gradients of float32 parameters do
      not show in which dtype they were computed, so say it here; without it
      each leaf's own is taken.

  Returns:
    A check for `loss_scaling`.

  Raises:
    TypeError: if `dtype` is not a floating-point dtype.

  Examples:
    >>> import jax.numpy as jnp
    >>> import optax
    >>> import optax_lossscale as ols
    >>> check = ols.saturated(jnp.float16)
    >>> tx = ols.loss_scaling(optax.sgd(1.0), ols.FixedLossScale(), check=check)
    >>> state = tx.init({"w": jnp.zeros(2)})
    >>> _, state = tx.update({"w": jnp.array([65504.0, 0.0])}, state)
    >>> print(state.overflow, state.nan)
    True False
  """
  return Check(saturating=True, dtype=dtype)


class Finding(NamedTuple):
  """What a check found in the scaled gradients of one step.

  Attributes:
    overflow: bool[], the gradients are not usable.
    amax: float32[], their largest absolute value; NaN if one of them was NaN.
  """

  overflow: jax.Array
  amax: jax.Array


def examine(check: Check, gradients: Any) -> Finding:
  """Looks at every element of every gradient.

  Args:
    check: what counts as an overflow.
    gradients: a pytree; its floating and complex leaves are looked at, of any
      shape. The magnitude of a complex number is the larger of its two parts',
      since they overflow one by one.
  """
  parts_of_dtype: dict[Any, list[jax.Array]] = {}
  for gradient in filter(_leaves.is_gradient, jax.tree.leaves(gradients)):
    is_complex = jnp.iscomplexobj(gradient)
    parts = [gradient.real, gradient.imag] if is_complex else [gradient]
    parts_of_dtype.setdefault(parts[0].dtype, []).extend(parts)

  overflow = jnp.full((), False)
  amaxes = [jnp.full((), 0, jnp.float32)]
  for dtype, parts in parts_of_dtype.items():
    amax = _amax.amax(parts)
    limit = check.limit(dtype)
    within = amax < limit if check.saturating else amax <= limit
    # `not within` and not the opposite comparison: NaN is within no limit.
    overflow |= ~within
    amaxes.append(_to_float32(amax))
  return Finding(overflow=overflow, amax=_amax.amax(amaxes))


def agree(finding: Finding, axis_name: Any) -> Finding:
  """Returns what all devices along the named axes found together.

  One maximum over integers: it carries NaN, which a maximum over floats drops.

  Args:
    finding: what this device found.
    axis_name: one mapped axis, or a tuple or list of them.
  """
  flag = finding.overflow.astype(jnp.uint32)
  flag_and_bits = jnp.stack([flag, _amax.magnitude_bits(finding.amax)])
  names = (
    tuple(axis_name) if isinstance(axis_name, (tuple, list)) else (axis_name,)
  )
  # JAX reduces over all axes at once only what may differ along all of them.
  # The position on an axis does, and 0 times it is nothing to add.
  for name in names:
    flag_and_bits += 0 * lax.axis_index(name).astype(jnp.uint32)
  flag_and_bits = lax.pmax(flag_and_bits, names)
  flag, bits = flag_and_bits
  return Finding(overflow=flag > 0, amax=_bits_to_float32(bits))


def _bits_to_float32(bits: jax.Array) -> jax.Array:
  return lax.bitcast_convert_type(bits, jnp.float32)


def _to_float32(amax: jax.Array) -> jax.Array:
  """Returns `amax` as float32[]; inf only if it was inf."""
  if amax.dtype == jnp.float64:
    # A finite float64 beyond float32's range must not be reported as inf.
    largest = float(jnp.finfo(jnp.float32).max)
    amax = jnp.where(jnp.isfinite(amax), jnp.minimum(amax, largest), amax)
  return amax.astype(jnp.float32)
