"""The command line, installed as `optax-lossscale`."""

from collections.abc import Sequence
import os
import sys

import optax_lossscale as ols
from optax_lossscale.cli import _parser
from optax_lossscale.cli import doctor
from optax_lossscale.cli import simulate


def main(argv: Sequence[str] | None = None) -> int:
  """Runs a sub-command and returns the exit status."""
  parser = _parser.Parser(
    prog="optax-lossscale",
    description="Loss scaling for JAX, as an optax transformation.",
  )
  version = f"%(prog)s {ols.__version__}"
  parser.add_argument("--version", action="version", version=version)
  subparsers = parser.add_subparsers(metavar="COMMAND")
  for command in (simulate, doctor):
    command.add_parser(subparsers)
  try:
    try:
      arguments = parser.parse_args(argv)
      if "run" not in arguments:  # An error, so that a script notices.
        parser.print_help(sys.stderr)
        return 2
      return int(arguments.run(arguments))
    finally:
      print(end="", flush=True)  # A flush at exit would fail too late.
  except _parser.BadInputError as error:
    print(error, file=sys.stderr)
    return 2
  except KeyboardInterrupt:
    print("Interrupted.", file=sys.stderr)
    return 130
  except OSError as error:
    if error.filename is not None:
      raise
    # Python would try to write the rest at exit: send it to the null device.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    reason = f"cannot print the output: {error.strerror}"
    print(f"{parser.prog}: error: {reason}", file=sys.stderr)
    return 1
