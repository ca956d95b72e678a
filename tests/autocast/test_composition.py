"""`autocast` with other transformations: in any order, on several devices.

The authority is the same function without `autocast`, in float32.
"""

import functools

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np
import pytest

import optax_lossscale as ols
from optax_lossscale import hardware
from tests.autocast import mixed

pytestmark = pytest.mark.slow

W = jnp.linspace(-0.6, 0.7, 16).reshape(4, 4)
X = jnp.linspace(-1.0, 0.9, 32).reshape(8, 4)
MESHES = {
  name: jax.make_mesh(
    (4, 2), ("data", "model"), (getattr(jax.sharding.AxisType, name),) * 2
  )
  for name in ("Auto", "Explicit")
}


def network(x, w):
  x = jax.nn.softmax(jax.nn.silu(x @ w + w[0]) @ w)
  return lax.scan(lambda x, _: (jnp.tanh(x @ w), None), x, None, length=2)[0]


# --- Order.

low = functools.partial(ols.autocast, level="O1")
by_rows = functools.partial(jax.vmap, in_axes=(0, None))
FORWARD = {
  "jit": lambda f: jax.jit(low(f)),
  "of jit": lambda f: low(jax.jit(f)),
  "vmap": lambda f: by_rows(low(f)),
  "of vmap": lambda f: low(by_rows(f)),
  "jit of vmap": lambda f: jax.jit(by_rows(low(f))),
  "of jit of vmap": lambda f: low(jax.jit(by_rows(f))),
}
GRADIENTS = {
  "jit of grad": lambda f: jax.jit(mixed.gradient(low(f))),
  "grad of jit": lambda f: mixed.gradient(jax.jit(low(f))),
  "of grad": lambda f: low(mixed.gradient(f)),
  "of jit of grad": lambda f: low(jax.jit(mixed.gradient(f))),
  "of grad of jit": lambda f: low(mixed.gradient(jax.jit(f))),
}


@pytest.mark.parametrize("name", FORWARD)
def test_forward_transformations_in_any_order_give_the_same(name):
  got = FORWARD[name](network)(X, W)
  np.testing.assert_allclose(got, low(network)(X, W), rtol=0, atol=1e-3)


@pytest.mark.parametrize("name", GRADIENTS)
def test_gradients_in_any_order_give_the_same(name):
  got = GRADIENTS[name](network)(X, W)
  mixed.assert_close(got, mixed.gradient(low(network))(X, W), 5e-3)


@pytest.mark.parametrize("levels", [("O1", "O0"), ("O0", "O1"), ("O1", "O1")])
def test_autocast_of_autocast_lowers_once(levels):
  inner, outer = levels
  twice = ols.autocast(ols.autocast(network, inner), outer)
  mixed.assert_close(twice(X, W), network(X, W))
  once = low(network)
  for name in ("dot_general", "convert_element_type"):
    assert mixed.count(twice, name, X, W) <= mixed.count(once, name, X, W)


@pytest.mark.parametrize(
  "change",
  [
    lambda f, low: hardware.emulate_saturation(low(f)),
    lambda f, low: low(hardware.emulate_saturation(f)),
    lambda f, low: hardware.float_status(low(f)),
    lambda f, low: low(hardware.float_status(f)),
    lambda f, low: mixed.gradient(hardware.emulate_saturation(low(f))),
    lambda f, low: hardware.emulate_saturation(mixed.gradient(low(f))),
    lambda f, low: low(hardware.emulate_saturation(mixed.gradient(f))),
  ],
)
def test_saturation_and_float_status_go_around_and_inside(change):
  got = jax.jit(change(network, low))(X, W)
  mixed.assert_close(got, jax.jit(change(network, lambda f: f))(X, W))


def test_an_overflow_of_float16_is_clamped_and_seen():
  def function(x, w):
    return (x @ w).sum()

  args = (jnp.full((2, 4), 300.0), jnp.full((4, 2), 300.0))
  result, overflow = hardware.float_status(low(function))(*args)
  assert overflow
  assert not np.isfinite(result)
  assert hardware.emulate_saturation(low(function))(*args) == 4 * 65504.0


