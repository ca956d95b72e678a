"""The caller's reasons in `update`: `overflow=`, `skip=` and `amax=`."""

from collections.abc import Sequence
import contextlib
import dataclasses
import functools
from typing import NamedTuple

from chex import ArrayTree
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
import numpy as np

from optax_lossscale._base import arguments
from optax_lossscale._base import bits
from optax_lossscale._base import formats
from optax_lossscale._base import leaves
from optax_lossscale._base import promises
from optax_lossscale._base.arguments import shown

LARGEST = formats.largest(jnp.float32)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class WindowOverflow:
  """The overflows of a window's micro-batches, to be passed to `update`.

  Used as a flag, as in `bool(overflow)` or `jnp.where(overflow, ...)`, it is
  True if any micro-batch overflowed. `update` also reads its attributes: it
  does not skip the step because of a dropped micro-batch, and it takes amax
  from the micro-batches.

  Attributes:
    flags: bool[microbatches], True for a micro-batch that overflowed.
    amax: float32[microbatches], the largest absolute value among each
      micro-batch's scaled gradients; NaN if any of them was NaN.
    drop: whether the gradients leave out the micro-batches that overflowed.

  Examples:
    >>> import jax.numpy as jnp
    >>> import optax_lossscale as ols
    >>> flags = jnp.array([False, True])
    >>> overflow = ols.WindowOverflow(flags, jnp.array([4, jnp.inf]), drop=True)
    >>> print(bool(overflow), overflow.valid, overflow.is_void)
    True 1 False
  """

  flags: jax.Array
  amax: jax.Array
  drop: bool = dataclasses.field(metadata={"static": True})

  @property
  def valid(self) -> jax.Array:
    """int32[], the number of micro-batches that did not overflow."""
    return jnp.sum(~self.flags, axis=-1, dtype=jnp.int32)

  @property
  def is_void(self) -> jax.Array:
    """bool[], True if the gradients of the window are unusable."""
    every_one = jnp.all(self.flags, axis=-1)
    return every_one if self.drop else jnp.any(self.flags, axis=-1)

  # JAX's protocol for objects that act as arrays, such as NNX's variables.
  def __jax_array__(self) -> jax.Array:
    return jnp.any(self.flags, axis=-1)

  def __array__(
    self, dtype: DTypeLike | None = None, copy: bool | None = None
  ) -> np.ndarray:
    return np.array(self.__jax_array__(), dtype, copy=copy)

  def __bool__(self) -> bool:
    return bool(self.__jax_array__())


class FloatStatus(NamedTuple):
  """How many operations of a function overflowed, as `float_status` counts.

  Each operation counts every time that it runs, on every device. `bool(status)`
  is True if an operation overflowed. As `overflow=` of `update`, a status means
  its `overflow`; pass `tuple(status)` if undefined operations count as well.

  Attributes:
    overflow: int32[], operations whose result was too large for its dtype.
    undefined: int32[], operations without a finite value for their inputs:
      division by zero, log 0, sqrt(-1).

  Examples:
    >>> import jax.numpy as jnp
    >>> import optax_lossscale as ols
    >>> square = ols.hardware.float_status(lambda x: x * x)
    >>> _, status = square(jnp.float16(300.0))
    >>> print(bool(status), status.overflow, status.undefined)
    True 1 0
  """

  overflow: jax.Array
  undefined: jax.Array

  def __bool__(self) -> bool:
    if isinstance(self.overflow, jax.core.Tracer):
      raise TypeError(
        "a FloatStatus must be known where its truth is used, got "
        f"{shown(self.overflow)} operations; under jit write "
        "status.overflow > 0, or pass overflow=status to update."
      )
    return bool(np.any(self.overflow))


@promises.promise("skip")
def requested(skip: object) -> jax.Array:
  """Returns whether the caller asks to skip."""
  # A state would pass for a list of flags.
  if hasattr(skip, "_fields") and not isinstance(skip, FloatStatus):
    raise TypeError(
      f"`skip` must be a flag or a list of flags, got a {type(skip).__name__}."
    )
  flags = [as_flag("skip", reason) for reason in listed(skip)]
  return functools.reduce(jnp.logical_or, flags, jnp.full((), False))


def listed(reasons: object) -> Sequence[object]:
  """Returns the reasons that a caller passed, also if it is only one."""
  is_one = isinstance(reasons, FloatStatus)
  return (
    [reasons] if is_one or not isinstance(reasons, (list, tuple)) else reasons
  )


def as_flag(name: str, reason: object) -> jax.Array:
  """Returns whether a caller's flag, of any type and shape, is set."""
  if isinstance(reason, (WindowOverflow, FloatStatus)):
    raise TypeError(
      f"`{name}` must be a reason that S has nothing to do with, got a "
      f"{type(reason).__name__}; pass it as overflow=."
    )
  if reason is not None and arguments.is_numeric(reason):
    with contextlib.suppress(TypeError, ValueError, OverflowError):
      # Convert on the host: JAX would keep the low 32 bits, which may be 0.
      if isinstance(reason, (int, np.ndarray, np.generic)):
        reason = np.asarray(reason).astype(bool)
      # NaN is not 0, so a flag of NaN is set.
      return jnp.any(jnp.asarray(reason).astype(bool))
  raise TypeError(
    f"`{name}` must be a bool, a number or an array, or a list of these, got "
    f"{shown(reason)}."
  )


def magnitudes(amax: object) -> list[jax.Array]:
  """Returns a list with the largest value in the caller's `amax`, if any."""
  if amax is None:
    return []
  values = []
  for value in jax.tree.leaves(amax, is_leaf=leaves.is_none):
    value = arguments.as_finite("amax", value)
    found = None
    # A flag is not a number; nor is an object whose dtype is bool.
    is_flag = np.issubdtype(getattr(value, "dtype", type(value)), np.bool_)
    if not (value is None or is_flag) and arguments.is_numeric(value):
      with contextlib.suppress(TypeError, ValueError):
        found = to_float32(value)
    if found is None:
      raise TypeError(
        "`amax` must be a number, an array, or a tree of these, such as the "
        f"gradient of what an amax_tap was given, got {shown(value)}."
      )
    values.append(found.reshape(-1))
  return [bits.amax(values)] if values else []


def to_float32(value: object) -> jax.Array:
  """Returns numbers as float32[...], without turning finite ones into inf."""
  is_jax = isinstance(value, jax.Array) or hasattr(value, "__jax_array__")
  # Convert on the host first, since jnp warns about numbers beyond float32.
  numpy = jnp if is_jax else np
  array = numpy.asarray(value)
  if array.dtype == np.float64:
    clipped = numpy.clip(array, -LARGEST, LARGEST)
    array = numpy.where(numpy.isfinite(array), clipped, array)
  return jnp.asarray(array, jnp.float32)
