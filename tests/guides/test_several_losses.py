"""Recipes for several losses and optimizers, as a reader would run them.

Gradients here are simple enough to be known, and overflow where a test says so.
What the recipes make of them is held against optax alone on true gradients, a
plain-Python model of the rule, and a table of who skips when.
"""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_lossscale as ols
from tests import documents
from tests import reference
from tests.support import relative_error

pytestmark = pytest.mark.slow

PAGE = documents.read("docs/guides/several_losses.md")
NAMES = ("discriminator", "generator")
INTERVAL = 3
RULE = ols.DynamicLossScale(2.0**10, growth_interval=INTERVAL)
MODEL = functools.partial(reference.Dynamic, 2.0**10, growth_interval=INTERVAL)

# Which of two losses overflow, step by step: enough clean steps for S to grow,
# each alone, both, and both ends of a row.
STEPS = [
  *((), (), (), ("generator",), (), ("discriminator",), ("discriminator",)),
  *((), NAMES, (), (), ("generator",), (), (), ()),
]


def run(title, **names):
  """Returns the names that a recipe leaves behind."""
  common = {"jax": jax, "jnp": jnp, "np": np, "optax": optax, "ols": ols}
  text = documents.section(PAGE, title)
  return documents.run(text, common | {"rule": RULE} | names)


def assert_close(found, expected, rtol=1e-5):
  """Asserts that two trees are the same up to rounding."""
  chex.assert_trees_all_close(found, expected, rtol=rtol, atol=0)


# Two optimizers ---------------------------------------------------------------


def make_loss(name, other):
  """Returns a loss whose gradient is `own + params[other]` times a factor.

  On a batch with an inf for this name it is inf.
  """

  def loss_fn(own, params, batch):
    gradient = own + params[other]
    known = jax.lax.stop_gradient(gradient) * batch[name]
    return jnp.sum(own * known)

  return loss_fn


LOSSES = {
  "discriminator": make_loss("discriminator", "generator"),
  "generator": make_loss("generator", "discriminator"),
}
PARAMS = {
  "discriminator": jnp.array([1.0, -2.0]),
  "generator": jnp.array([0.5, 3.0]),
}


def make_batch(overflows):
  return {name: jnp.inf if name in overflows else 1.0 for name in NAMES}


@functools.cache
def bare_adam():
  """Returns the steps of the two optimizers, by optax alone."""
  rates = {"discriminator": 4e-4, "generator": 1e-4}
  return {name: optax.adam(rate, b1=0.5) for name, rate in rates.items()}


def bare_run(skips, in_turn):
  """Returns the parameters after every step.

  Args:
    skips: for each step, who skips it.
    in_turn: whether the second sees what the first has done.
  """
  params = dict(PARAMS)
  states = {name: tx.init(params[name]) for name, tx in bare_adam().items()}
  history = []
  for skipped in skips:
    before = dict(params)
    for name, other in (NAMES, NAMES[::-1]):
      if name in skipped:
        continue
      gradient = before[name] + (params if in_turn else before)[other]
      updates, states[name] = bare_adam()[name].update(gradient, states[name])
      params[name] = optax.apply_updates(params[name], updates)
    history.append(dict(params))
  return history


def scales_of(overflows):
  """Returns S after every step, by the plain-Python model."""
  model, scales = MODEL(), []
  for overflow in overflows:
    model.update(overflow)
    scales.append(model.scale)
  return scales


@functools.cache
def recipe_of(title):
  return run(title, losses=LOSSES, params=PARAMS, batch=make_batch(()))


def each_step(title, states):
  """Yields what the recipe has after each of `STEPS`.

  Args:
    title: of the recipe.
    states: the names of what its step takes after the parameters.
  """
  recipe = recipe_of(title)
  first = {
    "opt_state": lambda: (
      recipe["tx"].init(PARAMS)
      if "tx" in recipe
      else {n: tx.init(PARAMS[n]) for n, tx in recipe["optimizers"].items()}
    ),
    "scales": lambda: {n: recipe["scaling"].init(PARAMS[n]) for n in NAMES},
  }
  now = [PARAMS, *(first[name]() for name in states)]
  for overflows in STEPS:
    now = recipe["train_step"](*now, make_batch(overflows))
    yield now
  assert recipe["train_step"]._cache_size() <= 2  # Made first, in the recipe.


