"""The error of a gradient, against float64 and NumPy's own float16."""

import functools
import math

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import optax_lossscale as ols

gradient_error = ols.instruments.gradient_error

WEIGHTS = jnp.linspace(-1.0, 1.0, 12).reshape(3, 4)
X = jnp.linspace(0.1, 1.3, 15).reshape(5, 3)


def loss_fn(weights, x):
  """Its cotangents are 2**-22 y: in float16, few bits are left of them."""
  with jax.named_scope("narrow"):
    return jnp.sum((x @ weights) ** 2) * 2.0**-23


def of_numpy(weights, x, loss_scale=None):
  """Returns the gradient in float64, or with float16 operands and results."""
  weights, x = np.float64(weights), np.float64(x)
  if loss_scale is None:
    return x.T @ (2 * 2.0**-23 * (x @ weights))
  weights, x = np.float16(weights), np.float16(x)
  y = np.float16(np.float32(x) @ np.float32(weights))
  cotangent = np.float32(loss_scale) * 2 * np.float32(2.0**-23) * np.float32(y)
  cotangent = np.float32(np.float16(cotangent))
  scaled = np.float16(np.float32(x).T @ cotangent)
  return np.float64(np.float32(scaled)) / loss_scale


@pytest.mark.parametrize("loss_scale", [1.0, 4.0, 2.0**10, 2.0**15])
def test_error_is_that_of_numpy(loss_scale):
  true, low = of_numpy(WEIGHTS, X), of_numpy(WEIGHTS, X, loss_scale)
  found = gradient_error(loss_fn, loss_scales=[loss_scale])(WEIGHTS, X)
  error = np.linalg.norm(low - true) / np.linalg.norm(true)
  # The reference is float32, and a product may be summed in another order.
  assert found.errors[loss_scale] == pytest.approx(error, rel=1e-2)
  assert found.rounding == found.errors[loss_scale]
  lost = np.mean((low == 0) & (true != 0)) / np.mean(true != 0)
  assert found.zeros[loss_scale] == lost


def test_what_underflows_is_counted():
  scales = jnp.array([0.0, 1.0, 1.0, 2.0**-20])
  params = jnp.ones((1, 4))
  error = gradient_error(
    lambda params: jnp.sum((jnp.ones((1, 1)) @ params) * scales) * 2.0**-10,
    loss_scales=[2**12, 1],
  )(params)
  # Three are not 0, and one of them is 2**-30.
  assert error.zeros == {1.0: 1 / 3, 4096.0: 0.0}
  assert error.errors[4096] == 0.0
  assert error.errors[1] == pytest.approx(2**-30 / (2**-10 * math.sqrt(2)))


def test_overflow_is_reported_as_such_whether_inf_or_nan():
  def loss(params):
    y = jnp.ones((4, 4)) @ params
    return jnp.sum(y @ y)  # inf - inf = NaN in the backward pass of float16.

  params = jnp.eye(4) - 0.5
  report = gradient_error(loss, loss_scales=[1, 2.0**4, 2.0**100])(params)
  assert report.errors[2.0**100] == math.inf
  assert report.rounding == report.errors[2.0**4] < 1e-3
  text = str(report)
  assert text.count("overflow") == 1 and "nan" not in text.lower()
  assert "S = 2**100  overflow" in text


def test_nan_is_an_overflow_too():
  params = jnp.full((9, 9), 300.0)
  report = gradient_error(lambda x: jnp.sum(jnp.sin(x @ x)))(params)
  assert set(report.errors.values()) == {math.inf}
  assert report.by_leaf[""].errors == report.errors


def test_parameter_without_gradient_is_left_out():
  params = {"used": WEIGHTS, "unused": jnp.ones(3)}
  report = gradient_error(lambda params, x: loss_fn(params["used"], x))(
    params, X
  )
  assert [*report.by_leaf] == ["used"]
  assert report.by_leaf["used"].errors == report.errors


def test_all_overflow():
  report = gradient_error(lambda x: jnp.sum((x @ x) ** 2))(
    100 * jnp.ones((9, 9))
  )
  assert set(report.errors.values()) == {math.inf} == {report.rounding}
  assert report.least_loss_scale is None
  assert "overflows at every S that was tried" in str(report)


