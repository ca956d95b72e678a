"""Scaled gradients: made, found to be what they should, and brought back."""

from collections.abc import Callable
import functools

import equinox as eqx
from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_lossscale as ols
from tests.support import assert_same_bits


def make(rule=None):
  """Returns parameters, a transformation and its state."""
  params = {"w": jnp.array([1.0, -2.0, 0.5]), "b": jnp.array(0.25)}
  tx = ols.loss_scaling(optax.sgd(0.1), rule or ols.FixedLossScale(1024.0))
  return params, tx, tx.init(params)


def loss_fn(params, batch, *, power=2):
  return jnp.mean((batch @ params["w"] + params["b"]) ** power)


BATCH = np.arange(6.0, dtype=np.float32).reshape(2, 3)


def test_it_is_value_and_grad_of_s_times_the_loss():
  params, _, state = make()
  loss, scaled = ols.scaled_value_and_grad(loss_fn, state)(params, BATCH)
  expected, gradients = jax.value_and_grad(loss_fn)(params, BATCH)
  assert loss == expected
  for name, gradient in gradients.items():
    np.testing.assert_array_equal(scaled[name], 1024.0 * gradient)
  unscaled = ols.unscale(scaled, state)
  for name, gradient in gradients.items():
    np.testing.assert_array_equal(unscaled[name], gradient)


def test_the_step_by_hand_gives_the_same_gradients():
  params, _, state = make()
  by_hand = jax.grad(
    lambda params: ols.scale_loss(loss_fn(params, BATCH), state)
  )(params)
  _, scaled = ols.scaled_value_and_grad(loss_fn, state)(params, BATCH)
  for name, gradient in scaled.items():
    np.testing.assert_array_equal(by_hand[name], gradient)


def test_argnums_has_aux_and_keywords_are_those_of_jax():
  params, _, state = make()

  def fun(batch, params, *, power):
    loss = loss_fn(params, batch, power=power)
    return loss, {"loss twice": 2 * loss}

  mirror = functools.partial(ols.scaled_value_and_grad, fun, state)
  (loss, aux), scaled = mirror(argnums=1, has_aux=True)(BATCH, params, power=4)
  assert aux == {"loss twice": 2 * loss}
  assert jax.tree.structure(scaled) == jax.tree.structure(params)
  _, pair = mirror((0, 1), True)(BATCH, params, power=4)
  assert isinstance(pair, tuple)
  assert pair[0].shape == BATCH.shape


def test_no_keyword_of_ours_collides_with_one_of_the_function():
  params, _, state = make()

  def fun(params, *, opt_state, path, argnums, has_aux, allow_int):
    return params["b"] * (opt_state + path + argnums + has_aux + allow_int)

  _, scaled = ols.scaled_value_and_grad(fun, state)(
    params, opt_state=1.0, path=2.0, argnums=3.0, has_aux=4.0, allow_int=5.0
  )
  assert scaled["b"] == 15.0 * 1024.0


def test_allow_int_gives_float0_that_update_passes_on():
  params = {"w": jnp.array([1.0]), "step": jnp.array([3])}
  tx = ols.loss_scaling(optax.identity(), ols.FixedLossScale(8.0))
  state = tx.init(params)
  _, scaled = ols.scaled_value_and_grad(
    lambda p: jnp.sum(p["w"] ** 2), state, allow_int=True
  )(params)
  assert scaled["step"].dtype == jax.dtypes.float0
  updates, _ = tx.update(scaled, state, params)
  assert updates["step"].dtype == jax.dtypes.float0
  assert updates["w"] == 2.0
  assert ols.unscale(scaled, state)["step"].dtype == jax.dtypes.float0


def test_a_scale_itself_is_accepted():
  params, _, _ = make()
  for scale in (8.0, 8, np.float32(8.0), jnp.float32(8.0)):
    assert ols.get_loss_scale(scale) == 8.0
    _, scaled = ols.scaled_value_and_grad(loss_fn, scale)(params, BATCH)
    np.testing.assert_array_equal(
      scaled["b"], 8.0 * jax.grad(loss_fn)(params, BATCH)["b"]
    )


