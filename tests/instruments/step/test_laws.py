"""The verdict on right programs, on odd ones, and on mistakes.

The common mistakes are in `tests/test_silent_mistakes.py`.
"""

import functools
import re
import warnings

from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_lossscale as ols
from optax_lossscale.instruments.step import _proof
from tests import documents
from tests import optimizers
from tests import support
from tests.instruments.step.steps import ADAM
from tests.instruments.step.steps import assert_proved
from tests.instruments.step.steps import BATCH
from tests.instruments.step.steps import check
from tests.instruments.step.steps import ending
from tests.instruments.step.steps import half_loss_fn
from tests.instruments.step.steps import loss_fn
from tests.instruments.step.steps import make_step
from tests.instruments.step.steps import PARAMS
from tests.instruments.step.steps import plain
from tests.instruments.step.steps import proved
from tests.instruments.step.steps import RULE
from tests.instruments.step.steps import said
from tests.instruments.step.steps import step_of
from tests.instruments.step.steps import TX
from tests.instruments.step.steps import verdicts

W_ALONE = {"w": True, "v": False}
# The parameters move only in the second step.
LATE = optax.sgd(optax.linear_schedule(0.0, 0.1, 10))
SGD = ols.loss_scaling(optax.sgd(0.1), RULE)


@pytest.fixture
def runs_alone(monkeypatch):
  """Makes a check judge a step by its runs alone."""

  def prove(traced, named, found, certain, free):
    return _proof.Proof((), found, certain, (), ())

  monkeypatch.setattr(_proof, "prove", prove)


def pmapped(after=lambda new: new, axis_name="data", average_scaled="data"):
  """Returns a step on two devices, with what they do after it."""
  tx = ols.loss_scaling(
    ADAM, RULE, axis_name=axis_name, average_scaled=average_scaled
  )
  step = jax.pmap(
    lambda *args: after(make_step(tx)(*args)),
    axis_name="data",
    donate_argnums=(0, 1),
  )
  given = jax.tree.map(lambda x: jnp.stack([x] * 2), (PARAMS, tx.init(PARAMS)))
  return step, *given, jax.tree.map(lambda x: x.reshape(2, 16, -1), BATCH)


def ensemble():
  several = jax.tree.map(lambda x: jnp.stack([x, 2 * x, x / 2]), PARAMS)
  opt_state = jax.vmap(TX.init)(several)
  # Each has its own S, and one of them overflows at first.
  scales = jnp.array([2.0**10, 2.0**126, 2.0**15], jnp.float32)
  opt_state = optax.tree.set(opt_state, loss_scale=scales)
  step = jax.jit(jax.vmap(make_step(), (0, 0, None)))
  return step, several, opt_state, BATCH


def two_losses(*scales):
  """Returns a step of two optimizers, each with the scale that is named."""

  def step(params, opt_states, batch):
    after, new_states = {}, {}
    for name, scale in zip("ab", scales, strict=True):
      loss_scale = ols.get_loss_scale(opt_states[scale])
      value_and_grad = ols.scaled_value_and_grad(loss_fn, loss_scale)
      _, scaled_grads = value_and_grad(params[name], batch)
      updates, new_states[name] = TX.update(
        scaled_grads, opt_states[name], params[name]
      )
      after[name] = optax.apply_updates(params[name], updates)
    return after, new_states

  params = {"a": PARAMS, "b": jax.tree.map(lambda x: x / 2, PARAMS)}
  opt_states = {name: TX.init(params[name]) for name in params}
  return jax.jit(step), params, opt_states, BATCH


def one_after_the_other():
  """Returns a step that leaves `b` out if the step of `a` was skipped."""
  step = make_step()

  def both(params, opt_states, batch):
    a, state_a, _ = step(params["a"], opt_states["a"], batch)
    b, state_b = jax.lax.cond(
      state_a.skipped,
      lambda *kept: kept,
      lambda *given: step(*given, batch)[:2],
      params["b"],
      opt_states["b"],
    )
    return {"a": a, "b": b}, {"a": state_a, "b": state_b}

  return jax.jit(both), *two_losses("a", "b")[1:]


def with_other_values():
  """Returns a step that takes Python's numbers, text and an object."""

  class Config:
    def copy(self, depth):
      raise AssertionError

  def distance(params, x):
    return (params["w"] * x - params["b"]) ** 2

  def step(params, opt_state, x, labels, config):
    return *make_step(loss_fn=distance)(params, opt_state, x), labels

  params = {"w": jnp.asarray(1.0), "b": 2.0}
  # The largest gradient is 6 S, whose log2 is rounded.
  return step, params, TX.init(params), 3.0, np.array(["a", "b"]), Config()


def with_an_average(new, old, ema):
  mean = optax.incremental_update(new[0], ema, 0.1)
  return *new, ols.select_on_skip(new[1], mean, ema)


