"""Scaled gradients: made, unscaled, and refused where S would be wrong."""

from collections.abc import Callable

import equinox as eqx
from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_lossscale as ols
from tests.support import assert_same_bits
from tests.support import Stub

PARAMS = {"w": jnp.array([1.0, -2.0, 0.5]), "b": jnp.array(0.25)}
TX = ols.loss_scaling(optax.sgd(0.1), Stub(1024.0))
STATE = TX.init(PARAMS)
BATCH = np.arange(6.0, dtype=np.float32).reshape(2, 3)


def loss_fn(params, batch, *, power=2):
  return jnp.mean((batch @ params["w"] + params["b"]) ** power)


def times(scale, gradients):
  return jax.tree.map(lambda x: scale * x, gradients)


# As jax.value_and_grad.


def test_gradients_are_those_of_s_times_the_loss():
  loss, scaled = ols.scaled_value_and_grad(loss_fn, STATE)(PARAMS, BATCH)
  expected, gradients = jax.value_and_grad(loss_fn)(PARAMS, BATCH)
  assert loss == expected
  assert_same_bits(scaled, times(1024.0, gradients))
  assert_same_bits(ols.unscale(scaled, STATE), gradients)
  by_hand = jax.grad(lambda x: ols.scale_loss(loss_fn(x, BATCH), STATE))
  assert_same_bits(by_hand(PARAMS), scaled)


@pytest.mark.parametrize("argnums", [1, (0, 1), -1])
def test_argnums_has_aux_and_keywords_are_those_of_jax(argnums):
  def fun(batch, params, *, power):
    loss = loss_fn(params, batch, power=power)
    return loss, {"loss twice": 2 * loss}

  run = ols.scaled_value_and_grad(fun, STATE, argnums, True)
  (loss, aux), scaled = run(BATCH, PARAMS, power=4)
  assert aux == {"loss twice": 2 * loss}
  gradients, _ = jax.grad(fun, argnums, has_aux=True)(BATCH, PARAMS, power=4)
  assert_same_bits(scaled, times(1024.0, gradients))


def test_unscale_leaves_alone_what_is_not_a_gradient():
  tree = {
    "w": jnp.array([8.0], jnp.float16),
    "n": jnp.array([8]),
    "key": jax.random.key(0),
    "none": None,
    "_overwrite_with_gradient": {"scale": jnp.array([8.0])},
  }
  assert_same_bits(ols.unscale(tree, 8.0), {**tree, "w": jnp.array([1.0])})


# Losses in float16.


def test_guarantee_7_a_float16_loss_keeps_its_true_value():
  @jax.jit
  def run(state):
    return ols.scaled_value_and_grad(
      lambda params: jnp.float16(3000.0) + jnp.sum(jnp.float16(params)), state
    )(jnp.zeros(3))

  loss, scaled = run(STATE)
  # 3000 * 1024 is far above 65504: S times the loss is not a float16 number.
  assert (loss.dtype, loss) == (jnp.float16, 3000.0)
  assert scaled.tolist() == [1024.0] * 3


@jax.custom_vjp
def saturating(x):
  """An identity whose cotangent is clipped as in saturation mode."""
  return x


saturating.defvjp(
  lambda x: (x, None),
  lambda _, dy: (jnp.clip(jnp.nan_to_num(dy), -65504.0, 65504.0),),
)


@pytest.mark.parametrize("hardware", [lambda x: x, saturating])
@pytest.mark.parametrize(
  ("scale", "is_held"),
  [
    (2.0**20, False),
    (2.0**16, False),
    (65504.0, True),
    (2.0**-20, True),  # It is subnormal.
    (2.0**-25, False),
    (3e-6, False),  # It would be rounded.
  ],
)
def test_guarantee_7_an_s_that_float16_does_not_hold_is_an_overflow(
  scale, is_held, hardware
):
  tx = ols.loss_scaling(optax.identity(), Stub(scale))
  state = tx.init(jnp.zeros(3))
  _, scaled = ols.scaled_value_and_grad(
    lambda params: hardware(jnp.sum(params).astype(jnp.float16)), state
  )(jnp.zeros(3))
  assert scaled.tolist() == [scale if is_held else np.inf] * 3
  assert tx.update(scaled, state)[1].overflow == (not is_held)


