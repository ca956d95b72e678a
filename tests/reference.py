"""Plain-Python models of loss-scale rules, which the tests take as the truth.

Every model has a ``scale`` and ``update(overflow)``, and is written from its
system's documented behaviour, apart from the code under test. The systems
differ in what restarts a count, in the bounds and in the arithmetic; each
docstring names the point. A float32 is held as the Python float of the same
value: the double product of two float32 values is exact, so that ``float32`` of
it is their float32 product.
"""

import math

import numpy as np


def float32(value):
  """Rounds a Python float once to the nearest float32, inf beyond its range."""
  with np.errstate(over="ignore", under="ignore"):
    return float(np.float32(value))


class Dynamic:
  """`DynamicLossScale` of this library.

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


class Torch:
  """torch.amp.GradScaler of PyTorch 2.1 and newer.

  The factors stay doubles: the product is formed in double and rounded once.
  No floor, so the scale can reach 0; a growth to inf is refused. The tracker is
  compared with `==`: once above the interval it never grows.
  """

  def __init__(
    self,
    init_scale=2.0**16,
    growth_factor=2.0,
    backoff_factor=0.5,
    growth_interval=2000,
  ):
    self.scale = float32(init_scale)
    self.growth_factor, self.backoff_factor = growth_factor, backoff_factor
    self.growth_interval = growth_interval
    self.growth_tracker = 0

  def update(self, overflow):
    if overflow:
      self.scale = float32(self.scale * self.backoff_factor)
      self.growth_tracker = 0
      return
    self.growth_tracker += 1
    if self.growth_tracker == self.growth_interval:
      larger = float32(self.scale * self.growth_factor)
      if math.isfinite(larger):
        self.scale = larger
      self.growth_tracker = 0


class Megatron:
  """DynamicGradScaler of Megatron-LM core.

  Hysteresis is refilled by a growth only, not by a clean step: it counts the
  overflows since the last growth, in a row or not. A floor, no cap: the scale
  can grow to inf. The factors are rounded to float32 before the product.
  """

  def __init__(
    self,
    initial_scale=2.0**32,
    min_scale=1.0,
    growth_factor=2.0,
    backoff_factor=0.5,
    growth_interval=1000,
    hysteresis=2,
  ):
    self.scale, self.min_scale = float32(initial_scale), float32(min_scale)
    self.growth_factor = float32(growth_factor)
    self.backoff_factor = float32(backoff_factor)
    self.growth_interval, self.hysteresis = growth_interval, hysteresis
    self.growth_tracker, self.hysteresis_tracker = 0, hysteresis

  def update(self, overflow):
    if overflow:
      self.growth_tracker = 0
      self.hysteresis_tracker -= 1
      if self.hysteresis_tracker <= 0:
        smaller = float32(self.scale * self.backoff_factor)
        self.scale = max(smaller, self.min_scale)
    else:
      self.growth_tracker += 1
      if self.growth_tracker == self.growth_interval:
        self.growth_tracker = 0
        self.hysteresis_tracker = self.hysteresis
        self.scale = float32(self.scale * self.growth_factor)


class DeepSpeed:
  """DynamicLossScaler of DeepSpeed (ZeRO), not raising at the minimum.

  A Python double. Since 0.17.1 the first growth after the start or an overflow
  needs `scale_window` + 1 clean steps and each further one `scale_window`; with
  `before_0_17_1` all need `scale_window`. A backoff leaves hysteresis spent; a
  growth refills it or, with `consecutive_hysteresis`, every clean step.
  """

  def __init__(
    self,
    init_scale=2.0**16,
    scale_window=1000,
    min_scale=1.0,
    delayed_shift=2,
    consecutive_hysteresis=False,
    before_0_17_1=False,
  ):
    self.scale, self.min_scale = float(init_scale), float(min_scale)
    self.scale_window, self.delayed_shift = scale_window, delayed_shift
    self.consecutive_hysteresis = consecutive_hysteresis
    self.uncounted = 0 if before_0_17_1 else 1
    self.iteration, self.last_overflow = 0, -1
    self.hysteresis = delayed_shift

  def update(self, overflow):
    if overflow:
      self.last_overflow = self.iteration
      if self.hysteresis == 1:
        self.scale = max(self.scale / 2.0, self.min_scale)
      else:
        self.hysteresis -= 1
    else:
      if self.consecutive_hysteresis:
        self.hysteresis = self.delayed_shift
      counted = self.iteration - self.last_overflow - self.uncounted
      if counted > 0 and counted % self.scale_window == 0:
        self.hysteresis = self.delayed_shift
        self.scale *= 2.0
    self.iteration += 1


class Keras:
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


class TensorFlowContrib:
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
