"""tune_precision, beside casts written by hand and what XLA counts."""

import re

import equinox
from flax import nnx
import flax.linen as nn
import jax
from jax import lax
import jax.numpy as jnp
import numpy as np
import pytest

import optax_lossscale as ols
from optax_lossscale._jaxpr import scopes
from optax_lossscale.instruments.function import _tune_precision
from tests import support

BF16, F32, E4M3 = jnp.bfloat16, np.dtype(np.float32), jnp.float8_e4m3fn
WIDTH, LAYERS = 32, 6


def normal(seed, *shape):
  return jax.random.normal(jax.random.key(seed), shape) / shape[0] ** 0.5


X = normal(0, 64, WIDTH) * 8
PARAMS = {
  **{f"layer{i}": normal(i + 1, WIDTH, WIDTH) for i in range(LAYERS)},
  "head": normal(9, WIDTH, WIDTH),
}


def make_loss_fn(*bad, cast=lambda name, x: x):
  """Returns a loss; bfloat16 loses the weights of bad layers.

  Args:
    *bad: the names of layers whose weights have a large number in common.
    cast: of what each layer multiplies.
  """

  def loss_fn(params, x, steep=1.0):
    for name, w in params.items():
      with jax.named_scope(name):
        far = 64.0 if name in bad else 0.0
        w = w + far if far else w
        y = (cast(name, x) @ cast(name, w)).astype(jnp.float32)
        y -= far * jnp.sum(x, axis=1, keepdims=True)
        x = x + jnp.tanh(steep * y)
    return jnp.mean(x**2)

  return loss_fn


def tune(loss_fn, *args, tolerance=0.03, **options):
  return ols.instruments.tune_precision(
    loss_fn, *args, tolerance=tolerance, **options
  )


def test_a_bad_layer_stays_in_float32_and_the_others_do_not(capsys):
  report = tune(make_loss_fn("head"), PARAMS, X)
  assert report.overrides == {"head": F32}
  assert report.scopes["layer*"].dtype == "bfloat16"
  assert report.scopes["head"].why == "bfloat16 is too wrong"
  # A layer has three products, but the first one has no gradient of its input.
  assert report.lowered == pytest.approx(3 * LAYERS / (3 * LAYERS + 2))

  def by_hand(name, x):
    return x if name == "head" else x.astype(BF16)

  low = make_loss_fn("head", cast=by_hand)
  error = ols.instruments.gradient_error(
    make_loss_fn("head"), low, loss_scales=1
  )(PARAMS, X)
  # autocast rounds what tanh sees, too.
  assert report.errors == [pytest.approx(error.rounding, rel=0.5)]
  # Equal layers are measured once, and what is known is not measured again.
  said = capsys.readouterr().err.splitlines()
  assert [re.search(", (.*) [.]{3} ", x)[1] for x in said] == [
    *("head in bfloat16", "layer* in bfloat16", "all low")
  ]


@pytest.mark.parametrize("bad", support.slow_but(["4"], ["4", "14"]))
def test_bad_layers_among_equal_ones_are_told_apart(bad):
  bad = [f"layer{i}" for i in bad]
  report = tune(make_loss_fn(*bad), PARAMS, X)
  assert report.overrides == dict.fromkeys(bad, F32)
  found = (x for x in report.scopes.values() if x.dtype == "float32")
  assert [x.scopes for x in found] == [[x] for x in bad]


def test_layers_that_are_bad_in_the_second_batch_do_not_keep_others():
  def loss_fn(params, x, far):
    for name, w in params.items():
      with jax.named_scope(name):
        far_now = 0.0 if name == "head" else far
        y = x @ (w + far_now) - far_now * jnp.sum(x, axis=1, keepdims=True)
        x = x + jnp.tanh(y)
    return jnp.mean(x**2)

  near, far = (X, jnp.float32(0.0)), (X, jnp.float32(64.0))
  report = tune(loss_fn, PARAMS, *near, confirm_args=far)
  # In the first batch they cost the least for what they save.
  assert report.overrides == {"layer*": F32}
  assert report.scopes["layer*"].why == "bfloat16 is too wrong when added"


