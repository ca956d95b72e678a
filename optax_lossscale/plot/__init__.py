"""Plots of loss scaling.

Each function returns Axes, without showing them::

  history = ols.instruments.get_history(opt_state)
  ols.plot.loss_scale(history)             # S, and the largest possible S

  stats = ols.instruments.leaf_stats(gradients)
  ols.plot.exponent_histogram(stats, loss_scale=1024)   # what S is for
  ols.plot.heat_map(stats)                 # one row per leaf

Each function makes a figure with pyplot, unless `ax=` is passed.
"""

try:
  import matplotlib as _matplotlib  # noqa: F401
except ModuleNotFoundError as error:
  raise ModuleNotFoundError(
    "ols.plot needs matplotlib, which is not installed; in a clone of the "
    'repository: pip install -e ".[plot]".'
  ) from error

from optax_lossscale.plot._by_exponent import exponent_histogram
from optax_lossscale.plot._by_exponent import heat_map
from optax_lossscale.plot._by_step import loss_scale
from optax_lossscale.plot._by_step import replays

__all__ = [
  "exponent_histogram",
  "heat_map",
  "loss_scale",
  "replays",
]
