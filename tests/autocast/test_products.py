"""Products in float8, and float32 results of products, held to NumPy's."""

import functools
import math
import re

import equinox
from flax import linen
import jax
from jax import lax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest

import optax_lossscale as ols
from optax_lossscale._autocast import _products
from tests import documents
from tests import support

E4M3, E5M2 = jnp.float8_e4m3fn, jnp.float8_e5m2
WIDE = {"preferred_element_type": jnp.float32}
FORMATS = {"e5m2": E4M3, "e4m3": (E4M3, E4M3)}
TOKENS, WIDTH, OUT = 128, 64, 96
in_float8 = functools.partial(ols.autocast, dtype=jnp.bfloat16, dot_dtype=E4M3)


def normal(*shape, seed=0):
  return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


W, X = normal(WIDTH, OUT), normal(TOKENS, WIDTH, seed=1)
T = normal(TOKENS, OUT, seed=2)


def in_format(x, dtype):
  """Returns numbers as a float8 product takes them, in float64."""
  amax, largest = float(np.max(np.abs(x))), float(ml_dtypes.finfo(dtype).max)
  if not amax:
    return x
  power = math.floor(math.log2(largest)) - math.floor(math.log2(amax))
  scale = 2.0 ** (power - (amax * 2.0**power > largest))
  return np.float64((x * np.float32(scale)).astype(dtype)) / scale


def expected(gradients=E5M2):
  """Returns the product and the gradients of its factors, in float64."""
  w, x = (in_format(a, E4M3) for a in (W, X))
  # The result is in bfloat16, and so is its gradient.
  g = in_format(np.float32(T.astype(ml_dtypes.bfloat16)), gradients)
  return (x @ w).astype(ml_dtypes.bfloat16), x.T @ g, g @ w.T


def gradients(function, w=W, x=X):
  return jax.grad(lambda w, x: jnp.sum(function(w, x) * T), (0, 1))(w, x)


def assert_near(found, true):
  for a, b in zip(found, true, strict=True):
    assert np.linalg.norm(a - b) <= 1e-6 * np.linalg.norm(b)


def product(w, x):
  return x @ w


# One product, written in several ways.
WAYS = {
  "plain": product,
  "jit": jax.jit(product),
  "transposed": lambda w, x: x @ w.T.reshape(-1, WIDTH).T,
  "remat": jax.checkpoint(product),
  "scan": lambda w, x: lax.scan(lambda h, w: (x, x @ w), x, w[None])[1][0],
  "cond": lambda w, x: lax.cond(x[0, 0] < 9, product, lambda w, x: x @ w, w, x),
  "vmap": lambda w, x: jax.vmap(product, (0, None))(w[None], x)[0],
  "batches": lambda w, x: jnp.einsum("bti,bio->bto", x[None], w[None])[0],
  "terms of two axes": lambda w, x: jnp.einsum(
    "tab,abo->to", x.reshape(-1, 8, 8), w.reshape(8, 8, -1)
  ),
  "output first": lambda w, x: jnp.einsum("ti,io->ot", x, w).T,
}


@pytest.mark.parametrize("way", WAYS)
def test_a_float8_product_is_numpys_however_it_is_written(way):
  found = jax.jit(in_float8(WAYS[way]))(W, X)
  result, *true = expected()
  assert np.mean(found == result.astype(np.float32)) > 0.99
  assert_near(
    jax.jit(functools.partial(gradients, in_float8(WAYS[way])))(), true
  )


@pytest.mark.parametrize("gradient_dtype", [E5M2, E4M3])
def test_the_format_of_gradients_is_e5m2_or_chosen(gradient_dtype):
  low = in_float8(product, dot_dtype=[E4M3, gradient_dtype])
  assert_near(gradients(low), expected(gradient_dtype)[1:])


def loss_of(function):
  return lambda w, x: jnp.sum(function(w, x) * T)


def on(mesh, x, *spec):
  return jax.device_put(x, jax.NamedSharding(mesh, jax.P(*spec)))


@pytest.mark.parametrize("axis_type", ["Auto", "Explicit"])
@pytest.mark.parametrize("spec", [(), ("data",), (None, "data")])
def test_a_float8_product_is_numpys_on_many_devices(axis_type, spec):
  mesh = support.make_mesh(axis_type, data=8)

  def gathered(w, x):
    if axis_type == "Explicit":
      w = jax.sharding.reshard(w, jax.P())
    return x @ w

  with jax.set_mesh(mesh):
    w, x = on(mesh, W, *spec), on(mesh, X, "data")
    found = jax.jit(functools.partial(gradients, in_float8(gathered)))(w, x)
  assert_near(found, expected()[1:])


