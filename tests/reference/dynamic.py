"""`DynamicLossScale` in plain Python."""

import math
import struct

_pack, _unpack = struct.Struct("<f").pack, struct.Struct("<f").unpack


def float32(value):
  """Rounds a Python float once to the nearest float32, inf beyond its range."""
  try:
    return _unpack(_pack(value))[0]
  except OverflowError:
    return math.copysign(math.inf, value)


class Dynamic:
  """The rule that counts overflows.

  Hysteresis counts the overflows in a row: a clean step ends the row, and
  from the `hysteresis`-th overflow of a row on, each one shrinks the scale.
  Both bounds clamp. `stalled`: this step overflowed with the scale already at
  `min_scale`.
  """

  def __init__(
    self,
    init_scale=2.0**15,
    growth_factor=2.0,
    backoff_factor=0.5,
    growth_interval=2000,
    hysteresis=1,
    min_scale=2.0**-14,
    max_scale=2.0**126,
  ):
    self.scale = float32(init_scale)
    self.growth_factor = float32(growth_factor)
    self.backoff_factor = float32(backoff_factor)
    self.min_scale, self.max_scale = float32(min_scale), float32(max_scale)
    self.growth_interval, self.hysteresis = growth_interval, hysteresis
    self.clean_steps = self.overflows_in_a_row = 0
    self.stalled = False

  def update(self, overflow):
    self.stalled = overflow and self.scale == self.min_scale
    if overflow:
      self.clean_steps = 0
      self.overflows_in_a_row += 1
      if self.overflows_in_a_row >= self.hysteresis:
        smaller = float32(self.scale * self.backoff_factor)
        self.scale = max(smaller, self.min_scale)
    else:
      self.overflows_in_a_row = 0
      self.clean_steps += 1
      if self.clean_steps == self.growth_interval:
        self.clean_steps = 0
        larger = float32(self.scale * self.growth_factor)
        self.scale = min(larger, self.max_scale)