def test_a_scale_each_each_skips_alone():
  title = "Two optimizers, a scale each"
  expected = bare_run(STEPS, in_turn=True)
  scales = {n: scales_of([n in step for step in STEPS]) for n in NAMES}
  for i, (params, opt_state) in enumerate(each_step(title, ["opt_state"])):
    assert_close(params, expected[i])
    for name in NAMES:
      state = opt_state[name]
      assert ols.get_loss_scale(state) == scales[name][i]
      assert state.skipped == (name in STEPS[i])
      count = ols.select_on_skip(opt_state, new=1, old=0, path=name)
      assert count == (name not in STEPS[i])
  assert scales["generator"] != scales["discriminator"]
  assert recipe_of(title)["metrics"]["generator"]["applied_steps"] == 1


@pytest.mark.slow
def test_a_scale_each_they_skip_together_and_each_s_follows_its_own_loss():
  title = "A scale each, skipping together"
  expected = bare_run([NAMES if step else () for step in STEPS], in_turn=False)
  scales = {n: scales_of([n in step for step in STEPS]) for n in NAMES}
  steps = each_step(title, ["opt_state", "scales"])
  for i, (params, opt_state, states) in enumerate(steps):
    assert_close(params, expected[i])
    for name in NAMES:
      assert ols.get_loss_scale(states[name]) == scales[name][i]
      assert opt_state[name].skipped == bool(STEPS[i])
      assert states[name].overflow == (name in STEPS[i])


def on_two_devices(title, batch, changes, states):
  """Returns parameters and states after a recipe's step on two devices.

  Gradients are those of each device, as `pmean_gradients` wants them.

  Args:
    title: of the recipe.
    batch: with two numbers for each name, one for each device.
    changes: from what is on the page to what takes its place.
    states: the names of what to return beside the parameters.
  """
  text = documents.section(PAGE, title)
  varying = {"(params[name], p": '(ols.make_varying(params[name], "data"), p'}
  for old, new in (changes | varying).items():
    assert old in text
    text = text.replace(old, new)

  def step(batch):
    names = {"jax": jax, "jnp": jnp, "optax": optax, "ols": ols, "rule": RULE}
    names |= {"losses": LOSSES, "params": PARAMS, "batch": batch}
    names = documents.run(text, names)
    return names["params"], *(names[name] for name in states)

  mesh = jax.make_mesh(
    (2,), ("data",), (jax.sharding.AxisType.Auto,), devices=jax.devices()[:2]
  )
  spec = jax.sharding.PartitionSpec
  return jax.jit(
    jax.shard_map(
      step, mesh=mesh, in_specs=spec("data"), out_specs=spec(), check_vma=True
    )
  )(batch)


IN_SCALING = {
  "optax.identity()": 'ols.pmean_gradients("data")',
  ", rule)": ', rule, axis_name="data")',
}
IN_OPTIMIZERS = {
  ", rule)": ', rule, axis_name="data")',
  "optax.adam(4e-4, b1=0.5)": (
    'optax.chain(ols.pmean_gradients("data"), optax.adam(4e-4, b1=0.5))'
  ),
  "optax.adam(1e-4, b1=0.5)": (
    'optax.chain(ols.pmean_gradients("data"), optax.adam(1e-4, b1=0.5))'
  ),
}
NAMED = {", alone)": ', alone, axis_name="data")'}


@pytest.mark.slow
@pytest.mark.parametrize(
  "changes",
  [IN_SCALING, IN_OPTIMIZERS | NAMED],
  ids=["in scaling", "in the optimizers"],
)
def test_a_scale_each_on_two_devices(changes):
  step = functools.partial(
    on_two_devices,
    "A scale each, skipping together",
    changes=changes,
    states=["opt_state", "scales"],
  )
  batch = {name: jnp.array([1.0, -3.0]) for name in NAMES}
  params, opt_state, _ = step(batch)
  # The mean of both devices has the sign of the second.
  for name, other in (NAMES, NAMES[::-1]):
    tx, gradient = bare_adam()[name], -(PARAMS[name] + PARAMS[other])
    updates, _ = tx.update(gradient, tx.init(PARAMS[name]))
    assert_close(params[name], optax.apply_updates(PARAMS[name], updates))
    assert not opt_state[name].skipped
  batch["generator"] = jnp.array([1.0, jnp.inf])
  params, opt_state, scales = step(batch)
  assert_close(params, PARAMS, rtol=0)
  assert all(opt_state[name].skipped for name in NAMES)
  assert ols.get_loss_scale(scales["generator"]) == 2.0**9
  assert ols.get_loss_scale(scales["discriminator"]) == 2.0**10


