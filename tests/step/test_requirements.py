"""Refusals of a step, with their remedies, and the end of a run."""

import re
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_lossscale as ols
from optax_lossscale._rules import engine
from tests import support

PARAMS = {"a": jnp.zeros(3), "b": jnp.zeros(2)}
SGD, ADAM, RULE = optax.sgd(0.1), optax.adam(0.1), support.Stub(8.0)


def scaling(inner=SGD, rule=RULE, **options):
  return ols.loss_scaling(inner, rule, **options)


def passing_on(init, update=lambda updates, state, params=None: None):
  return optax.GradientTransformation(init, update)


# Arguments of the wrapper.

ARGUMENTS = {
  "swapped": (
    *((RULE, SGD), {}),
    "`inner` must be an optax .* got Stub.*; the optimizer comes first, then "
    r"the rule: loss_scaling\(optax.adam\(1e-3\), r",
  ),
  "not called": ((optax.adam, RULE), {}, "`inner` .* got adam; call it"),
  "a class": ((optax.MultiSteps, RULE), {}, "`inner` .*MultiSteps; call it"),
  "a name": (("adam", RULE), {}, "`inner` must be an optax .* got 'adam'[.]"),
  "no rule's": (
    (ols.FixedLossScale(), None),
    {},
    "`inner` must be an optax .* got FixedLossScale.* optimizer comes first",
  ),
  "two optimizers": ((SGD, SGD), {}, "`rule` must be a LossScale, got Gradie"),
  "a number": ((SGD, 1024.0), {}, "`rule` must be .* got 1024.0; for a fixed"),
  "a rule's class": (
    *((SGD, ols.DynamicLossScale), {}),
    r"`rule` must be a LossScale, got <class.*call it: DynamicLossScale\(",
  ),
  "a check not called": (
    *((SGD, RULE), {"check": ols.nonfinite}),
    r"`check` must be made by nonfinite\(\)",
  ),
  "no rule's check": ((SGD, None), {"check": 3}, "`check` must be made by"),
  "check by position": ((SGD, RULE, ols.saturated()), {}, "positional"),
}


@pytest.mark.parametrize(
  ("arguments", "options", "message"), ARGUMENTS.values(), ids=ARGUMENTS
)
def test_guarantee_16_swapped_or_wrong_arguments_are_refused(
  arguments, options, message
):
  with pytest.raises(TypeError, match=message):
    ols.loss_scaling(*arguments, **options)


class Starting(support.Stub):
  """A rule that starts with any state."""

  def __init__(self, state):
    object.__setattr__(self, "state", state)

  def init(self):
    return self.state


FIRST_STATES = {
  "0": (support.StubState(jnp.float32(0)), "first state` must be positive"),
  "NaN": (support.StubState(jnp.float32(np.nan)), "first state` must be "),
  "a tuple": ((jnp.float32(1),), "attribute `loss_scale`, float32.*got .tuple"),
  "float16": (support.StubState(jnp.float16(1)), "attribute `loss_scale`, flo"),
  "an axis": (
    support.StubState(jnp.ones(1)),
    "attribute `loss_scale`, float32",
  ),
  "text": (support.StubState("1"), "attribute `loss_scale`, float32.*got '1'"),
}


@pytest.mark.parametrize(
  ("state", "message"), FIRST_STATES.values(), ids=FIRST_STATES
)
def test_guarantee_4_a_rule_that_starts_unusable_is_refused(state, message):
  tx = scaling(rule=Starting(state))
  for init in (tx.init, jax.jit(tx.init)):
    with pytest.raises((TypeError, ValueError), match=message):
      init(jnp.zeros(1))


def test_a_wrapper_inside_a_wrapper_is_refused():
  message = "`inner` must not contain loss_scaling, got it at inner_state{}:"
  for inner, place in (
    (optax.chain(optax.identity(), scaling()), "/1"),
    (scaling(), ""),
    (scaling(rule=None), ""),
  ):
    for rule in (RULE, None):
      with pytest.raises(ValueError, match=message.format(place)):
        scaling(inner, rule).init(PARAMS)