HALF = jax.tree.map(lambda x: x / 2, PARAMS)
FROZEN = optax.partition({True: ADAM, False: optax.set_to_zero()}, W_ALONE)
INJECTED = optax.inject_hyperparams(
  lambda rate: ols.loss_scaling(optax.sgd(rate), RULE)
)
RIGHT = {
  "record": lambda: step_of(ols.instruments.record(TX, 8)),
  "hyperparameters": lambda: step_of(INJECTED(0.1)),
  "a late rate": lambda: step_of(ols.loss_scaling(LATE, RULE)),
  "later than most": lambda: step_of(
    ols.loss_scaling(optax.MultiSteps(ADAM, 65), RULE)
  ),
  "a frozen group": lambda: step_of(ols.loss_scaling(FROZEN, RULE)),
  "a fixed 1 that scales nothing": lambda: step_of(
    ols.loss_scaling(ADAM, ols.FixedLossScale(1.0)), value_and_grad=plain
  ),
  "an average": lambda: ending(with_an_average, HALF),
  "other values": with_other_values,
  "pmap": pmapped,
  "an ensemble": ensemble,
  "two losses": lambda: two_losses("a", "b"),
  "one after the other": one_after_the_other,
}


# They take longest, and others are like them.
SLOW = {"pmap", "two losses", "later than most", "a clip around, S of 2**4"}


@pytest.mark.parametrize("program", support.slow_but({*RIGHT} - SLOW, RIGHT))
def test_a_right_step_is_proved(program):
  step, *args = RIGHT[program]()
  before = support.to_bits(args[1])
  report = check(step, *args)
  assert_proved(report)
  report.raise_if_wrong()
  assert report.deterministic and not report.follows
  assert support.to_bits(args[1]) == before


def test_the_report_names_the_next_values_and_what_is_below_float32():
  report = check(*step_of())
  assert documents.one_line(report).startswith(
    "The loss scaling of this step is right, for all values, but nothing in it "
    "works below float32. scale (proved): "
  )
  assert report.next_values == {"params": "0", "opt_state": "1"}
  assert verdicts(report)["precision"] == "not applied"
  assert "autocast" in said(report, "precision")
  report = check(*step_of(loss_fn=half_loss_fn))
  assert_proved(report)
  assert str(report) == (
    "The loss scaling of this step is right, for all values. It computes in "
    "float16.\nNext values: params from output 0, opt_state from output 1."
  )
  assert "computes in float16." in said(report, "precision")
  assert len(report.assumptions) == 6
  off = ols.loss_scaling(optax.sgd(0.1), None)
  report = check(*step_of(tx=off, loss_fn=half_loss_fn))
  assert not report and "without loss scaling" in said(report, "precision")


def test_a_program_may_forbid_transfers_and_nan_and_donate_its_arguments():
  step = jax.jit(make_step(), donate_argnums=(0, 1))
  params, opt_state = jax.tree.map(jnp.copy, (PARAMS, TX.init(PARAMS)))
  step(*jax.tree.map(jnp.copy, (params, opt_state)), BATCH)
  with jax.transfer_guard("disallow"), jax.debug_nans(True):
    report = ols.instruments.check_step(step, params, opt_state, BATCH)
  assert_proved(report)
  assert step._cache_size() == 1
  jax.tree.map(np.testing.assert_array_equal, params, PARAMS)


# The optimizers of optax whose programs are unlike that of Adam.
WITH_BRANCHES = (
  *("adafactor", "apply_if_finite", "backtracking", "lbfgs", "mechanize"),
  *("multi_steps", "muon", "plateau", "prodigy", "schedule_free"),
)


@pytest.mark.parametrize(
  "name", support.slow_but(["multi_steps"], WITH_BRANCHES, pytest.mark.long)
)
def test_a_step_with_an_optimizer_that_branches_or_counts_is_proved(name):
  tx = ols.loss_scaling(optimizers.OPTIMIZERS[name](), RULE)
  params = optimizers.make_params()

  def step(params, opt_state):
    value_fn = optimizers.loss_fn
    value_and_grad = ols.scaled_value_and_grad(value_fn, opt_state)
    loss, scaled_grads = value_and_grad(params)
    grad = ols.unscale(scaled_grads, opt_state)
    updates, opt_state = tx.update(
      scaled_grads, opt_state, params, value=loss, grad=grad, value_fn=value_fn
    )
    return optax.apply_updates(params, updates), opt_state

  report = check(jax.jit(step), params, tx.init(params))
  assert "wrong" not in verdicts(report).values() and report.ok, report


