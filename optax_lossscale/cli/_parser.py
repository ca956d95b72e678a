"""An argument parser that answers bad input with one line."""

import argparse
from collections.abc import Iterator
import re
from typing import NoReturn

import jax

from optax_lossscale._base.arguments import did_you_mean


class BadInputError(Exception):
  """The user asked for something impossible; the text is the line to print."""


class Parser(argparse.ArgumentParser):
  """argparse without abbreviations, and without the usage before an error."""

  def __init__(self, **kwargs: object) -> None:
    super().__init__(allow_abbrev=False, **kwargs)  # type: ignore[arg-type]

  def error(self, message: str) -> NoReturn:
    """Raises `BadInputError`, with the name that may have been meant."""
    text = re.sub(r"\s*\n\s*", " ", message).strip()
    pattern = r"(?:invalid choice|unrecognized arguments): '?([^' =]+)"
    wrong = re.search(pattern, text)
    choices = re.search(r"choose from (.*)\)", text)
    names = re.findall("[^', ]+", choices[1]) if choices else self._options()
    hint = did_you_mean(wrong[1], names) if wrong else ""
    raise BadInputError(f"{self.prog}: error: {text}{hint}")

  def find_devices(self) -> list[jax.Device]:
    """Returns JAX's devices, or says in one line that it starts none."""
    try:
      return jax.devices()
    except (RuntimeError, AssertionError) as error:
      self.error(f"JAX starts no device; is JAX_PLATFORMS right? {error}")

  def _options(self) -> Iterator[str]:
    """Yields the options, and those of each command."""
    for action in self._actions:
      yield from action.option_strings
      if isinstance(action.choices, dict):
        for command in action.choices.values():
          yield from command._options()
