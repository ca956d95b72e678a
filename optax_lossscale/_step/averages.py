"""Averages of gradients over devices, and values that vary over them."""

from chex import ArrayTree
import jax
from jax import lax
import optax

from optax_lossscale._base import leaves
from optax_lossscale._base.arguments import shown
from optax_lossscale._base.bits import varying_axes
from optax_lossscale._base.leaves import Tree
from optax_lossscale._step import devices


def pmean_gradients(
  axis_name: devices.AxisNames,
) -> optax.GradientTransformation:
  """Averages gradients over devices, as the first transformation in `inner`.

  Each device first checks its own scaled gradients, where an overflow shows.
  The devices agree on the flag, unscale, and then average in float32.

  Every device must have a copy of the parameters. Under `shard_map`,
  differentiate with respect to `make_varying(params, axis_name)`.

  Args:
    axis_name: a mapped axis of `shard_map`, `pmap` or `vmap`, or several in a
      tuple or list.

  Returns:
    A stateless transformation. Leaves that are not floating or complex arrays
    pass through unchanged.

  Raises:
    TypeError: if `axis_name` does not name an axis.
    ValueError: from `update`, if there is no such axis, or if JAX knows that a
      gradient has already been summed over it.

  Warns:
    WiringWarning: from `update`, unless compiled, if the `loss_scaling` around
      it does not name the axis, so that only some devices would skip.

  Examples:
    >>> import jax
    >>> import jax.numpy as jnp
    >>> import optax
    >>> import optax_lossscale as ols
    >>> inner = optax.chain(ols.pmean_gradients("data"), optax.sgd(1.0))
    >>> tx = ols.loss_scaling(inner, ols.FixedLossScale(8.0), axis_name="data")
    >>> state = tx.init(jnp.zeros(()))
    >>> update = jax.vmap(lambda g: tx.update(g, state)[0], axis_name="data")
    >>> print(update(jnp.array([8.0, 24.0])))
    [-2. -2.]
    >>> print(update(jnp.array([8.0, jnp.inf])))
    [-0. -0.]
  """
  names = devices.axis_names("axis_name", axis_name)
  if not names:
    raise TypeError(
      "`axis_name` must name a mapped axis, or several in a tuple or list, got "
      f"{shown(axis_name)}."
    )

  def mean(
    updates: optax.Updates, params: optax.Params | None = None
  ) -> optax.Updates:
    del params
    devices.check_mapped("axis_name", names)
    devices.refuse_reduced("pmean_gradients", updates, names)
    if (agreed := devices.agreed.get()) is not None:
      devices.check_combined(names, agreed)
    return devices.map_gradients(lambda x: devices.mean(x, names), updates)

  return optax.stateless(mean)


def make_varying(tree: Tree, axis_name: devices.AxisNames) -> Tree:
  """Returns the same values, marked as varying over devices.

  Under `shard_map`, JAX sums the gradients of replicated parameters over the
  devices by default, which can hide one device's overflow. If you differentiate
  with respect to the values returned here, each device gets its own gradients.

  Args:
    tree: parameters, or any pytree. Arrays of any dtype and random keys are
      marked; other leaves pass through.
    axis_name: a mapped axis, or several in a tuple or list.

  Returns:
    A pytree like `tree`; marking it costs nothing. Under `pmap` and with
    `check_vma=False` nothing is marked, since JAX does not track what varies.

  Raises:
    TypeError: if `axis_name` is not an axis name.
    ValueError: if there is no such axis.

  Examples:
    >>> import jax
    >>> import jax.numpy as jnp
    >>> import optax_lossscale as ols
    >>> loss_fn = lambda params, batch: jnp.mean(params * batch)
    >>> def gradient_of_each_device(params, batch):
    ...   local = ols.make_varying(params, "data")
    ...   return jax.grad(loss_fn)(local, batch)[None]
    >>> auto = (jax.sharding.AxisType.Auto,)
    >>> gradients = jax.shard_map(
    ...   gradient_of_each_device,
    ...   mesh=jax.make_mesh((1,), ("data",), axis_types=auto),
    ...   in_specs=(jax.P(), jax.P("data")),
    ...   out_specs=jax.P("data"),
    ... )
    >>> print(gradients(jnp.ones(()), 4 * jnp.ones(8)))
    [4.]
  """
  names = devices.axis_names("axis_name", axis_name, is_optional=False)
  devices.check_mapped("axis_name", names)

  def make_leaf_varying(x: object) -> object:
    if not isinstance(x, jax.Array):
      return x  # `x` is float0 or a function.
    missing = tuple(
      name
      for name in names
      if varying_axes(lax.axis_index(name)) and name not in varying_axes(x)
    )
    return lax.pcast(x, missing, to="varying") if missing else x

  return jax.tree.map(make_leaf_varying, leaves.as_arrays(tree))
