"""docs/guides/equinox.md: a program that prints what it shows."""

import difflib
import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import optax_lossscale as ols
from tests import documents

pytestmark = pytest.mark.slow

PATH = "docs/guides/equinox.md"
PAGE = documents.read(PATH)
page = functools.partial(documents.whole, PATH)


def test_the_page_prints_what_it_shows():
  *_, opt_state = page()["carry"]
  assert opt_state.applied_steps + opt_state.skipped_steps == 48


def test_gradients_that_are_not_scaled_are_named():
  names = dict(page().names)
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


def test_a_scan_of_micro_batches_becomes_accumulate_in_two_more_lines():
  section = documents.section(PAGE, "Micro-batches")
  loss, *steps = documents.blocks(section)
  lines = difflib.ndiff(*map(str.splitlines, steps))
  difference = [x[:2] for x in lines if x[2:]]
  assert [difference.count(x) for x in ("- ", "+ ")] == [9, 11]
  assert "nine lines\ngo and eleven come" in section
  found = []
  for code in steps:
    names = documents.run(f"```python\n{loss}{code}```", page().names)
    model = eqx.nn.MLP(8, 1, 64, depth=2, key=jax.random.key(0))
    opt_state = names["tx"].init(eqx.filter(model, eqx.is_inexact_array))
    x = jax.random.normal(jax.random.key(1), (64, 8))
    losses = []
    for _ in range(30):
      model, opt_state, loss_now = names["train_step"](model, opt_state, x)
      losses.append(float(loss_now))
    found.append(losses)
  assert opt_state.applied_steps == 30
  np.testing.assert_allclose(*found, rtol=0.01)
  assert found[0][-1] < 0.5 * found[0][0]


def test_a_partitioned_model_has_the_gradients_of_the_whole():
  model = eqx.nn.Linear(4, 1, use_bias=False, key=jax.random.key(0))
  x = jnp.arange(32.0).reshape(8, 4) / 8
  # The gradient of a linear model is known.
  expected = 1024 * jnp.mean(x, axis=0, keepdims=True)

  def mean_output(model, x):
    return jnp.mean(jax.vmap(model)(x))

  def line(begin):
    (found,) = [x for x in PAGE.split("`") if x.startswith(begin)]
    return found

  names = {"eqx": eqx, "model": model, "ols": ols}
  exec(line("params, static ="), names)
  _, scaled_grads = ols.scaled_value_and_grad(
    lambda params, x: mean_output(eqx.combine(params, names["static"]), x),
    1024.0,
  )(names["params"], x)
  np.testing.assert_allclose(scaled_grads.weight, expected, rtol=1e-6)


def test_without_optax_it_is_the_step_with_optax():
  names, start = page().names, jnp.ones(3)
  names["bare_loss_fn"] = lambda w, x: jnp.sum(w * jnp.float16(x))
  params, state = start, names["rule"].init()
  for factor, moved in ((1.0, 1), (np.inf, 1), (2.0, 3)):
    batch = factor * jnp.arange(1.0, 4.0)
    params, state, _ = names["bare_step"](params, state, batch)
    expected = start - 0.5 * moved * jnp.arange(1.0, 4.0)
    np.testing.assert_array_equal(params, expected)
  assert state.loss_scale == names["rule"].init_scale / 2
