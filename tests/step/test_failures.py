"""A run in which nothing is applied any more is ended on the host."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_lossscale as ols
from optax_lossscale import rules

RULES = {
  "fixed": ols.FixedLossScale(8.0),
  "dynamic": ols.DynamicLossScale(8.0),
  "headroom": rules.HeadroomLossScale(),
  "log_max": rules.LogMaxLossScale(),
  "warm_start": rules.WarmStart(ols.DynamicLossScale()),
  "torch": ols.presets.torch(),
  "deepspeed": ols.presets.deepspeed(),
}
NAN, INF = jnp.array([1.0, jnp.nan]), jnp.array([1.0, jnp.inf])
GOOD = jnp.ones(2)


def after(*scaled_grads, rule=RULES["dynamic"], check=None, **extra_args):
  """Returns an optimizer's state after a step for each of the gradients."""
  options = {} if check is None else {"check": check}
  tx = ols.loss_scaling(optax.sgd(0.1), rule, **options)
  state = tx.init(GOOD)
  for gradient in scaled_grads:
    _, state = tx.update(gradient, state, GOOD, **extra_args)
  return state


def message(opt_state, most=1):
  """Returns what is raised."""
  with pytest.raises(FloatingPointError) as caught:
    ols.raise_if_failed(opt_state, max_consecutive_skips=most)
  return str(caught.value)


@pytest.mark.parametrize("name", RULES)
def test_skips_in_a_row_end_the_run_whatever_the_rule(name):
  state = after(NAN, NAN, rule=RULES[name])
  ols.raise_if_failed(state)
  ols.raise_if_failed(state, max_consecutive_skips=2)
  assert "2 steps in a row were skipped" in message(state)


@pytest.mark.parametrize(
  "rule",
  [ols.FixedLossScale(8.0), ols.DynamicLossScale(8.0, min_scale=8.0)],
  ids=["fixed", "at the floor"],
)
def test_a_stalled_step_alone_does_not_end_the_run(rule):
  state = after(*60 * [NAN], rule=rule)
  assert state.stalled
  ols.raise_if_failed(state)
  # For one bad batch leaves the same flag, and costs its own step alone.
  state = after(GOOD, NAN, rule=rule)
  assert state.stalled
  ols.raise_if_failed(state, max_consecutive_skips=1)
  assert after(GOOD, NAN, GOOD, rule=rule).applied_steps == 2


def test_an_applied_step_ends_the_row():
  ols.raise_if_failed(after(NAN, NAN, GOOD, NAN), max_consecutive_skips=1)


def test_the_error_says_how_many_why_what_s_is_and_what_it_suggests():
  assert message(after(NAN, NAN, NAN), most=2) == (
    "3 steps in a row were skipped, more than `max_consecutive_skips`=2, the "
    "last one because of NaN in its gradients; run its batch again with "
    "scaled_value_and_grad(loss_fn, 1.0): what is not finite there is the "
    "model's or the batch's, else S is too large and still coming down; S is "
    "1.0."
  )


@pytest.mark.parametrize(
  ("state", "cause"),
  [
    (after(NAN, NAN), "because of NaN in its gradients; run its batch"),
    (after(INF, INF), "because of inf in its gradients; run its batch"),
    (
      after(*2 * [65504 * GOOD], check=ols.saturated(jnp.float16)),
      "because of a gradient at the limit of its dtype (amax is 65504.0, the ",
    ),
    (
      after(*2 * [1e5 * GOOD], check=ols.nonfinite(jnp.float16)),
      "because of a gradient at the limit of its dtype (amax is 100000.0, the ",
    ),
    (
      after(GOOD, GOOD, overflow=True),
      "because of `overflow`, which the caller passed; look at what sets it; S",
    ),
  ],
  ids=["nan", "inf", "saturated", "named dtype", "flag"],
)
def test_the_error_tells_the_causes_apart(state, cause):
  assert cause in message(state)


@pytest.mark.parametrize(
  "rule",
  [ols.FixedLossScale(2.0**40), ols.DynamicLossScale(8.0, min_scale=8.0)],
  ids=["fixed", "at the floor"],
)
def test_the_error_says_that_s_cannot_come_down(rule):
  text = message(after(INF, INF, rule=rule))
  assert "too large and cannot come down" in text
  assert text.endswith(f"; S is {rule.init().loss_scale}.")


def test_the_error_says_which_state_it_is():
  states = {"actor": after(NAN), "critic": after(NAN, NAN)}
  assert message(states).startswith("at 'critic': 2 steps in a row")
  # With one there is nothing to be told apart.
  assert message({"critic": states["critic"]}).startswith("2 steps in a row")


def test_the_error_of_a_system_says_which_state_it_is():
  rule = ols.presets.deepspeed(init_scale=1.0, delayed_shift=1)
  states = [after(GOOD), after(NAN, rule=rule)]
  with pytest.raises(FloatingPointError, match=r"^at '1': a step overflowed"):
    ols.raise_if_failed(states)


def test_the_error_says_which_member_it_is():
  members = [after(NAN, GOOD), after(GOOD, NAN), after(INF, INF)]
  state = jax.tree.map(lambda *x: jnp.stack(x), *members)
  text = message(state)
  assert text.startswith("member 2 of 3: 2 steps in a row")
  assert "because of inf" in text
  assert text.endswith("; S is 2.0.")
  # The axes that vmap has stacked, one in the other.
  text = message(jax.tree.map(lambda x: x[None], state))
  assert text.startswith("member 0, 2 of 3: 2 steps in a row")


def test_all_data_nan_is_heard():
  tx = ols.loss_scaling(optax.adam(0.1), ols.DynamicLossScale())
  params = {"w": jnp.ones(2)}
  opt_state = tx.init(params)

  @jax.jit
  def train_step(params, opt_state, batch):
    def loss_fn(params):
      return jnp.mean(params["w"] * batch)

    _, scaled_grads = ols.scaled_value_and_grad(loss_fn, opt_state)(params)
    updates, opt_state = tx.update(scaled_grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state

  with pytest.raises(FloatingPointError, match="6 steps in a row.*NaN"):
    for _ in range(10):
      params, opt_state = train_step(params, opt_state, np.full(2, np.nan))
      ols.raise_if_failed(opt_state, max_consecutive_skips=5)


def test_a_step_that_is_applied_all_the_same_is_no_skip():
  state = after(NAN, NAN, rule=ols.DynamicLossScale(skip=False))
  ols.raise_if_failed(state, max_consecutive_skips=1)


@pytest.mark.parametrize("most", [0, -1, 2**31])
def test_a_limit_out_of_range_is_refused(most):
  with pytest.raises(ValueError, match="`max_consecutive_skips` must be betw"):
    ols.raise_if_failed(after(), max_consecutive_skips=most)


@pytest.mark.parametrize("most", [1.5, "3", True], ids=str)
def test_a_limit_that_is_no_integer_is_refused(most):
  with pytest.raises(TypeError, match="`max_consecutive_skips` must be an int"):
    ols.raise_if_failed(after(), max_consecutive_skips=most)


@pytest.mark.parametrize("rule", [RULES["dynamic"], RULES["deepspeed"]])
def test_a_traced_state_is_refused_whatever_the_rule(rule):
  with pytest.raises(TypeError, match="`opt_state` .* traced .*outside jit"):
    jax.eval_shape(ols.raise_if_failed, after(rule=rule))