def test_guarantee_7_nothing_is_added_for_a_loss_that_holds_every_s():
  def count(dtype):
    jaxpr = jax.make_jaxpr(
      lambda state: ols.scaled_value_and_grad(
        lambda params: params["b"].astype(dtype), state
      )(PARAMS)
    )(STATE)
    return str(jaxpr).count("inf")

  assert count(jnp.float32) == count(jnp.bfloat16) == 0
  assert count(jnp.float16) > 0


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float64"])
def test_the_loss_keeps_its_dtype_and_is_scaled_in_float32_or_wider(dtype):
  with jax.enable_x64(True):
    loss, _ = ols.scaled_value_and_grad(lambda x: x.astype(dtype), 4.0)(
      jnp.float32(3.0)
    )
    assert loss.dtype == dtype
    scaled = ols.scale_loss(jnp.full((2, 3), 3072.0, dtype), 2.0**20)
    assert scaled.dtype == max(jnp.float32, jnp.dtype(dtype))
    assert scaled.tolist() == [[3072.0 * 2.0**20] * 3] * 2


def test_guarantee_12_an_fp8_collection_does_not_become_inf():
  params = {"w": jnp.ones(2), "_overwrite_with_gradient": jnp.ones(2)}
  _, scaled = ols.scaled_value_and_grad(
    lambda params: jnp.sum(params["w"]).astype(jnp.float16), 2.0**20
  )(params)
  assert scaled["w"].tolist() == [np.inf, np.inf]
  assert scaled["_overwrite_with_gradient"].tolist() == [0.0, 0.0]


# An S that is compiled in, or unusable.


@pytest.mark.parametrize(
  "use",
  [
    lambda x, state: ols.scaled_value_and_grad(jnp.sum, state)(x),
    lambda x, state: ols.accumulate(
      ols.scaled_value_and_grad(lambda x, batch: jnp.sum(x), state),
      microbatches=2,
    )(x, x),
    lambda x, state: ols.scale_loss(jnp.sum(x), state),
    ols.unscale,
    lambda x, state: ols.select_on_skip(state, x, x),
  ],
  ids=["scaled", "accumulate", "scale_loss", "unscale", "select_on_skip"],
)
def test_guarantee_1_a_state_that_jit_closes_over_is_refused(use):
  with pytest.raises(ValueError, match="must be an argument of the function"):
    jax.jit(lambda x: use(x, STATE))(jnp.ones(2))
  # Neither an argument nor a state that is made inside is frozen.
  jax.jit(use)(jnp.ones(2), STATE)
  jax.jit(lambda x: use(x, TX.init(PARAMS)))(jnp.ones(2))
  # Outside jit nothing is.
  use(jnp.ones(2), STATE)
  jax.vmap(lambda x: use(x, STATE))(jnp.ones((2, 2)))
  with jax.disable_jit():
    jax.jit(lambda x: use(x, STATE))(jnp.ones(2))


@pytest.mark.parametrize(
  ("scale", "message"),
  [
    (0.0, "must be positive, got 0.0"),
    (np.float32(-8.0), "must be positive, got .*-8[.]"),
    (jnp.float32(jnp.nan), "must be finite in float32, got nan"),
    (jnp.float32(2.0**-127), "at least 2.*-126"),
    (jnp.array(True), "must be a number, got .*True"),
    ("dynamic", "must be a number, got 'dynamic'"),
    (np.ones(3), r"must be a scalar, got an array of shape \(3,\)"),
  ],
  ids=["zero", "negative", "NaN", "subnormal", "flag", "text", "array"],
)
def test_an_unusable_scale_is_refused(scale, message):
  x = jnp.ones(2)
  for use in (
    lambda: ols.get_loss_scale(scale),
    lambda: ols.scale_loss(x, scale),
    lambda: ols.scaled_value_and_grad(jnp.sum, scale),
    lambda: jax.jit(lambda x: ols.unscale(x, scale))(x),
  ):
    with (
      jax.transfer_guard("disallow"),
      pytest.raises((TypeError, ValueError), match=message),
    ):
      use()