def report_with(errors, zeros=0.0):
  return ols.instruments.GradientErrorReport(
    "float16", errors, dict.fromkeys(errors, zeros), {}
  )


@pytest.mark.parametrize(
  ("errors", "least", "text"),
  [
    ({1: 0.6, 1024: 1e-3, 32768: 1e-3}, 1024, "From S = 1024 to 32768"),
    (
      {1: 0.011, 1024: 1e-2, 32768: 1e-2},
      1,
      "needs no loss scaling: the error is rounding, 1.00%, which no S",
    ),
    ({1: 0.012, 1024: 1e-2, 32768: 1e-2}, 1024, "From S = 1024 to 32768"),
    ({1: 0.6, 1024: 1e-3, 32768: 4e-3}, 1024, "the error is rounding, 0.40%"),
    (
      {1: 1.9e-3, 1024: 1e-4, 32768: 1e-4},
      1,
      "needs no loss scaling: the error is at most 0.19%, which is small",
    ),
    ({1: 2e-3, 1024: 1e-4, 32768: 1e-4}, 1024, "From S = 1024 to 32768"),
    (
      {1: 0.6, 1024: 1.9e-3, 32768: 1e-4},
      1024,
      "From S = 1024 to 32768, the error is at most 0.19%, which is small",
    ),
    ({64: 1e-2, 1024: 1e-2}, 64, "From S = 64 to 1024"),
    ({1: 0.0, 1024: 0.0}, 1, "needs no loss scaling"),
    ({1: 0.3, 1024: 1e-3, 2**40: math.inf}, 1024, "At S = 1024, the error"),
    ({1: math.inf, 0.5: 1e-2, 0.25: 1e-2}, 0.25, "From S = 2**-2 to 2**-1"),
    # Not shown, since no larger S does as well.
    (
      {1: 0.6, 1024: 0.1, 32768: 0.01},
      None,
      "falls at S = 32768. Try a larger",
    ),
    (
      {1: 0.6, 1024: 0.1, 32768: math.inf},
      None,
      "falls at S = 1024. S = 32768 overflows: try S between the two",
    ),
    ({1: 0.6, 1024: math.inf}, None, "does not tell underflow from rounding"),
    ({1: 0.6}, None, "does not tell underflow from rounding. Try a larger S"),
    ({1: 1e-3, 1024: math.inf}, 1, "needs no loss scaling"),
  ],
)
def test_sentence_follows_from_the_errors(errors, least, text):
  report = report_with(errors)
  assert report.least_loss_scale == least
  assert text in str(report).splitlines()[-1]


def test_what_is_all_zeros_is_not_rounding():
  report = report_with({1: 1.0, 1024: 1.0, 32768: 1.0}, zeros=1.0)
  assert report.least_loss_scale is None
  last = str(report).splitlines()[-1]
  assert last == "Most of the gradient is 0 at S = 32768. Try a larger S."
  report = gradient_error(lambda w, x: 1e-13 * loss_fn(w, x))(WEIGHTS, X)
  assert set(report.zeros.values()) == {1.0}
  assert "Most of the gradient is 0" in str(report)


@pytest.mark.parametrize(
  ("rounding", "is_large"), [(0.09, False), (0.11, True)]
)
def test_large_rounding_is_not_passed_over(rounding, is_large):
  report = report_with({1: rounding, 1024: rounding})
  assert "needs no loss scaling" in str(report)
  assert ("a large part of this gradient" in str(report)) == is_large


def test_forward_pass_that_overflows_is_named():
  def loss(w):
    return 1e-12 * jnp.sum((w @ w) ** 2)

  report = gradient_error(loss)(jnp.full((9, 9), 300.0))
  assert report.least_loss_scale is None
  assert "the forward pass does: see ols.instruments.where_overflow(" in str(
    report
  )


def test_reference_has_the_highest_precision():
  """A float32 product is TF32 on some GPUs, unless it asks for more."""
  asked = []

  def loss(weights, x):
    asked.append(jax.config.jax_default_matmul_precision)
    return loss_fn(weights, x)

  gradient_error(loss)(WEIGHTS, X)
  assert asked[0] == "highest" and asked[-1] is None


class Model(nn.Module):
  @nn.compact
  def __call__(self, x, train):
    x = nn.Dense(8, name="first")(x)
    x = nn.BatchNorm(not train)(x)
    return nn.Dense(2, name="last")(nn.tanh(x))