def test_an_optimizer_that_takes_the_mean_itself_needs_the_axis_too():
  title = "A scale each, skipping together"
  batch = {name: jnp.ones(2) for name in NAMES}
  with pytest.raises(ValueError, match="axis_name"):
    on_two_devices(title, batch, IN_OPTIMIZERS, [])


@pytest.mark.parametrize("argument", ["skip", "overflow"])
def test_fewer_lines_pass_all_flags_to_each_wrapper(argument):
  (code,) = documents.blocks(
    documents.section(PAGE, "Skipping together, in fewer lines")
  )
  names = dict(recipe_of("Two optimizers, a scale each"))
  exec(code.replace("skip=flags", f"{argument}=flags"), names)
  opt_state = {n: tx.init(PARAMS[n]) for n, tx in names["optimizers"].items()}
  start = opt_state["generator"].loss_scale_state
  opt_state["generator"] = opt_state["generator"]._replace(
    loss_scale_state=start._replace(loss_scale=jnp.float32(2.0**4))
  )
  expected = bare_run([NAMES if step else () for step in STEPS], in_turn=False)
  seen = {name: [] for name in NAMES}
  params, ratios = PARAMS, set()
  for i, overflows in enumerate(STEPS):
    params, opt_state = names["train_step"](
      params, opt_state, make_batch(overflows)
    )
    assert_close(params, expected[i])
    for name in NAMES:
      # With `skip` a rule does not see that only the other one overflowed.
      if argument == "overflow":
        seen[name].append(bool(overflows))
      elif name in overflows or not overflows:
        seen[name].append(name in overflows)
    first, second = (float(ols.get_loss_scale(opt_state[x])) for x in NAMES)
    ratios.add(first / second)
    assert first == scales_of(seen[NAMES[0]])[-1]
    assert second == scales_of(seen[NAMES[1]])[-1] / 2.0**6
  assert (ratios == {2.0**6}) == (argument == "overflow")


def test_one_scale_all_skip_together():
  title = "One scale, all skip together"
  expected = bare_run([NAMES if step else () for step in STEPS], in_turn=False)
  scales = scales_of([bool(step) for step in STEPS])
  for i, (params, opt_state) in enumerate(each_step(title, ["opt_state"])):
    assert_close(params, expected[i])
    assert ols.get_loss_scale(opt_state) == scales[i]
    assert opt_state.skipped == bool(STEPS[i])


def test_one_scale_each_skips_alone():
  title = "One scale, each skips separately"
  expected = bare_run(STEPS, in_turn=True)
  scales = scales_of([bool(step) for step in STEPS])
  for i, (params, opt_state) in enumerate(each_step(title, ["opt_state"])):
    assert_close(params, expected[i])
    for name in NAMES:
      assert ols.get_loss_scale(opt_state, path=name) == scales[i]
      assert opt_state[name].skipped == (name in STEPS[i])


def test_one_scale_each_skips_alone_is_what_grad_scaler_does():
  title = "One scale, each skips separately"
  rule = ols.presets.torch(init_scale=2.0**10, growth_interval=INTERVAL)
  recipe = run(
    title, rule=rule, losses=LOSSES, params=PARAMS, batch=make_batch(())
  )
  model = reference.Torch(2.0**10, growth_interval=INTERVAL)
  params, opt_state = recipe["params"], recipe["opt_state"]
  model.update(False)
  for overflows in STEPS:
    params, opt_state = recipe["train_step"](
      params, opt_state, make_batch(overflows)
    )
    model.update(bool(overflows))
    for name in NAMES:
      assert ols.get_loss_scale(opt_state[name]) == model.scale


# Losses that share parameters -------------------------------------------------

MODEL_PARAMS = {
  "actor": jnp.array(2.0),
  "critic": jnp.array(3.0),
  "encoder": jnp.array(0.5),
}
HEADS = ("actor", "critic")


