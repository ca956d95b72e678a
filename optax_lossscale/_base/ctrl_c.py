"""Ctrl-C while the command line is imported, and until it begins to train."""

import os
import pathlib
import signal
import sys


def end(*_: object) -> None:
  """Ends the process; an exception may get lost in an import or a callback."""
  os.write(2, b"Interrupted.\n")
  os._exit(130)


_NAME = pathlib.PurePath("".join(sys.argv[:1])).stem
_IS_COMMAND = _NAME == "optax-lossscale" or (
  # Until `python -m` has found the module.
  _NAME == "-m" and "-m optax_lossscale " in " ".join([*sys.orig_argv, ""])
)
# A shell may have told its background jobs to ignore it.
if _IS_COMMAND and signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
  signal.signal(signal.SIGINT, end)
