"""The command line, installed as `optax-lossscale`."""

from collections.abc import Sequence
import errno
import io
import os
import sys

import optax_lossscale as ols
from optax_lossscale._base.arguments import printable
from optax_lossscale.cli import _parser
from optax_lossscale.cli import doctor
from optax_lossscale.cli import simulate


def main(argv: Sequence[str] | None = None) -> int:
  """Runs a sub-command and returns the exit status."""
  argv = sys.argv[1:] if argv is None else argv
  parser = _parser.Parser(
    prog="optax-lossscale",
    description="Loss scaling for JAX, as an optax transformation.",
  )
  version = f"%(prog)s {ols.__version__}"
  parser.add_argument("--version", action="version", version=version)
  subparsers = parser.add_subparsers(metavar="COMMAND")
  for command in (simulate, doctor):
    command.add_parser(subparsers)
  if sys.stderr is None:  # It is closed, and print would take stdout instead.
    sys.stderr = io.StringIO()
  for stream in (sys.stdout, sys.stderr):
    if isinstance(stream, io.TextIOWrapper):
      stream.reconfigure(errors="backslashreplace")  # It may be ASCII.
  try:
    try:
      if sys.stdout is None:
        raise OSError(errno.EBADF, "it is closed")
      arguments = parser.parse_args(argv)
      if "run" not in arguments:  # An error, so that a script notices.
        parser.print_help(sys.stderr)
        return 2
      return int(arguments.run(arguments))
    finally:
      print(end="", flush=True)  # A flush at exit would fail too late.
  except _parser.BadInputError as error:
    # A name that begins with a dash was taken for an option.
    names = [x for x in argv if x.startswith("-") and os.path.lexists(x)]
    hint = f"; for the file write ./{names[0]}" if names else ""
    print(printable(f"{error}{hint}"), file=sys.stderr)
    return 2
  except KeyboardInterrupt:
    print("Interrupted.", file=sys.stderr)
    return 130
  except OSError as error:
    reason = f"{error.strerror}: {error.filename}"
    if error.filename is None:
      reason = f"cannot print the output: {error.strerror}"
      # Python would try to write the rest at exit: send it to the null device.
      if sys.stdout is not None:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    print(printable(f"{parser.prog}: error: {reason}"), file=sys.stderr)
    return 1
