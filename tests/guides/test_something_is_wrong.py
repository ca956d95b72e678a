"""The page on what goes wrong finds the causes that it names."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_lossscale as ols
from tests import documents
from tests.guides import guarded
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


# NaN loss in float16.


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


# NaN in bfloat16.


@functools.cache
def bfloat16():
  """Returns the names after the section, with its step."""
  first, step = documents.blocks(
    documents.section(PAGE, "NaN in bfloat16: guard without loss scaling")
  )[:2]
  return guarded.names_with_step(first, step)


ROWS = re.findall(r"^\| `(.+)` \| (\w+) \| (\w+) \|$", PAGE, re.MULTILINE)


@pytest.mark.parametrize("row", range(2))
def test_the_table_says_what_each_rule_does(row):
  code, on_nan, on_skip = ROWS[row]
  tx = ols.loss_scaling(optax.sgd(0.1), eval(code, {"ols": ols}))
  for expected, grads, skip in (
    (on_nan, [jnp.nan, 1.0], False),
    (on_nan, [jnp.inf, 1.0], False),
    (on_skip, [1.0, 1.0], True),
    ("applied", [1.0, 1.0], False),
  ):
    state = tx.init(jnp.ones(2))
    _, state = tx.update(jnp.array(grads), state, skip=skip)
    assert expected == ("skipped" if state.skipped else "applied")


@pytest.mark.parametrize(("size", "skips"), [(1e4, 2), (np.nan, 11)])
def test_bfloat16_has_all_guards_and_a_dead_run_is_ended(size, skips):
  names = bfloat16()
  before = guarded.trained(names, guarded.CLEAN)
  sizes = [*guarded.CLEAN, *[size] * skips]
  params, opt_state, _ = guarded.trained(names, sizes)
  assert opt_state.consecutive_skips == skips
  assert opt_state.overflow == opt_state.stalled == np.isnan(size)
  assert ols.get_loss_scale(opt_state) == 1
  assert_same_bits(params, before[0])
  title = "End a run that skips every step"
  if np.isnan(size):
    with pytest.raises(FloatingPointError, match="NaN in its gradients"):
      run(title, opt_state=opt_state, step=20)
  else:
    run(title, opt_state=opt_state, step=20)
  step = jax.make_jaxpr(names["train_step"])(*before, guarded.batch_of(1.0))
  assert "bf16" in str(step)


# My S never changes.


def metrics_after(rule, scaled_grads=1.0, keep=True, **arguments):
  """Returns the metrics of the last of three steps on the same gradients."""
  tx = ols.loss_scaling(optax.sgd(0.1), rule)
  opt_state = tx.init(jnp.ones(()))
  for _ in range(3):
    _, new = tx.update(jnp.float32(scaled_grads), opt_state, **arguments)
    opt_state = new if keep else opt_state
  return ols.loss_scale_metrics(new)


def metrics_in_bfloat16():
  tx = ols.loss_scaling(optax.sgd(0.1), AT_ONCE)
  schedule = ols.PrecisionSchedule(jnp.bfloat16, until_step=9)
  step = schedule.make_train_step(lambda params: jnp.sum(params**2), tx)
  carry = jnp.ones(2), tx.init(jnp.ones(2)), schedule.init()
  for _ in range(3):
    *carry, _ = step(*carry)
  return ols.loss_scale_metrics(carry[1])


AT_ONCE = ols.DynamicLossScale(growth_interval=1)
CEILING = ols.DynamicLossScale(max_scale=2.0**15, growth_interval=1)
FLOOR = ols.DynamicLossScale(min_scale=2.0**14)
# A run, and the metrics that show the cause.
CAUSES = {
  "the run is shorter": (
    lambda: metrics_after(ols.DynamicLossScale()),
    {"loss_scale": 2.0**15, "applied_steps": 3, "skipped_steps": 0},
  ),
  "the rule is `None`": (
    lambda: metrics_after(None, jnp.nan),
    {"loss_scale": 1, "headroom": jnp.nan},
  ),
  "`FixedLossScale`": (
    lambda: metrics_after(ols.FixedLossScale(512.0), jnp.inf),
    {"loss_scale": 512, "stalled": True},
  ),
  "the loop throws the state away": (
    lambda: metrics_after(ols.DynamicLossScale(), keep=False),
    {"applied_steps": 1},
  ),
  "S may not grow": (
    lambda: metrics_after(CEILING),
    {"loss_scale": 2.0**15, "headroom": np.log2(65504)},
  ),
  "every step overflows": (
    lambda: metrics_after(FLOOR, jnp.nan),
    {"loss_scale": 2.0**14, "stalled": True, "consecutive_skips": 3},
  ),
  "`skip=` skips every step": (
    lambda: metrics_after(AT_ONCE, skip=True),
    {"loss_scale": 2.0**15, "requested_skips": 3},
  ),
  "it trains in bfloat16": (
    metrics_in_bfloat16,
    {"loss_scale": 2.0**15, "applied_steps": 3},
  ),
}


def test_the_table_has_these_causes():
  table = documents.section(PAGE, "My S never changes")
  rows = re.findall(r"^\| .+ \| (.+) \| .+ \|$", table, re.MULTILINE)[1:]
  for cause, begins in zip(rows, CAUSES, strict=True):
    assert cause.startswith(begins)


@pytest.mark.parametrize("begins", CAUSES)
def test_the_cause_shows_in_the_metrics(begins):
  make, expected = CAUSES[begins]
  metrics = make()
  found = {name: metrics[name] for name in expected}
  jax.tree.map(np.testing.assert_allclose, found, expected)


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
