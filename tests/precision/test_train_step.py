"""Train steps in two precisions: what they lower, and what they refuse.

tests/precision/test_precision_schedule.py compares their numbers with a model.
"""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_lossscale as ols
from tests import support

X = np.linspace(-1, 1, 24, dtype=np.float32).reshape(8, 3)
Y = np.linspace(1, -1, 16, dtype=np.float32).reshape(8, 2)
PARAMS = {"w": jnp.linspace(0.3, 1.0, 6).reshape(3, 2), "b": jnp.zeros(2)}
OVERWRITE = "_overwrite_with_gradient"

BARE = optax.sgd(0.1, momentum=0.5)
DTYPES = {"f16": jnp.float16, "bf16": jnp.bfloat16}


def loss_fn(params, x, y):
  return jnp.mean((jnp.tanh(x @ params["w"] + params["b"]) - y) ** 2)


def by_steps(dtype=jnp.float16, *, until_step=2, **options):
  return ols.PrecisionSchedule(dtype, until_step=until_step, **options)


def scaling(inner=BARE):
  return ols.loss_scaling(inner, support.Stub(1024.0))


def start(schedule=None, tx=None, params=PARAMS):
  return params, (tx or scaling()).init(params), (schedule or by_steps()).init()


def branches(step):
  """Returns the programs in full and in low precision, as text."""
  jaxpr = jax.make_jaxpr(step)(*start(), X, Y)
  (cond,) = [
    e
    for e in jaxpr.eqns
    if e.primitive.name == "cond"
    # The check reads gradients in one way or another on each platform.
    and not e.params.get("branches_platforms")
  ]
  return [str(branch) for branch in cond.params["branches"]]


# Programs.


@pytest.mark.parametrize("short", DTYPES)
def test_the_low_part_is_autocast_and_the_rest_is_as_written(short):
  step = by_steps(DTYPES[short]).make_train_step(loss_fn, scaling())
  full, low = branches(step)
  assert f"{short}[8,2] = dot_general" in low
  assert short not in full
  assert "f32[8,2] = dot_general" in full


def in_two_layers(params, x, y):
  with jax.named_scope("head"):
    h = x @ params["w"]
  return jnp.mean((jnp.tanh(h) @ jnp.ones((2, 2)) - y) ** 2)


def low_part(**options):
  cast = functools.partial(ols.autocast, **options) if options else None
  step = by_steps().make_train_step(in_two_layers, scaling(), cast=cast)
  return branches(step)[1]


def test_cast_lowers_the_low_part():
  assert "f16[8,2] = tanh" in low_part()
  assert "f32[8,2] = tanh" in low_part(operations={"black": ["tanh"]})
  kept = low_part(overrides={"head": jnp.float32})
  assert "f32[8,2] = dot_general" not in low_part()
  assert "f32[8,2] = dot_general" in kept
  one = low_part(level="O0", overrides={"head": jnp.float16})
  assert "f16[8,2] = dot_general" in one
  assert "f32[8,2] = dot_general" in one


def test_a_cast_that_cannot_lower_is_refused():
  with pytest.raises(TypeError, match="`cast` must be a function, got str"):
    by_steps().make_train_step(loss_fn, scaling(), cast="O2")
  with pytest.raises(ValueError, match="`cast` must lower some"):
    by_steps().make_train_step(
      loss_fn, scaling(), cast=lambda f: ols.autocast(f, "O0")
    )


def test_aux_keywords_and_flags_reach_the_loss_function():
  def with_aux(params, x, *, y, train):
    assert train is True
    h = x @ params["w"]
    return jnp.mean((h - y) ** 2), {"h": h, "one": 1}

  step = by_steps(until_step=1).make_train_step(
    with_aux, scaling(), has_aux=True
  )
  step = jax.jit(functools.partial(step, train=True))
  state = start()
  for _ in range(2):
    *state, (loss, aux) = step(*state, X, y=Y)
    assert loss.shape == ()
    assert aux["h"].dtype == jnp.float32
    assert aux["one"] == 1
  assert not state[2].low


def test_gradients_of_other_arguments_by_one_of_several_scales():
  states = {
    name: ols.loss_scaling(BARE, ols.FixedLossScale(scale)).init(PARAMS)
    for name, scale in {"a": 8.0, "b": 1024.0}.items()
  }
  schedule = by_steps()

  def gradients(states, state):
    value_and_grad = schedule.value_and_grad(
      lambda x, params: (loss_fn(params, x, Y), 3),
      states,
      state,
      argnums=1,
      has_aux=True,
      path="a",
    )
    return value_and_grad(X, PARAMS)

  state = schedule.init()
  (loss, aux), scaled = jax.jit(gradients)(states, state)
  _, unscaled = jax.jit(gradients)(states, schedule.update(state, step=3))
  assert aux == 3
  assert loss == pytest.approx(float(loss_fn(PARAMS, X, Y)), rel=1e-3)
  np.testing.assert_allclose(scaled["w"] / 8.0, unscaled["w"], rtol=1e-2)


