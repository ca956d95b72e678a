"""No result depends on a narrowing that XLA may leave out on a GPU."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_lossscale as ols
from optax_lossscale import hardware
from tests import excess_precision
from tests import support

DTYPES = ("float16", "bfloat16", "float8_e4m3fn")


def numbers(name):
  """Returns float32 numbers that are not in a dtype, above all at its ends."""
  finfo = jnp.finfo(name)
  largest, least = float(finfo.max), float(finfo.smallest_subnormal)
  eps, normal = float(finfo.eps), float(finfo.smallest_normal)
  # Those next to the largest number become it, the others inf or NaN.
  with np.errstate(over="ignore"):
    ends = np.float32([1 - eps / 8, 1 + eps / 8, 1 + eps, 2]) * largest
  # bfloat16's subnormal numbers are also float32's, which a CPU flushes to 0.
  low = [normal] if name == "bfloat16" else [least, normal]
  steps = [0.4, 0.5, 0.6, 1, 1.4, 1.6] if name != "bfloat16" else [1, 1 + eps]
  between = [1 + eps / 4, 1 + eps * 0.7, 3 + eps, 1 / 3, 2 / 3]
  below = np.outer(low, steps).ravel()
  found = np.float32([*ends, *below, *between, 0, np.inf, np.nan])
  return np.concatenate([found, -found[:-1]])  # NaN has no sign.


def updated(check, x):
  tx = ols.loss_scaling(optax.sgd(1.0), ols.FixedLossScale(2.0), check=check)
  params = {"w": jnp.zeros_like(x)}
  _, state = tx.update({"w": x}, tx.init(params), params)
  return state.overflow, state.nan, state.amax, state.range_used


def tapped(tap, x):
  _, vjp = jax.vjp(lambda seen: tap(jnp.ones_like(x), seen), jnp.float32(0))
  return vjp(x)


def accumulated(x):
  """Returns what is found about a gradient in one of two micro-batches."""

  def loss_fn(params, batch):
    return jnp.sum((params * batch).astype(jnp.float32))

  value_and_grad = ols.accumulate(
    ols.scaled_value_and_grad(loss_fn, jnp.float32(1.0)), microbatches=2
  )
  params, batch = jnp.ones_like(x), jnp.stack([x, jnp.ones_like(x)])
  _, _, overflow = value_and_grad(params, batch)
  return overflow.flags, overflow.amax


def moved(x):
  """Returns how a step moves parameters to their master, which is all 1."""
  tx = ols.master_weights(optax.sgd(1.0))
  state = tx.init(x)._replace(master=jnp.ones(x.shape, jnp.float32))
  updates, state = tx.update(jnp.zeros_like(x), state, x)
  return updates, state.master


def swallowed(x):
  """Returns the shares swallowed by, and swallowed of, the narrowed array."""
  # optax adds no float32 to a float8.
  eps = jnp.finfo(x.dtype).eps
  dtype = jnp.float32 if x.dtype.itemsize > 1 else x.dtype
  small = jnp.full(x.shape, eps / 4, dtype)
  share = ols.instruments.swallowed_share
  return share(x, small), share(jnp.ones_like(x), x)


# Functions of an array that its caller has just narrowed.
PLACES = {
  "nonfinite": lambda x: updated(ols.nonfinite(), x),
  "saturated": lambda x: updated(ols.saturated(), x),
  "accumulated": accumulated,
  "amax_tap": lambda x: tapped(hardware.amax_tap, x),
  "status_tap": lambda x: tapped(hardware.status_tap, x),
  "swallowed": swallowed,
  "leaf_stats": ols.instruments.leaf_stats,
  "master_weights": moved,
}


def narrowed(wide):
  return {name: x.astype(name) for name, x in wide.items()}


def narrowed_by_numpy(wide):
  with np.errstate(all="ignore"):
    return {name: x.astype(jnp.dtype(name)) for name, x in wide.items()}


def with_one_nan(tree):
  """Returns a tree with one kind of NaN, since devices differ in its bits."""
  return jax.tree.map(lambda x: jnp.where(jnp.isnan(x), jnp.nan, x), tree)


def run_unrounded(function, wide, platform="cpu"):
  # Without `computes` fewer roundings would be removed.
  unrounded = excess_precision.unrounded(
    function, computes=True, platform=platform
  )
  return jax.jit(unrounded)(wide)


@pytest.mark.parametrize("place", support.slow_but({"nonfinite"}, PLACES))
def test_what_is_found_is_what_the_dtype_holds(place):
  wide = {name: numbers(name) for name in DTYPES}

  def find(narrow):
    # One by one, so that no number hides another.
    return {name: jax.vmap(PLACES[place])(x) for name, x in narrow.items()}

  expected = jax.jit(find)(narrowed_by_numpy(wide))
  for platform in ("cpu", "cuda") if place == "nonfinite" else ("cpu",):
    found = run_unrounded(lambda x: find(narrowed(x)), wide, platform)
    support.assert_same_bits(*map(with_one_nan, (found, expected)))


def clamped(wide, narrow):
  """Returns what saturating hardware makes of a cast, by NumPy."""
  largest = float(jnp.finfo(narrow.dtype).max)
  with np.errstate(all="ignore"):
    clipped = np.clip(wide, -largest, largest).astype(narrow.dtype)
  return np.where(np.isnan(wide), narrow.dtype.type(0), clipped)


def test_saturating_hardware_rounds():
  wide = {name: numbers(name) for name in DTYPES}

  found = run_unrounded(
    lambda wide: {
      name: hardware.emulate_saturation(
        lambda x, name=name: x.astype(name).astype(jnp.float32), dtypes=name
      )(x)
      for name, x in wide.items()
    },
    wide,
  )
  expected = {
    name: np.float32(clamped(wide[name], x))
    for name, x in narrowed_by_numpy(wide).items()
  }
  support.assert_same_bits(found, jax.tree.map(jnp.asarray, expected))


@pytest.mark.parametrize("make", [ols.nonfinite, ols.saturated])
def test_a_cast_that_overflows_sets_the_status(make):
  wide = {name: numbers(name) for name in DTYPES}

  def status(name, x):
    def cast_and_back(x):
      return x.astype(name).astype(jnp.float32)

    return hardware.float_status(cast_and_back, check=make(name))(x)[1].overflow

  found = run_unrounded(
    lambda wide: {
      name: jax.vmap(lambda x, name=name: status(name, x))(x)
      for name, x in wide.items()
    },
    wide,
  )
  for name, x in narrowed_by_numpy(wide).items():
    size = np.abs(np.float32(x))
    largest = float(jnp.finfo(name).max)
    within = size <= largest if make is ols.nonfinite else size < largest
    expected = np.isfinite(wide[name]) & ~within
    np.testing.assert_array_equal(found[name], expected, name)


def test_an_s_that_does_not_fit_the_loss_overflows():
  def gradients(x):
    def loss_fn(x):
      return jnp.sum(x).astype(jnp.float16)

    return ols.scaled_value_and_grad(loss_fn, jnp.float32(2.0**17))(x)[1]

  x = jnp.ones(3)
  found = jax.jit(excess_precision.unrounded(gradients))(x)
  np.testing.assert_array_equal(found, [np.inf] * 3)
