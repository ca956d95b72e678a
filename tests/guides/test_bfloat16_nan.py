"""The page on bfloat16 skips NaN without scaling, and ends a dead run."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_lossscale as ols
from tests import documents
from tests.guides.guarded import batch_of
from tests.guides.guarded import CLEAN
from tests.guides.guarded import loss_fn
from tests.guides.guarded import PARAMS
from tests.guides.guarded import trained
from tests.support import assert_same_bits

PAGE = documents.read("docs/guides/bfloat16_nan.md")


@functools.cache
def guarded():
  """Returns the names after the section with the step."""
  names = {"inner": optax.adam(0.125), "jax": jax, "jnp": jnp}
  names |= {"loss_fn": loss_fn, "ols": ols, "optax": optax, "params": PARAMS}
  return documents.run(documents.section(PAGE, "A step with all guards"), names)


ROWS = re.findall(r"^\| `(.+)` \| (\w+) \| (\w+) \|$", PAGE, re.MULTILINE)


@pytest.mark.parametrize(("code", "on_nan", "on_skip"), ROWS)
def test_the_table_says_what_each_rule_does(code, on_nan, on_skip):
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


def test_the_table_has_both_rules():
  assert len(ROWS) == 2


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_adam_alone_is_lost_after_one_bad_batch(bad):
  tx = optax.adam(0.125)
  params, state = PARAMS, tx.init(PARAMS)
  for size in (bad, 1.0):
    grads = jax.grad(loss_fn)(params, batch_of(size))
    updates, state = tx.update(grads, state)
    params = optax.apply_updates(params, updates)
  assert np.isnan(params["w"]).all()


def test_bfloat16_has_all_guards_without_scaling():
  names = guarded()
  before = trained(names, CLEAN)
  for size, overflow in ((1e4, False), (np.nan, True)):
    params, opt_state, _ = trained(names, [*CLEAN, size])
    assert (opt_state.skipped, opt_state.overflow) == (True, overflow)
    assert opt_state.stalled == overflow
    assert ols.get_loss_scale(opt_state) == 1
    assert_same_bits(params, before[0])
    cause = "NaN in its gradients" if overflow else "`skip`, which the caller"
    sizes = [*CLEAN, size, size]
    with pytest.raises(
      FloatingPointError, match=f"2 steps.* because of {cause}"
    ):
      ols.raise_if_failed(trained(names, sizes)[1], max_consecutive_skips=1)
  # The largest value of bfloat16 is about 2^128.
  np.testing.assert_allclose(
    before[1].headroom, np.log2(65504 / before[1].amax), rtol=1e-6
  )
  (check,) = re.findall(r"`check=(.+?)`", PAGE)
  check = eval(check, {"jnp": jnp, "ols": ols})
  tx = ols.loss_scaling(optax.identity(), ols.FixedLossScale(1.0), check=check)
  _, state = tx.update(PARAMS, tx.init(PARAMS))
  assert state.headroom > 100
  step = jax.make_jaxpr(names["train_step"])(
    PARAMS, names["opt_state"], names["guard_state"], batch_of(1.0)
  )
  assert "bf16" in str(step)


@pytest.mark.parametrize(("size", "dead"), [(1.0, False), (np.nan, True)])
def test_a_run_that_skips_every_step_is_ended(size, dead, capsys):
  names = dict(guarded(), batches=[batch_of(size, i) for i in range(20)])
  (code,) = documents.blocks(
    documents.section(PAGE, "End a run that skips every step")
  )
  if dead:
    with pytest.raises(FloatingPointError, match="NaN in its gradients"):
      exec(code, names)
  else:
    exec(code, names)
    assert capsys.readouterr().out.endswith(", 0 skipped\n")
