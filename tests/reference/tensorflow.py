"""TensorFlow 1 and 2, Keras 3, and TensorFlow 1 on Ascend."""

import math

from tests.reference.floats import float32
from tests.reference.floats import Model


class TensorFlowContrib(Model):
  """tf.contrib.mixed_precision.ExponentialUpdateLossScaleManager.

  Bad steps add up across clean ones: only a backoff or a growth, also a refused
  one, clears their count. A backoff clears it too, so that each backoff takes
  `decr_every_n_nan_or_inf` of them. The floor is 1; a growth to inf is refused;
  the ratios are float32.
  """

  def __init__(
    self,
    init_loss_scale,
    incr_every_n_steps,
    decr_every_n_nan_or_inf=2,
    incr_ratio=2.0,
    decr_ratio=0.8,
  ):
    self.scale = float32(init_loss_scale)
    self.incr_ratio, self.decr_ratio = float32(incr_ratio), float32(decr_ratio)
    self.incr_every_n_steps = incr_every_n_steps
    self.decr_every_n_nan_or_inf = decr_every_n_nan_or_inf
    self.good_steps = self.bad_steps = 0

  def update(self, overflow):
    if overflow:
      self.good_steps = 0
      self.bad_steps += 1
      if self.bad_steps >= self.decr_every_n_nan_or_inf:
        self.scale = max(1.0, float32(self.scale * self.decr_ratio))
        self.bad_steps = 0
    else:
      self.good_steps += 1
      if self.good_steps >= self.incr_every_n_steps:
        larger = float32(self.scale * self.incr_ratio)
        self.scale = larger if math.isfinite(larger) else self.scale
        self.good_steps = self.bad_steps = 0


class NpuExponential(Model):
  """ExponentialUpdateLossScaleManager of npu_bridge.

  As tf.contrib's, except that the scale stops growing at 3.4e38 / `incr_ratio`,
  a quotient of doubles rounded to float32, and may grow to inf.
  """

  def __init__(
    self,
    init_loss_scale,
    incr_every_n_steps,
    decr_every_n_nan_or_inf=2,
    incr_ratio=2.0,
    decr_ratio=0.8,
  ):
    self.scale = float32(init_loss_scale)
    self.incr_ratio, self.decr_ratio = float32(incr_ratio), float32(decr_ratio)
    self.grows_below = float32(3.4e38 / incr_ratio)
    self.incr_every_n_steps = incr_every_n_steps
    self.decr_every_n_nan_or_inf = decr_every_n_nan_or_inf
    self.good_steps = self.bad_steps = 0

  def update(self, overflow):
    if not overflow:
      if self.good_steps + 1 < self.incr_every_n_steps:
        self.good_steps += 1
        return
      if self.scale < self.grows_below:
        self.scale = float32(self.scale * self.incr_ratio)
      self.good_steps = self.bad_steps = 0
    elif self.bad_steps + 1 < self.decr_every_n_nan_or_inf:
      self.bad_steps += 1
      self.good_steps = 0
    else:
      self.scale = max(1.0, float32(self.scale * self.decr_ratio))
      self.good_steps = self.bad_steps = 0


class NpuFixed(Model):
  """FixedLossScaleManager of npu_bridge: a constant, so nothing is saved.

  `enable_overflow_check` says whether an overflow discards the step.
  """

  def __init__(self, loss_scale, enable_overflow_check=True):
    self.scale = float32(loss_scale)
    self.enable_overflow_check = enable_overflow_check

  def update(self, overflow):
    del overflow


class TensorFlow(Model):
  """tf.mixed_precision.experimental.DynamicLossScale, run eagerly.

  One `multiplier` for both ways: a growth multiplies by it and a backoff
  divides, in float32. The floor is 1; a growth to inf is refused, and restarts
  the count all the same.
  """

  def __init__(
    self,
    initial_loss_scale=2.0**15,
    increment_period=2000,
    multiplier=2.0,
  ):
    self.scale = float32(initial_loss_scale)
    self.increment_period = increment_period
    self.multiplier = float32(multiplier)
    self.good_steps = 0

  def update(self, overflow):
    if overflow:
      self.good_steps = 0
      self.scale = max(float32(self.scale / self.multiplier), 1.0)
    elif self.good_steps + 1 >= self.increment_period:
      self.good_steps = 0
      larger = float32(self.scale * self.multiplier)
      if math.isfinite(larger):
        self.scale = larger
    else:
      self.good_steps += 1


class Keras(Model):
  """LossScaleOptimizer of Keras 3.

  The factors are 2 and 0.5; no floor, no cap and no test for finiteness, so the
  scale can reach 0 and inf. Here a subnormal scale is kept; the TensorFlow
  backend flushes it to 0.
  """

  def __init__(self, initial_scale=2.0**15, dynamic_growth_steps=2000):
    self.scale = float32(initial_scale)
    self.dynamic_growth_steps = dynamic_growth_steps
    self.step_counter = 0

  def update(self, overflow):
    if overflow:
      self.step_counter = 0
      self.scale = float32(self.scale * 0.5)
    elif self.step_counter == self.dynamic_growth_steps - 1:
      self.step_counter = 0
      self.scale = float32(self.scale * 2.0)
    else:
      self.step_counter += 1
