"""Advice on runs that were really trained, and trained again as advised."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import sklearn.datasets

import optax_lossscale as ols
from optax_lossscale import instruments
from optax_lossscale import presets
from optax_lossscale import rules
from tests.instruments.test_advise import with_advice

STEPS = 400
TX = optax.adam(3e-3)


def init(seed):
  keys = jax.random.split(jax.random.key(seed), 4)
  sizes = [(64, 64), (64, 64), (64, 64), (64, 10)]
  return [
    jax.random.normal(key, shape) * (2 / 64) ** 0.5
    for key, shape in zip(keys, sizes, strict=True)
  ]


def loss_fn(params, batch):
  """Digits by layers that are normalised, in float16."""
  x, labels = jnp.float16(batch[0]), batch[1]
  for i, weights in enumerate(params):
    if i:
      x = x - x.mean(-1, keepdims=True)
      x *= jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + jnp.float16(1e-3))
      x = jax.nn.relu(x)
    x @= jnp.float16(weights)
  logits = jnp.float32(x)
  return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def is_finite(tree):
  return jnp.isfinite(optax.tree.norm(optax.tree.cast(tree, jnp.float32)))


@functools.cache  # Several tests look at the same run.
def train(rule, *, is_scaled=True, seed=0):
  """The history, and on which steps half of S would have done."""
  tx = instruments.record(ols.loss_scaling(TX, rule), STEPS)
  images, labels = sklearn.datasets.load_digits(return_X_y=True)
  images = jnp.asarray(images / 16, jnp.float32)
  labels = jnp.asarray(labels)
  chosen = np.random.default_rng(seed).integers(0, len(labels), (STEPS, 32))

  def step(carry, rows):
    params, opt_state = carry
    batch = images[rows], labels[rows]

    def gradients_at(loss_scale):
      return ols.scaled_value_and_grad(loss_fn, loss_scale)(params, batch)[1]

    half = is_finite(gradients_at(ols.get_loss_scale(opt_state) / 2))
    if is_scaled:
      _, grads = ols.scaled_value_and_grad(loss_fn, opt_state)(params, batch)
    else:
      grads = jax.grad(loss_fn)(params, batch)
    updates, opt_state = tx.update(grads, opt_state, params)
    return (optax.apply_updates(params, updates), opt_state), half

  @jax.jit
  def run():
    params = init(seed)
    return jax.lax.scan(step, (params, tx.init(params)), chosen)

  (_, opt_state), halves = run()
  return instruments.get_history(opt_state), np.asarray(halves)


def mean_headroom(history):
  headroom = history.headroom()[~history.overflow]
  return np.mean(headroom[np.isfinite(headroom)])


ASCEND = presets.npu_exponential(
  init_loss_scale=2.0**32,
  incr_every_n_steps=20,
  decr_every_n_nan_or_inf=2,
  decr_ratio=0.5,
)


@pytest.mark.slow
@pytest.mark.parametrize(
  "rule",
  [
    ASCEND,
    *(
      pytest.param(rule, marks=pytest.mark.long)
      for rule in (
        ols.DynamicLossScale(2.0**32, growth_interval=200),
        ols.DynamicLossScale(growth_interval=10),
        ols.DynamicLossScale(1.0, growth_interval=200),
        ols.DynamicLossScale(2.0**4, max_scale=2.0**5, growth_interval=100),
        presets.megatron(growth_interval=20, hysteresis=2),
        ols.FixedLossScale(2.0**20),
        ols.FixedLossScale(4.0),
        rules.HeadroomLossScale(headroom=0),
      )
    ),
  ],
  ids=str,
)
def test_training_again_as_advised_brings_what_was_promised(rule):
  history, _ = train(rule)
  advice = instruments.advise(history, rule)
  assert any(item.argument for item in advice)
  advised = with_advice(rule, advice)
  promised = instruments.replay(advised, history)
  again, _ = train(advised)
  before, after = history.overflow.sum(), again.overflow.sum()
  assert after <= promised.lost_steps + 4
  if promised.lost_steps < before:
    assert after < before / 2
  else:
    assert promised.mean_headroom < mean_headroom(history) - 1
    assert mean_headroom(again) < mean_headroom(history) - 1


@pytest.mark.slow
def test_nan_that_half_of_the_scale_mended_is_not_called_incurable():
  history, mended = train(ASCEND)
  clean = np.flatnonzero(~history.overflow)
  (nans,) = np.nonzero(np.isnan(history.amax) & mended)
  before = clean[np.searchsorted(clean, nans) - 1]
  stood = history.loss_scale[before] >= history.loss_scale[nans]
  assert np.sum(stood) > 10
  lines = [str(item) for item in instruments.advise(history, ASCEND)]
  assert not any("no loss scale" in line for line in lines)
  (line,) = [line for line in lines if "NaN" in line]
  assert "S or the model may have made these" in line


CLIMBING = [
  ols.DynamicLossScale(4.0, growth_interval=20),
  ols.DynamicLossScale(2.0**-8, growth_interval=5),
  ASCEND,
  rules.LogMaxLossScale(),
]


@pytest.mark.long
@pytest.mark.parametrize("rule", CLIMBING, ids=str)
def test_gradients_of_a_run_that_is_wired_right_follow(rule):
  for seed in range(2):
    lines = map(str, instruments.advise(train(rule, seed=seed)[0], rule))
    assert not any("follow" in line for line in lines)


@pytest.mark.parametrize(
  "rule", [CLIMBING[0], pytest.param(CLIMBING[1], marks=pytest.mark.slow)]
)
def test_gradients_that_were_never_scaled_are_told_and_nothing_else(rule):
  history, _ = train(rule, is_scaled=False)
  (advice,) = instruments.advise(history, rule)
  assert advice.argument is None
  assert str(advice).startswith("these gradients do not follow S: over ")
  assert "scaled_value_and_grad(fun, opt_state)" in str(advice)
