"""The rules that read amax, in plain Python.

`update(overflow, amax)` takes scaled amax, as the wrapper hands it to a rule;
`scale` is S and `stalled` whether the step overflowed with S at the floor. What
is a power of two is searched for with fractions, not read from bits.
"""

import fractions
import functools
import math

from tests.reference.floats import float32

SMALLEST_NORMAL = 2.0**-126
FLOAT16_MAX = 65504.0


def _power(exponent):
  """2**exponent where float32 has it as a normal number, else the nearest."""
  return 2.0 ** min(max(exponent, -126), 127)


@functools.lru_cache(maxsize=100_000)
def _floor_log2(x):
  """The largest e with 2**e <= x."""
  e = round(math.log2(x))
  while fractions.Fraction(2) ** e > x:
    e -= 1
  while fractions.Fraction(2) ** (e + 1) <= x:
    e += 1
  return e


@functools.lru_cache(maxsize=100_000)
def largest_fitting(amax, scale, limit, headroom):
  """The largest e: the step, at S = 2**e, has `headroom` bits left.

  Of a scale that is no power of two, the next smaller one counts.
  """
  power = fractions.Fraction(2) ** _floor_log2(scale)
  true_amax = fractions.Fraction(amax) / power
  return _floor_log2(fractions.Fraction(limit) / 2**headroom / true_amax)


def _tells(amax):
  return math.isfinite(amax) and amax >= SMALLEST_NORMAL


class _AmaxModel:
  """Bounds, and the overflow that amax itself is."""

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
  """The largest S that leaves its bits free in each of the last steps.

  What amax allows is kept with the bits already subtracted; `None` for a step
  that allows anything. While none of the last `window` steps was clean with an
  amax to read, S goes 16 bits down on an overflow and up on zeros, to 2**32.
  Otherwise an overflow leaves a ceiling behind, 1, 2, 3 bits lower the more
  come in a row, unless amax turns out to have been the reason.
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
  """The corrected LogMax, by sums of weights as it was published.

  `exponents`: what log2(S) may be after the step, of which there are two where
  rounding decides; `follow(scale)` goes on from one of them.
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
    # The first step as one that lies a bit off the mean of its kind.
    first_weight = (1 - self.beta2) * self.beta2 ** (self.seen - 1) / weight
    free = self.deviations * math.sqrt(variance + first_weight)
    wanted = self.log_max - mean - free
    low, high = math.log2(self.min_scale), math.log2(self.max_scale)
    # A power of two below 2**wanted, at most the ceiling; where rounding may
    # decide, either.
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


class LogMaxOriginal:
  """LogMaxScaler of OpenSeq2Seq, which takes amax already unscaled.

  The logarithm base 2 is a quotient of natural ones, and a step that is not
  finite enters as 2**log_max in the place of a logarithm. 0 has the logarithm
  -inf, and its square makes NaN of the deviation and of the scale.
  """

  def __init__(
    self,
    scale_min=1.0,
    scale_max=2.0**14,
    log_max=16.0,
    beta1=0.99,
    beta2=0.999,
    overflow_std_dev=3.09,
  ):
    self.scale_min, self.scale_max = scale_min, scale_max
    self.log_max, self.overflow_std_dev = log_max, overflow_std_dev
    self.beta1, self.beta2 = beta1, beta2
    self.scale, self.stalled = 1.0, False
    self.x_hat = self.slow_x_hat = self.xsquared_hat = 0.0
    self.b1_correction = self.b2_correction = 1.0

  def update(self, overflow, amax):
    self.stalled = overflow and self.scale <= self.scale_min
    amax = amax / self.scale
    if not math.isfinite(amax):
      x = 2.0**self.log_max
    elif amax == 0:
      x = -math.inf
    else:
      x = math.log(amax) / math.log(2.0)
    self.x_hat = self.beta1 * self.x_hat + (1 - self.beta1) * x
    self.b1_correction *= self.beta1
    self.slow_x_hat = self.beta2 * self.slow_x_hat + (1 - self.beta2) * x
    self.xsquared_hat = (
      self.beta2 * self.xsquared_hat + (1 - self.beta2) * x * x
    )
    self.b2_correction *= self.beta2
    mu = self.x_hat / (1 - self.b1_correction)
    slow_mu = self.slow_x_hat / (1 - self.b2_correction)
    sigma2 = self.xsquared_hat / (1 - self.b2_correction) - slow_mu * slow_mu
    if math.isnan(sigma2):
      self.scale = math.nan
      return
    cutoff = math.sqrt(max(sigma2, 0.0)) * self.overflow_std_dev + mu
    proposed = 2.0 ** min(16 - cutoff, 1000.0)
    self.scale = min(max(proposed, self.scale_min), self.scale_max)


class WarmStart:
  """A probe that ends at the first clean amax to read, then another model.

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