# Optimizers.


@pytest.mark.parametrize(
  "make",
  [
    lambda: optax.chain(scaling(), optax.identity()),
    # It does not hand on extra arguments.
    lambda: optax.GradientTransformation(scaling().init, scaling().update),
    lambda: scaling(optax.MultiSteps(BARE, 2)),
  ],
  ids=["chain", "bare", "accumulation-inside"],
)
def test_loss_scaling_may_be_in_a_chain_or_around_accumulation(make):
  tx = make()
  step = by_steps(until_step=1).make_train_step(loss_fn, tx)
  _, _, state, loss = jax.eval_shape(step, *start(tx=tx), X, Y)
  assert (state.low.dtype, loss.dtype) == (bool, jnp.float32)


def test_bfloat16_needs_no_loss_scaling_and_no_step_needs_jit():
  schedule = by_steps(jnp.bfloat16, until_step=1)
  step = schedule.make_train_step(loss_fn, BARE)
  *state, first = step(*start(schedule, BARE), X, Y)
  *state, second = step(*state, X, Y)
  assert not state[2].low
  assert state[2].steps == 2
  assert second < first


def test_leaves_that_are_no_gradients_are_stored_in_both_precisions():
  @jax.custom_vjp
  def remember(x, amax):
    return x

  remember.defvjp(
    lambda x, amax: (x, amax), lambda amax, grad: (grad, 2.0 * amax)
  )

  def fp8_loss_fn(variables, x, y):
    w = remember(variables["params"]["w"], variables[OVERWRITE])
    return loss_fn(variables["params"] | {"w": w}, x, y)

  variables = {"params": PARAMS, OVERWRITE: jnp.ones(())}
  step = by_steps().make_train_step(fp8_loss_fn, scaling())
  step, state = jax.jit(step), start(params=variables)
  for _ in range(3):
    *state, _ = step(*state, X, Y)
  assert not state[2].low
  assert state[0][OVERWRITE] == 2**3


@pytest.mark.filterwarnings("ignore:.*no optax.apply_if_finite around")
def test_a_step_that_is_rejected_around_loss_scaling_does_not_count():
  tx = optax.apply_if_finite(scaling(), 5)
  step = jax.jit(by_steps().make_train_step(loss_fn, tx))
  *state, _ = step(*start(tx=tx), np.full_like(X, np.inf), Y)
  assert state[2].steps == 0
  *state, _ = step(*state, X, Y)
  assert state[2].steps == 1


@pytest.mark.slow
def test_devices_switch_together_at_the_mean_of_their_losses():
  # The loss of one device is below the target from the start, but their mean
  # is not.
  y = np.concatenate([np.zeros((4, 2), np.float32), np.full((4, 2), 9.0)])
  schedule = ols.PrecisionSchedule(jnp.float16, until_loss=36.0)
  inner = optax.chain(ols.pmean_gradients("data"), optax.adam(0.5))
  tx = ols.loss_scaling(inner, support.Stub(1024.0), axis_name="data")
  step = jax.shard_map(
    schedule.make_train_step(loss_fn, tx, axis_name="data"),
    mesh=support.make_mesh(data=2),
    in_specs=(jax.P(), jax.P(), jax.P(), jax.P("data"), jax.P("data")),
    out_specs=jax.P(),
  )
  step, state, lows, losses = jax.jit(step), start(schedule, tx), [], []
  for _ in range(6):
    *state, loss = step(*state, X * 0.1, y)
    losses.append(float(loss))
    lows.append(bool(state[2].low))
  assert lows == [min(losses[: i + 1]) > 36.0 for i in range(6)]
  assert lows[0] and not lows[-1]
  assert losses[0] == pytest.approx(
    float(loss_fn(PARAMS, X * 0.1, y)), rel=1e-2
  )


# Losses that are not in full precision.


class Head(nn.Module):
  dtype: object = None

  @nn.compact
  def __call__(self, x):
    return nn.Dense(2, dtype=self.dtype)(x)


def with_layer(params, x, y):
  dense = {"kernel": params["w"], "bias": params["b"]}
  h = Head(jnp.float16).apply({"params": {"Dense_0": dense}}, x)
  return jnp.mean((h - y) ** 2)


def with_rule(backward):
  """Returns a loss with a derivative rule of its own."""

  @jax.custom_vjp
  def product(w, x):
    return x @ w

  product.defvjp(lambda w, x: (x @ w, x), lambda x, g: (backward(x, g), None))
  return lambda params, x, y: jnp.mean((product(params["w"], x) - y) ** 2)


def transposed_product(x, g):
  return x.T @ g


def one_operation_in_jit(params, x, y):
  # Another function on each call, because jit keeps what it has traced.
  return jnp.sum(jax.jit(ols.autocast(jnp.sin, "O3"))(params["w"]))