def make_head_loss(name):
  """Returns a loss: factor times head times encoder."""

  def loss_fn(params, batch):
    return batch[name] * params[name] * params["encoder"]

  return loss_fn


HEAD_LOSSES = {name: make_head_loss(name) for name in HEADS}


def head_gradients(params, weights):
  """Returns the gradient of the weighted sum, by hand, in float64."""
  actor, critic, encoder = (np.float64(params[n]) for n in MODEL_PARAMS)
  return {
    "actor": jnp.float32(weights["actor"] * encoder),
    "critic": jnp.float32(weights["critic"] * encoder),
    "encoder": jnp.float32(
      weights["actor"] * actor + weights["critic"] * critic
    ),
  }


def head_step(params, state, batch, critic_weight=1.0):
  """Returns parameters and state after a step of bare Adam."""
  weights = {"actor": batch["actor"], "critic": critic_weight * batch["critic"]}
  tx = optax.adam(3e-4)
  updates, state = tx.update(head_gradients(params, weights), state)
  return optax.apply_updates(params, updates), state


def head_batch(overflows=()):
  return {
    "actor": jnp.inf if "actor" in overflows else 0.75,
    # So that the weight of the sum decides where Adam takes the encoder.
    "critic": jnp.inf if "critic" in overflows else -0.75,
  }


HEAD_STEPS = [(), (), ("actor",), (), ("critic",), HEADS, (), (), ()]


@pytest.mark.slow
def test_one_loss_of_two_parts_has_one_scale():
  recipe = run(
    "Actor and critic: one loss of two parts",
    params=MODEL_PARAMS,
    batch=head_batch(),
    actor_loss=HEAD_LOSSES["actor"],
    critic_loss=HEAD_LOSSES["critic"],
  )
  assert recipe["parts"] == {"actor": 0.75, "critic": -1.125}
  params, opt_state = MODEL_PARAMS, recipe["tx"].init(MODEL_PARAMS)
  bare, bare_state = MODEL_PARAMS, optax.adam(3e-4).init(MODEL_PARAMS)
  model = MODEL()
  for overflows in HEAD_STEPS:
    batch = head_batch(overflows)
    params, opt_state, _ = recipe["train_step"](params, opt_state, batch)
    if not overflows:
      bare, bare_state = head_step(bare, bare_state, batch, 0.5)
    model.update(bool(overflows))
    assert_close(params, bare)
    assert ols.get_loss_scale(opt_state) == model.scale


@functools.cache
def sum_recipe():
  return run(
    "A sum of losses, a scale each",
    params=MODEL_PARAMS,
    batch=head_batch(),
    losses=HEAD_LOSSES,
  )


@pytest.mark.slow
def test_a_sum_of_losses_moves_each_scale_by_its_own_loss():
  recipe = sum_recipe()
  params, opt_state = MODEL_PARAMS, recipe["tx"].init(MODEL_PARAMS)
  scales = {name: recipe["scaling"].init(MODEL_PARAMS) for name in HEADS}
  bare, bare_state = MODEL_PARAMS, optax.adam(3e-4).init(MODEL_PARAMS)
  models = {name: MODEL() for name in HEADS}
  for overflows in HEAD_STEPS:
    batch = head_batch(overflows)
    params, opt_state, scales = recipe["train_step"](
      params, opt_state, scales, batch
    )
    if not overflows:
      bare, bare_state = head_step(bare, bare_state, batch)
    assert_close(params, bare)
    assert opt_state.skipped == bool(overflows)
    for name in HEADS:
      models[name].update(name in overflows)
      assert ols.get_loss_scale(scales[name]) == models[name].scale


