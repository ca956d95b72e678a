"""An argument parser that answers bad input with one line."""

import argparse
from typing import NoReturn


class BadInputError(Exception):
  """The user asked for something impossible; the text is the line to print."""


class Parser(argparse.ArgumentParser):
  """argparse without abbreviations, and without the usage before an error."""

  def __init__(self, **kwargs: object) -> None:
    super().__init__(allow_abbrev=False, **kwargs)  # type: ignore[arg-type]

  def error(self, message: str) -> NoReturn:
    """Raises `BadInputError`."""
    raise BadInputError(f"{self.prog}: error: {' '.join(message.split())}")