@pytest.mark.slow
def test_by_leaf_aux_and_flags_as_in_a_flax_model():
  model, x = Model(), jnp.linspace(-1.0, 1.0, 24).reshape(6, 4)
  variables = jax.jit(model.init, static_argnums=2)(jax.random.key(0), x, True)

  def loss(params, stats, x, train):
    y, changed = model.apply(
      {"params": params, "batch_stats": stats}, x, train, mutable="batch_stats"
    )
    return 1e-6 * jnp.sum(
      (y - jnp.array([[0.5], [-2.0], [1.0]] * 2)) ** 2
    ), changed

  report = gradient_error(loss, has_aux=True)(
    variables["params"], variables["batch_stats"], x, train=True
  )
  assert {"first/kernel", "last/kernel", "last/bias"} <= set(report.by_leaf)
  leaf = report.by_leaf["last/kernel"]
  assert leaf.errors.keys() == report.errors.keys() and leaf.by_leaf == {}
  assert str(leaf).startswith("Gradient in float16, compared with float32")
  # The whole is made of the leaves: squares of differences add up.
  norms = {
    path: np.linalg.norm(g)
    for path, g in ols.instruments._elements.named(
      jax.grad(loss, has_aux=True)(
        variables["params"], variables["batch_stats"], x, True
      )[0]
    ).items()
  }
  squares = sum(
    (report.by_leaf[path].errors[1] * norm) ** 2
    for path, norm in norms.items()
    if path in report.by_leaf
  )
  whole = math.sqrt(sum(norm**2 for norm in norms.values()))
  assert report.errors[1] == pytest.approx(math.sqrt(squares) / whole, rel=1e-2)


def test_any_program_in_low_precision_is_compared():
  def low_loss_fn(weights, x):
    with jax.named_scope("narrow"):
      y = jnp.float16(x) @ jnp.float16(weights)
      return jnp.sum(jnp.float32(y) ** 2) * 2.0**-23

  def of(low_loss_fn=None):
    report = gradient_error(loss_fn, low_loss_fn, loss_scales=[1, 64])
    return report(WEIGHTS, X)

  assert of(low_loss_fn) == of() == of(ols.autocast(loss_fn))
  bfloat16 = of(ols.autocast(loss_fn, dtype=jnp.bfloat16))
  assert bfloat16.precision == "bfloat16"
  # bfloat16 has float32's range: S = 1 is as good as any.
  assert bfloat16.errors[1] == pytest.approx(bfloat16.errors[64], rel=1e-6)
  assert bfloat16.errors[1] > of().errors[64]
  both = of(lambda w, x: low_loss_fn(w, x) + jnp.bfloat16(w).sum() * 2.0**-23)
  assert both.precision == "bfloat16, float16"
  in_float32 = ols.autocast(loss_fn, overrides={"narrow": jnp.float32})
  with pytest.raises(ValueError, match="`low_loss_fn` must compute below"):
    of(in_float32)


def test_complex_parameters():
  params = jnp.array([[1.0 + 2.0j, 3.0 - 1.0j]])

  def loss(params):
    return jnp.sum((X[:1, :1] @ jnp.real(params)) ** 2 + jnp.imag(params) ** 2)

  report = gradient_error(loss)(params)
  assert 0 < report.errors[1] < 1e-3


def low_layers(params, x):
  return jnp.mean(jnp.float16(x) @ jnp.float16(params)).astype(jnp.float32)


@pytest.mark.parametrize(
  "loss",
  [
    low_layers,
    ols.autocast(loss_fn),
    jax.jit(low_layers),
    lambda w, x: jnp.sum(jnp.tanh(jnp.bfloat16(x @ w))).astype(jnp.float32),
  ],
)
def test_narrow_loss_is_refused(loss):
  with pytest.raises(ValueError, match="`loss_fn` must compute in float32"):
    gradient_error(loss)(WEIGHTS, X)


def test_narrow_parameters_are_refused():
  with pytest.raises(ValueError, match="got bfloat16 at 'w'"):
    gradient_error(lambda p, x: loss_fn(jnp.float32(p["w"]), x))(
      {"w": jnp.bfloat16(WEIGHTS)}, X
    )