def test_in_shard_map_each_device_scales_its_share():
  mesh = support.make_mesh(data=8)
  share = np.concatenate([X * 2.0**i for i in range(8)])
  spread, whole = jax.P("data"), jax.P()
  low = in_float8(product)

  def local(w, x):
    return jax.grad(loss_of(low), (0, 1))(w, x)

  step = jax.jit(
    jax.shard_map(
      local, mesh=mesh, in_specs=(whole, spread), out_specs=(whole, spread)
    )
  )
  dw, dx = step(W, share)
  _, true_w, true_x = expected()
  assert_near((dw, dx[:TOKENS]), (true_w * (2**8 - 1), true_x))
  assert not support.between_devices(
    jax.jit(
      jax.shard_map(low, mesh=mesh, in_specs=(whole, spread), out_specs=spread)
    )
    .lower(W, share)
    .compile()
  )


# Scales.


@pytest.mark.parametrize(
  "dtype", [E4M3, E5M2, jnp.float8_e4m3fnuz, jnp.float8_e5m2fnuz]
)
def test_the_scale_is_the_largest_power_of_two_that_fits(dtype):
  largest = float(jnp.finfo(dtype).max)
  amax = np.ldexp([1, 1.25, 1.75, 1.875, 2 - 2**-23], np.c_[-110:112])
  amax = np.float32(amax).ravel()
  powers = jax.jit(jax.vmap(lambda x: _products._powers(x[None], largest)))
  scale, unscale = map(np.float64, powers(amax))
  assert (scale * amax <= largest).all()
  assert (2 * scale * amax > largest).all()
  assert (np.frexp(scale)[0] == 0.5).all()
  assert (scale * unscale == 1).all()


def test_zeros_and_subnormal_numbers_have_a_scale():
  for x in (0.0, 1e-45, 1e-38):
    found = in_float8(product)(np.full_like(W, x), X)
    assert np.isfinite(found).all()
    assert bool(x) or not np.any(found)


@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
def test_what_is_not_finite_is_in_the_result_and_scales_nothing_else(bad):
  low = in_float8(product)
  clean = low(W, X)
  x = X.copy()
  x[3, 5] = bad
  found = low(W, x)
  assert not np.isfinite(found[3]).any()
  rest = np.delete(np.arange(TOKENS), 3)
  # The other numbers keep their scale, unless the largest of all is gone.
  support.assert_same_bits(found[rest], clean[rest])
  dw, dx = jax.grad(lambda w, x: jnp.sum(low(w, x) * x[3, 5]), (0, 1))(W, x)
  assert not np.isfinite(dw).all()
  assert not np.isfinite(dx).all()


@pytest.mark.parametrize("options", [{}, {"preferred_element_type": "float32"}])
def test_s_changes_no_bit_of_a_gradient(options):
  low = in_float8(lambda w, x: jnp.tanh(x @ w) @ w.T, **options)

  @jax.jit
  def unscaled(scale):
    return jax.grad(lambda w: jnp.sum(low(w, X) ** 2) * scale)(W) / scale

  for power in (-60, 10, 30):
    support.assert_same_bits(unscaled(2.0**power), unscaled(1.0))


def llama(p, x):
  return (jax.nn.silu(x @ p["gate"]) * (x @ p["up"])) @ p["down"]


def decibels(found, true):
  found, true = np.float64(found), np.asarray(true)
  noise = np.linalg.norm(found - true)
  return 20 * np.log10(np.linalg.norm(true) / noise)


# The rows of the page's table.
OPTIONS = [{}, WIDE, *({"dot_dtype": x} for x in FORMATS.values())]


