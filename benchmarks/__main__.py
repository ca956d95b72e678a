"""Measures `optax_lossscale`: `python -m benchmarks [COMMAND]`, from the root.

update      the update phase, beside other libraries; the default
parts       whole steps, and each part of the library
gpu         what holds on a GPU, and what it costs there
targets     what is compiled for GPUs and TPUs that are not here
autocast    what autocast makes of a model's products
products    the error of the gradient in each format of products
accelerate  what a precision schedule saves and costs
truth       models trained with and without loss scaling

`python -m benchmarks COMMAND --help` has the options.
"""

from collections.abc import Sequence
import faulthandler
import importlib
import sys

from benchmarks import command as command_lib

# Imported when called, so that one does not need what the other one needs.
_COMMANDS = {
  "update": "benchmarks.update",
  "parts": "benchmarks.parts",
  "gpu": "benchmarks.gpu",
  "autocast": "benchmarks.autocast",
  "products": "benchmarks.products",
  "accelerate": "benchmarks.accelerate",
  "truth": "benchmarks.truth.command",
  "targets": "benchmarks.targets",
}


def main(argv: Sequence[str]) -> int:
  """Runs one benchmark, the update phase unless told otherwise.

  Args:
    argv: the words after the program's name.

  Returns:
    The exit code.
  """
  command, *rest = argv or ["update"]
  if command in ("-h", "--help"):
    print(__doc__)
    return 0
  if command.startswith("-"):
    command, rest = "update", list(argv)
  parser = command_lib.Parser("")
  if command not in _COMMANDS:
    known = ", ".join(map(repr, _COMMANDS))
    parser.error(f"invalid choice: {command!r} (choose from {known})")
  try:
    module = importlib.import_module(_COMMANDS[command])
  except ModuleNotFoundError as error:
    parser.error(f'{error}; install ".[benchmark]"')
  return int(module.main(rest))


if __name__ == "__main__":
  faulthandler.enable()  # What crashes in a driver would else say nothing.
  sys.exit(main(sys.argv[1:]))
