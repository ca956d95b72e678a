"""The warning for a program that runs but does not train as it should."""

import sys
import warnings

# Libraries whose frames are not the user's code.
_LIBRARIES = {
  *("contextlib", "dataclasses", "flax", "functools", "jax", "optax"),
  __name__.partition(".")[0],
}


class WiringWarning(UserWarning):
  """Loss scaling is set up so that a run would go wrong without an error.

  Constructors, `init`, and traced or eager steps emit it; a compiled step never
  does. It points to a mistake or, rarely, to something intended. To silence
  it::

    warnings.filterwarnings("ignore", category=ols.WiringWarning)

  Examples:
    >>> import warnings
    >>> import optax_lossscale as ols
    >>> with warnings.catch_warnings(record=True) as caught:
    ...   warnings.simplefilter("always")
    ...   rule = ols.FixedLossScale(1000.0)
    >>> print(caught[0].message)
    `scale` should be a power of two, so that scaling rounds nothing, got \
1000.0: take 1024.0.
  """


def warn(message: str) -> None:
  """Warns at the user's line: the first frame outside the libraries."""
  level, frame = 1, sys._getframe()
  while frame.f_back is not None and (
    frame.f_globals.get("__name__", "").partition(".")[0] in _LIBRARIES
  ):
    level, frame = level + 1, frame.f_back
  warnings.warn(message, WiringWarning, stacklevel=level)