@pytest.mark.parametrize("factor", support.slow_but({1e-9}, [1.0, 1e-9]))
def test_a_layer_and_its_gradients_are_as_near_to_float64_as_the_page_says(
  factor,
):
  shapes = {"gate": (256, 704), "up": (256, 704), "down": (704, 256)}
  p = {
    name: normal(*shape, seed=i) / shape[0] ** 0.5
    for i, (name, shape) in enumerate(shapes.items())
  }
  x, t = normal(512, 256, seed=3), normal(512, 256, seed=4)

  def results(function, p, x):
    loss = lambda p, x: jnp.sum(function(p, x) * t) * factor  # noqa: E731
    return function(p, x), jax.grad(loss, (0, 1))(p, x)

  with jax.enable_x64(True):
    true = results(llama, *jax.tree.map(np.float64, (p, x)))
  page = documents.section(
    documents.read("docs/guides/fp8.md"), "How much is lost"
  )
  shown = re.findall(r"(\S+) dB \| (\S+) dB", page)
  for options, row in zip(OPTIONS, shown, strict=True):
    low = ols.autocast(llama, dtype=jnp.bfloat16, **options)
    found = jax.jit(functools.partial(results, low))(p, x)
    output, gradients = jax.tree.map(decibels, found, true)
    worst = min(jax.tree.leaves(gradients))
    np.testing.assert_allclose([output, worst], [*map(float, row)], atol=0.5)
    assert worst > 20


@pytest.mark.parametrize("options", [{"dot_dtype": E4M3}, WIDE])
def test_a_step_is_proved(options):
  low = ols.autocast(
    lambda w, x: jnp.tanh(x @ w), dtype=jnp.bfloat16, **options
  )
  tx = ols.loss_scaling(optax.adam(1e-3), ols.DynamicLossScale())

  def step(params, state, x):
    loss, grads = ols.scaled_value_and_grad(loss_of(low), state)(params, x)
    updates, state = tx.update(grads, state, params)
    return optax.apply_updates(params, updates), state, loss

  found = ols.instruments.check_step(step, W, tx.init(W), X)
  assert str(found).startswith(
    "The loss scaling of this step is right, for all values."
  )


# Which products.


def lines(function, *args):
  report = str(ols.instruments.precision_report(function, *args))
  return re.findall(r"^(bfloat16.*|float8.*):\n +(?:\S+ +)?1 ", report, re.M)


E = normal(4, WIDTH, OUT)
STAY = {
  "too small": (lambda w, x: x[:16] @ w, W, X),
  "no multiple of 16": (lambda w, x: x[:72] @ w, W, X),
  "no argument": (lambda w, x: jnp.tanh(x) @ jnp.tanh(w), W, X),
  "no argument; a mask": (
    lambda w, x: jax.nn.one_hot(jnp.arange(TOKENS), WIDTH) @ jnp.tanh(w),
    *(W, X),
  ),
  "not a matrix product": (
    lambda w, x: lax.ragged_dot(x, w, jnp.array([32] * 4)),
    E,
    X,
  ),
  "in a jvp rule": (jax.custom_jvp(product), W, X),
}
STAY["in a jvp rule"][0].defjvp(lambda p, t: jax.jvp(product, p, t))


@pytest.mark.parametrize("why", STAY)
def test_a_product_stays_in_16_bits_and_the_report_says_why(why):
  function, w, x = STAY[why]
  low = in_float8(function)
  assert lines(low, w, x) == [f"bfloat16, not float8: {why.split(';')[0]}"]
  plain = ols.autocast(function, dtype=jnp.bfloat16)
  for f, g in (
    (low, plain),
    (
      jax.grad(lambda *a: jnp.sum(low(*a) ** 2)),
      jax.grad(lambda *a: jnp.sum(plain(*a) ** 2)),
    ),
  ):
    support.assert_same_bits(jax.jit(f)(w, x), jax.jit(g)(w, x))


def of_framework(name):
  """Returns a product that a layer of a framework makes, and its weights."""
  if name == "linen":
    layer = linen.Dense(OUT, use_bias=False)
    return lambda w, x: layer.apply({"params": {"kernel": w}}, x)
  layer = equinox.nn.Linear(WIDTH, OUT, use_bias=False, key=jax.random.key(0))
  return lambda w, x: jax.vmap(
    equinox.tree_at(lambda layer: layer.weight, layer, w.T)
  )(x)


@pytest.mark.parametrize("name", ["linen", "equinox"])
def test_a_layer_of_a_framework_is_lowered_as_it_is(name):
  low = in_float8(of_framework(name))
  assert_near(jax.jit(functools.partial(gradients, low))(), expected()[1:])


def test_the_report_says_how_products_are_summed():
  found = ols.instruments.precision_report(
    jax.grad(loss_of(in_float8(product)), (0, 1)), W, X
  )
  assert found.products == {"float8_e4m3fn": 1, "float8_e5m2": 2}
  assert "float8_e4m3fn, fast accumulation:" in str(found)
  assert "float8_e5m2, full accumulation:" in str(found)
  assert "float32, scaling of float8:" in str(found)


