"""The shares of gradients that underflow and of updates rounded away."""

from collections.abc import Iterable
import functools
import math

from chex import ArrayTree
import jax
from jax import lax
import jax.numpy as jnp
from jax.typing import DTypeLike
import numpy as np
import optax

from optax_lossscale._base import arguments
from optax_lossscale._base import bits as _bits
from optax_lossscale._base import leaves
from optax_lossscale._step import states
from optax_lossscale.instruments import _elements


def underflow_share(
  tree: ArrayTree,
  dtype: DTypeLike = jnp.float16,
  *,
  loss_scale: optax.OptState = 1.0,
) -> jax.Array:
  """Returns the share of the non-zero elements that would become 0 in a dtype.

  Loss scaling exists to reduce this share. The backward pass may lose more on
  the way to these gradients, which only `gradient_error` shows. In float16
  these are the elements with `abs(S g) <= 2**-25`; elements between that and
  the smallest subnormal number, 2**-24, are rounded up. The share is exact: S g
  is rounded like a float32 product that is then converted to `dtype`, both to
  nearest with ties to even. It compares bits, so the result is the same on a
  backend that flushes subnormal numbers to 0. It is usable inside jit.

  Args:
    tree: true gradients, in a wider dtype than `dtype`. Leaves that are not
      floating or complex are left out, and so is Flax's
      `_overwrite_with_gradient`. Each part of a complex number is an element.
      float64 elements are multiplied in float64. NaN and inf are non-zero.
    dtype: the computation's dtype, such as jnp.float16 or jnp.float8_e5m2.
    loss_scale: S, a number or float32[], or the state that holds it. Leave it
      at 1 for gradients that are already scaled.

  Returns:
    float32[], from 0 to 1; 0 if all elements are 0. Under `shard_map` each
    device gets the share of its own elements.

  Raises:
    TypeError: if `dtype` is not a floating-point dtype.
    ValueError: if `dtype` cannot hold 0, or `loss_scale` is not a usable scale.

  Examples:
    >>> import jax.numpy as jnp
    >>> import optax_lossscale as ols
    >>> gradients = jnp.array([2.0**-24, 2.0**-25, 2.0**-30, 0.0, -1.0])
    >>> print(ols.instruments.underflow_share(gradients))
    0.5
    >>> print(ols.instruments.underflow_share(gradients, loss_scale=2.0))
    0.25
  """
  target = arguments.check_dtype("dtype", dtype)
  if target == jnp.float8_e8m0fnu:
    raise ValueError(
      "`dtype` must be able to hold 0, or nothing becomes 0 in it, got "
      "float8_e8m0fnu."
    )
  scale = states.get_loss_scale(loss_scale)
  return _share(
    _count_lost(part, scale, target)
    for x in _elements.named(tree).values()
    for part in _bits.parts(x)
  )


def swallowed_share(params: optax.Params, updates: optax.Updates) -> jax.Array:
  """Returns the share of the non-zero updates that change nothing.

  An update below half the distance to the next parameter value is rounded away
  in `optax.apply_updates`. bfloat16 parameters lose updates below 1/512 of the
  parameter, float16 parameters below 1/4096; `master_weights` prevents that.
  Usable inside jit.

  Args:
    params: the parameters, of any dtype.
    updates: the optimizer's updates, as for `optax.apply_updates`. Leaves that
      are not floating or complex are left out, and so is Flax's
      `_overwrite_with_gradient`.

  Returns:
    float32[], from 0 to 1; 0 if all updates are 0. Under `shard_map` each
    device gets the share of its own updates. A complex number is one element.

  Raises:
    ValueError: if an update has no parameter, or differs from it in shape.

  Examples:
    >>> import jax.numpy as jnp
    >>> import optax_lossscale as ols
    >>> params = jnp.bfloat16([1.0, 1.0, 1.0])
    >>> updates = jnp.bfloat16([2.0**-9, 2.0**-7, 0.0])
    >>> print(ols.instruments.swallowed_share(params, updates))
    0.5
  """
  named_params = _elements.named(params)
  named_updates = _elements.named(updates)
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


def _share(counts: Iterable[jax.Array]) -> jax.Array:
  """Returns the sum of the first counts divided by that of the second."""
  # Adds in float32, since a uint32 sum over many leaves could wrap around.
  lost, of = sum(
    (pair.astype(jnp.float32) for pair in counts),
    start=jnp.zeros(2, jnp.float32),
  )
  return lost / jnp.maximum(of, 1)


@functools.partial(jax.jit, static_argnums=2)
def _count_lost(
  x: jax.Array, loss_scale: jax.Array, target: np.dtype
) -> jax.Array:
  """Returns uint32[2]: how many become 0 in `target`, how many are non-zero."""

  def tally(x: jax.Array) -> jax.Array:
    x = _bits.carried(x)
    return _counts(_becomes_zero(x, loss_scale, target), _magnitude(x) > 0)

  return _elements.count(tally, 2, [x])


