"""Handles Ctrl-C from the import of the command line until training begins."""

import os
import pathlib
import signal
import sys


def end(*_: object) -> None:
  """Ends the process; an import or callback could swallow an exception."""
  os.write(2, b"Interrupted.\n")
  os._exit(130)


_NAME = pathlib.PurePath("".join(sys.argv[:1])).stem
_IS_COMMAND = _NAME == "optax-lossscale" or (
  # The name is "-m" until Python has found the module.
  _NAME == "-m" and "-m optax_lossscale " in " ".join([*sys.orig_argv, ""])
)
# A shell may have set its background jobs to ignore Ctrl-C.
if _IS_COMMAND and signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
  signal.signal(signal.SIGINT, end)