def test_several_steps_in_one_are_proved_though_the_first_overflows():
  def step(params, opt_state, batches):
    def body(carry, batch):
      *carry, loss = make_step()(*carry, batch)
      return tuple(carry), loss

    carry, losses = jax.lax.scan(body, (params, opt_state), batches)
    return *carry, losses

  size = jnp.array([2.0**58, 1, 1])[:, None, None]
  batches = {"x": jnp.stack([BATCH["x"]] * 3), "y": BATCH["y"] * size}
  report = check(jax.jit(step), PARAMS, TX.init(PARAMS), batches)
  assert report.ok, report
  assert verdicts(report)["invariance"] == "proved"
  assert verdicts(report)["skip"] == "proved"
  assert "makes several updates" in said(report, "skip")
  assert "In runs: No next value" not in str(report)


@pytest.mark.parametrize("low", [True, False])
def test_a_precision_schedule_is_right_before_and_after_its_switch(
  low, request
):
  schedule = ols.PrecisionSchedule(jnp.float16, until_step=4)
  step = jax.jit(schedule.make_train_step(loss_fn, SGD))
  state = schedule.init()._replace(low=jnp.asarray(low))
  args = step, PARAMS, SGD.init(PARAMS), state, BATCH
  report = check(*args)
  text = "The loss scaling of this step is right, for all"
  assert report.ok and str(report).startswith(text)
  assert ("In runs: The step sets this S aside" in said(report, "scale")) != low
  request.getfixturevalue("runs_alone")
  report = check(*args)
  assert report.ok, report
  assert ("sets this S aside" in said(report, "scale")) != low


def test_an_s_that_overflows_is_halved_until_it_does_not():
  tx = ols.loss_scaling(ADAM, support.Stub(2.0**40))
  report = check(*step_of(tx, loss_fn=half_loss_fn))
  assert report.ok and report.halvings > 10, report
  assert f"it ran at S / 2**{report.halvings}." in str(report)


@pytest.mark.parametrize("is_narrow", [False, True])
def test_other_outputs_that_follow_s_are_reported_and_no_mistake(is_narrow):
  def small_loss_fn(params, batch):
    return 2.0**-12 * loss_fn(params, batch)

  small = ols.autocast(small_loss_fn) if is_narrow else small_loss_fn

  def more(new, old, _):
    params, opt_state, batch = old
    scaled_grads = jax.grad(
      lambda p: ols.scale_loss(small(p, batch), opt_state)
    )(params)
    norm = optax.tree.norm(scaled_grads)
    grads = ols.unscale(scaled_grads, opt_state)
    return *new, {
      "beside others": jnp.stack([new[2], new[2], norm]),
      "is large": norm > 0.03,
      "scaled": norm,
      "tiny": 2.0**-80 * norm,
      "true": [optax.tree.norm(grads), grads],
    }

  tx = ols.loss_scaling(ADAM, support.Stub(2.0**8))
  step, *args = ending(more, None, tx, loss_fn=small)
  report = check(step, *args)
  assert report.ok and report.deterministic, report
  names = ["beside others", "is large", "scaled", "tiny"]
  assert report.follows == tuple(f"3/{x}" for x in names)
  assert "depend on S: output 3/beside others, output 3/is" in str(report)
  # In float16 the true norm differs between values of S, by rounding.
  half = ols.loss_scaling(ADAM, support.Stub(2.0**7)).init(PARAMS)
  norm, half_norm = (
    float(step(PARAMS, x, BATCH, None)[3]["true"][0]) for x in (args[1], half)
  )
  assert (norm != half_norm) == is_narrow
  assert norm == pytest.approx(half_norm, rel=1e-4)


# Mistakes, and steps whose verdict is open.


def with_the_scale_of_another():
  _, several, _, batch = ensemble()
  opt_state = jax.vmap(TX.init)(several)

  def all_with_the_first(params, opt_state, batch):
    first = ols.get_loss_scale(opt_state)[0]
    scaled = ols.scaled_value_and_grad
    step = make_step(value_and_grad=lambda loss_fn, _: scaled(loss_fn, first))
    return jax.vmap(step, (0, 0, None))(params, opt_state, batch)

  return jax.jit(all_with_the_first), several, opt_state, batch


def counted_by_s(new, old, count):
  log2 = jnp.log2(ols.get_loss_scale(old[1]))
  return *new, count + log2.astype(count.dtype)


def counted_at_finite_s(new, old, count):
  return *new, count + jnp.isfinite(ols.get_loss_scale(old[1]))


def averaged_late(new, old, extra):
  # The average moves only after the parameters have moved.
  mean = optax.incremental_update(new[0], extra["mean"], 0.1)
  seen = ols.select_on_skip(new[1], extra["seen"] + new[2], extra["seen"])
  return *new[:2], {"mean": mean, "seen": seen}


def with_a_best_value():
  """Returns a step whose best value depends on S from the second step on."""

  def end(new, old, best):
    leak = 8 - jnp.log2(ols.get_loss_scale(old[1]))
    found = jnp.minimum(best, jnp.where(jnp.isinf(best), 9, leak))
    return *new[:2], ols.select_on_skip(new[1], found, best)

  return ending(end, jnp.full(1, jnp.inf))


