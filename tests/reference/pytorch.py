"""PyTorch and NVIDIA Apex."""

import math

from tests.reference.floats import float32
from tests.reference.floats import Model


class Torch(Model):
  """torch.amp.GradScaler of PyTorch 2.1 and newer.

  The factors stay doubles: the product is formed in double and rounded once.
  No floor, so the scale can reach 0; a growth to inf is refused, and restarts
  the tracker all the same. The tracker is compared with `==`: once above the
  interval it never grows.
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


class TorchSharded(Torch):
  """torch.distributed.fsdp.ShardedGradScaler with its scale on the CPU.

  There it has its own rule: it multiplies the tensor in place by a Python
  number, which is a float32 product, and the scale may grow to inf. With its
  scale on an accelerator it follows `Torch`.
  """

  def __init__(
    self,
    init_scale=2.0**16,
    backoff_factor=0.5,
    growth_factor=2.0,
    growth_interval=2000,
  ):
    super().__init__(init_scale, growth_factor, backoff_factor, growth_interval)

  def update(self, overflow):
    if overflow:
      self.scale = float32(self.scale * float32(self.backoff_factor))
      self.growth_tracker = 0
      return
    successful = self.growth_tracker + 1
    if successful == self.growth_interval:
      self.scale = float32(self.scale * float32(self.growth_factor))
      successful = 0
    self.growth_tracker = successful


class Apex(Model):
  """apex.amp.scaler.LossScaler.

  A Python double; the factors are 2 and 1/2. `max_loss_scale` also bounds the
  initial scale, `min_loss_scale` does not, and a minimum of 0 has no effect. A
  number as `loss_scale` holds the scale there: then an overflow is a step like
  any other, and the bounds do not apply.
  """

  def __init__(
    self,
    loss_scale="dynamic",
    init_scale=2.0**16,
    scale_window=2000,
    min_loss_scale=None,
    max_loss_scale=2.0**24,
  ):
    self.dynamic = loss_scale == "dynamic"
    if self.dynamic:
      self.scale = float(min(max_loss_scale, init_scale))
    else:
      self.scale = float(loss_scale)
    self.min_loss_scale, self.max_loss_scale = min_loss_scale, max_loss_scale
    self.scale_window = scale_window
    self.unskipped = 0

  def update(self, overflow):
    if overflow and self.dynamic:
      self.scale /= 2.0
      if self.min_loss_scale:
        self.scale = float(max(self.min_loss_scale, self.scale))
      self.unskipped = 0
    else:
      self.unskipped += 1
    if self.unskipped == self.scale_window and self.dynamic:
      self.scale = float(min(self.max_loss_scale, self.scale * 2.0))
      self.unskipped = 0


class ApexHysteresis(Model):
  """update_scale_hysteresis of Apex, as NeMo's GradScaler calls it.

  The rule of `Torch`, before which hysteresis forgives overflows: each one
  takes from the tracker, above 0 it only restarts the growth, and any clean
  step refills it. A backoff does not.
  """

  def __init__(
    self,
    init_scale=2.0**16,
    growth_factor=2.0,
    backoff_factor=0.5,
    growth_interval=2000,
    hysteresis=1,
  ):
    self.scale = float32(init_scale)
    self.growth_factor, self.backoff_factor = growth_factor, backoff_factor
    self.growth_interval, self.hysteresis = growth_interval, hysteresis
    self.growth_tracker, self.hysteresis_tracker = 0, hysteresis

  def update(self, overflow):
    if overflow:
      self.growth_tracker = 0
      self.hysteresis_tracker -= 1
      if self.hysteresis_tracker <= 0:
        self.scale = float32(self.scale * self.backoff_factor)
      return
    self.hysteresis_tracker = self.hysteresis
    self.growth_tracker += 1
    if self.growth_tracker == self.growth_interval:
      self.growth_tracker = 0
      larger = float32(self.scale * self.growth_factor)
      self.scale = larger if math.isfinite(larger) else self.scale

  def resume(self):
    """NeMo looks for this count under the misspelt `_hysterisis_tracker`."""
    self.hysteresis_tracker = self.hysteresis