def half_loss(params):
  """Returns a loss of 3000 in float16 with small gradients."""
  return (
    jnp.float16(3000.0) + jnp.sum(params.astype(jnp.float16)) * 2.0**-10
  ).astype(jnp.float16)


def test_guarantee_7_a_float16_loss_keeps_its_true_value():
  _, _, state = make(ols.DynamicLossScale())
  params = jnp.zeros(3)
  run = jax.jit(
    lambda params, state: ols.scaled_value_and_grad(half_loss, state)(params)
  )
  loss, scaled = run(params, state)
  assert loss.dtype == jnp.float16
  assert loss == 3000.0
  # 3000 * 2**15 is far above 65504: S times the loss is not a float16 number.
  np.testing.assert_array_equal(scaled, jnp.full(3, 2.0**15 * 2.0**-10))


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float16])
@pytest.mark.parametrize("scale", [2.0**16, 2.0**20, 2.0**-25, 3e-6])
def test_guarantee_7_an_s_beyond_the_losss_dtype_is_an_overflow(scale, dtype):
  tx = ols.loss_scaling(optax.sgd(0.1), ols.FixedLossScale(scale))
  params = jnp.zeros(3, dtype)
  state = tx.init(params)
  loss, scaled = ols.scaled_value_and_grad(half_loss, state)(params)
  assert loss == 3000.0
  _, state = tx.update(scaled, state, params)
  assert state.overflow and state.skipped


@jax.custom_vjp
def saturating(x):
  """An identity whose cotangent is clipped as in saturation mode."""
  return x


def _clip_cotangent(_, cotangent):
  largest = jnp.finfo(cotangent.dtype).max
  clipped = jnp.clip(cotangent, -largest, largest)
  return (jnp.where(jnp.isnan(cotangent), 0, clipped),)


saturating.defvjp(lambda x: (x, None), _clip_cotangent)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float16])
@pytest.mark.parametrize("scale", [2.0**15, 2.0**16, 2.0**20])
def test_guarantee_7_also_on_saturating_hardware(scale, dtype):
  check = ols.saturated(jnp.float16)
  tx = ols.loss_scaling(
    optax.identity(), ols.FixedLossScale(scale), check=check
  )
  params = jnp.zeros(3, dtype)
  state = tx.init(params)
  _, scaled = ols.scaled_value_and_grad(
    lambda params: saturating(half_loss(params)), state
  )(params)
  updates, state = tx.update(scaled, state)
  if scale < 2.0**16:
    assert not state.overflow
    np.testing.assert_array_equal(updates, jnp.full(3, 2.0**-10))
  else:
    assert state.overflow


def test_guarantee_7_nothing_is_added_for_a_loss_that_holds_every_s():
  params, _, state = make()

  def count(dtype):
    jaxpr = jax.make_jaxpr(
      lambda params, state: ols.scaled_value_and_grad(
        lambda params: params["b"].astype(dtype), state
      )(params)
    )(params, state)
    return str(jaxpr).count("inf")

  assert count(jnp.float32) == count(jnp.bfloat16) == 0
  assert count(jnp.float16) > 0


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float64])
def test_the_loss_keeps_its_dtype(dtype):
  with jax.enable_x64(True):
    loss, _ = ols.scaled_value_and_grad(
      lambda x: x.astype(dtype), jnp.float32(4.0)
    )(jnp.float32(3.0))
    assert loss.dtype == dtype
    scaled = ols.scale_loss(jnp.asarray(3.0, dtype), 4.0)
    wide = jnp.float64 if dtype == jnp.float64 else jnp.float32
    assert scaled.dtype == wide


@pytest.mark.parametrize("scale", [2.0**15, 2.0**20])
def test_guarantee_7_s_times_a_float16_loss_is_formed_in_float32(scale):
  scaled = jax.jit(ols.scale_loss)(jnp.float16(3000.0), jnp.float32(scale))
  assert scaled.dtype == jnp.float32
  assert scaled == 3000.0 * scale


