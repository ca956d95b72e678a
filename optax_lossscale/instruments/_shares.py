"""What is lost for lack of range or precision: how many, as a share."""

import functools
import math
from typing import Any

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np
import optax

from optax_lossscale._base import arguments
from optax_lossscale._base import bits as _bits
from optax_lossscale._base import leaves
from optax_lossscale._step import states
from optax_lossscale.instruments import _gradients


def underflow_fraction(
  tree: Any, dtype: Any = jnp.float16, *, loss_scale: Any = 1.0
) -> jax.Array:
  """Returns the share of the non-zero elements that would become 0 in a dtype.

  What loss scaling is against. In float16 these are the elements with
  |S g| <= 2**-25; between that and its smallest subnormal number, 2**-24, they
  are rounded up. It is exact: S g is what a float32 multiplication and then a
  conversion to `dtype` make of it, both rounding to the nearest and ties to
  even; but this multiplies nothing, it compares the bits of each element with
  those of the largest that is lost. So it is the same where a backend flushes
  subnormal numbers to 0. Usable inside jit.

  Args:
    tree: true gradients, in a wider dtype than `dtype`; leaves that are not
      floating or complex are left out, and what Flax keeps in
      `_overwrite_with_gradient`. Of complex numbers each part is an element.
      float64 elements are multiplied in float64. NaN and inf are non-zero.
    dtype: that of the computation, such as jnp.float16 or jnp.float8_e5m2.
    loss_scale: S, a number or float32[], or the state that holds it. Of
      gradients that are scaled already leave it at 1.

  Returns:
    float32[], from 0 to 1; 0 if all are 0. Under `shard_map` it is each
    device's own.

  Raises:
    TypeError: if `dtype` is not a floating-point dtype.
    ValueError: if it cannot hold 0, or `loss_scale` is not a usable scale.

  Examples:
    >>> import jax.numpy as jnp
    >>> import optax_lossscale as ols
    >>> gradients = jnp.array([2.0**-24, 2.0**-25, 2.0**-30, 0.0, -1.0])
    >>> print(ols.instruments.underflow_fraction(gradients))
    0.5
    >>> print(ols.instruments.underflow_fraction(gradients, loss_scale=2.0))
    0.25
  """
  target = _as_dtype(dtype)
  scale = states.get_loss_scale(loss_scale)
  return _share(
    _count_lost(part, scale, target)
    for x in _gradients.named(tree).values()
    for part in _gradients.parts(x)
  )


def swallowed_fraction(params: Any, updates: Any) -> jax.Array:
  """Returns the share of the non-zero updates that change nothing.

  An update below half the distance to the next parameter value is rounded away
  in `optax.apply_updates`. bfloat16 parameters lose those below 1/512 of the
  parameter, float16 ones below 1/4096: `master_weights` is against that. Usable
  inside jit.

  Args:
    params: the parameters, of any dtype.
    updates: what the optimizer returned for them, as `optax.apply_updates`
      takes it. Leaves that are not floating or complex are left out, and what
      Flax keeps in `_overwrite_with_gradient`.

  Returns:
    float32[], from 0 to 1; 0 if all updates are 0. Under `shard_map` it is each
    device's own. A complex number is one element.

  Raises:
    ValueError: if there are updates for other parameters than these, or of
      other shapes.

  Examples:
    >>> import jax.numpy as jnp
    >>> import optax_lossscale as ols
    >>> params = jnp.bfloat16([1.0, 1.0, 1.0])
    >>> updates = jnp.bfloat16([2.0**-9, 2.0**-7, 0.0])
    >>> print(ols.instruments.swallowed_fraction(params, updates))
    0.5
  """
  named_params = _gradients.named(params)
  named_updates = _gradients.named(updates)
  if not named_updates.keys() <= named_params.keys():
    raise ValueError(
      "`updates` must be for the parameters, got one for "
      f"{min(named_updates.keys() - named_params.keys())!r}, and parameters at "
      f"{sorted(named_params)}."
    )
  for path, update in named_updates.items():
    shapes = named_params[path].shape, update.shape
    if shapes[0] != shapes[1]:
      raise ValueError(
        f"`updates` must have the shapes of the parameters, got {shapes[1]} "
        f"for a parameter of shape {shapes[0]} at {path!r}."
      )
  return _share(
    _count_swallowed(named_params[path], update)
    for path, update in named_updates.items()
  )


def _as_dtype(dtype: Any) -> Any:
  found, name = arguments.read_dtype(dtype)
  if found is None:
    raise TypeError(
      f"`dtype` must be a floating-point dtype such as jnp.float16, got {name}."
    )
  if found == jnp.float8_e8m0fnu:
    raise ValueError(
      "`dtype` must be able to hold 0, or nothing becomes 0 in it, got "
      "float8_e8m0fnu."
    )
  return found


def _share(counts: Any) -> jax.Array:
  """Returns the first count over the second, over all pairs of counts."""
  # In float32 a sum over many leaves does not wrap around.
  lost, of = sum(
    (pair.astype(jnp.float32) for pair in counts),
    start=jnp.zeros(2, jnp.float32),
  )
  return lost / jnp.maximum(of, 1)


