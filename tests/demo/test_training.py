"""The runs: same start, same batches, and what is recorded of each step."""

import dataclasses
import itertools
import math

import jax
import jax.numpy as jnp
import optax
import pytest

import optax_lossscale as ols
from optax_lossscale.demo import comparison
from optax_lossscale.demo import run as run_lib
from optax_lossscale.demo import training
from tests import support
from tests.demo import tiny

pytestmark = pytest.mark.long

FLOAT32 = run_lib.Run("float32", "none", None)
UNSCALED = run_lib.Run("float16", "none", None)
FIXED = run_lib.Run("float16", "fixed:1024", ols.FixedLossScale(1024.0))
# 2**40 overflows at once in float16.
TOO_LARGE = run_lib.Run(
  "float16",
  "dynamic:2**40",
  ols.DynamicLossScale(2.0**40, backoff_factor=2.0**-30),
)
NONFINITE = dataclasses.replace(TOO_LARGE, check="nonfinite")
SATURATED = dataclasses.replace(TOO_LARGE, check="saturated")
# Nothing is float16 there, whatever the precision.
O0 = run_lib.Run("float16", "none", None, level="O0")
O1 = dataclasses.replace(O0, level="O1")
LOW = dataclasses.replace(TOO_LARGE, level="O1")
FAST = dataclasses.replace(LOW, accelerate="fast|step|0.5")
FAST1 = dataclasses.replace(
  O1, precision="bfloat16", accelerate="fast1|step|0.5"
)


class Huge(tiny.Linear):
  """A linear classifier of which no float16 holds the logits."""

  def __call__(self, images):
    factor = self.dtype.type(2**15)
    return super().__call__(images) * factor * factor


@pytest.fixture(scope="module")
def tiny_task():
  return tiny.make_task()


def steps_of(run, task, *, seed=0, steps=3, **options):
  found = []
  _, score = training.train(
    run, task, seed=seed, steps=steps, on_step=found.append, **options
  )
  return found, score


def test_first_loss_does_not_depend_on_loss_scaling(tiny_task):
  runs = (FLOAT32, UNSCALED, FIXED, TOO_LARGE)
  losses = [steps_of(run, tiny_task, steps=1)[0][0].loss for run in runs]
  assert losses[1] == losses[2] == losses[3]
  assert losses[0] == pytest.approx(losses[1], rel=1e-2)
  assert losses[0] != losses[1]


def test_training_lowers_the_loss(tiny_task):
  made, score = steps_of(FIXED, tiny_task, steps=150)
  assert made[-1].loss < made[0].loss / 1.2
  assert 0.5 < score <= 1


def test_same_seed_gives_the_same_history(tiny_task):
  first, _ = steps_of(FIXED, tiny_task, seed=1)
  again, _ = steps_of(FIXED, tiny_task, seed=1)
  other, _ = steps_of(FIXED, tiny_task, seed=2)
  assert first == again
  assert first[0].loss != other[0].loss


def test_record_holds_the_scale_that_the_step_used(tiny_task):
  made, _ = steps_of(TOO_LARGE, tiny_task, steps=3)
  assert [step.step for step in made] == [1, 2, 3]
  assert [step.loss_scale for step in made] == [
    2.0**40,
    2.0**10,
    2.0**10,
  ]
  assert [step.overflow for step in made] == [True, False, False]
  assert [step.skipped for step in made] == [True, False, False]
  assert not math.isfinite(made[0].amax)
  assert 0 < made[1].amax < 65504


def test_skipped_step_leaves_the_model_alone(tiny_task):
  made, _ = steps_of(TOO_LARGE, tiny_task, steps=1)
  same_batch = dataclasses.replace(
    tiny_task,
    batches=lambda seed: itertools.repeat(next(tiny_task.batches(seed))),
  )
  again, _ = steps_of(TOO_LARGE, same_batch, steps=3)
  assert made[0].loss == again[0].loss == again[1].loss != again[2].loss


def test_unscaled_run_records_no_scale(tiny_task):
  made, _ = steps_of(UNSCALED, tiny_task, steps=1)
  assert made[0][3:] == (None, None, None, None)


