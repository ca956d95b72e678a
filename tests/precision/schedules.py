"""Numbers and arguments for tests of precision schedules."""

import math

NAN, INF = math.nan, math.inf

# The arguments that a schedule of each mode needs, besides its text.
NEEDS = {"step": {"total_steps": 20}, "loss": {"target_loss": 2.0}}


def mode_of(schedule):
  """Returns the name of the number that updates a schedule."""
  return "step" if schedule.until_loss is None else "loss"
