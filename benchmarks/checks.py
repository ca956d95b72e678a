"""Whether a contender does what it is measured doing."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from benchmarks.peers.contender import Arrays
from benchmarks.peers.contender import Contender

# A step moves a parameter by about half the learning rate, 5e-4. The rest is
# rounding, which differs with the order of the operations.
_TOLERANCE = 1e-7


class Check(NamedTuple):
  """What came out.

  Attributes:
    difference: the largest one between the parameters after a step and those
      of the bare optimizer.
    skips: whether a step with one inf leaves all parameters as they were.
  """

  difference: float
  skips: bool

  @property
  def passed(self) -> bool:
    """Whether it takes the same step, and none on overflow."""
    # NaN is not below the tolerance.
    return self.difference <= _TOLERANCE and self.skips


def check(
  contender: Contender,
  *,
  params: Arrays,
  scaled_grads: Arrays,
  overflowing: Arrays,
  expected: Sequence[np.ndarray],
) -> Check:
  """Makes two steps, of which the second one is to be skipped.

  Args:
    contender: is compiled.
    params: before the steps.
    scaled_grads: of S times the loss.
    overflowing: the same with an inf.
    expected: the parameters after the first step.
  """
  contender.start(params)
  _step(contender, scaled_grads)
  after = contender.parameters()
  _step(contender, overflowing)
  return Check(
    difference=max(
      float(np.max(np.abs(a - b))) for a, b in zip(after, expected, strict=True)
    ),
    skips=all(map(np.array_equal, after, contender.parameters())),
  )


def _step(contender: Contender, scaled_grads: Arrays) -> None:
  contender.prepare(scaled_grads)
  contender.step(scaled_grads)
