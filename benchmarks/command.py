"""What the commands share: two options, and the head of what they write."""

import argparse
from collections.abc import Sequence
import os
import pathlib
import shlex
from typing import Any

from benchmarks import machine

_OUT = pathlib.Path("benchmarks/results")


def parser(name: str, description: str | None) -> argparse.ArgumentParser:
  """Returns a parser of the options that every command has.

  Args:
    name: the command's.
    description: for its help.
  """
  made = argparse.ArgumentParser(
    prog=f"python -m benchmarks {name}",
    description=description,
    formatter_class=argparse.RawDescriptionHelpFormatter,
    allow_abbrev=False,
  )
  made.add_argument(
    "--tiny", action="store_true", help="tiny sizes, to see it work"
  )
  made.add_argument(
    "--out",
    type=pathlib.Path,
    default=_OUT,
    metavar="DIR",
    help=f"where {name}.json goes; it is replaced (default: {_OUT})",
  )
  return made


def begin(name: str, argv: Sequence[str]) -> dict[str, Any]:
  """Prints and returns what is run on which machine, and how busy that is.

  Args:
    name: the command's.
    argv: its options.

  Returns:
    A dict for JSON: `command`, `machine`, and `load`, the number of programs
    that wanted to run in the last minute, on average.
  """
  content = {
    "command": shlex.join(["python", "-m", "benchmarks", name, *argv]),
    "machine": machine.describe(),
    "load": os.getloadavg()[0],
  }
  print(f"{content['command']}\n{machine.headline(content['machine'])}")
  print(f"load: {content['load']:.2f}\n", flush=True)
  return content


def positive(text: str) -> int:
  """Returns the value of an option that counts something."""
  value = int(text)
  if value < 1:
    raise argparse.ArgumentTypeError(f"must be at least 1, got {value}")
  return value
