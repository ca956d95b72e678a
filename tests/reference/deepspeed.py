"""DeepSpeed."""

from tests.reference.floats import Model


class DeepSpeed(Model):
  """DynamicLossScaler of DeepSpeed (ZeRO) since 0.17.1.

  A Python double. The first growth after the start or an overflow needs
  `scale_window` + 1 clean steps and each further one `scale_window`: a growth
  does not restart the count. A backoff leaves hysteresis spent; a growth
  refills it or, with `consecutive_hysteresis`, every clean step.

  A backoff that finds the scale at the minimum raises there; here `failed` is
  set, and the scale stays.
  """

  scale_factor = 2.0

  def __init__(
    self,
    init_scale=2.0**16,
    scale_window=1000,
    min_scale=1.0,
    delayed_shift=2,
    consecutive_hysteresis=False,
    raise_error_at_min_scale=True,
  ):
    self.scale, self.min_scale = float(init_scale), float(min_scale)
    self.scale_window = scale_window
    self.delayed_shift = self.cur_hysteresis = delayed_shift
    self.consecutive_hysteresis = consecutive_hysteresis
    self.raise_error_at_min_scale = raise_error_at_min_scale
    self.cur_iter, self.last_overflow_iter = 0, -1

  def update(self, overflow):
    if overflow:
      self._back_off_or_forgive()
      self.last_overflow_iter = self.cur_iter
    else:
      if self.consecutive_hysteresis:
        self.cur_hysteresis = self.delayed_shift
      if self._window_is_full():
        self.cur_hysteresis = self.delayed_shift
        self.scale *= self.scale_factor
    self.cur_iter += 1

  def _back_off_or_forgive(self):
    if self.delayed_shift != 1 and self.cur_hysteresis != 1:
      self.cur_hysteresis -= 1
      return
    if self.scale == self.min_scale and self.raise_error_at_min_scale:
      self.failed = True
    self.scale = max(self.scale / self.scale_factor, self.min_scale)

  def _window_is_full(self):
    stable_interval = self.cur_iter - self.last_overflow_iter - 1
    return stable_interval > 0 and stable_interval % self.scale_window == 0


class DeepSpeedLegacy(DeepSpeed):
  """DynamicLossScaler of DeepSpeed (ZeRO) before 0.17.1.

  As later, except that every growth, also the first, needs `scale_window`
  clean steps; the factor was an argument, by which a backoff divides.
  """

  def __init__(
    self,
    init_scale=2.0**32,
    scale_factor=2.0,
    scale_window=1000,
    min_scale=1.0,
    delayed_shift=1,
    consecutive_hysteresis=False,
    raise_error_at_min_scale=True,
  ):
    super().__init__(
      init_scale,
      scale_window,
      min_scale,
      delayed_shift,
      consecutive_hysteresis,
      raise_error_at_min_scale,
    )
    self.scale_factor = scale_factor

  def _window_is_full(self):
    stable_interval = self.cur_iter - self.last_overflow_iter
    return stable_interval % self.scale_window == 0