# Arguments of `update`.


def taking_skip(updates, state, params=None, *, skip=False):
  return updates, state


def test_arguments_of_update_that_would_be_ignored_are_refused():
  for rule in (RULE, None):
    tx = scaling(rule=rule)
    state = tx.init(PARAMS)
    for name, remedy in (
      ("overflowed", "overflow=overflowed"),
      ("found_inf", "overflow=found_inf"),
      ("grads_finite", "overflow=jnp.logical_not(grads_finite)"),
      ("skipped", "skip=skipped"),
      ("spike", "skip=spike"),
    ):
      message = re.escape(f"`{name}`, which the optimizer would ignore; did ")
      with pytest.raises(TypeError, match=message) as caught:
        tx.update(PARAMS, state, PARAMS, **{name: True})
      assert f"mean {remedy}?" in str(caught.value)
    with pytest.raises(TypeError, match="must be the scaled gradients, got No"):
      tx.update(None, state, PARAMS)
    with pytest.raises(TypeError, match="positional"):
      tx.update(PARAMS, state, None, True)
    inner = optax.GradientTransformationExtraArgs(SGD.init, taking_skip)
    with pytest.raises(TypeError, match="`inner` must not take a `skip` of it"):
      tx = scaling(inner, rule)
      tx.update(PARAMS, tx.init(PARAMS))


class Counting(NamedTuple):
  loss_scale: jax.Array
  counts: jax.Array


class Counter(support.Stub):
  """A rule whose state has a second field, of a size that is set."""

  def init(self):
    return Counting(jnp.float32(self.start), jnp.zeros(int(self.start)))

  def update(self, state, overflow, *, amax=None):
    return state


def state_with(rule_state, rule=RULE):
  return scaling(rule=rule).init(PARAMS)._replace(loss_scale_state=rule_state)


SET = (
  "to change the rule in mid-run, set its state: "
  "optax.tree.set(opt_state, loss_scale_state=rule.init())"
)
KEEP = (
  f"{SET}, or rule.init()._replace(loss_scale=get_loss_scale(opt_state)) to "
  "keep S."
)
# The wrapper's rule, a state, and the message.
STATES = {
  "bare": (
    RULE,
    SGD.init(PARAMS),
    "got tuple; for the state of an optimizer that is wrapped only now, "
    "checkpoints.with_loss_scaling(state, tx.init(params)).",
  ),
  "None": (RULE, None, "`state` must be the LossScalingState that init made"),
  "a bare state without a rule": (None, {}, "the LossScalingState that init"),
  "restored without a target": (
    *(RULE, state_with(RULE.init())._asdict()),
    "got dict; a checkpoint must be restored into the structure ",
  ),
  "another rule's": (
    *(RULE, state_with(Counter(2).init())),
    "got Counting(loss_scale, counts) where the rule has StubState(loss_scale)"
    f"; {KEEP}",
  ),
  "of another size": (
    *(Counter(3), state_with(Counter(2).init())),
    "got Counting(counts float32[2]) where the rule has Counting(counts "
    f"float32[3]); {KEEP}",
  ),
  "of another dtype": (
    *(RULE, state_with(support.StubState(np.float16(2)))),
    "got StubState(loss_scale float16[]) where the rule has StubState("
    f"loss_scale float32[]); {KEEP}",
  ),
  "a Python number": (
    *(RULE, state_with(support.StubState(2))),
    "got StubState(loss_scale int[])",
  ),
  "a rule's, restored without a target": (
    *(RULE, state_with({"loss_scale": jnp.float32(1)})),
    "a checkpoint must be restored into the structure",
  ),
  "of NNX": (
    *(RULE, state_with(support.StubState({"value": support.Boxed(8)}))),
    "StubState(loss_scale/value",
  ),
  # S was 1, which nobody would keep.
  "without a rule": (
    *(RULE, scaling(rule=None).init(PARAMS)),
    f"got NoLossScaleState() where the rule has StubState(loss_scale); {SET}.",
  ),
  "of a rule, where there is none": (
    *(None, state_with(RULE.init())),
    "where the rule has NoLossScaleState(); take checkpoints.with_loss_scaling("
    "checkpoints.without_loss_scaling(opt_state), tx.init(params)).",
  ),
}