@pytest.mark.slow
def test_a_sum_of_losses_holds_what_one_scale_cannot():
  """Gradients of 2**12 and 2**-30: no S brings both into float16."""

  def half_loss(factor):
    def loss_fn(params, batch):
      del batch
      product = params["w"].astype(jnp.float16) * jnp.float16(factor)
      return product.astype(jnp.float32) * jnp.float32(factor)

    return loss_fn

  losses = {"large": half_loss(2.0**6), "small": half_loss(2.0**-15)}
  params = {"w": jnp.float32(1)}
  rule = ols.DynamicLossScale(2.0**20, growth_interval=1)
  recipe = run(
    "A sum of losses, a scale each",
    params=params,
    batch=None,
    losses=losses,
    rule=rule,
  )
  scales = recipe["scales"]
  for _ in range(20):
    _, _, scales = recipe["train_step"](params, recipe["opt_state"], scales, 0)
  # Each is at its limit, where it goes up and down between two values.
  large, small = (
    float(ols.get_loss_scale(scales[name])) / 2 for name in ("large", "small")
  )

  def gradient(name, scale):
    scaled_grads = jax.grad(lambda p: losses[name](p, 0) * scale)(params)
    return ols.unscale(scaled_grads, scale)["w"]

  assert gradient("large", large) == 2.0**12
  assert gradient("small", small) == 2.0**-30
  of_both = jax.jit(lambda scale: [gradient(name, scale) for name in losses])
  for exponent in range(-10, 40):
    assert of_both(jnp.float32(2.0**exponent)) != [2.0**12, 2.0**-30]


def test_without_the_flag_the_other_loss_alone_makes_the_step():
  recipe = sum_recipe()
  state = recipe["scaling"].init(MODEL_PARAMS)
  updates, state = recipe["scaling"].update({"w": jnp.array(jnp.inf)}, state)
  assert state.overflow
  assert updates["w"] == 0 and np.signbit(updates["w"])


def test_parameter_groups_share_one_flag():
  params = {
    "dense": {"kernel": jnp.ones(2), "bias": jnp.ones(2)},
    "norm": {"scale": jnp.ones(1)},
  }
  recipe = run("Parameter groups", params=params)
  tx, state = recipe["tx"], recipe["opt_state"]
  scaled_grads = jax.tree.map(lambda x: 2.0**10 * x, params)
  updates, state = tx.update(scaled_grads, state, params)
  bare = {"decay": optax.adamw(1e-3), "no_decay": optax.adam(1e-3)}
  for updated, param, name in (
    (updates["dense"]["kernel"], params["dense"]["kernel"], "decay"),
    (updates["dense"]["bias"], params["dense"]["bias"], "no_decay"),
    (updates["norm"]["scale"], params["norm"]["scale"], "no_decay"),
  ):
    expected, _ = bare[name].update(param, bare[name].init(param), param)
    assert_close(updated, expected)
  for bad in ("dense", "norm"):
    spoiled = scaled_grads | {
      bad: jax.tree.map(lambda x: x * jnp.inf, scaled_grads[bad])
    }
    updates, after = tx.update(spoiled, state, params)
    assert after.skipped
    assert all(not np.any(x) for x in jax.tree.leaves(updates))
    assert_close(after.inner_state, state.inner_state, rtol=0)


def test_an_overflow_in_a_frozen_group_skips_too():
  tx = ols.loss_scaling(
    optax.partition(
      {"train": optax.sgd(1.0), "freeze": optax.set_to_zero()},
      {"a": "train", "b": "freeze"},
    ),
    RULE,
  )
  params = {"a": jnp.ones(1), "b": jnp.ones(1)}
  scaled_grads = {"a": jnp.ones(1), "b": jnp.array([jnp.inf])}
  _, state = tx.update(scaled_grads, tx.init(params), params)
  assert state.skipped


# A gradient penalty -----------------------------------------------------------


def critic(params, x, dtype=jnp.float16):
  """Returns a number per example, computed in float16, of small slopes."""
  hidden = jnp.tanh(x.astype(dtype) @ params["first"].astype(dtype))
  return (hidden @ params["second"].astype(dtype)).astype(x.dtype)


def penalty_case(second=1e-5):
  rng = np.random.default_rng(0)
  params = {
    "first": rng.normal(size=(3, 8)) * 1e-4,
    "second": rng.normal(size=8) * second,
  }
  batch = {
    "real": rng.normal(size=(5, 3)),
    "fake": rng.normal(size=(5, 3)),
    "where": rng.uniform(size=(5, 1)),
  }
  single = lambda x: jnp.asarray(x, jnp.float32)  # noqa: E731
  return jax.tree.map(single, params), jax.tree.map(single, batch)


def autocast_critic(params, x):
  """Returns the same, by `autocast`."""
  single = functools.partial(critic, dtype=jnp.float32)
  return ols.autocast(single, "O1", dtype=jnp.float16)(params, x)


@functools.cache
def penalty_recipe(second=1e-5, critic=critic):
  params, batch = penalty_case(second)
  return run("A gradient penalty", params=params, batch=batch, critic=critic)