AUTOCAST_LOSSES = {
  "around": ols.autocast(loss_fn, "O1", dtype=jnp.bfloat16),
  "one operation, inside of jit": one_operation_in_jit,
  "in the backward pass": with_rule(ols.autocast(transposed_product)),
  "that jit has traced before": jax.jit(ols.autocast(loss_fn, "O2")),
  "in a policy": ols.get_policy("mixed_float16").autocast(loss_fn),
}


@pytest.mark.parametrize("name", AUTOCAST_LOSSES)
def test_a_loss_under_autocast_is_refused(name):
  jax.eval_shape(AUTOCAST_LOSSES[name], PARAMS, X, Y)
  for allowed in (False, True):
    schedule = by_steps(allow_low_products=allowed)
    step = schedule.make_train_step(AUTOCAST_LOSSES[name], scaling())
    with pytest.raises(ValueError, match="`loss_fn` must not be under autoc"):
      jax.eval_shape(step, *start(), X, Y)
  # The refusal ends with the step.
  assert jax.eval_shape(AUTOCAST_LOSSES[name], PARAMS, X, Y).shape == ()


LOW_LOSSES = {
  "layer": with_layer,
  "backward pass": with_rule(
    lambda x, g: transposed_product(
      x.astype(jnp.float16), g.astype(jnp.float16)
    ).astype(jnp.float32)
  ),
}


@pytest.mark.parametrize("name", LOW_LOSSES)
def test_products_in_low_precision_are_refused(name):
  jax.eval_shape(LOW_LOSSES[name], PARAMS, X, Y)
  step = by_steps().make_train_step(LOW_LOSSES[name], scaling())
  with pytest.raises(
    ValueError, match="`loss_fn` must be in full precision.*dot_general"
  ):
    jax.eval_shape(step, *start(), X, Y)


def test_products_in_low_precision_may_be_allowed():
  schedule = by_steps(allow_low_products=True)
  step = schedule.make_train_step(with_layer, scaling())
  for branch in branches(step):
    assert "f16[8,2] = dot_general" in branch


def test_parameters_in_low_precision_are_refused_but_data_is_not():
  step = by_steps().make_train_step(loss_fn, scaling())
  x = jnp.asarray(X, jnp.float16)
  params = jax.tree.map(lambda x: x.astype(jnp.float16), PARAMS)
  with pytest.raises(ValueError, match="use float32 parameters"):
    jax.eval_shape(step, *start(params=params), x, Y)
  *_, loss = jax.eval_shape(step, *start(), x, Y)
  assert loss.dtype == jnp.float32


# Wrong arguments.


@pytest.mark.filterwarnings("ignore:`opt_state` must have optax.MultiSteps")
@pytest.mark.parametrize(
  ("dtype", "tx", "params", "error"),
  [
    ("float16", optax.adam(0.1), PARAMS, "`opt_state` must hold the state of"),
    ("float16", optax.MultiSteps(scaling(), 2), PARAMS, "MultiSteps inside"),
    (
      "bfloat16",
      BARE,
      PARAMS | {OVERWRITE: jnp.ones(())},
      "`tx` must hold loss_scaling.*Fixed",
    ),
  ],
  ids=["no scaling", "accumulation around", "no scaling beside FP8"],
)
def test_an_optimizer_without_proper_scaling_is_refused(
  dtype, tx, params, error
):
  step = by_steps(dtype).make_train_step(loss_fn, tx)
  with pytest.raises(ValueError, match=error):
    jax.eval_shape(step, *start(tx=tx, params=params), X, Y)


def test_an_argument_of_another_kind_is_refused_at_once():
  with pytest.raises(TypeError, match="`loss_fn` must be a function"):
    by_steps().make_train_step(3.0, scaling())
  with pytest.raises(TypeError, match="`tx` must be an optax .*call it"):
    by_steps().make_train_step(loss_fn, optax.adam)


def test_a_forgotten_or_swapped_state_is_named():
  step = by_steps().make_train_step(loss_fn, scaling())
  params, opt_state, state = start()
  for arguments in (
    (params, opt_state, X, Y),
    (params, state, opt_state, X, Y),
  ):
    with pytest.raises(TypeError, match="`state` must be the PrecisionSch"):
      step(*arguments)
  with pytest.raises(TypeError, match="got LossScalingState"):
    by_steps().update(opt_state, step=1)


def test_a_state_that_is_closed_over_is_refused():
  step = by_steps().make_train_step(loss_fn, scaling())
  params, opt_state, state = start()
  with pytest.raises(ValueError, match="`state` must be an argument.*switch"):
    jax.eval_shape(lambda p, o: step(p, o, state, X, Y), params, opt_state)
  with pytest.raises(ValueError, match="`opt_state` must be an argument"):
    jax.eval_shape(lambda p, s: step(p, opt_state, s, X, Y), params, state)
