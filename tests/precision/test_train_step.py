"""The train step in two precisions: what it computes before and after."""

import functools
import itertools
import pickle

import chex
import flax.linen as nn
import flax.serialization
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_lossscale as ols
from tests.support import same_bits

X = np.linspace(-1, 1, 24, dtype=np.float32).reshape(8, 3)
Y = np.linspace(1, -1, 16, dtype=np.float32).reshape(8, 2)
PARAMS = {"w": jnp.linspace(0.3, 1.0, 6).reshape(3, 2), "b": jnp.zeros(2)}

STEPS = 6
# Not Adam, which makes the same step of scaled gradients.
BARE = optax.sgd(0.1, momentum=0.5)
DTYPES = {"f16": jnp.float16, "bf16": jnp.bfloat16}


def loss_fn(params, x, y):
  return jnp.mean((jnp.tanh(x @ params["w"] + params["b"]) - y) ** 2)


def by_steps(dtype=jnp.float16, *, until_step=STEPS // 2, **options):
  return ols.PrecisionSchedule(dtype, until_step=until_step, **options)


def by_loss(until_loss, dtype=jnp.float16):
  return ols.PrecisionSchedule(dtype, until_loss=until_loss)


def scaling(rule=None, **options):
  rule = rule or ols.DynamicLossScale(1024.0, growth_interval=1)
  return ols.loss_scaling(BARE, rule, **options)


@functools.cache
def jitted(dtype=jnp.float16):
  """Returns the step of a "step" schedule, compiled once for many tests."""
  return jax.jit(by_steps(dtype).make_train_step(loss_fn, scaling()))


def start(schedule=None, tx=None, params=PARAMS):
  return params, (tx or scaling()).init(params), (schedule or by_steps()).init()


def run(step, state, steps, *args):
  """Returns the state after some steps, all states and the losses."""
  states, losses = [state], []
  for _ in range(steps):
    *state, loss = step(*state, *(args or (X, Y)))
    states.append(tuple(state))
    losses.append(float(loss))
  return tuple(state), states, losses


def rule_states(states):
  return [opt_state.loss_scale_state for _, opt_state, _ in states]


def branches(step, state, *args):
  """Returns the text of what runs in full and in low precision."""
  jaxpr = jax.make_jaxpr(step)(*state, *(args or (X, Y)))
  (cond,) = [
    e
    for e in jaxpr.eqns
    if e.primitive.name == "cond"
    # The check reads gradients in one way or another on each platform.
    and not e.params.get("branches_platforms")
  ]
  return [str(branch) for branch in cond.params["branches"]]


@pytest.mark.parametrize(("short", "dtype"), DTYPES.items())
def test_the_low_part_is_autocast_and_the_rest_is_as_written(short, dtype):
  step = by_steps(dtype).make_train_step(loss_fn, scaling())
  full, low = branches(step, start())
  assert f"{short}[8,2] = dot_general" in low
  assert short not in full
  assert "f32[8,2] = dot_general" in full


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_the_low_part_is_the_step_by_hand(dtype):
  low_loss_fn = ols.autocast(loss_fn, "O1", dtype=dtype)

  @jax.jit
  def by_hand(params, opt_state):
    loss, gradients = jax.value_and_grad(low_loss_fn)(params, X, Y)
    updates, opt_state = BARE.update(gradients, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, loss

  params, opt_state = PARAMS, BARE.init(PARAMS)
  for _ in range(2):
    params, opt_state, loss = by_hand(params, opt_state)
  state, _, losses = run(jitted(dtype), start(by_steps(dtype)), 2)
  assert losses[-1] == pytest.approx(float(loss), rel=1e-3)
  for name, param in params.items():
    np.testing.assert_allclose(state[0][name], param, rtol=1e-2)


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_the_rest_is_the_step_of_the_bare_optimizer(dtype):
  state, _, _ = run(jitted(dtype), start(by_steps(dtype)), 3)
  assert not state[2].low
  params, opt_state = state[0], state[1].inner_state
  after, _, losses = run(jitted(dtype), state, 2)

  @jax.jit
  def by_hand(params, opt_state):
    loss, gradients = jax.value_and_grad(loss_fn)(params, X, Y)
    updates, opt_state = BARE.update(gradients, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, loss

  for _ in range(2):
    params, opt_state, loss = by_hand(params, opt_state)
  assert losses[-1] == pytest.approx(float(loss), rel=1e-6)
  for name, param in params.items():
    np.testing.assert_allclose(after[0][name], param, rtol=1e-6)
  assert jax.tree.structure(after[1].inner_state) == jax.tree.structure(
    opt_state
  )


@pytest.mark.parametrize(
  ("dtype", "moves"), [(jnp.float16, 3), (jnp.bfloat16, 0)]
)
def test_the_rules_state_moves_in_the_float16_part_alone(dtype, moves):
  _, states, _ = run(jitted(dtype), start(by_steps(dtype)), STEPS)
  rules = rule_states(states)
  for before, after in itertools.pairwise(rules[: moves + 1]):
    assert not same_bits(before, after)
  for after in rules[moves:]:
    assert same_bits(after, rules[moves])
  assert [bool(state.low) for *_, state in states] == [True] * 3 + [False] * 4


def test_a_step_schedule_counts_applied_steps_only():
  step, state = jitted(), start()
  bad = np.full_like(X, np.inf)
  *state, _ = step(*state, bad, Y)
  assert state[1].skipped
  assert (state[2].steps, state[2].low) == (0, True)
  state, _, _ = run(step, state, 3)
  assert (state[2].steps, state[2].low) == (3, False)
  # The same in full precision, where the step is skipped as well.
  rule = state[1].loss_scale_state
  *state, _ = step(*state, bad, Y)
  assert state[1].skipped
  assert state[2].steps == 3
  assert same_bits(state[1].loss_scale_state, rule)


def test_a_loss_schedule_switches_after_the_step_whose_loss_is_there():
  _, _, losses = run(jitted(), start(), 3)
  # Between the losses of the second step and of the third.
  schedule = by_loss((losses[1] + losses[2]) / 2)
  step = jax.jit(schedule.make_train_step(loss_fn, scaling()))
  _, states, again = run(step, start(schedule), 5)
  assert again[:3] == pytest.approx(losses, rel=1e-6)
  lows = [bool(state.low) for *_, state in states]
  assert lows == [True, True, True, False, False, False]


def test_the_loss_of_a_skipped_step_switches_nothing():
  # On a zero batch the loss is below the target, and the gradients are NaN.
  def loss_fn(params, x):
    return jnp.sum(jnp.sqrt(jnp.abs(x @ params["w"]))) + 1e-3

  schedule = by_loss(1.5)
  step = jax.jit(schedule.make_train_step(loss_fn, scaling()))
  *state, loss = step(*start(schedule), np.zeros_like(X))
  assert 0 < loss < 1
  assert state[1].skipped
  assert state[2].low


def test_the_switch_compiles_nothing():
  step = by_steps().make_train_step(loss_fn, scaling())
  run(jax.jit(chex.assert_max_traces(step, n=1)), start(), STEPS)


@pytest.mark.slow
@pytest.mark.parametrize(
  "make_schedule",
  [by_steps, lambda: by_loss(1.74)],
  ids=["step", "loss"],
)
def test_a_scan_makes_the_same_steps(make_schedule):
  schedule = make_schedule()
  step = schedule.make_train_step(loss_fn, scaling())
  expected, _, losses = run(jax.jit(step), start(schedule), STEPS)

  def body(state, _):
    *state, loss = step(*state, X, Y)
    return tuple(state), loss

  @jax.jit
  def scanned(state):
    return jax.lax.scan(body, state, length=STEPS)

  state, scanned_losses = scanned(start(schedule))
  np.testing.assert_allclose(scanned_losses, losses, rtol=1e-5)
  assert same_bits(state[2], expected[2])
  assert not state[2].low
  assert same_bits(state[1].loss_scale_state, expected[1].loss_scale_state)


@pytest.mark.parametrize("saved_after", [2, 3, 4])
@pytest.mark.parametrize(
  "round_trip",
  [
    lambda state, target: flax.serialization.from_bytes(
      target, flax.serialization.to_bytes(state)
    ),
    lambda state, target: pickle.loads(pickle.dumps(state)),
  ],
  ids=["flax", "pickle"],
)
def test_a_checkpoint_passes_over_the_switch(round_trip, saved_after):
  step = jitted()
  expected, _, _ = run(step, start(), STEPS)
  state, _, _ = run(step, start(), saved_after)
  state = jax.tree.map(jnp.asarray, round_trip(state, start()))
  state, _, _ = run(step, tuple(state), STEPS - saved_after)
  assert same_bits(state, expected)


def test_the_structure_is_the_same_before_and_after():
  _, states, _ = run(jitted(), start(), STEPS)
  shapes = [jax.tree.map(jax.typeof, state) for state in states]
  assert all(shape == shapes[0] for shape in shapes)


def test_cast_lowers_the_first_part():
  def loss_fn(params, x, y):
    with jax.named_scope("head"):
      h = x @ params["w"]
    return jnp.mean((jnp.tanh(h) @ jnp.ones((2, 2)) - y) ** 2)

  def low(**options):
    cast = functools.partial(ols.autocast, **options) if options else None
    step = by_steps().make_train_step(loss_fn, scaling(), cast=cast)
    return branches(step, start())[1]

  assert "f16[8,2] = tanh" in low()
  assert "f32[8,2] = tanh" in low(operations={"black": ["tanh"]})
  kept = low(overrides={"head": jnp.float32})
  assert "f32[8,2] = dot_general" not in low()
  assert "f32[8,2] = dot_general" in kept
  with pytest.raises(ValueError, match="`level` must be one of"):
    low(level="O4")
  # Nothing at all is lowered, or one scope.
  with pytest.raises(ValueError, match="`cast` must lower something"):
    low(level="O0")
  one = low(level="O0", overrides={"head": jnp.float16})
  assert "f16[8,2] = dot_general" in one
  assert "f32[8,2] = dot_general" in one
  with pytest.raises(TypeError, match="`cast` must be a function, got str"):
    by_steps().make_train_step(loss_fn, scaling(), cast="O2")


def test_aux_keywords_and_flags_reach_the_loss_function():
  def loss_fn(params, x, *, y, train):
    assert train is True
    h = x @ params["w"]
    return jnp.mean((h - y) ** 2), {"h": h, "one": 1}

  schedule = by_steps()
  step = schedule.make_train_step(loss_fn, scaling(), has_aux=True)
  step = jax.jit(functools.partial(step, train=True))
  state = start()
  for _ in range(4):
    *state, (loss, aux) = step(*state, X, y=Y)
    assert loss.shape == ()
    assert aux["h"].dtype == jnp.float32
    assert aux["one"] == 1
  assert not state[2].low


def test_bfloat16_needs_no_loss_scaling():
  schedule = by_steps(jnp.bfloat16)
  step = jax.jit(schedule.make_train_step(loss_fn, BARE))
  state, states, losses = run(step, start(schedule, BARE), STEPS)
  assert [bool(state.low) for *_, state in states] == [True] * 3 + [False] * 4
  assert losses[-1] < losses[0]
  assert state[2].steps == STEPS


def test_many_seeds_switch_each_at_its_own_time():
  schedule = by_loss(0.6)
  step = jax.vmap(
    schedule.make_train_step(loss_fn, scaling()),
    in_axes=(0, 0, 0, None, None),
  )
  params = jax.tree.map(lambda x: jnp.stack([x, -x]), PARAMS)
  opt_state = jax.vmap(scaling().init)(params)
  states = jax.tree.map(lambda x: jnp.stack([x, x]), schedule.init())
  *_, states, losses = jax.jit(step)(params, opt_state, states, X, Y)
  assert losses.shape == (2,)
  np.testing.assert_array_equal(states.low, losses > 0.6)
  assert states.low[0] != states.low[1]


def test_it_runs_operation_by_operation_as_well():
  schedule = by_steps(until_step=1)
  step = schedule.make_train_step(loss_fn, scaling())
  state, _, losses = run(step, start(schedule), 2)
  assert losses == pytest.approx(run(jitted(), start(), 2)[2], rel=1e-3)
  assert not state[2].low


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_devices_switch_together_at_the_mean_of_their_losses(dtype):
  mesh = jax.make_mesh(
    (2,),
    ("data",),
    axis_types=(jax.sharding.AxisType.Auto,),
    devices=jax.devices()[:2],
  )
  # One device is below the target from the first step on, the mean is not.
  y = np.concatenate([np.zeros((4, 2), np.float32), np.full((4, 2), 9.0)])
  x = X * 0.1
  schedule = by_loss(30.0, dtype)
  tx = ols.loss_scaling(
    optax.chain(ols.pmean_gradients("data"), optax.adam(0.5)),
    ols.DynamicLossScale(1024.0),
    axis_name="data",
  )
  step = jax.shard_map(
    schedule.make_train_step(loss_fn, tx, axis_name="data"),
    mesh=mesh,
    in_specs=(jax.P(), jax.P(), jax.P(), jax.P("data"), jax.P("data")),
    out_specs=jax.P(),
  )
  state = start(schedule, tx)
  _, states, losses = run(jax.jit(step), state, 6, x, y)
  lows = [bool(state.low) for *_, state in states[1:]]
  assert lows == [
    all(loss > 30.0 for loss in losses[: i + 1]) for i in range(6)
  ]
  assert lows[0]
  alone = scaling()
  step = jax.jit(schedule.make_train_step(loss_fn, alone))
  *_, loss = step(*start(schedule, alone), x, y)
  assert losses[0] == pytest.approx(float(loss), rel=1e-2)


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


AUTOCAST_LOSSES = {
  "around": ols.autocast(loss_fn, "O1", dtype=jnp.bfloat16),
  "inside": lambda params, x, y: jnp.mean(
    (ols.autocast(lambda w: x @ w)(params["w"]) - y) ** 2
  ),
  "without-products": ols.autocast(
    lambda params, x, y: jnp.sum(params["w"] * 2.0), "O3"
  ),
  "in-the-backward-pass": lambda params, x, y: with_rule(
    ols.autocast(transposed_product)
  )(params, x, y),
  "in-a-policy": ols.get_policy("mixed_float16").autocast(loss_fn),
}


@pytest.mark.parametrize("name", AUTOCAST_LOSSES)
@pytest.mark.parametrize("allowed", [False, True])
def test_a_loss_under_autocast_is_refused(name, allowed):
  schedule = by_steps(allow_low_products=allowed)
  step = schedule.make_train_step(AUTOCAST_LOSSES[name], scaling())
  with pytest.raises(ValueError, match="`loss_fn` must not be under autocast"):
    jax.eval_shape(step, *start(), X, Y)
  # The refusal ends with the step.
  assert jax.eval_shape(AUTOCAST_LOSSES[name], PARAMS, X, Y).shape == ()


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_autocast_of_one_operation_is_seen_inside_of_jit_too(wrap):
  lowered = wrap(ols.autocast(jnp.sin, "O3"))
  step = by_steps().make_train_step(
    lambda params, x, y: jnp.sum(lowered(params["w"])), scaling()
  )
  with pytest.raises(ValueError, match="`loss_fn` must not be under autocast"):
    jax.eval_shape(step, *start(), X, Y)


LOW_LOSSES = {
  "layer": with_layer,
  "backward-pass": with_rule(
    lambda x, g: transposed_product(
      x.astype(jnp.float16), g.astype(jnp.float16)
    ).astype(jnp.float32)
  ),
  # JAX does not call it again.
  "autocast-that-jit-has-kept": jax.jit(ols.autocast(loss_fn, "O2")),
}


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("name", LOW_LOSSES)
def test_products_in_low_precision_are_refused(name, dtype):
  jax.eval_shape(LOW_LOSSES[name], PARAMS, X, Y)
  step = by_steps(dtype).make_train_step(LOW_LOSSES[name], scaling())
  with pytest.raises(
    ValueError, match="`loss_fn` must be in full precision.*dot_general"
  ):
    jax.eval_shape(step, *start(), X, Y)


def test_products_in_low_precision_may_be_meant():
  schedule = by_steps(allow_low_products=True)
  step = schedule.make_train_step(with_layer, scaling())
  full, low = branches(step, start())
  for branch in (full, low):
    assert "f16[8,2] = dot_general" in branch


def test_parameters_in_low_precision_are_refused():
  params = jax.tree.map(lambda x: x.astype(jnp.float16), PARAMS)
  step = by_steps().make_train_step(loss_fn, scaling())
  with pytest.raises(ValueError, match="use float32 parameters"):
    jax.eval_shape(step, *start(params=params), jnp.asarray(X, jnp.float16), Y)


def test_data_in_low_precision_is_not():
  step = by_steps().make_train_step(loss_fn, scaling())
  *_, loss = jax.eval_shape(step, *start(), jnp.asarray(X, jnp.float16), Y)
  assert loss.dtype == jnp.float32


def test_float16_without_loss_scaling_is_refused():
  tx = optax.adam(0.1)
  step = by_steps().make_train_step(loss_fn, tx)
  with pytest.raises(ValueError, match="`opt_state` must hold the state of"):
    jax.eval_shape(step, *start(tx=tx), X, Y)


@pytest.mark.parametrize(
  ("wrong", "error"),
  [
    ((3.0, scaling()), "`fun` must be a function"),
    ((loss_fn, optax.adam), "`tx` must be an optax .*call it"),
    ((loss_fn, ols.FixedLossScale(1.0)), "`tx` must be an optax"),
  ],
  ids=["number", "factory", "rule"],
)
def test_what_is_of_another_kind_is_refused_at_once(wrong, error):
  with pytest.raises(TypeError, match=error):
    by_steps().make_train_step(*wrong)


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


@pytest.mark.filterwarnings("ignore:`opt_state` must have optax.MultiSteps")
@pytest.mark.parametrize(
  ("wrap", "error"),
  [
    (lambda tx: optax.MultiSteps(tx, 2), "optax.MultiSteps inside"),
    (
      lambda tx: optax.chain(optax.MultiSteps(tx, 2).gradient_transformation()),
      "optax.MultiSteps inside",
    ),
  ],
  ids=["accumulation", "accumulation-in-a-chain"],
)
def test_what_belongs_inside_of_loss_scaling_is_refused_around_it(wrap, error):
  tx = wrap(scaling())
  step = by_steps().make_train_step(loss_fn, tx)
  with pytest.raises(ValueError, match=error):
    jax.eval_shape(step, *start(tx=tx), X, Y)


@pytest.mark.slow
@pytest.mark.parametrize(
  "make",
  [
    lambda: optax.chain(scaling(), optax.identity()),
    # It does not hand on extra arguments.
    lambda: optax.GradientTransformation(scaling().init, scaling().update),
    lambda: ols.loss_scaling(optax.MultiSteps(BARE, 2), ols.FixedLossScale()),
  ],
  ids=["chain", "bare", "accumulation-inside"],
)
def test_what_hands_it_on_and_what_is_inside_is_taken(make):
  tx = make()
  step = jax.jit(by_steps().make_train_step(loss_fn, tx))
  state, _, losses = run(step, start(tx=tx), STEPS)
  assert not state[2].low
  assert losses[-1] < losses[0]


def test_what_is_no_gradient_is_stored_and_not_added():
  @jax.custom_vjp
  def remember(x, amax):
    return x

  remember.defvjp(
    lambda x, amax: (x, amax), lambda amax, grad: (grad, 2.0 * amax)
  )

  def fp8_loss_fn(variables, x, y):
    params = variables["params"]
    w = remember(params["w"], variables["_overwrite_with_gradient"])
    return loss_fn(params | {"w": w}, x, y)

  variables = {"params": PARAMS, "_overwrite_with_gradient": jnp.ones(())}
  step = jax.jit(by_steps().make_train_step(fp8_loss_fn, scaling()))
  _, states, _ = run(step, start(params=variables), 5)
  kept = [float(x["_overwrite_with_gradient"]) for x, *_ in states]
  assert kept == [1.0, 2.0, 4.0, 8.0, 16.0, 32.0]


def test_a_bare_optimizer_is_not_given_what_is_no_gradient():
  step = by_steps(jnp.bfloat16).make_train_step(loss_fn, BARE)
  params = PARAMS | {"_overwrite_with_gradient": jnp.ones(())}
  with pytest.raises(ValueError, match="`tx` must hold loss_scaling.*Fixed"):
    jax.eval_shape(step, *start(tx=BARE, params=params), X, Y)


@pytest.mark.filterwarnings("ignore:.*no optax.apply_if_finite around")
def test_a_step_that_is_rejected_around_loss_scaling_does_not_count():
  tx = optax.apply_if_finite(scaling(), 5)
  step = jax.jit(by_steps().make_train_step(loss_fn, tx))
  *state, _ = step(*start(tx=tx), np.full_like(X, np.inf), Y)
  assert state[2].steps == 0
  *state, _ = step(*state, X, Y)
  assert state[2].steps == 1


@pytest.mark.slow
@pytest.mark.parametrize("position", ["inside", "outside"])
def test_narrow_parameters_with_a_master_are_cast_in_the_loss(position):
  def cast_loss_fn(params, x, y):
    wide = jax.tree.map(lambda x: x.astype(jnp.float32), params)
    return loss_fn(wide, x, y)

  rule = ols.FixedLossScale(1024.0)
  if position == "inside":
    tx = ols.loss_scaling(ols.master_weights(BARE), rule)
  else:
    tx = ols.master_weights(ols.loss_scaling(BARE, rule))
  params = jax.tree.map(lambda x: x.astype(jnp.float16), PARAMS)
  step = jax.jit(by_steps().make_train_step(cast_loss_fn, tx))
  state, _, losses = run(step, start(tx=tx, params=params), STEPS)
  assert not state[2].low
  assert losses[-1] < losses[0]
  assert state[0]["w"].dtype == jnp.float16
  assert optax.tree.get(state[1], "master")["w"].dtype == jnp.float32


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_the_step_by_hand_is_that_of_make_train_step(dtype):
  schedule, tx = by_steps(dtype), scaling()

  @jax.jit
  def by_hand(params, opt_state, state, x, y):
    value_and_grad = schedule.value_and_grad(loss_fn, opt_state, state)
    loss, scaled_grads = value_and_grad(params, x, y)
    updates, opt_state = schedule.optimizer(tx, state).update(
      scaled_grads, opt_state, params
    )
    params = optax.apply_updates(params, updates)
    state = schedule.update(state, step=opt_state.applied_steps)
    return params, opt_state, state, loss

  state, _, _ = run(by_hand, start(schedule), STEPS)
  expected, _, _ = run(jitted(dtype), start(schedule), STEPS)
  assert same_bits(state, expected)


def test_gradients_of_other_arguments_by_one_of_several_scales():
  tx = scaling(ols.FixedLossScale(8.0))
  other = scaling(ols.FixedLossScale(1024.0))
  states = {"a": tx.init(PARAMS), "b": other.init(PARAMS)}
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


def test_a_damaged_scale_is_skipped_and_starts_over():
  """Outside of jit too, where S could be looked at."""
  rule = ols.DynamicLossScale()
  schedule, params, tx = by_steps(), PARAMS, ols.loss_scaling(BARE, rule)
  opt_state = optax.tree.set(tx.init(params), loss_scale=jnp.float32(jnp.nan))
  state = schedule.init()
  loss, scaled_grads = schedule.value_and_grad(loss_fn, opt_state, state)(
    params, X, Y
  )
  _, after = schedule.optimizer(tx, state).update(
    scaled_grads, opt_state, params
  )
  assert jnp.isfinite(loss)
  assert after.skipped and after.stalled
  assert ols.get_loss_scale(after) == rule.init().loss_scale
