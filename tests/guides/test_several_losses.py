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


@functools.cache
def page():
  return documents.run_as_shown(PAGE)


def run(title, words, **names):
  """Returns the names after a block of the page, with other names before."""
  names = page() | {"rule": RULE} | names
  exec(documents.block(PAGE, title, words), names)
  return names


def test_the_page_prints_what_it_shows():
  assert page()["train_step"]._cache_size() == 1


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
def first_recipe():
  title = "Two optimizers, a scale each"
  return run(title, "def train_step", losses=LOSSES, params=PARAMS)


def each_step(train_step, opt_state):
  """Yields what a step makes of each of `STEPS`."""
  now = PARAMS, opt_state
  for overflows in STEPS:
    now = train_step(*now, make_batch(overflows))
    yield now


def test_a_scale_each_each_skips_alone():
  names = first_recipe()
  expected = bare_run(STEPS, in_turn=True)
  scales = {n: scales_of([n in step for step in STEPS]) for n in NAMES}
  steps = each_step(names["train_step"], names["opt_state"])
  for i, (params, opt_state) in enumerate(steps):
    assert_close(params, expected[i])
    for name in NAMES:
      state = opt_state[name]
      assert ols.get_loss_scale(state) == scales[name][i]
      assert state.skipped == (name in STEPS[i])
      count = ols.select_on_skip(opt_state, new=1, old=0, path=name)
      assert count == (name not in STEPS[i])
  assert scales["generator"] != scales["discriminator"]