def test_an_override_leaves_a_product_out():
  def model(w, x):
    with jax.named_scope("body"):
      x = x @ w
    with jax.named_scope("head"):
      return x @ w.T

  low = in_float8(model, overrides={"head": jnp.bfloat16})
  found = ols.instruments.precision_report(low, W, X)
  assert found.products == {"float8_e4m3fn": 1, "bfloat16": 1}
  assert {scope for scope, *_ in found.counts} == {"body", "head"}


def test_operands_are_kept_once_by_name_and_bit_for_bit(capsys):
  low = in_float8(lambda w, x: jnp.tanh(x @ w[0] + x @ w[1]) @ w[2].T)
  policy = jax.checkpoint_policies.save_only_these_names("float8")
  remat = jax.checkpoint(low, policy=policy)
  jax.ad_checkpoint.print_saved_residuals(remat, E, X)
  kept = re.findall(r"(\w+)\S* named 'float8'", capsys.readouterr().out)
  # Of five factors, of which x is one, with their scales.
  assert sorted(kept) == ["f32"] * 5 + ["u8"] * 5
  grads = [
    jax.jit(jax.grad(lambda w, function=function: jnp.sum(function(w, X) ** 2)))
    for function in (low, remat, jax.checkpoint(low))
  ]
  true = grads[0](E)
  assert np.isfinite(true).all()
  for other in grads[1:]:
    support.assert_same_bits(other(E), true)


def test_a_second_derivative_is_that_of_float32_or_an_error():
  def loss(function):
    return lambda w: jnp.sum(
      jax.grad(lambda w: jnp.sum(function(w, X) ** 2))(w) ** 2
    )

  w, true = W / 8, jax.grad(loss(product))(W / 8)
  found = jax.grad(loss(ols.autocast(product, dtype=jnp.bfloat16, **WIDE)))(w)
  assert support.relative_error(found, true) < 0.01
  found = jax.grad(in_float8(loss(product)))(w)
  assert support.relative_error(found, true) < 0.2
  with pytest.raises(TypeError, match="inside of `autocast`"):
    jax.jit(jax.grad(loss(in_float8(product))))(w)


@pytest.mark.parametrize("shapes", [((0, 64), (64, 0)), ((64, 0), (0, 64))])
def test_empty_products_are_empty(shapes):
  x, w = map(np.ones, shapes)
  assert np.array_equal(in_float8(product)(w, x), x @ w)


def test_results_that_the_program_wants_wide_stay_wide():
  def logits(w, x):
    w, x = jnp.bfloat16(w), jnp.bfloat16(x)
    return jnp.dot(x, w, preferred_element_type=jnp.float32)

  found = in_float8(logits)(W, X)
  assert not np.array_equal(found, found.astype(ml_dtypes.bfloat16))


def test_a_level_without_products_in_low_precision_is_an_error():
  lists = {"overrides": {"body": jnp.bfloat16}, "operations": {"gray": ["exp"]}}
  for options in (WIDE, {"dot_dtype": E4M3}, {"dot_dtype": E4M3, **lists}):
    with pytest.raises(ValueError, match="the level O1 (has|does)"):
      ols.autocast(product, "O0", **options)


# Devices.


@pytest.mark.parametrize(
  ("axis_type", "move"),
  [
    ("Explicit", jax.sharding.reshard),
    ("Auto", lax.with_sharding_constraint),
  ],
)
def test_two_all_reduces_more_for_each_product_and_weights_travel_in_float8(
  axis_type, move
):
  mesh = support.make_mesh(axis_type, data=8)

  def gathered(w, x):
    return x @ move(w, jax.P())

  def all_reduces(low):
    step = jax.jit(jax.grad(lambda w, x: jnp.sum(low(w, x) ** 2)))
    moved = support.between_devices(step.lower(w, x).compile())
    return sum(" all-reduce" in line for line in moved)

  with jax.set_mesh(mesh):
    w, x = on(mesh, W, "data"), on(mesh, X, "data")
    low = in_float8(gathered)
    plain = ols.autocast(gathered, dtype=jnp.bfloat16)
    # The largest of the two factors travel together.
    assert all_reduces(low) == all_reduces(plain) + 2
    # The weights travel as float8; in bfloat16 they are gathered as written.
    for function, dtype in ((low, jnp.uint8), (plain, jnp.float32)):
      moved = [
        x.invars[0].aval
        for x in support.equations(jax.make_jaxpr(function)(w, x))
        if x.primitive.name in ("reshard", "sharding_constraint")
      ]
      assert any(x.dtype == dtype and x.shape == W.shape for x in moved)