def test_unscaled_step_is_that_of_the_bare_optimizer(tiny_task):
  model = tiny_task.model(jnp.dtype("float16"))
  params = model.init(jax.random.key(0), tiny_task.held_out[0][0][:1])
  loss_fn = training.make_loss_fn(model)

  @jax.jit
  def bare_step(params, opt_state, batch):
    loss, grads = jax.value_and_grad(loss_fn)(params, batch)
    updates, opt_state = tiny_task.optimizer.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, loss

  tx = ols.loss_scaling(tiny_task.optimizer, None)
  step = training.make_train_step(loss_fn, tx)
  states = [(params, tx.init(params)), (params, tx.init(params).inner_state)]
  for batch in itertools.islice(tiny_task.batches(0), 5):
    *states[0], metrics = step(*states[0], batch)
    *states[1], loss = bare_step(*states[1], batch)
    support.assert_same_bits(metrics["loss"], loss)
    support.assert_same_bits(states[0][0], states[1][0])


def test_label_names_the_check_that_was_asked_for():
  assert TOO_LARGE.label == "float16, dynamic:2**40"
  assert SATURATED.label == "float16, dynamic:2**40, saturated"


def test_label_names_the_level():
  run = dataclasses.replace(SATURATED, level="auto")
  assert run.label == "float16, auto, dynamic:2**40, saturated"


def test_label_of_o0_tells_that_it_is_float32():
  assert O0.label == "float32, O0, none"


def test_label_names_the_schedule():
  assert FAST1.label == "bfloat16, O1, none, fast1|step|0.5"


def test_names_of_the_parts_are_in_the_order_of_the_labels(tiny_task):
  runs = [FLOAT32, SATURATED, dataclasses.replace(FIXED, level="O1")]
  plan = comparison.Comparison(tiny_task, runs, seeds=range(1), steps=1)
  assert plan.label_name == "precision, level, loss scale, check"


def test_record_holds_the_precision_of_a_run_without_a_schedule(tiny_task):
  for run, precision in (
    (FLOAT32, "float32"),
    (O0, "float32"),
    (LOW, "float16"),
  ):
    made, _ = steps_of(run, tiny_task, steps=1)
    assert [step.precision for step in made] == [precision]


@pytest.fixture(scope="module")
def fast(tiny_task):
  """Five steps, of which the first is skipped, and the score."""
  return steps_of(FAST, tiny_task, steps=5)


def test_run_with_a_schedule_switches_after_its_share_of_applied_steps(fast):
  precisions = [step.precision for step in fast[0]]
  # Half of five is two and a half, and one was skipped.
  assert precisions == ["float16"] * 3 + ["float32"] * 2


def test_low_part_of_a_schedule_is_the_low_run(fast, tiny_task):
  low, _ = steps_of(LOW, tiny_task, steps=5)
  for step, expected in zip(fast[0][:3], low[:3], strict=True):
    assert step.loss == pytest.approx(expected.loss, rel=1e-5)
    assert step.loss_scale == expected.loss_scale
    assert step.skipped == expected.skipped
  assert fast[0][4].loss != low[4].loss


def test_full_part_of_a_schedule_is_not_scaled(fast):
  for step in fast[0][3:]:
    assert step.loss_scale is None
    assert not step.skipped
    # Of gradients that S has not multiplied.
    assert 0 < step.amax < 1


@pytest.mark.parametrize(
  ("target_loss", "precision"), [(1e-3, "bfloat16"), (1e3, "float32")]
)
def test_run_with_a_schedule_is_scored_as_it_ends(
  target_loss, precision, tiny_task
):
  task = dataclasses.replace(
    tiny_task,
    optimizer=optax.set_to_zero(),
    score=lambda logits, labels: logits.max(-1),
  )
  run = dataclasses.replace(
    FAST1, accelerate="fast1|loss", target_loss=target_loss
  )
  made, score = steps_of(run, task, steps=2)
  assert [x.precision for x in made] == ["bfloat16", precision]
  assert {x.loss_scale for x in made} == {None}
  same = dataclasses.replace(O1, precision="bfloat16")
  if precision == "float32":
    same = FLOAT32
  assert score == steps_of(same, task, steps=1)[1]


def test_o0_computes_as_the_float32_model_does(tiny_task):
  expected, expected_score = steps_of(FLOAT32, tiny_task)
  made, score = steps_of(O0, tiny_task)
  assert [x.loss for x in made] == [x.loss for x in expected]
  assert score == expected_score