def true_penalty_gradient(params, batch):
  """Returns the loss and its gradient in float64, written anew."""

  def loss_fn(params, batch):
    def value(x):
      return critic(params, x[None], jnp.float64)[0]

    between = batch["real"] + batch["where"] * (batch["fake"] - batch["real"])
    slopes = jax.vmap(jax.grad(value))(between)
    norms = jnp.sqrt(jnp.sum(slopes**2, axis=1))
    values = {n: jax.vmap(value)(batch[n]) for n in ("fake", "real")}
    difference = jnp.mean(values["fake"]) - jnp.mean(values["real"])
    return difference + 10 * jnp.mean((norms - 1) ** 2)

  with jax.enable_x64(True):
    double = lambda x: jnp.asarray(np.asarray(x), jnp.float64)  # noqa: E731
    params, batch = jax.tree.map(double, (params, batch))
    return jax.tree.map(
      np.asarray, jax.jit(jax.value_and_grad(loss_fn))(params, batch)
    )


@pytest.mark.slow
@pytest.mark.parametrize("critic", [critic, autocast_critic])
def test_a_gradient_penalty_has_its_true_gradient(critic):
  params, batch = penalty_case()
  recipe = penalty_recipe(critic=critic)
  loss, expected = true_penalty_gradient(params, batch)
  np.testing.assert_allclose(recipe["loss"], loss, rtol=1e-5)
  assert not recipe["opt_state"].skipped
  state = recipe["tx"].init(params)
  state = optax.tree.set(state, loss_scale=jnp.float32(2.0**15))
  _, scaled_grads = jax.jit(
    lambda state: ols.scaled_value_and_grad(recipe["critic_loss"], state)(
      params, batch, state
    )
  )(state)
  grads = ols.unscale(scaled_grads, state)
  for name in params:
    assert relative_error(grads[name], expected[name]) < 0.03


@pytest.mark.parametrize("critic", [critic, autocast_critic])
def test_a_gradient_penalty_without_an_inner_scale_pushes_nowhere(critic):
  params, batch = penalty_case()
  recipe = penalty_recipe(critic=critic)

  def plain(params, batch, opt_state):
    one = jax.tree.map(jnp.zeros_like, opt_state)
    one = optax.tree.set(one, loss_scale=jnp.float32(1))
    return recipe["critic_loss"](params, batch, one)

  def difference(params, batch, opt_state):
    del opt_state
    return jnp.mean(
      critic(params, batch["fake"]) - critic(params, batch["real"])
    )

  @jax.jit
  def gradients(state):
    return [
      ols.scaled_value_and_grad(loss_fn, state)(params, batch, state)
      for loss_fn in (plain, difference)
    ]

  (loss, grads), (_, expected) = gradients(recipe["tx"].init(params))
  np.testing.assert_allclose(loss, 10, rtol=1e-5)  # As if all slopes were 0.
  assert_close(grads, expected)


def relu_critic(params, x):
  """Returns a number per example, in float16; 0 if all units are off."""
  x, *kernels = (
    leaf.astype(jnp.float16) for leaf in (x, params["first"], params["second"])
  )
  return (jax.nn.relu(x @ kernels[0]) @ kernels[1]).astype(jnp.float32)


def penalty_run(params, batch, critic, init_scale, steps):
  """Returns the recipe, its names and the states after each step."""
  rule = ols.DynamicLossScale(init_scale, growth_interval=1)
  names = {"params": params, "batch": batch, "critic": critic, "rule": rule}
  recipe = run("A gradient penalty", **names)
  state, states = recipe["tx"].init(params), []
  for _ in range(steps):
    params, state, _ = recipe["train_step"](params, state, batch)
    states.append(state)
  return params, states


@pytest.mark.slow
@pytest.mark.parametrize("critic", [critic, autocast_critic])
def test_a_gradient_penalty_finds_its_s_from_a_low_one(critic):
  params, batch = penalty_case()
  trained, states = penalty_run(params, batch, critic, 4.0, 8)
  assert not any(state.skipped for state in states)
  assert ols.get_loss_scale(states[-1]) == 2.0**10
  assert all(np.isfinite(x).all() for x in jax.tree.leaves(trained))
  assert np.any(trained["second"] != params["second"])