def test_scale_loss_takes_losses_of_any_shape():
  scaled = ols.scale_loss(jnp.ones((2, 3), jnp.float16), 2.0**17)
  np.testing.assert_array_equal(scaled, np.full((2, 3), 2.0**17))


def test_unscale_leaves_alone_what_is_no_gradient():
  key = jax.random.key(0)
  tree = {
    "w": jnp.array([8.0], jnp.float16),
    "n": jnp.array([8]),
    "key": key,
    "none": None,
    "_overwrite_with_gradient": {"scale": jnp.array([8.0])},
  }
  unscaled = ols.unscale(tree, 8.0)
  assert unscaled["w"].dtype == jnp.float32
  assert unscaled["w"] == 1.0
  assert unscaled["n"] == 8
  assert unscaled["key"] == key
  assert unscaled["_overwrite_with_gradient"]["scale"] == 8.0


def test_guarantee_1_a_frozen_s_is_refused():
  params, _, state = make()
  frozen = jax.jit(ols.scaled_value_and_grad(loss_fn, state))
  with pytest.raises(ValueError, match="must be an argument of the function"):
    frozen(params, BATCH)


@pytest.mark.parametrize(
  "read",
  [
    lambda x, state: ols.scale_loss(jnp.sum(x), state),
    lambda x, state: ols.unscale(x, state),
    lambda x, state: ols.select_on_skip(state, x, x),
  ],
  ids=["scale_loss", "unscale", "select_on_skip"],
)
def test_guarantee_1_a_frozen_state_is_refused_by_hand_too(read):
  _, _, state = make()
  with pytest.raises(ValueError, match="must be an argument of the function"):
    jax.jit(lambda x: read(x, state))(jnp.ones(2))
  jax.jit(read)(jnp.ones(2), state)
  read(jnp.ones(2), state)


def test_guarantee_1_a_state_that_is_passed_in_is_not_refused():
  params, tx, state = make()

  @jax.jit
  def whole_training(params):
    # A state made inside the jitted function is traced, and may be used there.
    state = tx.init(params)
    _, grads = ols.scaled_value_and_grad(loss_fn, state)(params, BATCH)
    return tx.update(grads, state, params)[1].applied_steps

  assert whole_training(params) == 1
  step = jax.jit(
    lambda params, state: ols.scaled_value_and_grad(loss_fn, state)(
      params, BATCH
    )
  )
  step(params, state)


def test_guarantee_1_eager_transformations_are_not_refused():
  params, _, state = make()
  both = jax.tree.map(lambda x: jnp.stack([x, x]), params)
  grad_fn = ols.scaled_value_and_grad(loss_fn, state)
  jax.vmap(grad_fn, in_axes=(0, None))(both, BATCH)
  jax.grad(lambda params: grad_fn(params, BATCH)[0])(params)
  with jax.disable_jit():
    jax.jit(grad_fn)(params, BATCH)


def test_guarantee_1_a_bare_scale_is_taken_to_be_meant():
  params, _, state = make()
  scale = ols.get_loss_scale(state)
  jax.jit(ols.scaled_value_and_grad(loss_fn, scale))(params, BATCH)
  jax.jit(ols.scaled_value_and_grad(loss_fn, 1024.0))(params, BATCH)


@pytest.mark.parametrize(
  ("fun", "message"),
  [
    (lambda x: (jnp.sum(x), 1), "got a tuple of 2; .*has_aux=True"),
    (lambda x: x, r"array of shape \(2,\); take its mean"),
    (lambda x: jnp.sum(x).astype(int), "floating-point array, got int32"),
    (lambda x: jnp.sum(x) * 1j, "floating-point array, got complex64"),
    (lambda x: 3.0, "floating-point array, got float"),
    (lambda x: None, "floating-point array, got NoneType"),
  ],
)
def test_a_function_that_returns_no_scalar_loss_is_refused(fun, message):
  with pytest.raises(TypeError, match=message):
    ols.scaled_value_and_grad(fun, 1024.0)(jnp.ones(2))