def test_the_value_of_s_in_a_state_or_a_tracer_is_not_looked_at():
  state = optax.tree.set(STATE, loss_scale=jnp.float32(jnp.nan))
  assert jnp.isnan(ols.get_loss_scale(state))
  assert jnp.isnan(jax.jit(ols.get_loss_scale)(jnp.float32(jnp.nan)))
  _, grads = ols.scaled_value_and_grad(jnp.sum, state)(jnp.ones(2))
  assert jnp.all(jnp.isnan(grads))


# Losses and arguments that are refused.


def refused(fun, **options):
  return lambda: ols.scaled_value_and_grad(fun, 8.0, **options)(jnp.ones(2))


REFUSED = {
  "tuple": (
    refused(lambda x: (jnp.sum(x), 1)),
    "got a tuple of 2; .*has_aux=True",
  ),
  "shape": (refused(lambda x: x), r"of shape \(2,\); take its mean"),
  "integer": (
    refused(lambda x: jnp.sum(x).astype(int)),
    "the loss must be a floating-point array, got int32",
  ),
  "complex": (refused(lambda x: jnp.sum(x) * 1j), "array, got complex64"),
  "no aux": (
    refused(lambda x: 3.0, has_aux=True),
    r"loss function must return \(loss, aux\)",
  ),
  "argnums": (
    refused(jnp.sum, argnums={"w": 1.0}),
    "`argnums` must be .* got dict; the arguments of `fun` go to",
  ),
  "no argnums": (
    refused(jnp.sum, argnums=()),
    "`argnums` must name at least one",
  ),
  "argnums twice": (
    refused(jnp.sum, argnums=(0, 0)),
    "`argnums` must name at least one",
  ),
  "by hand": (
    lambda: ols.scale_loss(jnp.array(3), 8.0),
    "`loss` must be a floating.* got int32",
  ),
  "value_and_grad": (
    refused(jnp.sum, value_and_grad="filter"),
    "`value_and_grad` must be a function",
  ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_errors_name_the_rule_and_the_value(name):
  call, message = REFUSED[name]
  with pytest.raises((TypeError, ValueError), match=message):
    call()


# Another function that differentiates.


class Model(eqx.Module):
  """JAX alone cannot differentiate it, as some leaves are not arrays."""

  weight: jax.Array
  count: jax.Array
  activation: Callable[[jax.Array], jax.Array]

  def __call__(self, x):
    return self.activation(x @ self.weight)


MODEL = Model(jnp.array([1.0, -2.0, 0.5]), jnp.array(3), jax.nn.relu)


def model_loss(model, x, *, power=2):
  return jnp.mean(model(x) ** power)


def test_a_filtered_function_differentiates_what_is_not_all_arrays():
  def fun(model, x, *, power):
    return model_loss(model, x, power=power), {"sum": jnp.sum(x)}

  @eqx.filter_jit
  def run(model, state):
    return ols.scaled_value_and_grad(
      fun, state, has_aux=True, value_and_grad=eqx.filter_value_and_grad
    )(model, BATCH, power=4)

  (loss, aux), scaled = run(MODEL, STATE)
  expected, gradients = eqx.filter_value_and_grad(model_loss)(
    MODEL, BATCH, power=4
  )
  assert (loss, aux["sum"]) == (expected, 15)
  assert (scaled.count, scaled.activation) == (None, None)
  np.testing.assert_array_equal(scaled.weight, 1024.0 * gradients.weight)


def test_options_reach_another_function_unless_they_are_the_defaults():
  seen = []

  def value_and_grad(fun, **options):
    seen.append(options)
    return jax.value_and_grad(fun, **options)

  given = {"argnums": (0, 1), "allow_int": True}
  for options in ({}, given):
    run = ols.scaled_value_and_grad(
      lambda x, n: x * n, 8.0, value_and_grad=value_and_grad, **options
    )
    _, scaled = run(1.0, 3)
  # Equinox takes no `argnums`.
  assert seen == [{"has_aux": True}, {"has_aux": True, **given}]
  # `unscale` passes on the gradient of an integer.
  assert ols.unscale(scaled, 8.0)[1].dtype == jax.dtypes.float0


@pytest.mark.parametrize(
  "value_and_grad",
  [
    jax.grad,
    jax.value_and_grad(loss_fn),
    eqx.filter_grad,
    nnx.grad,
    jax.jit,
    lambda fun, has_aux: None,
    lambda fun, has_aux: fun,
  ],
)
def test_a_function_unlike_value_and_grad_is_refused(value_and_grad):
  # Gradients of the second shape unpack like a pair.
  for params in (jnp.ones(3), jnp.ones((2, 2))):
    with pytest.raises(
      TypeError, match=r"like jax.value_and_grad.*\(\(loss, aux"
    ):
      ols.scaled_value_and_grad(
        lambda x: jnp.sum(x**2), 8.0, value_and_grad=value_and_grad
      )(params)


# Leaves without a gradient.


@pytest.mark.parametrize(
  ("argument", "options"),
  [
    (jnp.ones(2), {}),
    (3, {"allow_int": True}),
    (MODEL, {"value_and_grad": eqx.filter_value_and_grad}),
  ],
  ids=["jax", "integers", "Equinox"],
)
def test_a_type_error_of_the_loss_passes_through(argument, options):
  def fun(model):
    raise TypeError("mine")

  with pytest.raises(TypeError) as caught:
    ols.scaled_value_and_grad(fun, 8.0, **options)(argument)
  assert str(caught.value) == "mine"


FOR_EQUINOX = "of an Equinox model pass the arrays alone, eqx.partition(model"
FOR_NNX = "of an NNX model pass the parameters alone, nnx.split(model, nnx.Par"
# Arguments without a gradient, and the error's text for each.
WITHOUT_GRADIENT = {
  "equinox": ([MODEL], f"int32 at 'args[0]/0/count'; {FOR_EQUINOX}"),
  "nnx": (
    nnx.Dropout(0.5, rngs=nnx.Rngs(0)),
    f"uint32 at 'args[0]/rngs/count/value'; {FOR_NNX}",
  ),
  "number": (
    {"w": 1.0, "step": 3},
    "int32 at 'args[0]/step'; pass it in another argument.",
  ),
  "text": ({"name": "relu"}, "str at 'args[0]/name'; pass it in another arg"),
}


@pytest.mark.parametrize("name", WITHOUT_GRADIENT)
def test_a_leaf_without_a_gradient_is_named_with_the_remedy(name):
  model, said = WITHOUT_GRADIENT[name]
  scaling = ols.scaled_value_and_grad(model_loss, 8.0)
  for run in (scaling, ols.accumulate(scaling, microbatches=2)):
    with pytest.raises(TypeError, match="must be floating-point arr") as caught:
      run(model, BATCH)
    assert f"got {said}" in str(caught.value)


@pytest.mark.parametrize("argnums", [(0, 1), -1])
def test_the_argument_of_a_leaf_without_a_gradient_is_named(argnums):
  run = ols.scaled_value_and_grad(
    lambda x, model: model_loss(model, x), 8.0, argnums=argnums
  )
  with pytest.raises(TypeError, match=r"got int32 at 'args\[1\]/count'; of"):
    run(BATCH, MODEL)


# Objects that change in place.


def norm_loss(model, x):
  return jnp.mean(model(x) ** 2 * x)


def test_a_change_in_place_that_would_be_lost_is_refused():
  model = nnx.BatchNorm(3, rngs=nnx.Rngs(0))
  scaling = ols.scaled_value_and_grad(norm_loss, 8.0)
  for run in (scaling, ols.accumulate(scaling, microbatches=2)):
    with pytest.raises(ValueError, match="`fun` must not change its arguments"):
      run(nnx.BatchNorm(3, rngs=nnx.Rngs(0)), BATCH)
  got = "got a change to one that it closes over.*; pass the object as an arg"
  for fun in (
    lambda weight, x, _: weight * norm_loss(model, x),
    lambda weight, x, model: weight * norm_loss(model, x),
  ):
    with pytest.raises(ValueError, match=f"{got}.* keep what a call changes"):
      ols.scaled_value_and_grad(fun, 8.0)(1.0, BATCH, model)
  # It is an argument of a function that differentiates objects.
  ols.scaled_value_and_grad(fun, 8.0, value_and_grad=nnx.value_and_grad)(
    1.0, BATCH, model
  )
  assert model.mean[...].any()
