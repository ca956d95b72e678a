"""The sentence under the table, for whatever a comparison may show."""

import math

import pytest

import optax_lossscale as ols
from optax_lossscale.demo import run as run_lib
from optax_lossscale.demo import verdict

RULE = ols.FixedLossScale(8.0)
FLOAT32 = run_lib.Run("float32", "none", None)
ALONE = run_lib.Run("float16", "none", None)
FIXED = run_lib.Run("float16", "fixed:8", RULE)
DYNAMIC = run_lib.Run("float16", "dynamic", RULE)
BFLOAT16 = run_lib.Run("bfloat16", "none", None, level="O1")
FAST = "fast|step|0.5"


def said(*ends, more_is_better=True):
  """Returns the sentence about runs that end at these scores, from 0."""
  results = [
    run_lib.Result(run.label, seed, held_out=end, start=0.0)
    for run, scores in ends
    for seed, end in enumerate(scores)
  ]
  runs = [run for run, _ in ends]
  way = verdict.closed(runs, results, more_is_better=more_is_better)
  return verdict.sentence(runs, way)


def test_the_way_is_measured_from_the_start_to_float32():
  results = [
    run_lib.Result(FLOAT32.label, 0, start=1.0, held_out=5.0),
    run_lib.Result(ALONE.label, 0, start=2.0, held_out=3.0),
  ]
  way = verdict.closed([FLOAT32, ALONE], results, more_is_better=True)
  assert way == {FLOAT32.label: [100.0], ALONE.label: [50.0]}


@pytest.mark.parametrize("sign", [1, -1])
def test_the_sentence_tells_how_far_each_run_came(sign):
  runs = (FLOAT32, [8.0]), (ALONE, [1.0]), (FIXED, [8.0]), (DYNAMIC, [7.99])
  ends = [(run, [sign * x for x in scores]) for run, scores in runs]
  assert said(*ends, more_is_better=sign > 0) == (
    "float16 alone closed 12.5 % of the gap between the start and float32; "
    "with "
    "loss scaling 100.0 and 99.9 %."
  )


def test_several_seeds_are_a_range():
  ends = (FLOAT32, [8.0] * 3), (ALONE, [1.0, -0.001, 2.0])
  assert "float16 alone closed 0.0 to 25.0 % of" in said(*ends)
  ends = (FLOAT32, [8.0] * 3), (ALONE, [0.001, -0.001, 0.002])
  assert "float16 alone closed 0.0 % of" in said(*ends)


def test_a_task_that_needs_no_loss_scaling_is_told():
  end = " float16 alone did as well: these steps needed no loss scaling."
  assert said((FLOAT32, [8]), (ALONE, [7.97]), (FIXED, [8])).endswith(end)
  # The transformer falls behind by a hundredth of the gap.
  ends = (FLOAT32, [2.5629 - 5.3249]), (ALONE, [2.5887 - 5.3249])
  assert said(*ends, (FIXED, ends[0][1]), more_is_better=False) == (
    "float16 alone closed 99.1 % of the gap between the start and float32; "
    "with "
    "loss scaling 100.0 %."
  )
  assert said((FLOAT32, [8]), (FIXED, [8])) == (
    "float16 with loss scaling closed 100.0 % of the gap between the start "
    "and float32."
  )


def test_checks_are_told_apart_where_there_are_several():
  checked = [
    run_lib.Run("float16", "fixed:8", RULE, check)
    for check in ("nonfinite", "saturated")
  ]
  ends = (FLOAT32, [8]), (ALONE, [0]), (checked[0], [0]), (checked[1], [8])
  assert said(*ends).endswith(
    "; with loss scaling and the check nonfinite 0.0 %; with loss scaling and "
    "the check saturated 100.0 %."
  )


def test_a_schedule_is_named():
  low = run_lib.Run("float16", "fixed:8", RULE, level="O1")
  fast = run_lib.Run("float16", "fixed:8", RULE, level="O1", accelerate=FAST)
  assert said((FLOAT32, [8]), (low, [4]), (fast, [6])) == (
    "float16 with loss scaling closed 50.0 % of the gap between the start "
    f"and float32; with {FAST} 75.0 %."
  )
  fast = run_lib.Run("bfloat16", "none", None, level="O1", accelerate=FAST)
  assert said((FLOAT32, [8]), (BFLOAT16, [8]), (fast, [8])) == (
    "bfloat16 alone closed 100.0 % of the gap between the start and float32; "
    "with "
    f"{FAST} 100.0 %."
  )


@pytest.mark.parametrize("end", [math.nan, math.inf])
def test_a_score_that_is_no_number_closed_nothing(end):
  assert said((FLOAT32, [8]), (ALONE, [end])) == (
    "float16 alone closed nothing (its score is not finite) of the gap "
    "between the start and float32."
  )


def test_a_seed_whose_score_is_no_number_is_counted():
  ends = (FLOAT32, [8.0] * 3), (FIXED, [8.0, math.nan, 8.0])
  assert said(*ends) == (
    "float16 with loss scaling closed 100.0 % (1 of 3 not finite) of the gap "
    "between the start and float32."
  )
  ends = (FLOAT32, [8.0] * 2), (ALONE, [8.0, math.nan]), (FIXED, [8.0] * 2)
  assert "needed no loss scaling" not in said(*ends)


@pytest.mark.parametrize("end", [0.0, -1.0, math.nan, math.inf])
def test_nothing_is_measured_by_a_float32_that_did_not_get_better(end):
  assert said((FLOAT32, [end]), (ALONE, [1.0])) == (
    "float32 itself did not improve on the held-out data, so the other runs "
    "cannot be measured against it."
  )


@pytest.mark.parametrize(
  "ends",
  [
    [],
    [(FLOAT32, [8])],
    [(ALONE, [8])],
    [(FLOAT32, [None]), (ALONE, [1])],
    [(FLOAT32, [8]), (ALONE, [None])],
    [(FLOAT32, []), (ALONE, [])],
  ],
  ids=["none", "float32", "alone", "interrupted", "half", "at once"],
)
def test_nothing_is_said_where_nothing_can_be_compared(ends):
  assert said(*ends) == ""


def test_seeds_that_have_not_ended_are_left_out():
  ends = (FLOAT32, [8.0, 8.0]), (ALONE, [4.0, None])
  assert said(*ends).startswith("float16 alone closed 50.0 % of")
  ends = (FLOAT32, [8.0, None]), (ALONE, [4.0, 8.0])
  assert said(*ends).startswith("float16 alone closed 50.0 % of")


@pytest.mark.parametrize("runs", [[FLOAT32], [FLOAT32, ALONE]])
def test_a_run_is_not_compared_with_itself(runs):
  result = run_lib.Result(FLOAT32.label, 0, start=1.0, held_out=5.0)
  assert verdict.closed(runs, [result], more_is_better=True) is None
