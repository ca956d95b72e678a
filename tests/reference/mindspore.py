"""MindSpore."""

import math

from tests.reference.floats import float32
from tests.reference.floats import Model


class MindSpore(Model):
  """mindspore.train.DynamicLossScaleManager, which lives on the host.

  A Python double; a backoff multiplies by 1 / `scale_factor`, itself a double.
  The floor is 1; the scale has no cap. A growth does not restart the count: it
  comes at each multiple of `scale_window` steps since the last overflow.

  From the 1001st overflow in a row on it raises; here `failed` is set, and the
  step counts like any other.
  """

  bad_step_max = 1000

  def __init__(
    self, init_loss_scale=2.0**24, scale_factor=2, scale_window=2000
  ):
    self.scale = float(init_loss_scale)
    self.scale_factor, self.scale_window = scale_factor, scale_window
    self.decrease_ratio = 1 / scale_factor
    self.cur_iter, self.last_overflow_iter, self.bad_step = 1, 0, 0

  def update(self, overflow):
    if overflow:
      self.scale = max(self.scale * self.decrease_ratio, 1.0)
      self.last_overflow_iter = self.cur_iter
      self.bad_step += 1
      if self.bad_step > self.bad_step_max:
        self.failed = True
    else:
      if (self.cur_iter - self.last_overflow_iter) % self.scale_window == 0:
        self.scale *= self.scale_factor
      self.bad_step = 0
    self.cur_iter += 1


class MindSporeFixed(Model):
  """mindspore.train.FixedLossScaleManager: a constant.

  `drop_overflow_update` says whether an overflow discards the step.
  """

  def __init__(self, loss_scale=128.0, drop_overflow_update=True):
    self.scale = float(loss_scale)
    self.drop_overflow_update = drop_overflow_update

  def update(self, overflow):
    del overflow


class MindSporeAmp(Model):
  """mindspore.amp.DynamicLossScaler.

  In float32: a backoff divides, the floor is 1, a growth to inf is refused. The
  counter runs modulo `scale_window`, and a growth comes with its last value.
  """

  def __init__(self, scale_value, scale_factor, scale_window):
    self.scale = float32(scale_value)
    self.scale_factor, self.scale_window = float32(scale_factor), scale_window
    self.counter = 0

  def update(self, overflow):
    if overflow:
      self.scale = max(1.0, float32(self.scale / self.scale_factor))
      self.counter = 0
      return
    if self.counter == self.scale_window - 1:
      larger = float32(self.scale * self.scale_factor)
      self.scale = larger if math.isfinite(larger) else self.scale
    self.counter = (self.counter + 1) % self.scale_window


class MindSporeCell(Model):
  """mindspore.nn.DynamicLossScaleUpdateCell, which lives on the device.

  In float32: a backoff multiplies by the reciprocal of `scale_factor`, rounded
  to float32. The floor is 1, and the scale can grow to inf. A growth moves the
  mark from which steps are counted, as an overflow does, and comes as soon as
  the window is reached or passed.
  """

  def __init__(self, loss_scale_value, scale_factor, scale_window):
    self.scale = float32(loss_scale_value)
    self.scale_factor, self.scale_window = float32(scale_factor), scale_window
    self.reciprocal = float32(1 / self.scale_factor)
    self.cur_iter, self.last_overflow_iter = 1, 0

  def update(self, overflow):
    if overflow:
      self.scale = max(float32(self.scale * self.reciprocal), 1.0)
      self.last_overflow_iter = self.cur_iter
    elif self.cur_iter - self.last_overflow_iter >= self.scale_window:
      self.scale = float32(self.scale * self.scale_factor)
      self.last_overflow_iter = self.cur_iter
    self.cur_iter += 1