def test_loss_and_score_are_computed_at_the_level(tiny_task):
  still = dataclasses.replace(
    tiny_task,
    optimizer=optax.set_to_zero(),
    score=lambda logits, labels: logits.max(-1),
  )
  results = {
    run.label: [made[0].loss, score]
    for run in (
      FLOAT32,
      *(dataclasses.replace(O0, level=x) for x in ("O1", "O2", "O3", "auto")),
      dataclasses.replace(O1, precision="bfloat16"),
    )
    for made, score in [steps_of(run, still, steps=1)]
  }
  expected = results.pop("float32, none")
  for result in results.values():
    assert result == pytest.approx(expected, rel=2e-2)
    assert result[0] != expected[0] and result[1] != expected[1]
  assert results["bfloat16, O1, none"] != results["float16, O1, none"]


def test_saturation_mode_hides_an_overflow_from_nonfinite(tiny_task):
  made, _ = steps_of(NONFINITE, tiny_task, saturating=True)
  assert [step.loss_scale for step in made] == [2.0**40] * 3
  assert not any(step.overflow or step.skipped for step in made)
  assert [step.amax for step in made] == [65504.0] * 3


def test_saturated_sees_there_what_nonfinite_sees_on_ieee_hardware(tiny_task):
  seen, seen_score = steps_of(SATURATED, tiny_task, saturating=True)
  assert [step.overflow for step in seen] == [True, False, False]
  assert seen[0].amax == 65504.0
  expected, expected_score = steps_of(NONFINITE, tiny_task)
  assert seen[0].loss_scale == expected[0].loss_scale
  assert seen_score == expected_score
  for step, other in zip(seen[1:], expected[1:], strict=True):
    assert step == other


@pytest.mark.parametrize(
  ("run", "overflows"),
  [(NONFINITE, [False] * 3), (SATURATED, [True, False, False])],
  ids=["nonfinite", "saturated"],
)
def test_what_a_level_makes_float16_saturates(run, overflows, tiny_task):
  run = dataclasses.replace(run, level="O1")
  made, _ = steps_of(run, tiny_task, saturating=True)
  assert [step.overflow for step in made] == overflows


@pytest.mark.parametrize("run", [UNSCALED, FIXED], ids=["unscaled", "fixed"])
def test_loss_and_score_of_float16_saturate(run, tiny_task):
  huge = dataclasses.replace(
    tiny_task,
    model=lambda dtype: Huge(dtype=dtype),
    score=lambda logits, labels: logits.max(-1),
  )
  made, score = steps_of(run, huge, steps=1)
  assert not math.isfinite(made[0].loss) and not math.isfinite(score)
  made, score = steps_of(run, huge, steps=1, saturating=True)
  assert 0 < made[0].loss <= 2 * 65504
  assert 0 < score <= 65504


@pytest.mark.parametrize(
  ("run", "saturating"),
  [(FLOAT32, True), (O0, True), (UNSCALED, False), (FIXED, False)],
  ids=["float32", "O0", "unscaled", "scaled"],
)
def test_nothing_is_emulated_unless_it_saturates(
  run, saturating, tiny_task, monkeypatch
):
  def refuse(fun):
    raise AssertionError(fun)

  monkeypatch.setattr(ols, "saturating", refuse)
  steps_of(run, tiny_task, steps=1, saturating=saturating)


@pytest.mark.parametrize(
  ("precision", "level"),
  [("float32", None), ("float16", "O0")],
  ids=["float32", "O0"],
)
def test_saturated_knows_the_precision_of_the_run(precision, level, tiny_task):
  rule = ols.FixedLossScale(2.0**40)
  run = run_lib.Run(precision, "fixed:2**40", rule, "saturated", level)
  made, _ = steps_of(run, tiny_task, steps=1)
  assert made[0].amax > 65504 and not made[0].overflow


def test_comparison_gives_every_run_the_same_batches(tiny_task):
  plan = comparison.Comparison(
    tiny_task, [FLOAT32, FIXED], seeds=range(2), steps=2
  )
  results = comparison.train(plan)
  assert not results.interrupted
  assert [(x.run, x.seed) for x in results.runs] == [
    (run.label, seed) for seed in range(2) for run in (FLOAT32, FIXED)
  ]
  assert [[s.step for s in x.steps] for x in results.runs] == [[1, 2]] * 4
  losses = [[s.loss for s in x.steps] for x in results.runs]
  assert losses[0] == pytest.approx(losses[1], rel=1e-2)
  assert losses[0] != pytest.approx(losses[2], rel=1e-2)
  assert all(0 <= x.held_out <= 1 for x in results.runs)
