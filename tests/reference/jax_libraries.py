"""Flax and JMP."""

import math

from tests.reference.floats import float32
from tests.reference.floats import Model

_LARGEST = float32((2.0 - 2.0**-23) * 2.0**127)
_SMALLEST_NORMAL = 2.0**-126


class Flax(Model):
  """flax.training.dynamic_scale.DynamicScale, under jit.

  The clean steps are compared before this one is counted, so that each growth
  takes `growth_interval` + 1 of them. A growth beyond float32 gives its
  largest number, not inf. `minimum_scale=None`: no floor; then a subnormal
  scale is kept here, and flushed to 0 by XLA on a CPU. The factors are rounded
  to float32.
  """

  def __init__(
    self,
    scale=65536.0,
    growth_factor=2.0,
    backoff_factor=0.5,
    growth_interval=2000,
    minimum_scale=_SMALLEST_NORMAL,
  ):
    self.scale = float32(scale)
    self.growth_factor = float32(growth_factor)
    self.backoff_factor = float32(backoff_factor)
    self.growth_interval = growth_interval
    self.minimum_scale = 0.0 if minimum_scale is None else minimum_scale
    self.fin_steps = 0

  def update(self, overflow):
    if overflow:
      smaller = float32(self.scale * self.backoff_factor)
      self.scale = max(smaller, float32(self.minimum_scale))
      self.fin_steps = 0
    elif self.fin_steps == self.growth_interval:
      larger = float32(self.scale * self.growth_factor)
      self.scale = min(larger, _LARGEST)
      self.fin_steps = 0
    else:
      self.fin_steps += 1


class Jmp(Model):
  """jmp.DynamicLossScale of a float32 scale, outside jit.

  In float32: one `factor` for both ways, by which a backoff divides. A growth
  to inf is refused. The counter runs modulo `period`. Passing through jit, the
  original forgets `min_loss_scale` and takes 1 again.
  """

  def __init__(self, loss_scale, period=2000, factor=2, min_loss_scale=1.0):
    self.scale = float32(loss_scale)
    self.period, self.factor = period, factor
    self.min_loss_scale = float32(min_loss_scale)
    self.counter = 0

  def update(self, overflow):
    factor = float32(self.factor)
    if overflow:
      smaller = float32(self.scale / factor)
      self.scale = max(self.min_loss_scale, smaller)
      self.counter = 0
      return
    if self.counter == self.period - 1:
      larger = float32(self.scale * factor)
      self.scale = larger if math.isfinite(larger) else self.scale
    self.counter = (self.counter + 1) % self.period
