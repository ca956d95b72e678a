"""The page on an S that never changes: its causes show as its table says."""

import re

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_lossscale as ols
from tests import documents

PAGE = documents.read("docs/guides/s_never_changes.md")
PARAMS = jnp.ones(2)
CLEAN = jnp.array([3.0, 4.0])


def metrics_after(
  rule, scaled_grads=CLEAN, steps=3, keep=True, inside=True, **arguments
):
  """Returns the metrics of steps on the same gradients, by the page's line."""
  tx = ols.loss_scaling(optax.sgd(0.1), rule)
  opt_state = tx.init(PARAMS)
  metrics = []
  for _ in range(steps):
    _, new = tx.update(scaled_grads, opt_state, PARAMS, **arguments)
    opt_state = new if keep else opt_state
    names = {"ols": ols, "opt_state": new if inside else opt_state}
    exec(documents.blocks(PAGE)[0], names)
    metrics.append(names["metrics"])
  return metrics


def too_short():
  *_, last = metrics_after(ols.DynamicLossScale())
  assert last["loss_scale"] == 2.0**15
  assert last["applied_steps"] == 3 and last["skipped_steps"] == 0


def switched_off():
  *_, last = metrics_after(None, CLEAN * jnp.nan)
  assert last["loss_scale"] == 1 and jnp.isnan(last["headroom"])


def fixed():
  *_, last = metrics_after(ols.FixedLossScale(512.0), CLEAN * jnp.inf)
  assert last["loss_scale"] == 512 and last["stalled"]


def thrown_away():
  rule = ols.DynamicLossScale()
  for inside in (True, False):
    for last in metrics_after(rule, keep=False, inside=inside):
      assert last["applied_steps"] == inside


def at_the_ceiling():
  rule = ols.DynamicLossScale(max_scale=2.0**15, growth_interval=1)
  *_, last = metrics_after(rule)
  assert last["loss_scale"] == 2.0**15 and last["headroom"] > 10


def at_the_floor():
  rule = ols.DynamicLossScale(min_scale=2.0**14)
  first, *_, last = metrics_after(rule, CLEAN * jnp.nan)
  assert last["loss_scale"] == 2.0**14 and last["stalled"]
  assert (first["consecutive_skips"], last["consecutive_skips"]) == (1, 3)


def skipped_on_request():
  rule = ols.DynamicLossScale(growth_interval=1)
  *_, last = metrics_after(rule, skip=True)
  assert last["loss_scale"] == 2.0**15 and last["requested_skips"] == 3


def in_bfloat16():
  tx = ols.loss_scaling(optax.sgd(0.1), ols.DynamicLossScale(growth_interval=1))
  schedule = ols.PrecisionSchedule(jnp.bfloat16, until_step=9)
  step = schedule.make_train_step(lambda params: jnp.sum(params**2), tx)
  carry = PARAMS, tx.init(PARAMS), schedule.init()
  for _ in range(2):
    *carry, _ = step(*carry)
  last = ols.loss_scale_metrics(carry[1])
  assert last["applied_steps"] == 2 and last["loss_scale"] == 2.0**15


CAUSES = {
  "the run is shorter": too_short,
  "the rule is `None`": switched_off,
  "`FixedLossScale`": fixed,
  "the loop throws the state away": thrown_away,
  "S may not grow": at_the_ceiling,
  "every step overflows": at_the_floor,
  "`skip=` skips every step": skipped_on_request,
  "it trains in bfloat16": in_bfloat16,
}
ROWS = re.findall(r"^\| (.+) \| (.+) \| .+ \|$", PAGE, re.MULTILINE)[1:]


def test_the_table_has_these_causes():
  for (_, cause), begins in zip(ROWS, CAUSES, strict=True):
    assert cause.startswith(begins)


@pytest.mark.parametrize("begins", CAUSES)
def test_the_cause_shows_in_the_metrics(begins):
  CAUSES[begins]()


def test_500_steps_do_not_move_s_and_the_figures_are_those_of_the_page(capsys):
  section = documents.section(PAGE, "A short run")
  names = documents.run(section, {"np": np, "ols": ols})
  (shown,) = documents.blocks(section, "text")
  assert capsys.readouterr().out == shown
  slow = ols.instruments.replay(ols.DynamicLossScale(), names["history"])
  assert set(slow.history.loss_scale) == {2.0**15}
  # The page's figure: the largest S without an overflow.
  largest = 65504 / names["history"].unscaled_amax.max()
  assert np.floor(np.log2(largest)) == 24