@pytest.mark.parametrize("value", [3.0, (3.0, 1, 2), None])
def test_has_aux_asks_for_a_pair(value):
  with pytest.raises(
    TypeError, match=r"loss function must return \(loss, aux\)"
  ):
    ols.scaled_value_and_grad(lambda x: value, 8.0, has_aux=True)(1.0)


@pytest.mark.parametrize("argnums", [(), [], (0, 0)])
def test_argnums_name_one_argument_at_least_and_none_twice(argnums):
  with pytest.raises(ValueError, match="`argnums` must name at least one"):
    ols.scaled_value_and_grad(lambda x: x, 8.0, argnums)


def test_arguments_in_the_wrong_call_are_told_apart():
  with pytest.raises(TypeError, match="`argnums` must be .* got dict; the arg"):
    ols.scaled_value_and_grad(loss_fn, 8.0, {"w": 1.0}, BATCH)


def test_guarantee_7_subnormal_powers_of_two_are_carried():
  tx = ols.loss_scaling(optax.identity(), ols.FixedLossScale(2.0**-20))
  params = jnp.zeros(3)
  state = tx.init(params)
  _, scaled = ols.scaled_value_and_grad(
    lambda params: jnp.sum(params.astype(jnp.float16)), state
  )(params)
  updates, state = tx.update(scaled, state)
  assert not state.overflow
  np.testing.assert_array_equal(updates, jnp.ones(3))


def test_guarantee_12_an_fp8_collection_is_not_made_inf_with_the_rest():
  params = {"w": jnp.ones(2), "_overwrite_with_gradient": jnp.ones(2)}
  _, scaled = ols.scaled_value_and_grad(
    lambda params: jnp.sum(params["w"]).astype(jnp.float16), 2.0**20
  )(params)
  np.testing.assert_array_equal(scaled["w"], [jnp.inf, jnp.inf])
  np.testing.assert_array_equal(scaled["_overwrite_with_gradient"], [0.0, 0.0])


def test_scale_loss_refuses_integers():
  with pytest.raises(TypeError, match="`loss` must be a floating.* got int32"):
    ols.scale_loss(jnp.array(3), 8.0)


@pytest.mark.parametrize(
  ("scale", "error", "message"),
  [
    (0.0, ValueError, "must be positive, got 0.0"),
    (float("nan"), ValueError, "must be finite in float32, got nan"),
    (float("inf"), ValueError, "must be finite in float32, got inf"),
    (True, TypeError, "must be a number, got True"),
    ("dynamic", TypeError, "must be a number, got 'dynamic'"),
    (np.float32(0.0), ValueError, "`loss scale` must be positive"),
    (np.array(True), TypeError, "must be a number, got array"),
    (np.ones(3), ValueError, r"must be a scalar, got an array of shape \(3,\)"),
  ],
)
def test_an_unusable_scale_is_refused(scale, error, message):
  with pytest.raises(error, match=message):
    ols.get_loss_scale(scale)


UNUSABLE = [
  (jnp.nan, ValueError, "must be finite in float32, got nan"),
  (jnp.inf, ValueError, "must be finite in float32, got inf"),
  (0.0, ValueError, "must be positive, got .*0[.]"),
  (-8.0, ValueError, "must be positive, got .*-8[.]"),
  (2.0**-127, ValueError, "at least 2.*-126"),
  (True, TypeError, "must be a number, got .*True"),
  (1j, TypeError, "must be a number, got .*1j?"),
]


@pytest.mark.parametrize("array", [np.array, jnp.array, jax.jit(jnp.array)])
@pytest.mark.parametrize(("scale", "error", "message"), UNUSABLE, ids=str)
def test_an_array_that_is_no_scale_is_refused_whoever_made_it(
  array, scale, error, message
):
  scale = array(scale) if scale in (True, 1j) else array(np.float32(scale))
  x = jnp.ones(2)
  for use in (
    ols.get_loss_scale,
    lambda scale: ols.unscale(x, scale),
    lambda scale: ols.scale_loss(x, scale),
    lambda scale: ols.scaled_value_and_grad(jnp.sum, scale)(x),
    lambda scale: jax.jit(lambda x: ols.unscale(x, scale))(x),
  ):
    with jax.transfer_guard("disallow"), pytest.raises(error, match=message):
      use(scale)


