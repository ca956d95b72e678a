"""The page on Equinox and plain JAX is a program that does what it says."""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_lossscale as ols
from tests import documents
from tests.support import assert_same_bits
from tests.support import to_numpy

pytestmark = pytest.mark.slow

PAGE = documents.read("docs/guides/equinox.md")


@functools.cache
def page():
  return documents.run_as_shown(PAGE)


def arrays(tree):
  """Returns the arrays in a tree, random keys as their data."""
  return [to_numpy(x) for x in jax.tree.leaves(tree) if eqx.is_array(x)]


def test_the_page_prints_what_it_shows():
  *_, opt_state = page()["carry"]
  assert opt_state.applied_steps + opt_state.skipped_steps == 48


def test_gradients_that_are_not_scaled_are_named():
  names = dict(page())
  right = "value_and_grad = ols.scaled_value_and_grad("
  code = documents.block(PAGE, "The step", "def make")
  wrong = (
    "value_and_grad = (lambda fun, _, **x: x.pop('value_and_grad')(fun, **x))("
  )
  assert code.count(right) == 1
  exec(code.replace(right, wrong), names)
  train_step, first = names["make"](names["mixed_loss_fn"], names["rule"])
  report = ols.instruments.check_step(train_step, *first, names["windows"][:64])
  (said,) = documents.quoted(PAGE, "Is the step right?")
  assert said in documents.one_line(report)


def test_a_model_that_jax_differentiates_is_refused_by_its_leaf():
  names = page()
  model, state, key, opt_state = names["first"]
  value_and_grad = ols.scaled_value_and_grad(
    names["loss_fn"], opt_state, has_aux=True
  )
  with pytest.raises(TypeError, match=r"at 'args\[0\]/.*eqx\.filter_"):
    value_and_grad(model, state, names["windows"][:64], key)


def test_on_a_skip_model_statistics_and_key_stay():
  train_step, first = page()["train_step"], page()["first"]
  batch = page()["windows"][:64]
  bad = eqx.tree_at(
    lambda model: model.output.bias, first[0], jnp.full(128, jnp.nan)
  )
  before = bad, *first[1:]
  *after, _ = train_step(*before, batch)
  assert after[3].skipped
  for old, new in zip(before[:3], after[:3], strict=True):
    assert_same_bits(arrays(new), arrays(old))
  *after, _ = train_step(*first, batch)
  for old, new in zip(first[:3], after[:3], strict=True):
    pairs = zip(arrays(new), arrays(old), strict=True)
    assert any((x != y).any() for x, y in pairs)


def test_micro_batches_and_a_partitioned_model_change_what_the_page_says():
  """The gradient of a linear model is known."""
  model = eqx.nn.Linear(4, 1, use_bias=False, key=jax.random.key(0))
  x = jnp.arange(32.0).reshape(8, 4) / 8
  expected = 1024 * jnp.mean(x, axis=0, keepdims=True)

  def mean_output(model, x):
    return jnp.mean(jax.vmap(model)(x))

  names = {
    "ols": ols,
    "value_and_grad": ols.scaled_value_and_grad(
      mean_output, 1024.0, value_and_grad=eqx.filter_value_and_grad
    ),
  }
  (line,) = [
    y for y in PAGE.split("`") if y.startswith("value_and_grad = ols.acc")
  ]
  exec(line, names)
  _, scaled_grads, overflow = names["value_and_grad"](model, x)
  np.testing.assert_allclose(scaled_grads.weight, expected, rtol=1e-6)
  assert overflow.valid == 4
  (line,) = [y for y in PAGE.split("`") if y.startswith("params, static =")]
  exec(line, names | {"eqx": eqx, "model": model})
  params, static = eqx.partition(model, eqx.is_inexact_array)
  _, scaled_grads = ols.scaled_value_and_grad(
    lambda params, x: mean_output(eqx.combine(params, static), x), 1024.0
  )(params, x)
  np.testing.assert_allclose(scaled_grads.weight, expected, rtol=1e-6)


def test_autocast_keeps_the_sums_of_a_batch_norm_in_float32():
  model, state = eqx.nn.make_with_state(eqx.nn.BatchNorm)(
    3, "batch", mode="batch", momentum=0.5
  )
  params, static = eqx.partition(model, eqx.is_inexact_array)
  x = 100 * np.random.default_rng(0).normal(size=(64, 3)).astype(np.float32)

  def stateful_loss_fn(params, x):
    norm = jax.vmap(
      eqx.combine(params, static),
      axis_name="batch",
      in_axes=(0, None),
      out_axes=(0, None),
    )
    # All that follows the last product is in float32 anyway.
    eye = jnp.eye(3, dtype=x.dtype)
    outputs, new = norm(x @ eye, state)
    loss = jnp.mean((outputs @ eye) ** 2)
    return loss, new.get(model.batch_state_index)[1]

  def cast_loss_fn(params, x):
    return stateful_loss_fn(*jax.tree.map(jnp.float16, (params, x)))

  mixed = ols.autocast(stateful_loss_fn)
  _, variance = jax.jit(mixed)(params, x)
  # The variance in a new state is 1.
  expected = (1 + np.var(np.float64(x), axis=0)) / 2
  np.testing.assert_allclose(variance, expected, rtol=1e-3)
  _, variance = jax.jit(cast_loss_fn)(params, x)
  assert np.isinf(variance).all()


def test_without_optax_it_is_the_step_with_optax_bit_for_bit():
  names, tx = page(), ols.loss_scaling(optax.sgd(0.5), page()["rule"])
  names["bare_loss_fn"] = lambda w, x: jnp.sum(w * jnp.float16(x))
  weights = jnp.ones(3)
  ours = weights, names["rule"].init()
  theirs = weights, tx.init(weights)
  for factor in (1.0, np.inf, 2.0):
    batch = factor * jnp.arange(1.0, 4.0)
    *ours, loss = names["bare_step"](*ours, batch)
    expected, scaled_grads = ols.scaled_value_and_grad(
      names["bare_loss_fn"], theirs[1]
    )(theirs[0], batch)
    updates, state = tx.update(scaled_grads, theirs[1], theirs[0])
    theirs = optax.apply_updates(theirs[0], updates), state
    np.testing.assert_array_equal(loss, expected)
    assert_same_bits(ours[0], theirs[0])
    assert ours[1].loss_scale == ols.get_loss_scale(state)
  assert state.skipped_steps == 1
