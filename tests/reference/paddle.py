"""PaddlePaddle."""

import math

from tests.reference.floats import float32
from tests.reference.floats import Model


class Paddle(Model):
  """paddle.amp.GradScaler, in dynamic graphs.

  Bad steps must follow one another: a clean step clears their count, whatever
  the documentation says. No floor, no cap and no test for finiteness, so the
  scale can reach 0 and inf. The ratios are rounded to float32.
  """

  def __init__(
    self,
    init_loss_scaling=2.0**16,
    incr_ratio=2.0,
    decr_ratio=0.5,
    incr_every_n_steps=2000,
    decr_every_n_nan_or_inf=1,
    use_dynamic_loss_scaling=True,
  ):
    self.scale = float32(init_loss_scaling)
    self.incr_ratio, self.decr_ratio = incr_ratio, decr_ratio
    self.incr_every_n_steps = incr_every_n_steps
    self.decr_every_n_nan_or_inf = decr_every_n_nan_or_inf
    self.use_dynamic_loss_scaling = use_dynamic_loss_scaling
    self.incr_count = self.decr_count = 0

  def update(self, overflow):
    if not self.use_dynamic_loss_scaling:
      return
    if overflow:
      self.incr_count = 0
      self.decr_count += 1
      if self.decr_count == self.decr_every_n_nan_or_inf:
        self.scale = float32(self.scale * float32(self.decr_ratio))
        self.decr_count = 0
    else:
      self.decr_count = 0
      self.incr_count += 1
      if self.incr_count == self.incr_every_n_steps:
        self.scale = float32(self.scale * float32(self.incr_ratio))
        self.incr_count = 0


class PaddleOp(Model):
  """The update_loss_scaling operation of Paddle's static graphs.

  As `Paddle`, with a floor of 1, and a growth to inf refused; the count starts
  anew after it. The defaults are paddle.static.amp.decorate's.
  """

  def __init__(
    self,
    init_loss_scaling=2.0**16,
    incr_every_n_steps=2000,
    decr_every_n_nan_or_inf=1,
    incr_ratio=2.0,
    decr_ratio=0.5,
  ):
    self.scale = float32(init_loss_scaling)
    self.incr_every_n_steps = incr_every_n_steps
    self.decr_every_n_nan_or_inf = decr_every_n_nan_or_inf
    self.incr_ratio, self.decr_ratio = float32(incr_ratio), float32(decr_ratio)
    self.num_good_steps = self.num_bad_steps = 0

  def update(self, overflow):
    if overflow:
      self.num_good_steps = 0
      self.num_bad_steps += 1
      if self.num_bad_steps == self.decr_every_n_nan_or_inf:
        smaller = float32(self.scale * self.decr_ratio)
        self.scale = 1.0 if smaller < 1.0 else smaller
        self.num_bad_steps = 0
    else:
      self.num_bad_steps = 0
      self.num_good_steps += 1
      if self.num_good_steps == self.incr_every_n_steps:
        larger = float32(self.scale * self.incr_ratio)
        if math.isfinite(larger):
          self.scale = larger
        self.num_good_steps = 0