@functools.partial(jax.jit, static_argnums=2)
def _count_lost(x: jax.Array, loss_scale: jax.Array, target: Any) -> jax.Array:
  """Returns uint32[2]: how many become 0 in `target`, and are not 0 now."""
  last_lost = _largest_lost(_bits.carrier(x.dtype), loss_scale, target)

  def tally(x: jax.Array) -> jax.Array:
    bits = _magnitude(x)
    is_nonzero = bits > 0
    return jnp.stack(
      [
        jnp.sum(is_nonzero & (bits <= last_lost), dtype=jnp.uint32),
        jnp.sum(is_nonzero, dtype=jnp.uint32),
      ]
    )

  return _gradients.count(tally, 2, [x])


def _largest_lost(dtype: Any, loss_scale: jax.Array, target: Any) -> jax.Array:
  """Returns the bits of the largest number that S times it becomes 0.

  It is the largest product that becomes 0 divided by S, all in integers.
  """
  own = jnp.finfo(dtype)
  # In which S times the number is computed.
  wide = jnp.finfo(leaves.at_least_float32(dtype))
  precision = int(wide.nmant) + 1
  quantum = int(wide.minexp) - int(wide.nmant)
  product, product_exponent = _largest_lost_product(precision, quantum, target)

  # S is an integer of so many bits times a power of two.
  bits = _bits.magnitude_bits(loss_scale.astype(wide.dtype))
  unsigned = bits.dtype.type
  hidden = unsigned(1 << wide.nmant)
  scale = bits & (hidden - unsigned(1)) | hidden
  field = (bits >> unsigned(wide.nmant)).astype(jnp.int32)
  scale_exponent = field + np.int32(quantum - 1)

  # Shifted, so that the quotient has at least `precision` bits.
  quotient = _divide(product << precision, scale, precision)
  length = np.int32(8 * bits.dtype.itemsize) - lax.clz(quotient).astype(
    jnp.int32
  )
  exponent = length + np.int32(product_exponent - precision - 1)
  exponent -= scale_exponent
  above = exponent - np.int32(own.minexp)
  # Cut to the precision of `dtype`, and to less where it is subnormal there.
  cut = length - np.int32(own.nmant + 1) + jnp.maximum(-above, np.int32(0))
  fraction = quotient >> jnp.minimum(cut, length).astype(unsigned)
  whole = jnp.maximum(above, np.int32(0)).astype(unsigned)
  found = (whole << unsigned(own.nmant)) + fraction
  infinity = unsigned((own.maxexp - own.minexp + 1) << own.nmant)
  own_unsigned = jnp.dtype(f"uint{own.bits}")
  return jnp.minimum(found, infinity - unsigned(1)).astype(own_unsigned)


def _largest_lost_product(
  precision: int, quantum: int, target: Any
) -> tuple[int, int]:
  """Returns the largest product that becomes 0: an integer and an exponent."""
  smallest = float(jnp.finfo(target).smallest_subnormal)
  # Half of it is a tie, and 0 is even.
  half = math.frexp(smallest)[1] - 2
  product = 1 << precision
  if half < quantum:
    # Already the product of what is smaller is rounded to 0.
    return product, quantum - 1 - precision
  # Up to half of the distance to its next number it is rounded to this.
  product += 1 << max(0, quantum - 1 - half + precision)
  return product, half - precision


def _divide(dividend: int, divisor: jax.Array, precision: int) -> jax.Array:
  """Returns the quotient of integers, rounded down: long division."""
  unsigned = divisor.dtype.type
  # A digit's bits: so many can be appended to a remainder.
  step = 8 * divisor.dtype.itemsize - precision
  quotient = remainder = jnp.zeros((), divisor.dtype)
  for shift in reversed(range(0, 2 * precision + 2, step)):
    digit = unsigned((dividend >> shift) % 2**step)
    remainder = (remainder << unsigned(step)) | digit
    quotient = (quotient << unsigned(step)) | (remainder // divisor)
    remainder = remainder % divisor
  return quotient


@jax.jit
def _count_swallowed(param: jax.Array, update: jax.Array) -> jax.Array:
  """Returns uint32[2]: how many updates change nothing, how many are not 0."""

  def tally(param: jax.Array, update: jax.Array) -> jax.Array:
    new = optax.apply_updates(param, update)
    pairs = zip(_gradients.parts(new), _gradients.parts(param), strict=True)
    is_same = functools.reduce(
      jnp.logical_and, (_is_same(a, b) for a, b in pairs)
    )
    is_nonzero = functools.reduce(
      jnp.logical_or, (_magnitude(x) > 0 for x in _gradients.parts(update))
    )
    return jnp.stack(
      [
        jnp.sum(is_nonzero & is_same, dtype=jnp.uint32),
        jnp.sum(is_nonzero, dtype=jnp.uint32),
      ]
    )

  return _gradients.count(tally, 2, [param, update])


def _is_same(a: jax.Array, b: jax.Array) -> jax.Array:
  """Returns where two real arrays are equal, NaN to NaN and 0 to -0."""
  # By the bits: a compiler may otherwise compare what it has not rounded yet.
  magnitude = _magnitude(a)
  is_equal = magnitude == _magnitude(b)
  return is_equal & ((magnitude == 0) | (jnp.signbit(a) == jnp.signbit(b)))


def _magnitude(x: jax.Array) -> jax.Array:
  return _bits.magnitude_bits(x.astype(_bits.carrier(x.dtype)))
