"""A right step, the ways to spoil it, and what a report says of it."""

import jax
import jax.numpy as jnp
import numpy as np
import optax

import optax_lossscale as ols
from tests import support

RULE = support.Stub(2.0**15)
ADAM = optax.adam(1e-2)
TX = ols.loss_scaling(ADAM, RULE)
RNG = np.random.default_rng(0)
PARAMS = {
  "v": jnp.asarray(RNG.normal(size=(16, 4)) * 0.3, jnp.float32),
  "w": jnp.asarray(RNG.normal(size=(8, 16)) * 0.3, jnp.float32),
}
BATCH = {
  "x": jnp.asarray(RNG.normal(size=(32, 8)), jnp.float32),
  "y": jnp.asarray(RNG.normal(size=(32, 4)), jnp.float32),
}
LAWS = ("scale", "invariance", "skip")


def loss_fn(params, batch):
  hidden = jnp.tanh(batch["x"] @ params["w"])
  return jnp.mean((hidden @ params["v"] - batch["y"]) ** 2)


half_loss_fn = ols.autocast(loss_fn, "O1")


def make_step(
  tx=TX,
  loss_fn=loss_fn,
  value_and_grad=ols.scaled_value_and_grad,
  change=lambda scaled_grads, opt_state, params: scaled_grads,
):
  """Returns the step of the README, with what a mistake changes in it."""

  def train_step(params, opt_state, batch):
    loss, scaled_grads = value_and_grad(loss_fn, opt_state)(params, batch)
    scaled_grads = change(scaled_grads, opt_state, params)
    updates, opt_state = tx.update(scaled_grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, loss

  return train_step


def step_of(tx=TX, compile=jax.jit, **changes):
  """Returns a step and its arguments."""
  return compile(make_step(tx, **changes)), PARAMS, tx.init(PARAMS), BATCH


def ending(end, extra, tx=TX, **changes):
  """Returns a step that returns what `end` makes of it, and its arguments.

  Args:
    end: takes what the step has made, what it was given, and `extra`.
    extra: one more argument of the step.
    tx: the optimizer.
    **changes: as those of `make_step`.
  """
  step = make_step(tx, **changes)

  def ended(params, opt_state, batch, extra):
    new = step(params, opt_state, batch)
    return end(new, (params, opt_state, batch), extra)

  return jax.jit(ended), PARAMS, tx.init(PARAMS), BATCH, extra


def plain(loss_fn, opt_state):
  return jax.value_and_grad(loss_fn)


def check(step, *args, **options):
  """Returns the report on a step, in which every line is of its program."""
  report = ols.instruments.check_step(step, *args, **options)
  for law in report.laws:
    assert not any("site-packages" in file for file, *_ in law.where)
  return report


def proved(step, *args, **options):
  """Returns what is found of a step by its shapes alone."""
  shapes = jax.eval_shape(lambda: args)
  return ols.instruments.check_step(step, *shapes, **options)


def verdicts(report):
  """Returns the verdict of each law by its name, the worst one of several."""
  found = {}
  for law in report.laws:
    found.setdefault(law.name, []).append(law.verdict)
  return {
    name: "wrong" if "wrong" in several else several[0]
    for name, several in found.items()
  }


def said(report, name):
  """Returns what is found of a law, and what mends it."""
  found = [f"{x.text} {x.remedy}" for x in report.laws if x.name == name]
  return "\n".join(found)


def assert_proved(report):
  """Checks that a step is proved, and that runs agree exactly."""
  assert report.ok, report
  found = verdicts(report)
  assert [found[x] for x in LAWS] == ["proved"] * 3, report
  assert "In runs" not in str(report)
