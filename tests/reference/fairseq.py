"""fairseq and metaseq."""

from tests.reference.floats import Model


class Fairseq(Model):
  """DynamicLossScaler of fairseq.

  A Python double. A backoff divides, and needs that of the steps since the last
  change of the scale at least the part `tolerance` overflowed: a growth
  restarts these steps, but does not clear the overflows counted so far.
  `threshold` clamps a backoff. Growth goes by the steps since the last overflow
  alone, and has no cap.

  An overflow that leaves the scale at or below `min_loss_scale` raises there,
  and training ends. Here `failed` is set, and the step counts as an overflow
  that leaves the scale unchanged.
  """

  def __init__(
    self,
    init_scale=2.0**15,
    scale_factor=2.0,
    scale_window=2000,
    tolerance=0.0,
    threshold=None,
    min_loss_scale=1e-4,
  ):
    self.scale = float(init_scale)
    self.scale_factor, self.scale_window = scale_factor, scale_window
    self.tolerance, self.threshold = tolerance, threshold
    self.min_loss_scale = min_loss_scale
    self.resume()

  def update(self, overflow):
    if overflow:
      self._check_overflow()
    elif (self.iter - self.last_overflow_iter) % self.scale_window == 0:
      self.scale *= self.scale_factor
      self.last_rescale_iter = self.iter
    self.iter += 1

  def _check_overflow(self):
    previous = self.scale
    steps = self.iter - self.last_rescale_iter
    self.last_overflow_iter = self.iter
    self.overflows_since_rescale += 1
    if self.overflows_since_rescale / steps >= self.tolerance:
      self.scale /= self.scale_factor
      if self.threshold is not None:
        self.scale = float(max(self.scale, self.threshold))
      self.last_rescale_iter = self.iter
      self.overflows_since_rescale = 0
    if self.scale <= self.min_loss_scale:
      self.scale = previous
      self.failed = True

  def resume(self):
    """A checkpoint holds only the scale."""
    self.iter = 0
    self.last_overflow_iter = self.last_rescale_iter = -1
    self.overflows_since_rescale = 0


class Metaseq(Model):
  """DynamicLossScaler of metaseq.

  fairseq's, with a window that the scale takes along: a growth multiplies it, a
  backoff divides it, rounded down to an integer and at least 1. The steps since
  the last overflow are compared with the current window. A scale that would
  fall below `min_loss_scale` is held, and nothing is raised; the window
  shrinks all the same.
  """

  def __init__(
    self,
    init_scale=4.0,
    scale_factor=2.0,
    scale_window=256,
    tolerance=0.0,
    threshold=None,
    min_loss_scale=2.0**-5,
  ):
    self.scale = float(init_scale)
    self.scale_factor, self.initial_window = scale_factor, scale_window
    self.tolerance, self.threshold = tolerance, threshold
    self.min_loss_scale = min_loss_scale
    self.resume()

  def update(self, overflow):
    if overflow:
      self._check_overflow()
    elif (self.iter - self.last_overflow_iter) % self.scale_window == 0:
      self.scale *= self.scale_factor
      self.scale_window *= self.scale_factor
      self.last_rescale_iter = self.iter
    self.iter += 1

  def _check_overflow(self):
    previous = self.scale
    self.overflows_since_rescale += 1
    steps = self.iter - self.last_rescale_iter
    if self.overflows_since_rescale / steps >= self.tolerance:
      self.scale /= self.scale_factor
      self.scale_window = max(int(self.scale_window / self.scale_factor), 1)
      if self.threshold is not None:
        self.scale = float(max(self.scale, self.threshold))
      self.last_rescale_iter = self.iter
      self.overflows_since_rescale = 0
    if self.scale < self.min_loss_scale:
      self.scale = previous
    self.last_overflow_iter = self.iter

  def resume(self):
    """A checkpoint holds only the scale, so the window is the first again."""
    self.scale_window = self.initial_window
    self.iter = 0
    self.last_overflow_iter = self.last_rescale_iter = -1
    self.overflows_since_rescale = 0
