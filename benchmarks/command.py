"""The options that commands have in common, and the head of their results."""

import argparse
from collections.abc import Sequence
import os
import pathlib
import shlex
from typing import Any

from benchmarks import machine

_OUT = "benchmarks/results"


def parser(
  name: str, description: str | None, *, rounds: int | None = None
) -> argparse.ArgumentParser:
  """Returns a parser of the options that commands have in common.

  Args:
    name: the command's.
    description: for its help.
    rounds: how many there are by default; None for no such option.
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
    type=_folder,
    default=_OUT,
    metavar="DIR",
    help=f"where {name}.json goes; it is replaced (default: {_OUT})",
  )
  if rounds is not None:
    made.add_argument(
      "--rounds",
      type=_count,
      default=rounds,
      metavar="N",
      help=f"turns of each contender (default: {rounds})",
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
    # Windows does not have it.
    "load": os.getloadavg()[0] if hasattr(os, "getloadavg") else None,
  }
  print(f"{content['command']}\n{machine.headline(content['machine'])}")
  print(f"load: {content['load']}\n", flush=True)
  return content


def _count(text: str) -> int:
  if not text.isdecimal() or not int(text):
    raise argparse.ArgumentTypeError(f"must be 1 or more, got {text!r}")
  return int(text)


def _folder(text: str) -> pathlib.Path:
  """Makes the folder, so that what is measured can be written."""
  try:
    (path := pathlib.Path(text)).mkdir(parents=True, exist_ok=True)
  except OSError as error:
    raise argparse.ArgumentTypeError(f"must be a folder: {error}") from error
  return path
