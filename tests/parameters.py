"""What the parametrised tests of the rules share."""

import itertools

SMALLEST = 2.0**-126  # The smallest normal float32.
LARGEST = 2.0**126  # The largest power of two with a normal reciprocal.


def pairs(first, second):
  """Returns every pair of one from each."""
  return list(itertools.product(first, second))


def name(value):
  """Returns a test id without spaces, so that `pytest -k` can select it."""
  if isinstance(value, dict):
    return ",".join(f"{key}={value[key]}" for key in value)
  return repr(value).replace(" ", "")