def test_what_a_state_or_a_traced_scale_is_worth_is_not_looked_at():
  tx = ols.loss_scaling(optax.sgd(1.0), ols.FixedLossScale())
  state = optax.tree.set(tx.init(1.0), loss_scale=jnp.float32(jnp.nan))
  assert jnp.isnan(ols.get_loss_scale(state))
  assert jnp.isnan(jax.jit(ols.get_loss_scale)(jnp.float32(jnp.nan)))
  _, grads = ols.scaled_value_and_grad(jnp.sum, state)(jnp.ones(2))
  assert jnp.all(jnp.isnan(grads))


def test_an_s_that_is_no_power_of_two_scales_within_one_rounding():
  generator = np.random.default_rng(0)
  gradients = generator.normal(size=1000).astype(np.float32)
  for scale in (3.0, 1000.0, 0.7):
    _, scaled = ols.scaled_value_and_grad(lambda x: x @ gradients, scale)(
      jnp.zeros(1000)
    )
    true = np.asarray(ols.unscale(scaled, scale), np.float64)
    np.testing.assert_allclose(true, gradients, rtol=3 * 2.0**-24)


# Another function that differentiates.


class Scaled(eqx.Module):
  """Not all of it are arrays, so JAX alone cannot differentiate it."""

  weight: jax.Array
  count: jax.Array
  activation: Callable[[jax.Array], jax.Array]

  def __call__(self, x):
    return self.activation(x @ self.weight)


def model_loss(model, x):
  return jnp.mean(model(x) ** 2)


MODEL = Scaled(jnp.array([1.0, -2.0, 0.5]), jnp.array(3), jax.nn.relu)


def test_a_filtered_function_differentiates_what_is_not_all_arrays():
  _, _, state = make()

  @eqx.filter_jit
  def value_and_grad(model, state):
    return ols.scaled_value_and_grad(
      model_loss, state, value_and_grad=eqx.filter_value_and_grad
    )(model, BATCH)

  loss, scaled = value_and_grad(MODEL, state)
  expected, gradients = eqx.filter_value_and_grad(model_loss)(MODEL, BATCH)
  assert loss == expected
  assert (scaled.count, scaled.activation) == (None, None)
  np.testing.assert_array_equal(scaled.weight, 1024.0 * gradients.weight)


def test_a_filtered_function_hands_on_what_comes_beside_the_loss():
  def fun(model, x, *, power):
    return jnp.mean(model(x) ** power), {"sum": jnp.sum(x)}

  _, _, state = make()
  value_and_grad = ols.scaled_value_and_grad(
    fun, state, has_aux=True, value_and_grad=eqx.filter_value_and_grad
  )
  (loss, aux), _ = value_and_grad(MODEL, BATCH, power=4)
  assert (loss, aux["sum"]) == (jnp.mean(MODEL(BATCH) ** 4), 15)


def test_guarantee_7_a_float16_loss_of_a_filtered_function_is_carried():
  def fun(model, x):
    return jnp.float16(model_loss(model, x))

  for scale, is_carried in ((2.0**12, True), (2.0**16, False)):
    loss, scaled = ols.scaled_value_and_grad(
      fun, scale, value_and_grad=eqx.filter_value_and_grad
    )(MODEL, BATCH)
    assert loss == fun(MODEL, BATCH)
    assert jnp.isfinite(scaled.weight).all() == is_carried
    assert is_carried or jnp.isinf(scaled.weight).all()


def test_the_arguments_of_jax_reach_another_function():
  seen = []

  def value_and_grad(fun, **options):
    seen.append(options)
    return jax.value_and_grad(fun, **options)

  def fun(count, params):
    return loss_fn(params, BATCH) * count

  params, _, state = make()
  ols.scaled_value_and_grad(fun, state, value_and_grad=value_and_grad)(
    1.0, params
  )
  ols.scaled_value_and_grad(
    fun, state, (0, 1), allow_int=True, value_and_grad=value_and_grad
  )(3, params)
  # What is as by default is left out: Equinox takes nothing else.
  assert seen == [
    {"has_aux": True},
    {"argnums": (0, 1), "has_aux": True, "allow_int": True},
  ]