@pytest.mark.slow
def test_what_is_found_keeps_the_tolerance_of_both_batches():
  loss_fn, steep = make_loss_fn(), (X, jnp.float32(9.0))
  flat = (X, jnp.float32(0.1))
  alone = tune(loss_fn, PARAMS, *flat)
  assert alone.overrides == {} and alone.between_batches is None
  both = tune(loss_fn, PARAMS, *flat, confirm_args=steep)
  assert both.overrides
  assert max(both.errors) <= both.tolerance
  grads = [jax.grad(loss_fn)(PARAMS, *x) for x in (flat, steep)]
  first, second = (
    np.concatenate([np.ravel(x) for x in jax.tree.leaves(g)]) for g in grads
  )
  norms = [np.linalg.norm(x) for x in (second - first, first, second)]
  noise = norms[0] / np.mean(norms[1:])
  assert both.between_batches == pytest.approx(noise, rel=1e-2)
  # By default a quarter of that, or 1 % where there is one batch.
  options = {"tolerance": None}
  free = tune(loss_fn, PARAMS, *flat, confirm_args=steep, **options)
  assert free.tolerance == both.between_batches / 4
  assert tune(loss_fn, PARAMS, *flat, **options).tolerance == 0.01


def test_float8_is_for_what_bears_it():
  options = {"dtypes": (E4M3, BF16), "tolerance": 0.4}
  report = tune(make_loss_fn("head"), PARAMS, X, **options)
  assert report.dtype == BF16
  assert {x: y.dtype for x, y in report.scopes.items()} == {
    "layer*": "float8_e4m3fn",
    "head": "float32",
  }
  assert list(report.scopes["layer*"].errors) == ["bfloat16", "float8_e4m3fn"]
  low = ols.autocast(
    make_loss_fn("head"), dtype=report.dtype, overrides=report.overrides
  )
  found = ols.instruments.precision_report(low, PARAMS, X).products
  assert found == {"float8_e4m3fn": LAYERS, "float32": 1}
  # autocast multiplies no fewer than 16 numbers in float8.
  alone = {"dtypes": [E4M3], "tolerance": 0.4}
  report = tune(make_loss_fn(), {"head": normal(1, 8, 8)}, X[:, :8], **alone)
  assert report.scopes["head"].dtype == "bfloat16"


def test_layers_that_differ_in_work_are_not_equal():
  def loss_fn(params, x):
    with jax.named_scope("layer0"):
      w = params["layer0"]
      x = lax.scan(lambda y, _: (jnp.tanh(y @ w), None), x, length=3)[0]
    with jax.named_scope("layer1"):
      x = jnp.tanh(x @ params["layer1"])
    return jnp.mean(x**2)

  assert [*tune(loss_fn, PARAMS, X).scopes] == ["layer0", "layer1"]


def test_float16_errs_by_overflow_but_not_by_what_an_s_cures():
  def loss_fn(params, x):
    for name, w in params.items():
      with jax.named_scope(name):
        x = x @ w
        x /= jnp.max(jnp.abs(x))
    return jnp.mean(x**2) * 1e-6

  params = {**PARAMS, "head": PARAMS["head"] * 1e6}
  report = tune(loss_fn, params, X, dtypes=[jnp.float16])
  assert report.overrides == {"head": F32}
  assert re.search("head .* overflow  float32", str(report))


def test_products_without_a_scope_are_found_as_well():
  def loss_fn(w, x):
    with jax.named_scope("body"):
      x = jnp.tanh(x @ w)
    return jnp.mean((x @ (w + 1000) - jnp.sum(x, 1, keepdims=True) * 1000) ** 2)

  report = tune(loss_fn, PARAMS["head"], X)
  assert report.overrides == {"*": F32, "body": None}
  assert "(no scope)" in str(report)


class Block(nn.Module):
  """A layer whose products are in two scopes, one inside the other."""

  @nn.compact
  def __call__(self, x, _):
    return x + nn.tanh(nn.Dense(WIDTH)(nn.Dense(WIDTH, name="up")(x))), None