@pytest.mark.parametrize(
  ("rule", "state", "message"), STATES.values(), ids=STATES
)
def test_update_refuses_a_state_that_init_would_not_make(rule, state, message):
  with pytest.raises((TypeError, ValueError), match=re.escape(message)):
    scaling(rule=rule).update(PARAMS, state, PARAMS)


# Gradients, updates and states that do not fit.

OTHER = {"a": jnp.zeros(3), "c": jnp.zeros(2)}
PRIVATE = optax.contrib.differentially_private_aggregate(1.0, 0.0, key=0)
PER_EXAMPLE = jax.tree.map(lambda x: jnp.ones((5, *x.shape)), PARAMS)
LARGER = jax.tree.map(lambda x: jnp.zeros((2, *x.shape)), PARAMS)
# An optimizer, gradients, parameters, what the state is for, and the message.
MISFITS = {
  "sgd": (SGD, OTHER, PARAMS, PARAMS, "the parameters, got nothing at 'b' and"),
  "adam": (ADAM, OTHER, PARAMS, PARAMS, "the parameters, got nothing at 'b'"),
  "adam without parameters": (
    *(ADAM, OTHER, None, PARAMS),
    "gradients that fit the state, got nothing at '0/mu/b', '0/nu/b",
  ),
  "of no axis": (
    *(SGD, PARAMS | {"a": 0.0}, PARAMS, PARAMS),
    r"have the shapes of the parameters, got shape \(\) at 'a' and not \(3,\)",
  ),
  "of one element": (
    *(SGD, PARAMS | {"a": jnp.zeros(1)}, PARAMS, PARAMS),
    r"got shape \(1,\) at 'a' and not \(3,\)",
  ),
  "of an axis more": (
    *(ADAM, PARAMS | {"a": jnp.zeros((3, 1))}, PARAMS, PARAMS),
    r"got shape \(3, 1\) at 'a' and not \(3,\)",
  ),
  "another optimizer's state": (
    *(passing_on(ADAM.init, ADAM.update), PARAMS, PARAMS, SGD),
    "`state` must be that of this optimizer for these parameters",
  ),
  "a larger state": (
    *(ADAM, PARAMS, PARAMS, LARGER),
    r"got shape \(2, 3\) at '0/mu/a' and not",
  ),
  # The optimizer's own errors stay the same.
  "adamw": (optax.adamw(0.1), PARAMS, None, PARAMS, "not passing `params`"),
  "polyak": (optax.polyak_sgd(), PARAMS, PARAMS, PARAMS, "value"),
  "private": (PRIVATE, PARAMS, PARAMS, PARAMS, "to have a batch dimension"),
  "private adamw": (
    *(optax.chain(PRIVATE, optax.adamw(0.1)), PER_EXAMPLE, None, PARAMS),
    "not passing `params`",
  ),
}


@pytest.mark.parametrize("compiles", [False, True], ids=["eager", "jit"])
@pytest.mark.parametrize(
  ("inner", "gradients", "params", "like", "message"),
  MISFITS.values(),
  ids=MISFITS,
)
def test_what_does_not_fit_is_named(
  inner, gradients, params, like, message, compiles
):
  tx = scaling(inner)
  state = scaling(like).init(PARAMS) if like is SGD else tx.init(like)
  update = jax.jit(tx.update) if compiles else tx.update
  with pytest.raises((TypeError, ValueError), match=message):
    update(gradients, state, params)


def test_gradients_for_each_example_are_for_the_optimizer_to_sum():
  for inner, shape in ((PRIVATE, (3,)), (optax.identity(), (5, 3))):
    tx = scaling(inner)
    updates, _ = tx.update(PER_EXAMPLE, tx.init(PARAMS), PARAMS)
    assert updates["a"].shape == shape


