"""Histories of a run, replays, advice and statistics of leaves."""

from optax_lossscale.instruments.run._advise import Advice
from optax_lossscale.instruments.run._advise import advise
from optax_lossscale.instruments.run._history import get_history
from optax_lossscale.instruments.run._history import History
from optax_lossscale.instruments.run._history import record
from optax_lossscale.instruments.run._history_files import read_history
from optax_lossscale.instruments.run._history_files import write_history
from optax_lossscale.instruments.run._leaf_stats import leaf_stats
from optax_lossscale.instruments.run._leaf_stats import LeafStats
from optax_lossscale.instruments.run._print import print_loss_scale
from optax_lossscale.instruments.run._replay import replay
from optax_lossscale.instruments.run._replay import ReplayedRun
from optax_lossscale.instruments.run._shares import swallowed_share
from optax_lossscale.instruments.shared import RecordState

__all__ = [
  "Advice",
  "History",
  "LeafStats",
  "RecordState",
  "ReplayedRun",
  "advise",
  "get_history",
  "leaf_stats",
  "print_loss_scale",
  "read_history",
  "record",
  "replay",
  "swallowed_share",
  "write_history",
]