class Stack(nn.Module):
  """Layers in a scan, and one that is not."""

  @nn.compact
  def __call__(self, x):
    scanned = nn.scan(
      Block, variable_axes={"params": 0}, split_rngs={"params": True}, length=3
    )
    x, _ = scanned(name="body")(x, None)
    return nn.Dense(WIDTH, name="head")(x)


def of_linen():
  params = Stack().init(jax.random.key(0), X)
  return lambda params, x: jnp.mean(Stack().apply(params, x) ** 2), params


def of_nnx():
  graph, params = nnx.split(nnx.Linear(WIDTH, WIDTH, rngs=nnx.Rngs(0)))

  @jax.named_scope("head")
  def loss_fn(params, x):
    return jnp.mean(nnx.merge(graph, params)(x) ** 2)

  return loss_fn, params


def of_equinox():
  model = equinox.nn.Linear(WIDTH, WIDTH, key=jax.random.key(0))
  params, static = equinox.partition(model, equinox.is_array)

  @jax.named_scope("head")
  def loss_fn(params, x):
    return jnp.mean(jax.vmap(equinox.combine(params, static))(x) ** 2)

  return loss_fn, params


@pytest.mark.parametrize(
  ("make", "expected"),
  [
    (of_linen, {"Stack/body/up": 3, "Stack/body/Dense_0": 3, "Stack/head": 1}),
    (of_nnx, {"head": 1}),
    (of_equinox, {"head": 1}),
  ],
)
def test_a_model_of_a_framework_has_its_scopes(make, expected):
  report = tune(*make(), X)
  total = sum(expected.values())
  # Equinox adds a scope for each of its layers.
  shares = {
    x.removesuffix("/eqx.nn.Linear"): y.share * total
    for x, y in report.scopes.items()
  }
  assert shares == pytest.approx(expected)


def convolution(x, w):
  return lax.conv_general_dilated(
    x.reshape(4, 16, WIDTH),
    w[None],
    (1,),
    "VALID",
    (1,),
    (1,),
    ("NWC", "WIO", "NWC"),
  )


@pytest.mark.parametrize(
  ("function", "loops"),
  [
    (lambda x, w: x @ w, 1),
    (
      lambda x, w: jnp.einsum(
        "bij,bjk->bik", x.reshape(4, 16, WIDTH), jnp.stack([w] * 4)
      ),
      1,
    ),
    (lambda x, w: lax.scan(lambda y, _: (y @ w, None), x, length=3)[0], 3),
    (convolution, 1),
  ],
)
def test_work_is_what_xla_counts(function, loops):
  w = PARAMS["head"]
  (cost,) = (
    _tune_precision._cost(equation, around)
    for _, equation, around in scopes.operations(jax.make_jaxpr(function)(X, w))
    if equation.primitive.name in ("dot_general", "conv_general_dilated")
  )
  counted = jax.jit(function).lower(X, w).compile().cost_analysis()["flops"]
  # A multiplication and an addition of four bytes; XLA counts a loop once.
  assert cost / 4 * 2 == pytest.approx(loops * counted, rel=0.01)


@pytest.mark.parametrize(
  ("options", "error", "message"),
  [
    ({"dtypes": BF16}, TypeError, "`dtypes` must be a sequence"),
    ({"dtypes": []}, ValueError, "or of both kinds, got none"),
    (
      {"dtypes": [BF16, jnp.float16]},
      ValueError,
      "both kinds, got bfloat16, float16",
    ),
    ({"dtypes": [F32]}, ValueError, "got float32."),
    (
      {"tolerance": 0},
      ValueError,
      "`tolerance` must be between 0 and 1, got 0",
    ),
    ({"confirm_args": X}, TypeError, "`confirm_args` must be a tuple"),
    ({"confirm_args": (X, X)}, ValueError, "here 1, got 2"),
    (
      {"confirm_args": (X,)},
      ValueError,
      "`confirm_args` must be another batch",
    ),
  ],
)
def test_a_wrong_argument_is_an_error(options, error, message):
  with pytest.raises(error, match=re.escape(message)):
    tune(make_loss_fn(), PARAMS, X, **options)


def test_a_loss_without_products_is_an_error():
  with pytest.raises(ValueError, match="products that `autocast` lowers"):
    tune(lambda w: jnp.sum(w**2), PARAMS["head"])