def test_an_update_of_one_element_fits_a_parameter_of_one_element():
  """DoG makes an update of shape (1,) for a scalar."""
  tx = scaling(optax.scale_by_distance_over_gradients())
  params = {"a": jnp.ones(3), "b": jnp.float32(2.0)}
  for bad in (1.0, jnp.nan):
    gradients = {"a": jnp.ones(3), "b": jnp.float32(bad)}
    updates, _ = tx.update(gradients, tx.init(params), params)
    assert [x.shape for x in jax.tree.leaves(updates)] == [(3,), ()]


def returning(updates=None, state=None):
  """Returns an optimizer with an empty state that returns something else."""

  def update(given, old, params=None):
    return (given if updates is None else updates), (
      old if state is None else state
    )

  return optax.GradientTransformation(
    lambda params: {"t": jnp.zeros(1)}, update
  )


@pytest.mark.parametrize(
  ("inner", "message"),
  [
    (returning(state={"t": jnp.zeros(2)}), r"shape \(2,\) at 't' and not \(1,"),
    (returning(state={"new": 1.0}), "`inner` must keep the structure"),
    (
      returning(updates=PARAMS | {"a": jnp.zeros(1)}),
      r"updates of `inner` must have .* shape \(1,\) at 'a' and not \(3,\)",
    ),
    (returning(updates={"a": jnp.zeros(3)}), "tree structure error"),
  ],
  ids=["shape", "structure", "updates", "structure of updates"],
)
def test_an_optimizer_that_returns_something_else_is_refused(inner, message):
  tx = scaling(inner)
  with pytest.raises(ValueError, match=message):
    tx.update(PARAMS, tx.init(PARAMS), PARAMS)


def test_without_a_rule_only_a_state_that_may_be_kept_must_be_the_same():
  tx = scaling(returning(state=(1, 2)), rule=None)
  state = tx.init(PARAMS)
  assert tx.update(PARAMS, state)[1].inner_state == (1, 2)
  with pytest.raises(ValueError, match="state of `inner` must keep the struc"):
    tx.update(PARAMS, state, skip=[False])


def test_a_rule_that_changes_its_state_is_refused():
  class Forgetful(support.Stub):
    def update(self, state, overflow, *, amax=None):
      return None

  tx = scaling(rule=Forgetful())
  with pytest.raises(ValueError, match="`rule` must keep the structure"):
    tx.update(PARAMS, tx.init(PARAMS))


# The end of a run.


def state_after(skips, **facts):
  """Returns the state of a run after so many skips in a row."""
  state = scaling().init(PARAMS)
  last = {"overflow": True, "skipped": True, "amax": 1.0, "range_used": 2.0**-9}
  last = {name: jnp.asarray(value) for name, value in (last | facts).items()}
  return state._replace(
    counts=state.counts._replace(consecutive_skips=jnp.int32(skips)),
    last_step=state.last_step._replace(**last),
  )


def message(opt_state, most=1):
  """Returns what is raised."""
  with pytest.raises(FloatingPointError) as caught:
    ols.raise_if_failed(opt_state, max_consecutive_skips=most)
  return str(caught.value)


def test_more_skips_in_a_row_than_the_limit_end_the_run():
  tx = scaling()
  state = tx.init(PARAMS)
  gradients = {"a": jnp.full(3, jnp.nan), "b": jnp.ones(2)}
  for skips in range(3):
    ols.raise_if_failed(state, max_consecutive_skips=2)
    assert state.consecutive_skips == skips
    _, state = tx.update(gradients, state)
  assert message(state, most=2) == (
    "3 steps in a row were skipped, more than `max_consecutive_skips`=2, the "
    "last one because of NaN in its gradients; run its batch again with "
    "scaled_value_and_grad(loss_fn, 1.0): a gradient that overflows even "
    "then is the model's or the batch's fault, else S is too large and still "
    "coming down; S is 1.0."
  )
  _, state = tx.update(PARAMS, state)
  ols.raise_if_failed(state, max_consecutive_skips=1)
  # A stalled step that is not skipped ends nothing.
  ols.raise_if_failed(state_after(0, stalled=True), max_consecutive_skips=1)


