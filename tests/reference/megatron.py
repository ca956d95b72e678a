"""Megatron-LM, and ColossalAI, which took its rule."""

from tests.reference.floats import float32
from tests.reference.floats import Model


class Megatron(Model):
  """DynamicGradScaler of Megatron-LM core.

  Hysteresis is refilled by a growth only, not by a clean step: it counts the
  overflows since the last growth, in a row or not. A backoff does not refill
  it, so each further overflow is another one. A floor, no cap: the scale can
  grow to inf. The factors are rounded to float32 before the product.

  `refill="clean"` is what Megatron-LM documents and does not do: the overflows
  that hysteresis counts are consecutive.
  """

  def __init__(
    self,
    initial_scale=2.0**32,
    min_scale=1.0,
    growth_factor=2.0,
    backoff_factor=0.5,
    growth_interval=1000,
    hysteresis=2,
    refill="growth",
  ):
    self.scale, self.min_scale = float32(initial_scale), float32(min_scale)
    self.growth_factor = float32(growth_factor)
    self.backoff_factor = float32(backoff_factor)
    self.growth_interval, self.hysteresis = growth_interval, hysteresis
    self.refill = refill
    self.growth_tracker, self.hysteresis_tracker = 0, hysteresis

  def update(self, overflow):
    if overflow:
      self.growth_tracker = 0
      self.hysteresis_tracker -= 1
      if self.hysteresis_tracker <= 0:
        smaller = float32(self.scale * self.backoff_factor)
        self.scale = max(smaller, self.min_scale)
    else:
      if self.refill == "clean":
        self.hysteresis_tracker = self.hysteresis
      self.growth_tracker += 1
      if self.growth_tracker == self.growth_interval:
        self.growth_tracker = 0
        self.hysteresis_tracker = self.hysteresis
        self.scale = float32(self.scale * self.growth_factor)


class MegatronConstant(Model):
  """ConstantGradScaler of Megatron-LM core, which saves nothing."""

  def __init__(self, initial_scale):
    self.scale = float32(initial_scale)

  def update(self, overflow):
    del overflow


class ColossalAI(Model):
  """DynamicGradScaler of colossalai.amp.naive_amp.

  Counts up to its hysteresis where Megatron-LM counts down from it; only a
  growth clears the count. A floor or a cap of 0 or None has no effect. The
  factors are rounded to float32 before the product.
  """

  def __init__(
    self,
    initial_scale=2.0**16,
    growth_factor=2.0,
    backoff_factor=0.5,
    growth_interval=1000,
    min_scale=None,
    max_scale=None,
    hysteresis=2,
  ):
    self.scale = float32(initial_scale)
    self.min_scale = float32(min_scale) if min_scale else None
    self.max_scale = float32(max_scale) if max_scale else None
    self.growth_factor, self.backoff_factor = growth_factor, backoff_factor
    self.growth_interval, self.hysteresis = growth_interval, hysteresis
    self.growth_step = self.hysteresis_step = 0

  def update(self, overflow):
    if overflow:
      self.hysteresis_step += 1
      self.growth_step = 0
      if self.hysteresis_step >= self.hysteresis:
        self.scale = float32(self.scale * float32(self.backoff_factor))
        if self.min_scale is not None:
          self.scale = max(self.scale, self.min_scale)
    else:
      self.growth_step += 1
      if self.growth_step == self.growth_interval:
        self.growth_step = self.hysteresis_step = 0
        self.scale = float32(self.scale * float32(self.growth_factor))
        if self.max_scale is not None:
          self.scale = min(self.scale, self.max_scale)

  def resume(self):
    """A checkpoint holds neither count."""
    self.growth_step = self.hysteresis_step = 0