def clip_around(log2_scale):
  # In float16 the norm overflows before the gradients do.
  clip = optax.clip_by_global_norm(1.0)
  scaling = ols.loss_scaling(ADAM, support.Stub(2.0**log2_scale))
  tx = ols.master_weights(optax.chain(clip, scaling))
  params = jax.tree.map(jnp.float16, PARAMS)
  step = jax.jit(make_step(tx, loss_fn=half_loss_fn))
  return step, params, tx.init(params), BATCH


def finite(scaled_grads, opt_state, params):
  return jax.tree.map(lambda x: jnp.where(jnp.isfinite(x), x, 0), scaled_grads)


def decayed(scaled_grads, opt_state, params):
  return jax.tree.map(lambda x, p: x + 1e-2 * p, scaled_grads, params)


def average_parameters(new):
  return jax.lax.pmean(new[0], "data"), new[1]


def swapped(scaled_grads, opt_state, params):
  return jax.lax.ppermute(scaled_grads, "data", [(0, 1), (1, 0)])


def returned_as_one(axis_name=(), **changes):
  step = jax.shard_map(
    make_step(ols.loss_scaling(ADAM, RULE, axis_name=axis_name), **changes),
    mesh=support.make_mesh(data=2),
    in_specs=(jax.P(), jax.P(), support.SPREAD),
    out_specs=jax.P(),
    check_vma=False,
  )
  return jax.jit(step), PARAMS, TX.init(PARAMS), BATCH


ACCUMULATED = ols.loss_scaling(optax.MultiSteps(ADAM, 4), RULE)
JUDGED = {
  "another member's S": (
    with_the_scale_of_another,
    ("scale", "wrong", "grows as S[0], but `update`"),
    ("scale", "wrong", "In runs: The largest gradient is prop"),
  ),
  "another optimizer's S": (
    lambda: two_losses("a", "a"),
    (
      "scale",
      "wrong",
      "Of S at opt_states/b: The gradient v grows as S of opt_states/a",
    ),
  ),
  "an average of what devices skip alone": (
    lambda: pmapped(average_parameters, (), ()),
    ("invariance", "wrong", "each device skips for itself"),
  ),
  "one of several devices' parameters": (
    returned_as_one,
    ("invariance", "inconclusive", "but may differ along 'data'"),
  ),
  "gradients that devices swap": (
    lambda: returned_as_one("data", change=swapped),
    ("invariance", "inconclusive", "but may differ along 'data'"),
  ),
  "the state thrown away": (
    lambda: ending(lambda new, old, _: (new[0], old[1]), None),
    ("invariance", "wrong", "The next S is the old one"),
    ("scale", "proved", "`update` of loss_scaling did not run"),
  ),
  "an integer": (
    lambda: ending(counted_by_s, jnp.zeros(2, int)),
    ("invariance", "inconclusive", "between S and S/2: extra. "),
  ),
  "a best value, late": (
    with_a_best_value,
    ("invariance", "wrong", "Not proved: extra "),
  ),
  "a count at an overflow": (
    lambda: ending(counted_at_finite_s, jnp.zeros(1), loss_fn=half_loss_fn),
    ("invariance", "proved", ""),
    ("skip", "inconclusive", "A step that overflows changed extra."),
  ),
  "an average that moves late": (
    lambda: ending(
      averaged_late, {"mean": PARAMS, "seen": jnp.zeros(1)}, ACCUMULATED
    ),
    ("skip", "wrong", "changed extra/mean/v, extra/mean/w."),
  ),
  "an inf hidden in float16": (
    lambda: step_of(loss_fn=half_loss_fn, change=finite),
    ("skip", "wrong", "A step whose gradients overflow was applied."),
  ),
  **{
    f"a clip around, S of 2**{x}": (
      functools.partial(clip_around, x),
      ("skip", "wrong", "A step whose gradients overflow was applied."),
    )
    for x in (4, 15)
  },
  "parameters in another form": (
    lambda: ending(lambda new, *_: (tuple(new[0].values()), new[1]), None),
    ("invariance", "inconclusive", "next value of the parameters"),
  ),
  "a key that is data": (
    lambda: ending(
      lambda new, old, key: (*new, jax.random.split(key)[0]),
      jax.random.PRNGKey(0),
    ),
    ("skip", "inconclusive", "changed extra."),
  ),
  "switched off": (
    lambda: step_of(ols.loss_scaling(ADAM, None)),
    ("scale", "not applied", "switched off"),
  ),
  "switched off, and skipping": (
    lambda: skipping(jnp.array(False), ols.loss_scaling(ADAM, None)),
    ("skip", "inconclusive", "does not look at what a `skip` keeps"),
  ),
  "skip=False": (
    lambda: step_of(ols.loss_scaling(ADAM, ols.DynamicLossScale(skip=False))),
    ("skip", "not applied", "The rule has skip=False"),
  ),
}