def _counts(where: jax.Array, among: jax.Array) -> jax.Array:
  """Returns uint32[2]: the size of `where & among`, and that of `among`."""
  return jnp.stack(
    [jnp.sum(where & among, dtype=jnp.uint32), jnp.sum(among, dtype=jnp.uint32)]
  )


def _becomes_zero(
  x: jax.Array, loss_scale: jax.Array, target: np.dtype
) -> jax.Array:
  """Returns where S x, rounded to at least float32, becomes 0 in `target`.

  The exact product, held in two integers, is compared with the largest product
  that is rounded to 0. No floating-point operation sees a subnormal number,
  which a backend may flush to 0. In bfloat16 and float32, the products close to
  that limit are subnormal themselves.
  """
  wide = jnp.finfo(leaves.at_least_float32(x.dtype))
  unsigned, width = jnp.dtype(f"uint{wide.bits}").type, wide.bits
  # Half of the smallest number of `target` is a tie, and 0 is even. Rounding in
  # `wide` brings products up to half a bit above the tie down to it.
  half = math.frexp(float(jnp.finfo(target).smallest_subnormal))[1] - 2
  half_bit = min(wide.nmant, half - (wide.minexp - wide.nmant)) + 1
  largest = 1 << (width - 2)
  if half_bit > 0:
    largest += largest >> half_bit

  a, exponent_of_a = _split(x, unsigned)
  b, exponent_of_b = _split(loss_scale.astype(wide.dtype), unsigned)
  # The product of the integers is at least 2**(2 * width - 2), and below four
  # times that. `room` counts the bits from that power of two to `half`.
  room = np.int32(half + 2 - 2 * width) - (exponent_of_a + exponent_of_b)
  limit = unsigned(largest) << jnp.clip(room, 0, 1).astype(unsigned)
  high = _high_half(a, b)
  is_within = (high < limit) | ((high == limit) & (a * b == unsigned(0)))
  is_finite = _magnitude(x) < _magnitude(jnp.array(jnp.inf, x.dtype))
  is_zero: jax.Array = is_finite & ((room > 1) | ((room >= 0) & is_within))
  return is_zero


def _split(
  x: jax.Array, unsigned: type[np.unsignedinteger]
) -> tuple[jax.Array, jax.Array]:
  """Returns |x| as an integer whose highest bit is set, and its exponent."""
  own = jnp.finfo(x.dtype)
  bits = _magnitude(x).astype(unsigned)
  hidden = unsigned(1 << own.nmant)
  field = (bits >> unsigned(own.nmant)).astype(jnp.int32)
  fraction = bits & (hidden - unsigned(1))
  integer = jnp.where(field > 0, fraction | hidden, fraction)
  shift = lax.clz(integer)
  exponent = jnp.maximum(field, 1) - shift.astype(jnp.int32)
  return integer << shift, exponent + np.int32(own.minexp - own.nmant - 1)


def _high_half(a: jax.Array, b: jax.Array) -> jax.Array:
  """Returns the upper half of the bits of an integer product."""
  # lax.mulhi does this, but not for sharded arrays.
  half = a.dtype.type(4 * a.dtype.itemsize)
  low_bits = a.dtype.type((1 << int(half)) - 1)
  (a_high, a_low), (b_high, b_low) = ((x >> half, x & low_bits) for x in (a, b))
  middle = a_high * b_low + (a_low * b_low >> half)
  carry = (middle & low_bits) + a_low * b_high
  high: jax.Array = a_high * b_high + (middle >> half) + (carry >> half)
  return high


@jax.jit
def _count_swallowed(param: jax.Array, update: jax.Array) -> jax.Array:
  """Returns uint32[2]: how many updates change nothing, how many are not 0."""

  def tally(param: jax.Array, update: jax.Array) -> jax.Array:
    # The sum must start from the numbers that the dtypes hold.
    param, update = (
      _bits.held(x) if leaves.is_real(x) else x for x in (param, update)
    )
    new = jnp.asarray(optax.apply_updates(param, update))
    pairs = zip(_bits.parts(new), _bits.parts(param), strict=True)
    is_same = functools.reduce(
      jnp.logical_and, (_is_same(a, b) for a, b in pairs)
    )
    is_nonzero = functools.reduce(
      jnp.logical_or, (_magnitude(x) > 0 for x in _bits.parts(update))
    )
    return _counts(is_same, is_nonzero)

  return _elements.count(tally, 2, [param, update])


def _is_same(a: jax.Array, b: jax.Array) -> jax.Array:
  """Returns where two real arrays are equal; NaN equals NaN, 0 equals -0."""
  # Compares bits, since a compiler may compare floats before rounding them.
  a, b = _bits.carried(a), _bits.carried(b)
  magnitude = _magnitude(a)
  is_equal = magnitude == _magnitude(b)
  return is_equal & ((magnitude == 0) | (jnp.signbit(a) == jnp.signbit(b)))


def _magnitude(x: jax.Array) -> jax.Array:
  return _bits.magnitude_bits(_bits.carried(x))
