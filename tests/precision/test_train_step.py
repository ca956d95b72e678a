"""The train step in two precisions: what it computes before and after."""

import functools
import itertools
import pickle

import flax.linen as nn
import flax.serialization
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_lossscale as ols

pytestmark = pytest.mark.usefixtures("quick_compilation")

X = np.linspace(-1, 1, 24, dtype=np.float32).reshape(8, 3)
Y = np.linspace(1, -1, 16, dtype=np.float32).reshape(8, 2)
PARAMS = {"w": jnp.linspace(0.3, 1.0, 6).reshape(3, 2), "b": jnp.zeros(2)}

STEPS = 6
# Not Adam, which makes the same step of scaled gradients.
BARE = optax.sgd(0.1, momentum=0.5)
TYPES = {"fast": jnp.float16, "fast1": jnp.bfloat16}


def loss_fn(params, x, y):
  return jnp.mean((jnp.tanh(x @ params["w"] + params["b"]) - y) ** 2)


def by_steps(kind="fast", **options):
  return ols.precision_schedule(
    f"{kind}|step|0.5", **{"total_steps": STEPS, **options}
  )


def by_loss(target, kind="fast"):
  return ols.precision_schedule(f"{kind}|loss|1.5", target_loss=target)


def scaling(rule=None, **options):
  rule = rule or ols.DynamicLossScale(1024.0, growth_interval=1)
  return ols.loss_scaling(BARE, rule, **options)


@functools.cache
def jitted(kind="fast"):
  """Returns the step of a "step" schedule, compiled once for many tests."""
  return jax.jit(by_steps(kind).make_train_step(loss_fn, scaling()))


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


def same_bits(a, b):
  return jax.tree.structure(a) == jax.tree.structure(b) and all(
    x.dtype == y.dtype and np.asarray(x).tobytes() == np.asarray(y).tobytes()
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
  )


def rule_states(states):
  return [opt_state.loss_scale_state for _, opt_state, _ in states]


def branches(step, state, *args):
  """Returns the text of what runs in full and in low precision."""
  jaxpr = jax.make_jaxpr(step)(*state, *(args or (X, Y)))
  (cond,) = [e for e in jaxpr.eqns if e.primitive.name == "cond"]
  return [str(branch) for branch in cond.params["branches"]]


@pytest.mark.parametrize("kind", TYPES)
def test_the_low_part_is_autocast_and_the_rest_is_as_written(kind):
  step = by_steps(kind).make_train_step(loss_fn, scaling())
  full, low = branches(step, start())
  short = {"fast": "f16[", "fast1": "bf16["}[kind]
  assert f"{short}8,2] = dot_general" in low
  assert short not in full
  assert "f32[8,2] = dot_general" in full