@pytest.mark.parametrize("program", support.slow_but({*JUDGED} - SLOW, JUDGED))
def test_a_program_gets_its_verdicts(program):
  make, *expected = JUDGED[program]
  report = check(*make())
  found = verdicts(report)
  for law, verdict, text in expected:
    assert found[law] == verdict and text in said(report, law), report
  kinds = {verdict for _, verdict, _ in expected}
  assert ("wrong" in found.values()) == ("wrong" in kinds), report
  assert report.ok == (not kinds & {"wrong", "inconclusive"})


def drawing(change):
  """Returns a step with random numbers of the host."""
  rng = np.random.default_rng(0)

  def step(params, opt_state, batch):
    return make_step(SGD)(params, opt_state, change(rng, batch))

  return step, PARAMS, SGD.init(PARAMS), BATCH


def at_the_smallest_scale():
  opt_state = optax.tree.set(SGD.init(PARAMS), loss_scale=jnp.float32(2**-126))
  return jax.jit(make_step(SGD)), PARAMS, opt_state, BATCH


def with_nan():
  *args, batch = step_of()
  return *args, batch | {"x": batch["x"].at[0].set(jnp.nan)}


def decay_w(scaled_grads, opt_state, params):
  # The largest gradient is another one.
  return scaled_grads | {"w": scaled_grads["w"] + 1e-2 * params["w"]}


def late_mistake(inner):
  return step_of(ols.loss_scaling(inner, RULE), change=decay_w)


def skipping(flag, tx=TX):
  def step(params, opt_state, batch):
    value_and_grad = ols.scaled_value_and_grad(loss_fn, opt_state)
    scaled_grads = value_and_grad(params, batch)[1]
    updates, opt_state = tx.update(scaled_grads, opt_state, params, skip=flag)
    return optax.apply_updates(params, updates), opt_state

  return step, PARAMS, tx.init(PARAMS), BATCH


LATE_LEAK = ("invariance", "wrong", "between S and S/2: params/w (")
SEEN_IN_RUNS = {
  "noise": (
    lambda: drawing(
      lambda rng, batch: batch | {"y": np.exp(3 * rng.normal()) * batch["y"]}
    ),
    ("invariance", "inconclusive", ""),
  ),
  "NaN": (with_nan, ("scale", "inconclusive", "at this S and at smaller ones")),
  "no gradient": (
    lambda: step_of(loss_fn=lambda params, batch: 0 * loss_fn(params, batch)),
    ("scale", "inconclusive", "or all gradients are 0"),
  ),
  "the smallest S": (at_the_smallest_scale, ("scale", "inconclusive", "")),
  "a late rate": (lambda: late_mistake(LATE), LATE_LEAK),
  # Some parameters move at once.
  "a group that is late": (
    lambda: late_mistake(
      optax.partition({True: LATE, False: optax.sgd(0.1)}, W_ALONE)
    ),
    LATE_LEAK,
  ),
  "no rate": (
    lambda: step_of(ols.loss_scaling(optax.sgd(0.0), RULE)),
    ("invariance", "inconclusive", "No parameter moves in 64 steps."),
  ),
  "some skips": (
    lambda: skipping(flag=[jnp.array([0, 1])]),
    ("scale", "inconclusive", "`skip` skipped the step"),
  ),
  "decay in float16": (
    lambda: step_of(SGD, loss_fn=half_loss_fn, change=decayed),
    ("invariance", "rounding", "check the step with the model in float32"),
  ),
  "masked in float16": (
    lambda: step_of(optax.masked(TX, W_ALONE), loss_fn=half_loss_fn),
    ("invariance", "wrong", "params/v (50 % like S^1)"),
  ),
}


@pytest.mark.parametrize("program", SEEN_IN_RUNS)
def test_runs_alone_give_a_law_its_verdict(program, runs_alone):
  make, (law, verdict, text) = SEEN_IN_RUNS[program]
  report = check(*make())
  found = verdicts(report)
  assert found[law] == verdict and text in said(report, law), report
  assert ("wrong" in found.values()) == (verdict == "wrong"), report
  assert report.ok == (verdict == "rounding")
  assert report.deterministic == ("noise" not in program)
  assert ("Two runs with the same S" in str(report)) != report.deterministic


def test_numbers_alone_are_no_next_values():
  def step(params, opt_state, batch, count, train, rate):
    params, opt_state, loss = make_step()(params, opt_state, batch)
    right = count + jnp.sum(batch["y"] > 0)
    return params, opt_state, right, opt_state.skipped, rate * loss

  report = check(jax.jit(step), *step_of()[1:], jnp.int32(3), True, 0.5)
  assert_proved(report)
  assert report.next_values == {"params": "0", "opt_state": "1"}


