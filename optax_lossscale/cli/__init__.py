"""The command line, installed as `optax-lossscale`."""

from collections.abc import Sequence
import sys

from optax_lossscale.cli import _parser
from optax_lossscale.cli import simulate
from optax_lossscale.cli import train

_COMMANDS = (train, simulate)


def main(argv: Sequence[str] | None = None) -> int:
  """Runs one sub-command."""
  parser = _parser.Parser(
    prog="optax-lossscale",
    description="Loss scaling for JAX, as an optax transformation.",
  )
  subparsers = parser.add_subparsers(metavar="COMMAND", required=True)
  for command in _COMMANDS:
    command.add_parser(subparsers)
  try:
    arguments = parser.parse_args(argv)
    return int(arguments.run(arguments))
  except _parser.BadInputError as error:
    print(error, file=sys.stderr)
    return 2
  except KeyboardInterrupt:
    print("Interrupted.", file=sys.stderr)
    return 130