# --- Devices.


def placed(mesh):
  return (
    jax.device_put(X, jax.NamedSharding(mesh, jax.P("data"))),
    jax.device_put(W, jax.NamedSharding(mesh, jax.P())),
  )


@pytest.mark.parametrize("name", MESHES)
def test_shardings_of_jit_are_those_of_the_function(name):
  mesh = MESHES[name]
  with jax.set_mesh(mesh):
    args = placed(mesh)
    got = jax.jit(low(network))(*args)
    want = jax.jit(network)(*args)
    grads = jax.jit(mixed.gradient(low(network)))(*args)
    mixed.assert_close(grads, jax.jit(mixed.gradient(network))(*args))
  mixed.assert_close(got, want)
  assert got.sharding.is_equivalent_to(want.sharding, got.ndim)


def mean_network(x, w):
  return lax.pmean(network(x, w).sum(0), "data")


def collectives(x, w):
  y = x @ w
  return (
    lax.all_gather(y, "data", tiled=True)[:2],
    lax.psum_scatter(jnp.tile(y, (4, 1)), "data", tiled=True),
    lax.ppermute(y, "data", [(i, (i + 1) % 4) for i in range(4)]),
    lax.all_to_all(jnp.tile(y, (2, 1)), "data", 0, 0, tiled=True),
    y * lax.axis_index("data"),
  )


def sharded(function, check_vma, out_specs):
  return jax.shard_map(
    function,
    mesh=MESHES["Auto"],
    in_specs=(jax.P("data"), jax.P()),
    out_specs=out_specs,
    check_vma=check_vma,
  )


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize(
  ("function", "spec"),
  [
    (network, jax.P("data")),
    (mean_network, jax.P()),
    (collectives, jax.P("data")),
  ],
)
def test_shard_map_inside_and_around(function, spec, check_vma):
  sharding = functools.partial(sharded, check_vma=check_vma, out_specs=spec)
  args = placed(MESHES["Auto"])
  want = jax.jit(mixed.gradient(sharding(function)))(*args)
  for changed in (low(sharding(function)), sharding(low(function))):
    got = jax.jit(mixed.gradient(changed))(*args)
    mixed.assert_close(got, want, 0.03)


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("where", ["function", "gradient", "all"])
def test_gradients_inside_of_a_shard_map(where, check_vma):
  def of(function, change):
    def inside(x, w):
      grads = change(mixed.gradient(function, 1))(x, w)
      return lax.pmean(grads, "data")

    return sharded(inside, check_vma, jax.P())

  changed = {
    "function": of(low(network), lambda f: f),
    "gradient": of(network, low),
    "all": low(of(network, lambda f: f)),
  }[where]
  args = placed(MESHES["Auto"])
  want = jax.jit(of(network, lambda f: f))(*args)
  mixed.assert_close(jax.jit(changed)(*args), want, 0.03)


def test_sharded_constants_are_taken_apart():
  numbers = np.arange(8, dtype=np.float32)

  def function(x, w):
    scale = jax.shard_map(
      lambda x, numbers: (x @ W) * numbers[:, None],
      mesh=MESHES["Auto"],
      in_specs=(jax.P("data"), jax.P("data")),
      out_specs=jax.P("data"),
    )
    return scale(x @ w, numbers)

  args = placed(MESHES["Auto"])
  mixed.assert_close(low(function)(*args), jax.jit(function)(*args), 0.03)


@pytest.mark.parametrize("around", [True, False])
def test_pmap_inside_and_around(around):
  def function(x, w):
    return lax.pmean(network(x, w), "data")

  pmap = functools.partial(jax.pmap, axis_name="data", in_axes=(0, None))
  changed = low(pmap(function)) if around else pmap(low(function))
  mixed.assert_close(changed(X, W), pmap(function)(X, W))
