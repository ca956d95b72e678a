"""`python -m benchmarks [COMMAND]`, from the root: one of those below."""

from collections.abc import Sequence
import faulthandler
import importlib
import sys

# Imported when called, so that one does not need what the other one needs.
_COMMANDS = {
  "update": "benchmarks.update_phase",
  "parts": "benchmarks.parts",
  "gpu": "benchmarks.gpu",
  "autocast": "benchmarks.autocast",
  "accelerate": "benchmarks.accelerate",
  "truth": "benchmarks.truth.command",
}


def main(argv: Sequence[str]) -> int:
  """Runs one benchmark, the update phase unless told otherwise.

  Args:
    argv: the words after the program's name.

  Returns:
    The exit code.
  """
  command, rest = "update", list(argv)
  if rest and rest[0] in _COMMANDS:
    command = rest.pop(0)
  return int(importlib.import_module(_COMMANDS[command]).main(rest))


if __name__ == "__main__":
  faulthandler.enable()  # What crashes in a driver would else say nothing.
  sys.exit(main(sys.argv[1:]))