def test_a_count_that_goes_on_by_itself_must_wait_on_a_skip():
  def step(params, opt_state, batch, count):
    params, opt_state, loss = make_step()(params, opt_state, batch)
    return params, opt_state, loss, count + 1

  args = *step_of()[1:], jnp.int32(3)
  for report in (check(step, *args), proved(step, *args)):
    assert report.next_values["count"] == "3"
    assert verdicts(report)["skip"] == "wrong"
    assert "If the step is skipped, count may change" in said(report, "skip")
  assert check(step, *args, may_change="count").ok


@pytest.mark.parametrize(
  ("skip", "verdict"), [(False, "inconclusive"), (True, "proved")]
)
def test_gradients_must_not_be_left_out_by_the_loss_alone(skip, verdict):
  def step(params, opt_state, batch):
    value_and_grad = ols.scaled_value_and_grad(loss_fn, opt_state)
    loss, grads = value_and_grad(params, batch)
    is_bad = ~jnp.isfinite(loss)
    grads = jax.tree.map(lambda x: jnp.where(is_bad, 0, x), grads)
    flag = is_bad if skip else False
    updates, opt_state = TX.update(grads, opt_state, params, skip=flag)
    return optax.apply_updates(params, updates), opt_state, loss

  report = check(step, *step_of()[1:])
  assert verdicts(report)["scale"] == verdict, report
  text = "may have lost its inf and NaN"
  assert (text in said(report, "scale")) == (not skip)


def test_a_step_inside_autocast_is_told_from_one_without_an_update():
  report = proved(ols.autocast(make_step()), *step_of()[1:])
  text = "`update` of loss_scaling is inside a function that rewrites it"
  assert text in said(report, "scale") and not report.ok


def test_arguments_in_another_order_than_the_outputs_break_no_law():
  def step(ema, params, opt_state, batch):
    params, opt_state, _ = make_step()(params, opt_state, batch)
    new = optax.incremental_update(params, ema, 0.1)
    return params, ols.select_on_skip(opt_state, new, ema), opt_state

  carry = {"ema": "1", "params": "0", "opt_state": "2"}
  for ema, options in ((PARAMS, {}), (HALF, {"carry": carry})):
    report = proved(step, ema, PARAMS, TX.init(PARAMS), BATCH, **options)
    assert_proved(report)
    assert report.next_values == carry


def test_whole_states_in_another_order_break_no_law():
  def step(target, state, batch):
    params, opt_state, _ = make_step()(*state, batch)
    return (params, opt_state), target

  args = (HALF, TX.init(HALF)), (PARAMS, TX.init(PARAMS)), BATCH
  report = check(jax.jit(step), *args)
  assert not report.ok and "wrong" not in verdicts(report).values(), report
  assert_proved(proved(step, *args, carry={"state": 0}))


def all_outputs(outputs):
  """Returns a step whose outputs are made of all that it has."""

  def step(params, old, opt_state, x, y):
    def distilled(params, batch):
      apart = jax.tree.map(jnp.subtract, params, old)
      return loss_fn(params, batch) + optax.tree.norm(apart)

    batch = {"x": x, "y": y}
    value_and_grad = ols.scaled_value_and_grad(distilled, opt_state)
    _, scaled_grads = value_and_grad(params, batch)
    updates, opt_state = SGD.update(scaled_grads, opt_state, params)
    new = optax.apply_updates(params, updates)
    return outputs(new, opt_state, scaled_grads, updates, x)

  old = jax.tree.map(lambda x: 0.9 * x, PARAMS)
  return jax.jit(step), PARAMS, old, SGD.init(PARAMS), BATCH["x"], BATCH["y"]


OUTPUTS = {
  "predictions": lambda p, s, g, u, x: (p, s, jnp.tanh(x)),
  "gradients": lambda p, s, g, u, x: (p, s, g),
  "updates": lambda p, s, g, u, x: (u, s),
}


@pytest.mark.parametrize("kind", support.slow_but(["gradients"], OUTPUTS))
def test_an_output_that_is_only_shaped_like_an_argument_breaks_no_law(kind):
  report = check(*all_outputs(OUTPUTS[kind]))
  assert "wrong" not in verdicts(report).values(), report
  assert not report.ok and "carry=" in said(report, "skip")


def test_carry_says_which_outputs_are_next_values():
  args = all_outputs(lambda p, s, g, u, x: (p, s, g, jnp.tanh(x)))
  assert_proved(check(*args, carry={"params": 0, "opt_state": 1}))