def test_an_object_that_changes_in_place_goes_through_nnx():
  model = nnx.BatchNorm(3, rngs=nnx.Rngs(0))
  fun = lambda model, x: jnp.mean(model(x) ** 2 * x)  # noqa: E731
  _, _, state = make()
  loss, scaled = ols.scaled_value_and_grad(
    fun, state, value_and_grad=nnx.value_and_grad
  )(model, BATCH)
  expected = nnx.BatchNorm(3, rngs=nnx.Rngs(0))
  assert loss == fun(expected, BATCH)
  assert_same_bits(
    nnx.as_pure(nnx.state(model, nnx.BatchStat)),
    nnx.as_pure(nnx.state(expected, nnx.BatchStat)),
  )
  _, gradients = nnx.value_and_grad(fun)(nnx.clone(expected), BATCH)
  np.testing.assert_allclose(
    scaled["scale"][...], 1024 * gradients["scale"][...]
  )


def test_an_object_that_changes_in_place_is_refused_by_default():
  fun = lambda model, x: jnp.mean(model(x) ** 2)  # noqa: E731
  value_and_grad = ols.scaled_value_and_grad(fun, 8.0)
  with pytest.raises(ValueError, match="`fun` must not change its arguments"):
    value_and_grad(nnx.BatchNorm(3, rngs=nnx.Rngs(0)), BATCH)


def test_what_differentiates_must_be_a_function():
  with pytest.raises(TypeError, match="`value_and_grad` must be a function"):
    ols.scaled_value_and_grad(loss_fn, 8.0, value_and_grad="filter")


@pytest.mark.parametrize(
  "value_and_grad",
  [
    jax.grad,
    jax.hessian,
    eqx.filter_grad,
    nnx.grad,
    jax.value_and_grad(loss_fn),
    eqx.filter_value_and_grad(loss_fn),
    nnx.value_and_grad(loss_fn),
    ols.scaled_value_and_grad,
    jax.jit,
    lambda fun, has_aux: None,
    lambda fun, has_aux: fun,
  ],
)
# Gradients that unpack like a pair are no pair.
@pytest.mark.parametrize("params", [{"w": jnp.ones(2)}, jnp.ones((2, 2))])
def test_what_differentiates_must_return_the_value_too(value_and_grad, params):
  def fun(params):
    return sum(jnp.sum(x**2) for x in jax.tree.leaves(params))

  with pytest.raises(
    TypeError, match=r"like jax.value_and_grad.*\(\(loss, aux"
  ):
    ols.scaled_value_and_grad(fun, 8.0, value_and_grad=value_and_grad)(params)


@pytest.mark.parametrize("differentiate", [jax.value_and_grad, jax.grad])
@pytest.mark.parametrize("params", [jnp.ones(2), 1.0, np.ones(2), {}])
def test_an_error_of_the_loss_stays_as_it_is(differentiate, params):
  def fun(model, x):
    raise TypeError("mine")

  for function, argument in (
    (differentiate, params),
    (eqx.filter_value_and_grad, MODEL),
  ):
    with pytest.raises(TypeError) as caught:
      ols.scaled_value_and_grad(fun, 8.0, value_and_grad=function)(
        argument, BATCH
      )
    assert str(caught.value) == "mine"
    assert "Equinox" not in str(getattr(caught.value, "__notes__", ""))


def test_an_error_of_a_loss_of_integers_stays_as_it_is():
  def fun(count):
    raise TypeError("mine")

  with pytest.raises(TypeError) as caught:
    ols.scaled_value_and_grad(fun, 8.0, allow_int=True)(3)
  assert "Equinox" not in str(getattr(caught.value, "__notes__", ""))


