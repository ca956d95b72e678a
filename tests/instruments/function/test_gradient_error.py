"""The error of a gradient, compared with float64 and NumPy's float16."""

import math

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import optax_lossscale as ols

gradient_error = ols.instruments.gradient_error

WEIGHTS = jnp.linspace(-1.0, 1.0, 12).reshape(3, 4)
X = jnp.linspace(0.1, 1.3, 15).reshape(5, 3)


def loss_fn(weights, x):
  """A loss whose cotangents, 2**-22 y, keep few bits in float16."""
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


def test_the_errors_and_zeros_are_those_of_numpy():
  scales = [1.0, 4.0, 2.0**10, 2.0**15]
  found = gradient_error(loss_fn, loss_scales=scales)(WEIGHTS, X)
  true = of_numpy(WEIGHTS, X)
  for scale in scales:
    low = of_numpy(WEIGHTS, X, scale)
    error = np.linalg.norm(low - true) / np.linalg.norm(true)
    # The reference is float32, and a product may be summed in another order.
    assert found.errors[scale] == pytest.approx(error, rel=1e-2)
    lost = np.mean((low == 0) & (true != 0)) / np.mean(true != 0)
    assert found.zeros[scale] == lost
  assert found.precision == "float16"
  assert found.rounding == found.errors[2.0**15]


def test_a_gradient_that_underflows_counts_among_those_that_are_not_zero():
  scales = jnp.array([0.0, 1.0, 1.0, 2.0**-20])
  error = gradient_error(
    lambda params: jnp.sum((jnp.ones((1, 1)) @ params) * scales) * 2.0**-10,
    loss_scales=[2**12, 1],
  )(jnp.ones((1, 4)))
  # Three are not 0, and one of them is 2**-30.
  assert error.zeros == {1.0: 1 / 3, 4096.0: 0.0}
  assert error.errors[4096] == 0.0
  assert error.errors[1] == pytest.approx(2**-30 / (2**-10 * math.sqrt(2)))


@pytest.mark.parametrize(
  ("loss", "params"),
  [
    # inf - inf is NaN in the backward pass.
    (lambda x: jnp.sum((jnp.ones((4, 4)) @ x) @ x), (jnp.eye(4) - 0.5) * 2**15),
    (lambda x: jnp.sum(jnp.sin(x @ x)), jnp.full((9, 9), 300.0)),
  ],
)
def test_inf_and_nan_are_overflows(loss, params):
  report = gradient_error(loss, loss_scales=[1, 2.0**100])(params)
  assert set(report.errors.values()) == {math.inf} == {report.rounding}
  assert report.by_leaf[""].errors == report.errors
  assert report.least_loss_scale is None
  text = str(report)
  assert "nan" not in text.lower()
  assert "S = 2**100  overflow" in text
  assert "overflows at every S that was tried" in text
  assert "the forward pass does: see ols.instruments.where_overflow(" in text


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
      *(1, "needs no loss scaling: the error is rounding, 1.00%, which no S"),
    ),
    ({1: 0.012, 1024: 1e-2, 32768: 1e-2}, 1024, "From S = 1024 to 32768"),
    (
      {1: 1.9e-3, 1024: 1e-4, 32768: 1e-4},
      *(1, "needs no loss scaling: the error is at most 0.19%, which is small"),
    ),
    ({1: 2e-3, 1024: 1e-4, 32768: 1e-4}, 1024, "From S = 1024 to 32768"),
    ({1: 0.0, 1024: 0.0}, 1, "needs no loss scaling"),
    ({1: 0.3, 1024: 1e-3, 2**40: math.inf}, 1024, "At S = 1024, the error"),
    ({1: math.inf, 0.5: 1e-2, 0.25: 1e-2}, 0.25, "From S = 2**-2 to 2**-1"),
    # A larger S may do better.
    ({1: 0.6, 1024: 0.1, 32768: 0.01}, None, "falls at S = 32768. Try a large"),
    (
      {1: 0.6, 1024: 0.1, 32768: math.inf},
      *(None, "at S = 1024. S = 32768 overflows: try S between the two"),
    ),
    ({1: 0.6}, None, "does not tell underflow from rounding. Try a larger S"),
    ({1: 0.09, 1024: 0.09}, 1, "needs no loss scaling"),
    ({1: 0.11, 1024: 0.11}, 1, "That is a large part of this gradient"),
  ],
)
def test_the_sentence_follows_from_the_errors(errors, least, text):
  report = report_with(errors)
  assert report.least_loss_scale == least
  assert text in str(report).splitlines()[-1]


def test_zeros_everywhere_are_not_called_rounding():
  report = report_with({1: 1.0, 1024: 1.0, 32768: 1.0}, zeros=1.0)
  assert report.least_loss_scale is None
  last = str(report).splitlines()[-1]
  assert last == "Most of the gradient is 0 at S = 32768. Try a larger S."
  report = gradient_error(lambda w, x: 1e-13 * loss_fn(w, x))(WEIGHTS, X)
  assert set(report.zeros.values()) == {1.0}
  assert "Most of the gradient is 0" in str(report)


def test_the_reference_has_the_highest_precision_and_compiles_once():
  asked = []

  def loss(weights, x):
    asked.append(jax.config.jax_default_matmul_precision)
    return loss_fn(weights, x)

  # Otherwise a float32 product is TF32 on some GPUs.
  gradient_error(loss, loss_scales=(1, 2))(WEIGHTS, X)
  assert asked[0] == "highest" and asked[-1] is None
  count = len(asked)
  scales = tuple(2.0**i for i in range(12))
  gradient_error(loss, loss_scales=scales)(WEIGHTS, X)
  assert len(asked) == 2 * count