# Haiku's names of modules hold slashes, so two leaves may be at "a/b".
@pytest.mark.parametrize("moved", ["['extra']['a']['b']", "['extra']['a/b']"])
@pytest.mark.parametrize("judge", [check, proved])
def test_leaves_at_paths_of_one_text_are_two_leaves(judge, moved):
  def change(new, _, extra):
    # The loss is inf if the step overflows, and a skip must not add it.
    return *new, jax.tree.map_with_path(
      lambda path, x: (
        x + new[2] if moved.endswith(jax.tree_util.keystr(path)) else x
      ),
      extra,
    )

  step, *args = ending(change, {"a": {"b": jnp.ones(3)}, "a/b": jnp.ones(3)})
  carry = {"params": 0, "opt_state": 1, "extra": 3}
  report = judge(step, *args, carry=carry)
  assert verdicts(report)["skip"] == "wrong"
  assert moved in said(report, "skip")
  # What is inside of "a" is free, but the key "a/b" is not inside.
  report = judge(step, *args, carry=carry, may_change=["extra/a"])
  assert (moved in said(report, "skip")) == moved.endswith("'a/b']")


def test_an_output_in_carry_must_be_one():
  _, params, opt_state, batch = step_of()

  def step(params, opt_state, batch):
    params, opt_state, _ = make_step()(params, opt_state, batch)
    return {"a": {"b": params}, "a/b": params, "state": opt_state}

  args = step, params, opt_state, batch
  text = r"'a'\]\['b'\] and \['a/b'\]; write one"
  with pytest.raises(ValueError, match=text):
    check(*args, carry={"params": "a/b", "opt_state": "state"})
  carry = {"params": "['a/b']", "opt_state": "state"}
  assert check(*args, carry=carry).ok


def test_names_and_patterns_of_may_change_free_values():
  def step(params, opt_state, key, batch):
    key, mine = jax.random.split(key["l[0]"])
    keep = jax.random.bernoulli(mine, 0.5, batch["x"].shape)
    batch = batch | {"x": batch["x"] * keep}
    return *make_step()(params, opt_state, batch), {"l[0]": key}

  args = PARAMS, TX.init(PARAMS), {"l[0]": jax.random.key(0)}, BATCH
  report = check(jax.jit(step), *args)
  assert verdicts(report)["skip"] == "wrong" and not report.ok
  assert "changed key/l[0]." in said(report, "skip")
  for names in (["key"], ["key/l[0]", "env_state*"], "*/l?0?"):
    assert_proved(proved(step, *args, may_change=names))
  with pytest.raises(ValueError, match=r"must name leaves .* 'yek'; they"):
    proved(step, *args, may_change="yek")


def test_a_step_of_any_signature_is_right():
  step = make_step()
  args = PARAMS, TX.init(PARAMS)
  report = proved(lambda p, *rest: step(p, *rest), *args, BATCH)
  assert report.next_values == {"p": "0", "1": "1"}
  bound = functools.partial(lambda *args, train: step(*args), train=True)
  assert_proved(proved(bound, *args, BATCH, carry={}, may_change=None))


class Net(nnx.Module):
  """Everything that a forward pass changes in place."""

  def __init__(self, rngs):
    self.linear = nnx.Linear(8, 4, rngs=rngs, dtype=jnp.float16)
    self.norm = nnx.BatchNorm(4, rngs=rngs)
    self.dropout = nnx.Dropout(0.1, rngs=rngs)

  def __call__(self, x):
    with warnings.catch_warnings():
      warnings.simplefilter("ignore")  # It is deprecated outside of a capture.
      self.sow(nnx.Intermediate, "seen", x)
    return jnp.float32(self.dropout(self.norm(self.linear(x))))


def nnx_loss_fn(model, batch):
  return jnp.mean((model(batch["x"]) - batch["y"]) ** 2)


@nnx.jit
def nnx_step_without_a_block(model, optimizer, batch):
  value_and_grad = ols.nnx.scaled_value_and_grad(nnx_loss_fn, optimizer)
  loss, scaled_grads = value_and_grad(model, batch)
  optimizer.update(model, scaled_grads)
  return loss


@nnx.jit
def nnx_step(model, optimizer, batch):
  with ols.nnx.undo_on_skip(optimizer, model):
    return nnx_step_without_a_block(model, optimizer, batch)


def check_nnx(step, **options):
  """Returns the report on a step, which must have changed nothing."""
  model = Net(nnx.Rngs(0))
  optimizer = nnx.Optimizer(model, TX, wrt=nnx.Param)
  before = support.to_bits(nnx.as_pure(nnx.state((model, optimizer))))
  report = check(step, model, optimizer, BATCH, **options)
  assert support.to_bits(nnx.as_pure(nnx.state((model, optimizer)))) == before
  return report


def test_nnx_objects_may_change_in_place():
  report = check_nnx(nnx_step)
  assert_proved(report)
  assert "model in place, optimizer in place." in str(report)
  free = ["model/norm", "*/rngs/*"]
  assert_proved(check_nnx(nnx_step_without_a_block, may_change=free))


