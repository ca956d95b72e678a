"""The page on what goes wrong finds the causes that it names."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_lossscale as ols
from tests import documents
from tests.support import assert_same_bits

PAGE = documents.read("docs/guides/something_is_wrong.md")
PARAMS = {"kernel": jnp.full((4, 3), 0.25)}
GOOD = {
  "x": jnp.linspace(0.25, 1.0, 8).reshape(2, 4),
  "y": jnp.array([1.0, 2.0]),
}
# A row of zeros: the derivative of its root is infinite, and inf * 0 is NaN.
ZERO = dict(GOOD, x=GOOD["x"].at[0].set(0.0))
# Fine in float32, and beyond float16 whatever S is.
LARGE = dict(GOOD, x=GOOD["x"] * 2.0**17)


def loss_fn(params, batch):
  hidden = jnp.sqrt(jnp.abs(batch["x"] @ params["kernel"]))
  return jnp.mean((hidden.sum(axis=-1) - batch["y"]) ** 2)


def steep_loss_fn(params, batch):
  """Returns a loss with gradients of 150,000 to 250,000."""
  return 1.6e5 * jnp.sum(batch["x"] @ params["kernel"])


def run(title, batch=GOOD, loss_fn=loss_fn, loss_scale=1024.0, **given):
  """Returns what the code of a section defines."""
  tx = ols.loss_scaling(optax.sgd(2.0**-10), ols.DynamicLossScale(loss_scale))
  names = {"batch": batch, "jax": jax, "jnp": jnp, "loss_fn": loss_fn}
  names |= {"np": np, "ols": ols, "optax": optax, "params": PARAMS, "tx": tx}
  names |= {"opt_state": tx.init(PARAMS), **given}
  return documents.run(documents.section(PAGE, title), names)


@pytest.mark.parametrize(
  ("loss_fn", "batch", "cause"),
  [
    (loss_fn, ZERO, "the model or the batch"),
    (loss_fn, LARGE, "float16, whatever S is"),
    (loss_fn, GOOD, "S"),
    (steep_loss_fn, GOOD, "an S that is not below 1"),
  ],
  ids=["model", "float16", "scale", "steep"],
)
def test_the_cause_is_found_and_has_a_remedy(loss_fn, batch, cause):
  title = "The model's NaN, or an overflow caused by S"
  assert run(title, batch, loss_fn)["cause"] == cause
  assert f"\n| {cause} | " in documents.section(PAGE, title)


def test_a_loop_that_ends_at_a_nan_asks_whether_the_step_was_skipped():
  def train(rule, *batches):
    tx = ols.loss_scaling(optax.sgd(2.0**-10), rule)
    names = {"loss_fn": ols.autocast(loss_fn), "ols": ols, "optax": optax}
    step = documents.step(documents.STEP, names | {"tx": tx})
    given = {"train_step": step, "batches": batches}
    return run("Was the step skipped?", opt_state=tx.init(PARAMS), **given)

  names = train(ols.DynamicLossScale(2.0**10), GOOD, LARGE, GOOD)
  assert names["opt_state"].skipped_steps == 1
  assert jnp.isfinite(names["loss"])
  with pytest.raises(FloatingPointError, match="applied step is (inf|nan)"):
    train(ols.FixedLossScale(1.0, skip=False), GOOD, LARGE)


def test_debug_nans_names_the_line_of_the_models_nan():
  def negative_loss_fn(params, batch):
    return jnp.sum(jnp.log(-params["kernel"]))

  with pytest.raises(FloatingPointError, match="nan.* log") as raised:
    run("Where a NaN comes from", loss_fn=negative_loss_fn)
  assert "negative_loss_fn" in [entry.name for entry in raised.traceback]
  assert np.isfinite(run("Where a NaN comes from")["loss"])


@pytest.mark.slow
@pytest.mark.parametrize(
  ("batch", "loss_scale", "overflow", "undefined"),
  [(ZERO, 1024.0, False, True), (GOOD, 2.0**40, True, False)],
  ids=["undefined", "overflow"],
)
def test_overflow_and_undefined_are_told_apart(
  batch, loss_scale, overflow, undefined, capsys
):
  mixed_loss_fn = ols.autocast(loss_fn)
  names = run("Overflowed or undefined", batch, mixed_loss_fn, loss_scale)
  status = names["status"]
  assert (status.overflow > 0, status.undefined > 0) == (overflow, undefined)
  assert f"{status.undefined} undefined" in capsys.readouterr().out


def test_the_fault_lies_between_the_taps():
  counts = run("At which layer", ZERO)["counts"]
  assert counts["sqrt"] == 0
  assert counts["product"] == 3


@pytest.mark.parametrize("bad", [False, True])
def test_a_check_of_ones_own_is_reported(bad, capsys):
  names = {"ols": ols, "optax": optax}
  names["tx"] = ols.loss_scaling(optax.sgd(0.5), ols.DynamicLossScale())

  def step(*arguments):
    code = documents.STEP.replace("loss_fn", "checked_loss_fn")
    return documents.step(code, names)(*arguments)

  def own_loss_fn(params, batch):
    return loss_fn(params, batch) + (jnp.inf if bad else 0)

  given = {"loss_fn": own_loss_fn, "opt_state": names["tx"].init(PARAMS)}
  names |= {"jax": jax, "jnp": jnp, "params": PARAMS, "batch": GOOD, **given}
  names["train_step"] = step
  exec(*documents.blocks(documents.section(PAGE, "A check of your own")), names)
  expected = "the loss is inf" if bad else "None"
  assert capsys.readouterr().out.startswith(expected)
  assert names["opt_state"].applied_steps == 1


def test_bfloat16_has_all_guards_and_a_dead_run_is_ended():
  title = "NaN in bfloat16: guard without loss scaling"
  first, step = documents.blocks(documents.section(PAGE, title))[:2]
  names = documents.spike_guard() | {"inner": optax.adam(0.125)}
  names |= {"loss_fn": loss_fn, "params": PARAMS}
  names = documents.run(f"```python\n{first}```", names)
  carry = "params", "opt_state", "guard_state"
  train_step = documents.step(step, names, carry)
  carry = [names[name] for name in carry]
  assert "bf16" in str(jax.make_jaxpr(train_step)(*carry, GOOD))
  for _ in range(66):  # The warm-up of the guard, and two more.
    *carry, _ = train_step(*carry, GOOD)
  before, clean, _ = carry
  assert clean.applied_steps == 66
  _, spiked, *_ = train_step(*carry, GOOD | {"y": GOOD["y"] * 1e3})
  assert spiked.requested_skips == 1
  for _ in range(11):
    *carry, _ = train_step(*carry, GOOD | {"x": GOOD["x"] * np.nan})
  params, opt_state, _ = carry
  assert opt_state.consecutive_skips == 11
  assert opt_state.overflow and ols.get_loss_scale(opt_state) == 1
  assert_same_bits(params, before)
  title = "End a run that skips every step"
  with pytest.raises(FloatingPointError, match="NaN in its gradients"):
    run(title, opt_state=opt_state, step=20)
  run(title, opt_state=clean, step=20)


# Recorded runs.

INTERVALS = "A short run"
REGULAR = "An overflow every 2000 steps: is that normal?"


@pytest.mark.parametrize(
  ("title", "steps", "log2_amax", "spread"),
  [(INTERVALS, 500, -9, 0.3), (REGULAR, 20_000, -2, 0.1)],
)
def test_a_recorded_run_prints_what_is_shown(
  title, steps, log2_amax, spread, capsys
):
  rule = ols.DynamicLossScale()
  tx = ols.loss_scaling(optax.identity(), rule)
  tx = ols.instruments.record(tx, capacity=steps)
  noise = np.random.default_rng(0).standard_normal(steps)
  amax = jnp.float32(2.0 ** (log2_amax + spread * noise))

  def step(opt_state, amax):
    # In float16, where they overflow.
    grads = jnp.float16(amax * ols.get_loss_scale(opt_state))
    return tx.update(grads, opt_state)[1], None

  opt_state, _ = jax.lax.scan(step, tx.init(jnp.float32(0)), amax)
  run(title, opt_state=opt_state, rule=rule)
  assert capsys.readouterr().out in documents.blocks(PAGE, "text")
