"""Multiple devices: values that vary along a mapped axis, and their means."""

from collections.abc import Callable
from collections.abc import Hashable
from collections.abc import Iterator
from collections.abc import Sequence
import contextlib
import contextvars
import math

import jax
from jax import lax
from jax.extend import core
import jax.numpy as jnp

from optax_lossscale._base import arguments
from optax_lossscale._base import formats
from optax_lossscale._base import leaves
from optax_lossscale._base.arguments import shown
from optax_lossscale._base.bits import varying_axes
from optax_lossscale._base.leaves import Tree

# A mapped axis, or several in a tuple or list.
AxisNames = Hashable | Sequence[Hashable]

# Axes along which devices are known to skip together; None means all of them.
Known = Sequence[Hashable] | None

# What is known while the wrapper's optimizer runs outside jit.
agreed: contextvars.ContextVar[Known] = contextvars.ContextVar(
  "agreed", default=None
)


def axis_names(
  argument: str, axis_name: object, *, is_optional: bool = True
) -> tuple[Hashable, ...]:
  """Returns the distinct axis names that a caller passed; () for None."""
  if axis_name is None and is_optional:
    return ()
  names = axis_name if isinstance(axis_name, (tuple, list)) else (axis_name,)
  if not all(isinstance(x, Hashable) and x is not None for x in names):
    raise TypeError(
      f"`{argument}` must name a mapped axis, or several in a tuple or list, "
      f"got {shown(axis_name)}."
    )
  return tuple(dict.fromkeys(names))


def check_mapped(argument: str, names: Sequence[Hashable]) -> None:
  """Raises unless every name is that of a mapped axis around the call."""
  for name in names:
    if not _is_mapped(name):
      raise ValueError(
        f"`{argument}` must name an axis of the shard_map, pmap or vmap around "
        f"this, got {shown(name)}, which is not one; under plain jit "
        "leave it out."
      )


def check_agreed(
  flags: Sequence[jax.Array],
  own: jax.Array,
  names: Sequence[Hashable],
  *,
  is_told: bool,
) -> Known:
  """Returns the axes along which devices decide alike about a step."""
  # None means all, if the caller says so (`is_told`) by naming no axis. It
  # raises if `flags` vary along an axis along which `own`, a part of the state,
  # does not, and warns where JAX does not track what varies.
  varying = frozenset().union(*map(varying_axes, flags))
  if missing := sorted(varying - varying_axes(own), key=str):
    raise ValueError(
      "devices that share a loss scale must skip together, got a "
      f"flag that varies along {listed(missing)} for a state that does not; "
      f"pass loss_scaling(..., axis_name={listed([*names, *missing])}), or "
      "npu_loss_scale_optimizer(..., is_distributed=True) with that axis_name. "
      "If each device trains a model of its own, make the state vary too: "
      f"make_varying(state, {listed(missing)})."
    )
  if is_told and not names:
    return None
  tracked, untracked = _manual_axes()
  if untracked and not names:
    arguments.warn(
      "`axis_name` must say over which axes devices skip together, as JAX does "
      f"not track what varies along {listed(untracked)} here, got none. Pass "
      f"loss_scaling(..., axis_name={listed(untracked)}); or axis_name=() if "
      "gradients are the same on all devices already, or if each device has a "
      "model of its own."
    )
  # A flag that JAX tracks and that does not vary is the same on all devices.
  same = [name for name in tracked if name not in varying]
  return [*names, *same] if names else [*untracked, *same]


def _manual_axes() -> tuple[list[Hashable], list[Hashable]]:
  """Returns the mapped axes that JAX tracks, and those that it does not."""
  manual = sorted(jax.sharding.get_abstract_mesh().manual_axes, key=str)
  # Devices cannot agree over the axes that pmap named itself.
  names = [name for name in manual if not str(name).startswith("_")]
  if not names:
    return [], []
  tracked: set[Hashable] = set()
  # `eval_shape` evaluates only types, so it adds no operation to the program.
  jax.eval_shape(
    lambda: tracked.update(*(varying_axes(lax.axis_index(x)) for x in names))
  )
  return (
    [name for name in names if name in tracked],
    [name for name in names if name not in tracked],
  )


@contextlib.contextmanager
def agreeing_on(known: Known) -> Iterator[None]:
  """Makes `pmean_gradients` warn if it averages over any other axis."""
  token = agreed.set(known)
  try:
    yield
  finally:
    agreed.reset(token)