def test_each_update_in_place_needs_a_block_of_its_own():
  @nnx.jit
  def in_one_block(model, optimizer, batch):
    with ols.nnx.undo_on_skip(optimizer, model):
      for _ in range(2):
        nnx_step_without_a_block(model, optimizer, batch)

  @nnx.jit
  def in_two_blocks(model, optimizer, batch):
    for _ in range(2):
      nnx_step(model, optimizer, batch)

  make = lambda: nnx.Linear(8, 4, rngs=nnx.Rngs(0))  # noqa: E731
  for step, is_right in ((in_one_block, False), (in_two_blocks, True)):
    optimizer = nnx.Optimizer(make(), TX, wrt=nnx.Param)
    report = check(step, make(), optimizer, BATCH)
    text = "If only one of 2 updates of a step is skipped, the parameters"
    assert (text in said(report, "skip")) != is_right, report
    assert report.ok == is_right


def test_an_nnx_model_may_change_in_place_beside_a_state_that_is_returned():
  model = nnx.Linear(8, 4, rngs=nnx.Rngs(0))
  graphdef, given = nnx.split(model)
  merge = functools.partial(nnx.merge, graphdef)
  pure_step = make_step(loss_fn=lambda x, batch: nnx_loss_fn(merge(x), batch))

  @nnx.jit
  def step(model, opt_state, batch):
    params, *others = pure_step(nnx.state(model), opt_state, batch)
    nnx.update(model, params)
    return others

  report = check(step, model, TX.init(given), BATCH)
  assert_proved(report)
  assert report.next_values == {"model": "in place", "opt_state": "0"}


def test_nnx_objects_need_no_carry_and_an_optimizer_with_loss_scaling():
  with pytest.raises(ValueError, match="`carry` must be None with Flax NNX"):
    check_nnx(nnx_step, carry={"model": 0})
  model = Net(nnx.Rngs(0))
  optimizer = nnx.Optimizer(model, ADAM, wrt=nnx.Param)
  with pytest.raises(ValueError, match=r"unless an nnx\.Optimizer holds it"):
    check(nnx_step, model, optimizer, BATCH)


NOT_FOUND = {
  "the arguments are params, opt_state, batch": {"param": 0},
  "the outputs 0, 1, 2": {0: 7},
  "of the same structure, shapes and dtypes": {0: 1},
  "opt_state, got `carry` without it, {0: 0}; it must": {0: 0},
}


@pytest.mark.parametrize("text", NOT_FOUND)
def test_a_name_that_leads_nowhere_is_refused(text):
  with pytest.raises(ValueError, match=re.escape(text)):
    proved(*step_of(), carry=NOT_FOUND[text])


def test_what_is_quoted_is_short():
  with pytest.raises(TypeError, match=r"`carry` must be a dict .* \[0, 1\]"):
    proved(*step_of(), carry=[0, 1])
  with pytest.raises(TypeError, match="must be a list of names .* got 3"):
    proved(*step_of(), may_change=3)
  with pytest.raises(ValueError, match="`carry` must lead") as caught:
    proved(*step_of(), carry={"params": "0" * 10**6})
  assert len(str(caught.value)) < 500


def test_a_step_without_a_state_to_judge_is_refused():
  opt_state = TX.init(PARAMS)
  with pytest.raises(ValueError, match="none among its arguments params, x"):
    check(lambda params, x: params, PARAMS, BATCH)
  with pytest.raises(ValueError, match="next value of the argument that holds"):
    check(lambda params, state: params, PARAMS, opt_state)
  with pytest.raises(TypeError, match="be the train step itself, got a dict"):
    check(PARAMS, opt_state)
  with pytest.raises(TypeError, match="must be called outside of jit"):
    jax.jit(functools.partial(check, make_step()))(PARAMS, opt_state, BATCH)


def test_a_rule_whose_scale_is_derived_is_named():
  text = "got a ExponentState whose .* store S itself in it"
  with pytest.raises(TypeError, match=text):
    check(*step_of(ols.loss_scaling(ADAM, support.Exponent())))


def test_a_step_with_an_argument_by_keyword_is_refused():
  instrument = ols.instruments.check_step
  with pytest.raises(TypeError, match=r"functools\.partial\(\w+, train="):
    instrument(lambda params, *, train: params, PARAMS)
  with pytest.raises(TypeError, match="unexpected keyword argument 'train'"):
    instrument(lambda params, train: params, PARAMS, train=True)


def test_a_warning_is_given_though_the_step_fails():
  def step(params, opt_state):
    warnings.warn("a hint of the user's", stacklevel=1)
    raise ValueError("the step fails")

  with (
    pytest.warns(UserWarning, match="a hint"),
    pytest.raises(ValueError, match="the step fails"),
  ):
    check(step, PARAMS, TX.init(PARAMS))