@pytest.mark.parametrize("kind", TYPES)
def test_the_low_part_is_the_step_by_hand(kind):
  low_loss_fn = ols.autocast(loss_fn, "O1", dtype=TYPES[kind])

  @jax.jit
  def by_hand(params, opt_state):
    loss, gradients = jax.value_and_grad(low_loss_fn)(params, X, Y)
    updates, opt_state = BARE.update(gradients, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, loss

  params, opt_state = PARAMS, BARE.init(PARAMS)
  for _ in range(2):
    params, opt_state, loss = by_hand(params, opt_state)
  state, _, losses = run(jitted(kind), start(by_steps(kind)), 2)
  assert losses[-1] == pytest.approx(float(loss), rel=1e-3)
  for name, param in params.items():
    np.testing.assert_allclose(state[0][name], param, rtol=1e-2)


@pytest.mark.parametrize("kind", TYPES)
def test_the_rest_is_the_step_of_the_bare_optimizer(kind):
  state, _, _ = run(jitted(kind), start(by_steps(kind)), 3)
  assert not state[2].low
  params, opt_state = state[0], state[1].inner_state
  after, _, losses = run(jitted(kind), state, 2)

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


@pytest.mark.parametrize(("kind", "moves"), [("fast", 3), ("fast1", 0)])
def test_the_rules_state_moves_in_the_float16_part_alone(kind, moves):
  _, states, _ = run(jitted(kind), start(by_steps(kind)), STEPS)
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
  _, _, losses = run(jitted("fast"), start(), 3)
  # Between the losses of the second step and of the third.
  target = (losses[1] + losses[2]) / 2 / 1.5
  schedule = by_loss(target)
  step = jax.jit(schedule.make_train_step(loss_fn, scaling()))
  _, states, again = run(step, start(schedule), 5)
  assert again[:3] == pytest.approx(losses, rel=1e-6)
  lows = [bool(state.low) for *_, state in states]
  assert lows == [True, True, True, False, False, False]


def test_the_loss_of_a_skipped_step_switches_nothing():
  # On a zero batch the loss is below the target, and the gradients are NaN.
  def loss_fn(params, x):
    return jnp.sum(jnp.sqrt(jnp.abs(x @ params["w"]))) + 1e-3

  schedule = by_loss(1.0)
  step = jax.jit(schedule.make_train_step(loss_fn, scaling()))
  *state, loss = step(*start(schedule), np.zeros_like(X))
  assert 0 < loss < 1
  assert state[1].skipped
  assert state[2].low


def test_the_switch_compiles_nothing():
  step = jax.jit(by_steps().make_train_step(loss_fn, scaling()))
  run(step, start(), STEPS)
  assert step._cache_size() == 1


@pytest.mark.parametrize(
  "make_schedule",
  [by_steps, lambda: by_loss(1.16)],
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


def test_level_overrides_and_operations_are_those_of_autocast():
  def loss_fn(params, x, y):
    with jax.named_scope("head"):
      h = x @ params["w"]
    return jnp.mean((jnp.tanh(h) @ jnp.ones((2, 2)) - y) ** 2)

  def low(**options):
    step = by_steps().make_train_step(loss_fn, scaling(), **options)
    return branches(step, start())[1]

  assert "f16[8,2] = tanh" in low()
  assert "f32[8,2] = tanh" in low(operations={"black": ["tanh"]})
  kept = low(overrides={"head": jnp.float32})
  assert "f32[8,2] = dot_general" not in low()
  assert "f32[8,2] = dot_general" in kept
  with pytest.raises(ValueError, match="`level` must be one of"):
    low(level="O4")


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
  schedule = by_steps("fast1")
  step = jax.jit(schedule.make_train_step(loss_fn, BARE))
  state, states, losses = run(step, start(schedule, BARE), STEPS)
  assert [bool(state.low) for *_, state in states] == [True] * 3 + [False] * 4
  assert losses[-1] < losses[0]
  assert state[2].steps == STEPS


def test_many_seeds_switch_each_at_its_own_time():
  schedule = by_loss(0.4)
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
  schedule = by_steps(total_steps=2)
  step = schedule.make_train_step(loss_fn, scaling())
  state, _, losses = run(step, start(schedule), 2)
  assert losses == pytest.approx(run(jitted(), start(), 2)[2], rel=1e-3)
  assert not state[2].low


@pytest.mark.parametrize("kind", TYPES)
def test_devices_switch_together_at_the_mean_of_their_losses(kind):
  mesh = jax.make_mesh(
    (2,),
    ("data",),
    axis_types=(jax.sharding.AxisType.Auto,),
    devices=jax.devices()[:2],
  )
  # One device is below the target from the first step on, the mean is not.
  y = np.concatenate([np.zeros((4, 2), np.float32), np.full((4, 2), 9.0)])
  x = X * 0.1
  schedule = by_loss(20.0, kind)
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


LOW_LOSSES = {
  "autocast": ols.autocast(loss_fn, "O1", dtype=jnp.bfloat16),
  "autocast inside": lambda params, x, y: jnp.mean(
    (ols.autocast(lambda w: x @ w)(params["w"]) - y) ** 2
  ),
  "jitted autocast": jax.jit(ols.autocast(loss_fn, "O2")),
  "layer": lambda params, x, y: jnp.mean(
    (
      Head(jnp.float16).apply(
        {"params": {"Dense_0": {"kernel": params["w"], "bias": params["b"]}}},
        x,
      )
      - y
    )
    ** 2
  ),
}


@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize("name", LOW_LOSSES, ids=lambda x: x.replace(" ", "-"))
def test_a_loss_that_is_in_low_precision_already_is_refused(name, kind):
  low_loss_fn = LOW_LOSSES[name]
  jax.eval_shape(low_loss_fn, PARAMS, X, Y)  # What jit has kept is seen too.
  step = by_steps(kind).make_train_step(low_loss_fn, scaling())
  with pytest.raises(
    ValueError, match="`loss_fn` must be in full precision.*dot_general"
  ):
    jax.eval_shape(step, *start(), X, Y)


def test_parameters_in_low_precision_are_refused():
  params = jax.tree.map(lambda x: x.astype(jnp.float16), PARAMS)
  step = by_steps().make_train_step(loss_fn, scaling())
  with pytest.raises(ValueError, match="let the parameters be float32"):
    jax.eval_shape(step, *start(params=params), jnp.asarray(X, jnp.float16), Y)


def test_data_in_low_precision_is_not():
  step = by_steps().make_train_step(loss_fn, scaling())
  *_, loss = jax.eval_shape(step, *start(), jnp.asarray(X, jnp.float16), Y)
  assert loss.dtype == jnp.float32


def test_float16_without_loss_scaling_is_refused():
  tx = optax.adam(0.1)
  step = by_steps().make_train_step(loss_fn, tx)
  with pytest.raises(ValueError, match="`tx` must hold loss_scaling.*Fixed"):
    jax.eval_shape(step, *start(tx=tx), X, Y)


def test_what_is_no_function_is_refused():
  with pytest.raises(TypeError, match="`fun`"):
    by_steps().make_train_step(3.0, scaling())