FOR_EQUINOX = "of an Equinox model pass the arrays alone, eqx.partition(model"
FOR_NNX = (
  "of an NNX model pass the parameters alone, nnx.split(model, nnx.Param"
)
DROPOUT = nnx.Dropout(0.5, rngs=nnx.Rngs(0))
KEY = jax.random.PRNGKey(0)
# What is no floating-point array, and what the error says of it.
UNFIT = {
  "equinox": (MODEL, f"int32 at 'args[0]/count'; {FOR_EQUINOX}"),
  "flag": (eqx.nn.Dropout(0.5), f"bool at 'args[0]/inference'; {FOR_EQUINOX}"),
  "nested": (
    [MODEL.weight, MODEL],
    f"int32 at 'args[0]/1/count'; {FOR_EQUINOX}",
  ),
  "nnx": (DROPOUT, f"uint32 at 'args[0]/rngs/count/value'; {FOR_NNX}"),
  "state": (
    nnx.state(DROPOUT),
    f"uint32 at 'args[0]/rngs/count/value'; {FOR_NNX}",
  ),
  "number": (
    {"w": KEY * 1.0, "step": 3},
    "int32 at 'args[0]/step'; pass it in",
  ),
  "key": ((1.0, {"key": KEY}), "uint32 at 'args[0]/1/key'; pass it in another"),
  "text": ({"name": "relu"}, "str at 'args[0]/name'; pass it in another arg"),
}


@pytest.mark.parametrize("name", UNFIT)
def test_a_leaf_without_a_gradient_is_named_with_the_remedy(name):
  model, said = UNFIT[name]
  for value_and_grad in (
    ols.scaled_value_and_grad(model_loss, 8.0),
    ols.scaled_value_and_grad(model_loss, 8.0, value_and_grad=jax.grad),
    ols.accumulate(ols.scaled_value_and_grad(model_loss, 8.0), microbatches=2),
  ):
    with pytest.raises(TypeError, match="must be floating-point arr") as caught:
      value_and_grad(model, BATCH)
    assert f"got {said}" in str(caught.value)
    cause = str(caught.value.__cause__)
    assert "not a valid JAX" in cause or "grad requires" in cause


def test_the_argument_of_a_leaf_without_a_gradient_is_named():
  value_and_grad = ols.scaled_value_and_grad(
    lambda x, model: model_loss(model, x), 8.0, argnums=(0, 1)
  )
  with pytest.raises(TypeError, match=r"got int32 at 'args\[1\]/count'; of"):
    value_and_grad(BATCH, MODEL)
  from_the_end = ols.scaled_value_and_grad(
    lambda x, model: model_loss(model, x), 8.0, argnums=-1
  )
  with pytest.raises(TypeError, match=r"got int32 at 'args\[1\]/count'; of"):
    from_the_end(BATCH, MODEL)
  with pytest.raises(TypeError, match="requires at least 1 positional"):
    ols.scaled_value_and_grad(lambda x: x, 8.0)(x=1.0)


class Counting(nnx.Module):
  def __init__(self):
    self.norm = nnx.BatchNorm(3, rngs=nnx.Rngs(0))
    self.calls, self.nothing = 0, None

  def __call__(self, x):
    return self.norm(x)

  def count(self, x):
    self.calls += 1
    return x


def test_a_model_that_is_no_part_of_what_is_traced_is_refused():
  model = Counting()
  closed_over = ols.scaled_value_and_grad(
    lambda weight, x: weight * model_loss(model, x), 8.0
  )
  beside = ols.scaled_value_and_grad(
    lambda weight, x, model: weight * model_loss(model, x), 8.0
  )
  got = "got a change to one that it closes over.*; pass the object as an arg"
  for run in (
    lambda: closed_over(1.0, BATCH),
    lambda: beside(1.0, BATCH, model),
  ):
    with pytest.raises(ValueError, match=f"{got}.* keep what a call changes"):
      run()
  counting = ols.scaled_value_and_grad(lambda x: jnp.sum(model.count(x)), 8.0)
  with pytest.raises(ValueError, match=got):
    counting(BATCH)
  # It is an argument to what differentiates objects.
  ols.scaled_value_and_grad(
    lambda weight, x, model: weight * model_loss(model, x),
    8.0,
    value_and_grad=nnx.value_and_grad,
  )(1.0, BATCH, model)
  assert model.norm.mean[...].any()