@pytest.mark.parametrize("argument", ["skip", "overflow"])
def test_fewer_lines_pass_all_flags_to_each_wrapper(argument):
  title = "Skipping together, in fewer lines"
  code = documents.block(PAGE, title, "def together").partition("show(")[0]
  names = dict(first_recipe())
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
    params, opt_state = names["together"](
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


@pytest.mark.parametrize("system", ["rule", "torch"])
def test_one_scale_each_skips_alone(system):
  rule, model = RULE, MODEL()
  if system == "torch":
    rule = ols.presets.torch(init_scale=2.0**10, growth_interval=INTERVAL)
    model = reference.Torch(2.0**10, growth_interval=INTERVAL)
  title = "Two optimizers, a scale each"
  names = run(title, "def train_step", losses=LOSSES, rule=rule)
  title = "One scale, each skips separately"
  share = run(title, "def share", rule=rule)["share"]
  params, opt_state = (
    PARAMS,
    {name: tx.init(PARAMS[name]) for name, tx in names["optimizers"].items()},
  )
  expected = bare_run(STEPS, in_turn=True)
  for i, overflows in enumerate(STEPS):
    before = opt_state
    params, opt_state = names["train_step"](
      params, opt_state, make_batch(overflows)
    )
    opt_state = share(before, opt_state)
    assert_close(params, expected[i])
    model.update(bool(overflows))
    for name in NAMES:
      assert ols.get_loss_scale(opt_state, path=name) == model.scale
      assert opt_state[name].skipped == (name in overflows)


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


def sum_recipe(losses=None, rule=RULE):
  title = "A sum of losses, a scale each"
  names = run(title, "sum_step", losses=losses or HEAD_LOSSES, rule=rule)
  return names | {"sum_step": jax.jit(names["sum_step"])}


@pytest.mark.slow
def test_a_sum_of_losses_moves_each_scale_by_its_own_loss():
  recipe = sum_recipe()
  params, opt_state = MODEL_PARAMS, recipe["tx"].init(MODEL_PARAMS)
  scales = {name: recipe["scaling"].init(MODEL_PARAMS) for name in HEADS}
  bare, bare_state = MODEL_PARAMS, optax.adam(3e-4).init(MODEL_PARAMS)
  models = {name: MODEL() for name in HEADS}
  for overflows in HEAD_STEPS:
    batch = head_batch(overflows)
    params, opt_state, scales = recipe["sum_step"](
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
  recipe = sum_recipe(losses, rule)
  scales = {name: recipe["scaling"].init(params) for name in losses}
  opt_state = recipe["tx"].init(params)
  for _ in range(20):
    _, _, scales = recipe["sum_step"](params, opt_state, scales, 0)
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
    "noise": rng.normal(size=(5, 3)),
    "where": rng.uniform(size=(5, 1)),
  }
  single = lambda x: jnp.asarray(x, jnp.float32)  # noqa: E731
  return jax.tree.map(single, params), jax.tree.map(single, batch)


def autocast_critic(params, x):
  """Returns the same, by `autocast`."""
  single = functools.partial(critic, dtype=jnp.float32)
  return ols.autocast(single, "O1", dtype=jnp.float16)(params, x)


@functools.cache
def penalty_loss(critic=critic):
  names = dict(page())
  exec(documents.block(PAGE, "A gradient penalty", "def critic_loss"), names)
  names["critic"] = critic
  return names["critic_loss"]


def true_penalty_gradient(params, batch):
  """Returns the loss and its gradient in float64, written anew."""

  def loss_fn(params, batch):
    def value(x):
      return critic(params, x[None], jnp.float64)[0]

    between = batch["real"] + batch["where"] * (batch["noise"] - batch["real"])
    slopes = jax.vmap(jax.grad(value))(between)
    norms = jnp.sqrt(jnp.sum(slopes**2, axis=1))
    values = {n: jax.vmap(value)(batch[n]) for n in ("noise", "real")}
    difference = jnp.mean(values["noise"]) - jnp.mean(values["real"])
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
  loss, expected = true_penalty_gradient(params, batch)
  scale = 2.0**15
  found, scaled_grads = jax.jit(
    ols.scaled_value_and_grad(penalty_loss(critic), scale)
  )(params, batch, scale)
  np.testing.assert_allclose(found, loss, rtol=1e-5)
  grads = ols.unscale(scaled_grads, scale)
  for name in params:
    assert relative_error(grads[name], expected[name]) < 0.03


@pytest.mark.parametrize("critic", [critic, autocast_critic])
def test_a_gradient_penalty_without_an_inner_scale_pushes_nowhere(critic):
  params, batch = penalty_case()

  def plain(params, batch):
    return penalty_loss(critic)(params, batch, 1.0)

  def difference(params, batch):
    return jnp.mean(
      critic(params, batch["noise"]) - critic(params, batch["real"])
    )

  @jax.jit
  def gradients(scale):
    return [
      ols.scaled_value_and_grad(loss_fn, scale)(params, batch)
      for loss_fn in (plain, difference)
    ]

  (loss, grads), (_, expected) = gradients(2.0**10)
  np.testing.assert_allclose(loss, 10, rtol=1e-5)  # As if all slopes were 0.
  assert_close(grads, expected)


def relu_critic(params, x):
  """Returns a number per example, in float16; 0 if all units are off."""
  x, *kernels = (
    leaf.astype(jnp.float16) for leaf in (x, params["first"], params["second"])
  )
  return (jax.nn.relu(x @ kernels[0]) @ kernels[1]).astype(jnp.float32)


def penalty_run(params, batch, critic, init_scale, steps):
  """Returns parameters, optimizer states and losses after each step."""
  rule = ols.DynamicLossScale(init_scale, growth_interval=1)
  tx = ols.loss_scaling(optax.adam(1e-4, b1=0.0), rule)

  @jax.jit
  def train_step(params, state):
    value_and_grad = ols.scaled_value_and_grad(penalty_loss(critic), state)
    loss, scaled_grads = value_and_grad(params, batch, state)
    updates, state = tx.update(scaled_grads, state, params)
    return optax.apply_updates(params, updates), state, loss

  state, seen = tx.init(params), []
  for _ in range(steps):
    params, state, loss = train_step(params, state)
    seen.append((params, state, float(loss)))
  return zip(*seen, strict=True)


@pytest.mark.slow
@pytest.mark.parametrize("critic", [critic, autocast_critic])
def test_a_gradient_penalty_finds_its_s_from_a_low_one(critic):
  params, batch = penalty_case()
  (*_, trained), states, _ = penalty_run(params, batch, critic, 4.0, 8)
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
  dead = {n: jnp.where(rows, batch[n], -batch[n]) for n in ("real", "noise")}
  _, states, _ = penalty_run(params, batch | dead, relu_critic, 4.0, 3)
  assert not any(state.skipped for state in states)
  assert ols.get_loss_scale(states[-1]) == 32
  gradient = jax.jit(jax.grad(penalty_loss(relu_critic)))
  grads = gradient(params, batch | dead, 1.0)
  without = gradient(params, {n: x[1:] for n, x in batch.items()}, 1.0)
  assert_close(grads, jax.tree.map(lambda x: x * 0.8, without), rtol=5e-3)


def test_an_overflow_of_the_inner_pass_skips_and_shrinks_s():
  params, batch = penalty_case(second=8.0)
  after, states, losses = penalty_run(params, batch, critic, 2.0**15, 7)
  skipped = [bool(state.skipped) for state in states]
  first = skipped.index(False)
  assert first > 0
  for unmoved in after[:first]:
    assert_close(unmoved, params, rtol=0)
  assert not np.isfinite(losses[0]) and np.isfinite(losses[first])
  assert ols.get_loss_scale(states[first - 1]) < 2.0**15