def check_recorded(jaxpr: core.Jaxpr, known: Known) -> None:
  """Warns if a recorded optimizer combines devices that may not agree."""
  if known is not None:
    # Most steps combine no devices, and need no table of operations.
    from optax_lossscale._jaxpr import collectives

    # A shard_map in the optimizer has axes of its own.
    around = filter(_is_mapped, dict.fromkeys(collectives.axes(jaxpr)))
    check_combined(list(around), known)


def _is_mapped(name: Hashable) -> bool:
  try:
    lax.axis_size(name)
  except (NameError, ValueError):  # ValueError: an axis by position.
    return False
  return True


def check_combined(
  names: Sequence[Hashable], known: Sequence[Hashable]
) -> None:
  if missing := [name for name in names if name not in known]:
    arguments.warn(
      "`axis_name` must name every axis over which `inner` averages or sums, "
      f"got an average or a sum over {listed(missing)}, which it does not "
      "name: one device's NaN would reach the parameters of all, since only "
      "that device skips. Pass loss_scaling(..., "
      f"axis_name={listed([*known, *missing])})."
    )


def axes_beyond(x: jax.Array, *others: jax.Array) -> list[Hashable]:
  """Returns the axes along which `x` varies but one of the others does not."""
  missing = (varying_axes(x) - varying_axes(other) for other in others)
  return sorted(frozenset().union(*missing), key=str)


def average_scaled(
  scaled_grads: Tree, names: Sequence[Hashable], overflow: jax.Array
) -> Tree:
  """Returns the mean of scaled gradients over devices, in their own dtype."""
  refuse_reduced("average_scaled", scaled_grads, names)

  def average_leaf(x: jax.Array) -> jax.Array:
    # Dtypes of 8 bits are too narrow for sums.
    own = mean(x.astype(formats.carrier(x.dtype)), names)
    # Without an overflow every gradient is finite, and so is the true mean. The
    # sum of the quotients may not be: 65504 / 3 is rounded up in float16, and
    # three times the result is inf.
    return jnp.where(overflow, own, leaves.without_inf(own))

  return map_gradients(average_leaf, scaled_grads)


def refuse_split(
  overflow: jax.Array, together: Sequence[jax.Array], names: Sequence[Hashable]
) -> None:
  """Raises if devices that share gradients could disagree on a micro-batch."""
  if missing := axes_beyond(overflow, *together):
    axes = listed([*names, *missing])
    raise ValueError(
      "devices that share a loss or gradients must decide about a micro-batch "
      f"together, got an overflow that varies along {axes} and a loss or a "
      f"gradient that does not; pass axis_name={axes} to accumulate."
    )


def mean(x: jax.Array, names: Sequence[Hashable]) -> jax.Array:
  """Returns the mean over devices."""
  # Each device divides first, since the sum may not fit the values' dtype.
  devices = math.prod(map(lax.axis_size, names))
  # Divide in float32, since XLA would multiply float16 by a rounded 1/n.
  quotient = x.astype(leaves.at_least_float32(x.dtype)) / devices
  total: jax.Array = lax.psum(quotient.astype(x.dtype), tuple(names))
  return total


def refuse_reduced(
  what: str, gradients: object, names: Sequence[Hashable]
) -> None:
  """Raises if JAX has already summed a gradient over devices."""
  tracked = [name for name in names if varying_axes(lax.axis_index(name))]
  for path, x in jax.tree.leaves_with_path(gradients):
    if not leaves.is_gradient(x):
      continue
    missing = [name for name in tracked if name not in varying_axes(x)]
    if missing:
      place = jax.tree_util.keystr(path) or "their root"
      raise ValueError(
        f"`{what}` must be given gradients that vary along "
        f"{listed(names)}, got one at {place} that does not along "
        f"{listed(missing)}: JAX has summed it over the devices already, as "
        "it does for replicated parameters. Differentiate with respect to "
        f"make_varying(params, {listed(names)}); or leave `{what}` out and "
        "take jax.lax.pmean of the loss in the function to differentiate."
      )


def map_gradients(
  function: Callable[[jax.Array], jax.Array], tree: Tree
) -> Tree:
  return jax.tree.map(
    lambda x: function(x) if leaves.is_gradient(x) else x, tree
  )


def listed(names: Sequence[Hashable]) -> str:
  """Returns axis names as a caller would write them in code."""
  return repr(names[0] if len(names) == 1 else tuple(names))