def test_stored_images_may_be_narrow():
  def loss(weights, x):
    return loss_fn(weights, jnp.float32(x))

  report = gradient_error(loss)(WEIGHTS, jnp.float16(X))
  assert report.rounding < 1e-3


@pytest.mark.parametrize(
  ("loss", "error"),
  [
    (lambda w, x: jnp.sum(w), "`low_loss_fn` must compute below"),
    (lambda w, x: jnp.sum(x @ jnp.zeros_like(w) * w[:1] * 0), "not be 0"),
    (lambda w, x: jnp.sum(jnp.log(x @ (w - w))), "must be finite"),
  ],
)
def test_what_has_nothing_to_compare_is_refused(loss, error):
  with pytest.raises(ValueError, match=error):
    gradient_error(loss)(WEIGHTS, X)


def test_arguments_are_checked_before_the_call():
  with pytest.raises(TypeError, match="`loss_fn` must be a function"):
    gradient_error(3)
  with pytest.raises(TypeError, match="`low_loss_fn` must be a function"):
    gradient_error(loss_fn, WEIGHTS)
  with pytest.raises(ValueError, match="`loss_scales` must hold at least one"):
    gradient_error(loss_fn, loss_scales=())
  with pytest.raises(ValueError, match="`loss_scales` must be positive"):
    gradient_error(loss_fn, loss_scales=(1, 0))
  for value in ("many", None, [[1, 2]], [True]):
    with pytest.raises(TypeError, match="`loss_scales` must be a number"):
      gradient_error(loss_fn, loss_scales=value)


def test_parameters_come_first_and_by_position():
  with pytest.raises(TypeError, match="positional argument: 'params'"):
    gradient_error(loss_fn)(params=WEIGHTS, x=X)
  assert gradient_error(loss_fn)(WEIGHTS, x=X).rounding < 1e-2


def test_one_scale_needs_no_list():
  several = gradient_error(loss_fn, loss_scales={64, 1})(WEIGHTS, X)
  assert [*several.errors] == [1, 64]
  assert gradient_error(loss_fn, loss_scales=64)(WEIGHTS, X).errors.keys() == {
    64
  }


def test_not_under_jit():
  with pytest.raises(ValueError, match="outside of jit"):
    jax.jit(gradient_error(loss_fn))(WEIGHTS, X)
  closed = gradient_error(lambda w: loss_fn(w, X))
  with pytest.raises(ValueError, match="outside of jit"):
    jax.vmap(lambda x: gradient_error(lambda w: loss_fn(w, x))(WEIGHTS))(
      X[None]
    )
  assert closed(WEIGHTS).rounding < 1e-3


def test_model_with_functions_names_the_remedy():
  model = eqx.nn.MLP(3, 2, 8, 2, key=jax.random.key(0))
  loss = lambda model, x: jnp.sum(jax.vmap(model)(x) ** 2)  # noqa: E731
  with pytest.raises(TypeError, match="eqx.partition"):
    gradient_error(loss)(model, X)
  arrays, rest = eqx.partition(model, eqx.is_inexact_array)
  report = gradient_error(lambda arrays, x: loss(eqx.combine(arrays, rest), x))
  assert "layers/0/weight" in report(arrays, X).by_leaf


def test_leaves_that_are_not_floating_are_left_out():
  params = {"w": WEIGHTS, "count": 3, "steps": jnp.arange(3)}
  found = gradient_error(lambda params, x: loss_fn(params["w"], x))(params, X)
  assert found.errors == gradient_error(loss_fn)(WEIGHTS, X).errors
  assert [*found.by_leaf] == ["w"]


def test_it_compiles_once_for_all_scales():
  traced = []

  def loss(weights, x):
    traced.append(1)
    return loss_fn(weights, x)

  few = gradient_error(loss, loss_scales=(1, 2))
  many = gradient_error(loss, loss_scales=tuple(2.0**i for i in range(12)))
  few(WEIGHTS, X)
  count = len(traced)
  many(WEIGHTS, X)
  assert len(traced) == 2 * count


def test_constants_are_not_compiled_into_the_program():
  """A batch that `loss_fn` closes over stays an operand."""
  report = gradient_error(functools.partial(loss_fn, x=X))(WEIGHTS)
  assert report.errors == gradient_error(loss_fn)(WEIGHTS, X).errors