def test_each_parameter_has_its_own_errors():
  def loss(params, x, *, power):
    y = loss_fn(params["narrow"], x) + 2.0**-23 * jnp.sum(x @ params["wide"])
    return y * power, y

  params = {
    "count": 3,
    "narrow": WEIGHTS,
    "unused": jnp.ones(3),
    "wide": WEIGHTS[:, :2],
  }
  report = gradient_error(loss, has_aux=True)(params, X, power=1.0)
  assert [*report.by_leaf] == ["narrow", "wide"]
  leaf = report.by_leaf["narrow"]
  assert leaf.errors == pytest.approx(
    gradient_error(loss_fn)(WEIGHTS, X).errors, rel=1e-3
  )
  assert leaf.by_leaf == {}
  # The squares of the differences add up.
  grads = jax.grad(lambda x: loss(params | x, X, power=1.0)[0])(
    {"narrow": WEIGHTS, "wide": params["wide"]}
  )
  norms = {path: np.linalg.norm(x) for path, x in grads.items()}
  squares = [(report.by_leaf[x].errors[1] * norms[x]) ** 2 for x in norms]
  whole = math.hypot(*norms.values())
  assert report.errors[1] == pytest.approx(math.sqrt(sum(squares)) / whole)


def test_any_program_in_low_precision_is_compared():
  def low_loss_fn(weights, x):
    with jax.named_scope("narrow"):
      y = jnp.float16(x) @ jnp.float16(weights)
      return jnp.sum(jnp.float32(y) ** 2) * 2.0**-23

  def of(low_loss_fn=None):
    report = gradient_error(loss_fn, low_loss_fn, loss_scales=[1, 64])
    return report(WEIGHTS, X)

  assert of(low_loss_fn) == of()
  both = of(lambda w, x: low_loss_fn(w, x) + jnp.bfloat16(w).sum() * 2.0**-23)
  assert both.precision == "bfloat16, float16"
  in_float32 = ols.autocast(loss_fn, overrides={"narrow": jnp.float32})
  with pytest.raises(ValueError, match="`low_loss_fn` must compute below"):
    of(in_float32)


def test_complex_parameters_are_compared_by_their_parts():
  def loss(params):
    return jnp.sum((X[:1, :1] @ jnp.real(params)) ** 2 + jnp.imag(params) ** 2)

  report = gradient_error(loss)(jnp.array([[1.0 + 2.0j, 3.0 - 1.0j]]))
  assert 0 < report.errors[1] < 1e-3


# Each loss that cannot be compared, and the reason.
REFUSED = {
  "in float16": (
    ols.autocast(loss_fn),
    "`loss_fn` must compute in float32, .* in the scope 'narrow'; ",
  ),
  "narrow parameters": (
    lambda w, x: loss_fn(jnp.float32(w), x),
    "got bfloat16 at",
  ),
  "no product": (lambda w, x: jnp.sum(w), "`low_loss_fn` must compute below"),
  "zero": (
    lambda w, x: jnp.sum(x @ jnp.zeros_like(w) * w[:1] * 0),
    "must not be 0 everywhere",
  ),
  "not finite": (
    lambda w, x: jnp.sum(jnp.log(x @ (w - w))),
    "must be finite in float32, got inf or NaN at ''",
  ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_loss_that_cannot_be_compared_is_refused(name):
  loss, error = REFUSED[name]
  dtype = jnp.bfloat16 if name == "narrow parameters" else jnp.float32
  with pytest.raises(ValueError, match=error):
    gradient_error(loss)(WEIGHTS.astype(dtype), X)


def test_arguments_are_checked_before_the_call():
  with pytest.raises(TypeError, match="`loss_fn` must be a function"):
    gradient_error(3)
  with pytest.raises(TypeError, match="`low_loss_fn` must be a function"):
    gradient_error(loss_fn, WEIGHTS)
  with pytest.raises(ValueError, match="`loss_scales` must hold at least one"):
    gradient_error(loss_fn, loss_scales=())
  with pytest.raises(ValueError, match="`loss_scales` must be positive"):
    gradient_error(loss_fn, loss_scales=(1, 0))
  with pytest.raises(TypeError, match="`loss_scales` must be a number"):
    gradient_error(loss_fn, loss_scales="many")


@pytest.mark.parametrize(
  ("given", "scales"),
  [(64, [64]), ({64, 1}, [1, 64]), (np.array([64, 1]), [1, 64])],
)
def test_scales_come_as_a_number_or_in_any_collection(given, scales):
  report = gradient_error(loss_fn, loss_scales=given)(WEIGHTS, x=X)
  assert [*report.errors] == scales


def test_traced_values_are_refused():
  with pytest.raises(ValueError, match="outside of jit"):
    jax.jit(gradient_error(loss_fn))(WEIGHTS, X)


def test_a_model_with_functions_names_the_remedy():
  model = eqx.nn.MLP(3, 2, 8, 2, key=jax.random.key(0))
  with pytest.raises(TypeError, match="eqx.partition"):
    gradient_error(lambda model, x: jnp.sum(jax.vmap(model)(x) ** 2))(model, X)
