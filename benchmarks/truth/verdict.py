"""The rule by which scores differ, and what a workload's scores say."""

from collections.abc import Mapping
from collections.abc import Sequence
import math
from typing import NamedTuple

import numpy as np

from benchmarks.truth import settings

DEVIATIONS = 2

RULE = (
  "A setting differs from float32 if all of this holds: the mean of its scores "
  f"lies outside of float32's mean ± {DEVIATIONS} standard deviations over the "
  "seeds; the difference from float32 with the same seed has the same sign for "
  "every seed; and the mean difference is at least what matters for the score. "
  "A setting with a score that is not finite is worse."
)

SAME, BETTER, WORSE = "no difference", "better", "worse"


class Comparison(NamedTuple):
  """How scores differ from float32's.

  Attributes:
    verdict: `SAME`, `BETTER` or `WORSE`.
    mean: of the differences with the same seed.
    deviation: the standard deviation of those differences.
    visible: the smallest mean difference that the rule can see.
  """

  verdict: str
  mean: float
  deviation: float
  visible: float


def compare(
  scores: Sequence[float],
  reference: Sequence[float],
  *,
  matters: float,
  more_is_better: bool,
) -> Comparison:
  """Compares scores with float32's, by the rule.

  Args:
    scores: one per seed.
    reference: float32's, in the same order.
    matters: the smallest difference that matters.
    more_is_better: of the score.

  Raises:
    ValueError: if float32 has a score that is not finite.
  """
  ours, theirs = np.array(scores, float), np.array(reference, float)
  if not np.all(np.isfinite(theirs)):
    raise ValueError(f"float32's scores must be finite, got {reference}.")
  visible = max(matters, DEVIATIONS * float(theirs.std(ddof=1)))
  if not np.all(np.isfinite(ours)):
    return Comparison(WORSE, math.nan, math.nan, visible)
  paired = ours - theirs
  mean, deviation = float(paired.mean()), float(paired.std(ddof=1))
  found = SAME
  is_one_sided = np.all(paired > 0) or np.all(paired < 0)
  if is_one_sided and abs(mean) >= visible:
    found = BETTER if (mean > 0) == more_is_better else WORSE
  return Comparison(found, mean, deviation, visible)


def reading(verdicts: Mapping[str, str]) -> str:
  """Returns what a workload's verdicts say of loss scaling.

  Args:
    verdicts: by setting, those of float16 alone and of the default at least.
  """
  alone, scaled = verdicts[settings.UNSCALED], verdicts[settings.DEFAULT]
  match alone, scaled:
    case (_, "worse") if alone != WORSE:
      return "worse with loss scaling"
    case ("worse", "worse"):
      return "not cured by loss scaling"
    case ("worse", _):
      return "needs loss scaling"
  return "no need seen"