@pytest.mark.slow
def test_a_dead_example_adds_nothing_to_a_gradient_penalty():
  params, batch = penalty_case(second=1.0)
  params = jax.tree.map(jnp.abs, params) | {"first": jnp.ones((3, 8)) / 4}
  batch = jax.tree.map(jnp.abs, batch)
  rows = jnp.arange(5)[:, None] > 0
  # All units are off for the first example, and its slope is exactly 0.
  dead = {n: jnp.where(rows, batch[n], -batch[n]) for n in ("real", "fake")}
  _, states = penalty_run(params, batch | dead, relu_critic, 4.0, 3)
  assert not any(state.skipped for state in states)
  assert ols.get_loss_scale(states[-1]) == 32
  gradient = jax.jit(jax.grad(penalty_recipe(1.0, relu_critic)["critic_loss"]))
  grads = gradient(params, batch | dead, 1.0)
  without = gradient(params, {n: x[1:] for n, x in batch.items()}, 1.0)
  assert_close(grads, jax.tree.map(lambda x: x * 0.8, without), rtol=5e-3)


def test_an_overflow_of_the_inner_pass_skips_and_shrinks_s():
  params, batch = penalty_case(second=8.0)
  recipe = penalty_recipe(second=8.0)
  state = recipe["tx"].init(params)
  state = optax.tree.set(state, loss_scale=jnp.float32(2.0**15))
  now, losses, skipped = params, [], []
  for _ in range(7):
    now, state, loss = recipe["train_step"](now, state, batch)
    skipped.append(bool(state.skipped))
    losses.append(float(loss))
    if skipped[-1]:
      assert_close(now, params, rtol=0)
  assert skipped[0] and not skipped[-1]
  assert skipped == sorted(skipped, reverse=True)
  assert not np.isfinite(losses[0]) and np.isfinite(losses[-1])
  assert ols.get_loss_scale(state) < 2.0**15


# Layers -----------------------------------------------------------------------


def test_factors_of_layers_leave_the_gradients_as_they_are():

  def layer(params, x):
    return jnp.tanh(x @ params)

  recipe = run("A scale for each layer", layer=layer)
  rng = np.random.default_rng(0)
  params = [jnp.float32(rng.normal(size=(4, 4))) for _ in range(3)]
  x = jnp.float32(rng.normal(size=(2, 4)))

  @jax.jit
  def gradients(factors):
    return jax.grad(lambda p: jnp.sum(recipe["network"](p, x, factors)))(params)

  plain = gradients([1.0, 1.0, 1.0])
  for a, b in zip(plain, gradients([2.0**20, 2.0**-7, 8.0]), strict=True):
    np.testing.assert_array_equal(a, b)


def test_a_layer_without_a_gradient_takes_a_factor_of_1():
  names = {"layer": lambda params, x: jnp.tanh(x @ params)}
  network = run("A scale for each layer", **names)["network"]
  # Nothing comes through the last layer but to the last layer.
  params = [jnp.eye(4), jnp.eye(4), jnp.zeros((4, 4))]
  x = jnp.linspace(-1.0, 1.0, 8).reshape(2, 4)

  def gradients(factors):
    loss_fn = lambda p: jnp.sum(network(p, x, factors))  # noqa: E731
    return jax.grad(loss_fn)(params)

  plain = gradients([1.0, 1.0, 1.0])
  largest = np.array([np.abs(g).max() for g in plain])
  assert (largest > 0).tolist() == [False, False, True]
  with np.errstate(divide="ignore"):
    factors = 2.0 ** -np.floor(np.log2(largest))
  assert np.isinf(factors[:2]).all()
  with pytest.raises(ValueError, match="finite"):
    gradients(factors.tolist())
  factors[largest == 0] = 1.0
  for a, b in zip(plain, gradients(factors.tolist()), strict=True):
    np.testing.assert_array_equal(a, b)


def test_the_table_at_the_top_leads_to_the_recipes():
  for line in PAGE.splitlines():
    if line.startswith("## "):
      anchor = line[3:].lower().replace(" ", "-")
      anchor = "".join(c for c in anchor if c.isalnum() or c == "-")
      linked = f"(#{anchor})" in PAGE
      assert linked or line[3:] in (
        "Parameter groups",
        "A gradient penalty",
        "A scale for each layer",
      )
