"""The rules that read amax, in plain Python.

`update(overflow, amax)` takes the scaled amax, as a rule gets it; `scale` is S,
and `stalled` is True if the step overflowed with S at the floor. The models
search for powers of two with fractions instead of reading bits.
"""

import fractions
import functools
import math

from tests.reference.dynamic import float32

SMALLEST_NORMAL = 2.0**-126
FLOAT16_MAX = 65504.0


def _power(exponent):
  """Returns the normal float32 nearest to 2**exponent."""
  return 2.0 ** min(max(exponent, -126), 127)


@functools.lru_cache(maxsize=100_000)
def _floor_log2(x):
  """Returns the largest e with 2**e <= x."""
  e = round(math.log2(x))
  while fractions.Fraction(2) ** e > x:
    e -= 1
  while fractions.Fraction(2) ** (e + 1) <= x:
    e += 1
  return e


@functools.lru_cache(maxsize=100_000)
def largest_fitting(amax, scale, limit, headroom):
  """Returns the largest e at which the step has `headroom` bits left.

  `scale` is rounded down to a power of two.
  """
  power = fractions.Fraction(2) ** _floor_log2(scale)
  true_amax = fractions.Fraction(amax) / power
  return _floor_log2(fractions.Fraction(limit) / 2**headroom / true_amax)


def _tells(amax):
  return math.isfinite(amax) and amax >= SMALLEST_NORMAL


class _AmaxModel:
  """The bounds. An infinite or NaN amax is an overflow by itself."""

  def __init__(self, init_scale, min_scale, max_scale):
    self.scale = float32(init_scale)
    self.min_scale, self.max_scale = float32(min_scale), float32(max_scale)
    self.stalled = False

  def update(self, overflow, amax):
    self.stalled = overflow and self.scale <= self.min_scale
    self.move(overflow or not math.isfinite(amax), amax)

  def _bounded(self, scale):
    return min(max(scale, self.min_scale), self.max_scale)


class Headroom(_AmaxModel):
  """The largest S that leaves the bits free in each of the last steps.

  `steps` holds the largest exponent that each step allows, headroom subtracted.
  Until a clean step within the window shows an amax, S goes 16 bits down on an
  overflow and 16 bits up on zeros, to 2**32. After that, an overflow sets a
  ceiling, 1, 2, 3 bits lower the more overflows come in a row, until an amax
  explains the overflow.
  """

  def __init__(
    self,
    init_scale=1.0,
    headroom=1,
    window=50,
    limit=FLOAT16_MAX,
    min_scale=2.0**-14,
    max_scale=2.0**126,
  ):
    super().__init__(init_scale, min_scale, max_scale)
    self.headroom, self.window, self.limit = headroom, window, limit
    self.steps = []
    self.ceiling = self.failed_at = math.inf
    self.row = self.clean = 0

  def move(self, overflow, amax):
    here = _floor_log2(self.scale)
    was_searching = not any(known for _, known in self.steps)
    allowed = math.inf
    if _tells(amax):
      allowed = largest_fitting(amax, self.scale, self.limit, self.headroom)
    is_known = _tells(amax) and not overflow
    self.steps = [*self.steps, (allowed, is_known)][-self.window :]
    least = min(allowed for allowed, _ in self.steps)
    if overflow:
      self.row, self.clean = self.row + 1, 0
      lower = here - self.row
      if self.row == 1 and not was_searching and least - 16 > lower:
        lower = min(here, least - 16)
      self.ceiling = min(self.ceiling, lower)
      self.failed_at = min(self.failed_at, here)
    else:
      self.row, self.clean = 0, self.clean + 1
      if self.clean == 4 * self.window:
        self.ceiling, self.clean = self.ceiling + 1, 0
      is_explained = least + self.headroom < self.failed_at
      if is_known and (is_explained or was_searching):
        self.ceiling = self.failed_at = math.inf
    exponent = min(least, self.ceiling)
    if not any(known for _, known in self.steps):
      if overflow:
        exponent = here - 16
      else:
        exponent = min(max(here, min(here + 16, 32)), exponent)
    self.scale = self._bounded(_power(exponent))