CAUSES = {
  "inf": ({"amax": np.inf}, "because of inf in its gradients; run its batch"),
  "stalled": (
    {"amax": np.inf, "stalled": True},
    "too large and cannot come down; S is 8.0.",
  ),
  "saturated": (
    {"amax": 65504.0, "range_used": 1.0},
    "because of a gradient at the limit of its dtype (amax is 65504.0, the d",
  ),
  "overflow": (
    *({"range_used": 0.5},),
    "because of `overflow`, which the caller passed; look at what sets it; S",
  ),
  "skip": (
    {"overflow": False, "range_used": 2.0},
    "because of `skip`, which the caller passed; look at what sets it; S is",
  ),
  "skip of a step with inf": (
    {"overflow": False, "amax": np.inf},
    "because of `skip`, which the caller passed",
  ),
}


@pytest.mark.parametrize(("facts", "cause"), CAUSES.values(), ids=CAUSES)
def test_the_error_names_the_cause_of_the_last_skip(facts, cause):
  assert cause in message(state_after(2, **facts))


def test_the_error_says_which_state_and_which_member_it_is():
  both = {"actor": state_after(1), "critic": state_after(2)}
  assert message(both).startswith("at 'critic': 2 steps in a row")
  assert message({"critic": both["critic"]}).startswith("2 steps in a row")
  members = [state_after(1), state_after(0), state_after(2, amax=np.inf)]
  stacked = jax.tree.map(lambda *x: jnp.stack(x), *members)
  text = message(stacked)
  assert text.startswith("member 2 of 3: 2 steps in a row")
  assert "because of inf" in text
  # The axes of one vmap in another.
  text = message(jax.tree.map(lambda x: x[None], stacked))
  assert text.startswith("member 0, 2 of 3: 2 steps in a row")


class FailingState(NamedTuple):
  loss_scale: jax.Array
  failure: jax.Array


class WrappingState(NamedTuple):
  loss_scale: jax.Array
  rule_state: FailingState


@pytest.mark.parametrize(
  ("failure", "text"),
  [
    (engine.Failure.AT_MINIMUM, "at its minimum, where DeepSpeed ends the run"),
    (engine.Failure.BELOW_MINIMUM, "or below, where fairseq ends the run"),
    (
      engine.Failure.TOO_MANY_OVERFLOWS,
      "more than 1000 steps .* MindSpore end",
    ),
  ],
)
def test_a_rule_that_has_given_up_ends_the_run_without_a_limit(failure, text):
  scale = jnp.float32(2)
  failed = FailingState(scale, jnp.int32(failure))
  sound = FailingState(scale, jnp.int32(0))
  ols.raise_if_failed(state_with(sound))
  for rule_state in (failed, WrappingState(scale, failed)):
    states = [state_with(sound), state_with(rule_state)]
    with pytest.raises(FloatingPointError, match=rf"^at '1': .*{text}.*S is 2"):
      ols.raise_if_failed(states)
    with pytest.raises(FloatingPointError, match="at '1': .*ends the run"):
      ols.raise_if_failed(states, max_consecutive_skips=1)


def test_a_limit_and_a_state_that_cannot_be_compared_are_refused():
  state = state_after(0)
  for most in (0, -1, 2**31):
    with pytest.raises(
      ValueError, match="`max_consecutive_skips` must be betw"
    ):
      ols.raise_if_failed(state, max_consecutive_skips=most)
  for most in (1.5, "3", True):
    with pytest.raises(
      TypeError, match="`max_consecutive_skips` must be an in"
    ):
      ols.raise_if_failed(state, max_consecutive_skips=most)
  with pytest.raises(
    ValueError, match=r"that never ends a run, got None; .*100"
  ):
    ols.raise_if_failed(state)
  with pytest.raises(TypeError, match="`opt_state` .* traced .*outside jit"):
    jax.eval_shape(lambda x: ols.raise_if_failed(x, 1), state)
  with pytest.raises(ValueError, match="must hold the state of `loss_scaling`"):
    ols.raise_if_failed(SGD.init(PARAMS))
