"""Histories that are made up, for what replays and advice make of them."""

import numpy as np

from optax_lossscale import instruments


def make_history(unscaled, *, scale=1.0, overflow=False, first_step=1):
  """A history with this amax / S; where it is not finite, an overflow."""
  unscaled = np.asarray(unscaled, np.float64)
  scale = np.broadcast_to(np.float32(scale), unscaled.shape)
  amax = np.float32(unscaled * scale)
  return instruments.History(
    step=np.arange(first_step, first_step + unscaled.size),
    loss_scale=scale,
    amax=amax,
    overflow=np.broadcast_to(overflow, unscaled.shape) | ~np.isfinite(amax),
  )