class LogMax(_AmaxModel):
  """The corrected LogMax, computed from sums of weights as in the paper.

  `exponents` holds the values that log2(S) may have after the step. There are
  two if rounding decides; `follow(scale)` goes on from one of them.
  """

  def __init__(
    self,
    scale_min=2.0**-14,
    scale_max=2.0**126,
    log_max=16.0,
    beta1=0.99,
    beta2=0.999,
    overflow_std_dev=3.09,
  ):
    super().__init__(min(max(1.0, scale_min), scale_max), scale_min, scale_max)
    self.log_max, self.deviations = log_max, overflow_std_dev
    self.beta1, self.beta2 = beta1, beta2
    self.seen = 0
    self.first = self.second = self.square = 0.0
    self.ceiling = math.inf
    self.exponents = {math.log2(self.scale)}

  def move(self, overflow, amax):
    log2_scale = math.log2(self.scale)
    self.exponents = {log2_scale}
    if overflow:
      x = self.log_max - log2_scale + 1
      if _tells(amax):
        x = max(x, math.log2(amax) - log2_scale)
      self.ceiling = log2_scale - 1
    elif _tells(amax):
      x = math.log2(amax) - log2_scale
      self.ceiling += 1 - self.beta1
    else:
      return
    self.seen += 1
    self.first = self.beta1 * self.first + (1 - self.beta1) * x
    self.second = self.beta2 * self.second + (1 - self.beta2) * x
    self.square = self.beta2 * self.square + (1 - self.beta2) * x * x
    mean = self.first / (1 - self.beta1**self.seen)
    weight = 1 - self.beta2**self.seen
    variance = max(self.square / weight - (self.second / weight) ** 2, 0)
    # The first step counts as one bit away from the mean.
    first_weight = (1 - self.beta2) * self.beta2 ** (self.seen - 1) / weight
    free = self.deviations * math.sqrt(variance + first_weight)
    wanted = self.log_max - mean - free
    low, high = math.log2(self.min_scale), math.log2(self.max_scale)
    # A power of two below 2**wanted and not above the ceiling, or one of two if
    # rounding decides.
    self.exponents = {
      min(max(min(math.ceil(wanted + e) - 1, ceiling), low), high)
      for e in (-1e-3, 0.0, 1e-3)
      for ceiling in (
        math.floor(min(self.ceiling + d, 1e3)) for d in (-1e-3, 0.0, 1e-3)
      )
    }
    self.scale = 2.0 ** max(self.exponents)

  def follow(self, scale):
    self.scale = scale


class WarmStart:
  """A probe until the first clean step that shows an amax, then another model.

  Args:
    begin: makes the model of the rule from its first S.
  """

  def __init__(self, begin, probe_scale=1.0, headroom=2, limit=FLOAT16_MAX):
    self.begin, self.headroom, self.limit = begin, headroom, limit
    self.scale, self.rule, self.stalled = float32(probe_scale), None, False

  def update(self, overflow, amax):
    if self.rule is not None:
      self.rule.update(overflow, amax)
      self.scale, self.stalled = self.rule.scale, self.rule.stalled
      return
    self.stalled = overflow and self.scale <= SMALLEST_NORMAL
    here = _floor_log2(self.scale)
    if overflow or not math.isfinite(amax):
      exponent = here - 16
    elif not _tells(amax):
      exponent = max(here, min(here + 16, 32))
    else:
      exponent = largest_fitting(amax, self.scale, self.limit, self.headroom)
    self.scale = 2.0 ** min(max(exponent, -126), 126)
    if _tells(amax) and not overflow:
      self.rule = self.begin(self.scale)
