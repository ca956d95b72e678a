"""The page on NaN finds the cause that it names, and the right culprit."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_lossscale as ols
from tests import documents

PAGE = documents.read("docs/guides/nan_loss.md")
PARAMS = {"kernel": jnp.full((4, 3), 0.25)}
GOOD = {
  "x": jnp.linspace(0.25, 1.0, 8).reshape(2, 4),
  "y": jnp.array([1.0, 2.0]),
}
# A row of zeros: the derivative of its root is infinite, and inf * 0 is NaN.
ZERO = dict(GOOD, x=GOOD["x"].at[0].set(0.0))
# Fine in float32, and beyond float16 whatever S is.
LARGE = dict(GOOD, x=GOOD["x"] * 2.0**17)


def steep_loss_fn(params, batch):
  """Returns a loss with gradients of 150,000 to 250,000."""
  return 1.6e5 * jnp.sum(batch["x"] @ params["kernel"])


def loss_fn(params, batch):
  hidden = jnp.sqrt(jnp.abs(batch["x"] @ params["kernel"]))
  return jnp.mean((hidden.sum(axis=-1) - batch["y"]) ** 2)


def run(title, batch=GOOD, loss_fn=loss_fn, loss_scale=1024.0):
  """Returns what the code of a section defines."""
  tx = ols.loss_scaling(optax.sgd(0.5), ols.DynamicLossScale(loss_scale))
  names = {
    "batch": batch,
    "functools": functools,
    "jax": jax,
    "jnp": jnp,
    "loss_fn": loss_fn,
    "ols": ols,
    "opt_state": tx.init(PARAMS),
    "optax": optax,
    "params": PARAMS,
    "tx": tx,
  }
  return documents.run(documents.section(PAGE, title), names)


@pytest.mark.slow
@pytest.mark.parametrize(
  ("batch", "cause"),
  [
    (ZERO, "the model or the batch"),
    (LARGE, "float16, whatever S is"),
    (GOOD, "S"),
  ],
  ids=["model", "float16", "scale"],
)
def test_the_cause_is_found(batch, cause):
  assert (
    run("The model's NaN, or an overflow caused by S", batch)["cause"] == cause
  )


def test_gradients_beyond_float16_ask_for_an_s_below_1_which_the_rule_finds():
  run_with = functools.partial(
    run, "The model's NaN, or an overflow caused by S"
  )
  names = run_with(loss_fn=steep_loss_fn)
  assert names["cause"] == "an S that is not below 1"
  in_float16, tx = names["in_float16"], names["tx"]

  @jax.jit
  def step(state):
    _, scaled_grads = ols.scaled_value_and_grad(in_float16, state)(PARAMS, GOOD)
    return tx.update(scaled_grads, state)[1]

  state = names["opt_state"]
  for _ in range(15):
    state = step(state)
  assert not state.skipped
  assert ols.get_loss_scale(state) < 1


@pytest.mark.slow
def test_a_loop_that_ends_at_a_nan_asks_whether_the_step_was_skipped():
  text = documents.section(PAGE, "Was the step skipped?")

  def train(batches, tx, text=text):
    @jax.jit
    def train_step(params, opt_state, batch):
      value_and_grad = ols.scaled_value_and_grad(
        ols.autocast(loss_fn, "O1"), opt_state
      )
      loss, scaled_grads = value_and_grad(params, batch)
      updates, opt_state = tx.update(scaled_grads, opt_state, params)
      return optax.apply_updates(params, updates), opt_state, loss

    names = {"train_step": train_step, "batches": batches, "params": PARAMS}
    names |= {"opt_state": tx.init(PARAMS), "jnp": jnp, "ols": ols}
    return documents.run(text, names)

  rule = ols.DynamicLossScale(2.0**10)
  tx = ols.loss_scaling(optax.sgd(2.0**-10), rule)
  names = train([GOOD, LARGE, GOOD], tx)
  assert names["opt_state"].skipped_steps == 1
  assert jnp.isfinite(names["loss"])
  # Without the question the run would have ended, with nothing wrong.
  careless = text.replace(
    "(skipped or jnp.isfinite(loss))", "jnp.isfinite(loss)"
  )
  assert careless != text
  with pytest.raises(
    FloatingPointError, match="the loss of an applied step is"
  ):
    train([GOOD, LARGE, GOOD], tx, careless)
  applied = ols.loss_scaling(
    optax.sgd(2.0**-10), ols.FixedLossScale(1.0, skip=False)
  )
  with pytest.raises(FloatingPointError, match="applied step is (inf|nan)"):
    train([GOOD, LARGE, GOOD], applied)


def test_debug_nans_stops_at_the_models_nan():
  with pytest.raises(FloatingPointError, match="nan"):
    run("Where a NaN comes from", ZERO)
  assert np.isfinite(run("Where a NaN comes from")["loss"])


def test_debug_nans_names_the_line_of_a_nan_in_the_forward_pass():
  def negative_loss_fn(params, batch):
    return jnp.sum(jnp.log(-params["kernel"]))

  with pytest.raises(FloatingPointError, match="nan.* log") as raised:
    run("Where a NaN comes from", loss_fn=negative_loss_fn)
  names = [entry.name for entry in raised.traceback]
  assert "negative_loss_fn" in names


@pytest.mark.slow
@pytest.mark.parametrize(
  ("batch", "loss_scale", "overflow", "undefined"),
  [
    (GOOD, 1024.0, False, False),
    (ZERO, 1024.0, False, True),
    (GOOD, 2.0**40, True, False),
  ],
  ids=["clean", "undefined", "overflow"],
)
def test_overflow_and_undefined_are_told_apart(
  batch, loss_scale, overflow, undefined, capsys
):
  def mixed_loss_fn(params, batch):
    return ols.autocast(loss_fn, "O1")(params, batch)

  names = run("Overflowed or undefined", batch, mixed_loss_fn, loss_scale)
  status = names["status"]
  assert (status.overflow > 0, status.undefined > 0) == (overflow, undefined)
  assert f"{status.undefined} undefined" in capsys.readouterr().out


def test_the_fault_lies_between_the_taps():
  counts = run("At which layer", ZERO)["counts"]
  assert counts["sqrt"] == 0
  assert counts["product"] == 3
  counts = run("At which layer")["counts"]
  assert counts == {"product": 0, "sqrt": 0}


@pytest.mark.slow
def test_a_check_of_ones_own_is_reported():
  names = run("A check of your own")
  assert names["message"] is None
  assert names["opt_state"].applied_steps == 1

  def infinite_loss_fn(params, batch):
    return loss_fn(params, batch) + jnp.inf

  message = run("A check of your own", loss_fn=infinite_loss_fn)["message"]
  assert "the loss is inf" in message


def test_s_changes_gradients_and_never_the_loss():
  def gradients(loss_scale):
    mixed_loss_fn = ols.autocast(loss_fn, "O1")
    return ols.scaled_value_and_grad(mixed_loss_fn, loss_scale)(PARAMS, GOOD)

  loss, scaled_grads = gradients(2.0**40)
  assert not np.isfinite(scaled_grads["kernel"]).all()
  expected, scaled_grads = gradients(1.0)
  assert np.isfinite(scaled_grads["kernel"]).all()
  assert loss == expected
