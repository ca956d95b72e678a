"""Modules whose names are loaded when somebody asks for them."""

from collections.abc import Callable
from collections.abc import Mapping
import importlib

from optax_lossscale._base import arguments


def open_door(
  module: str,
  # By name, the module that has it, relative to `module`.
  rooms: Mapping[str, str],
  # Returns the end of the error for a name that does not exist. By default it
  # guesses which name was meant.
  remedy: Callable[[str], str] | None = None,
) -> Callable[[str], object]:
  """Returns the `__getattr__` of a module that loads its names on demand."""

  def load(name: str) -> object:
    if name not in rooms:
      end = remedy(name) if remedy else arguments.did_you_mean(name, rooms)
      raise AttributeError(f"module {module!r} has no attribute {name!r}{end}")
    room = importlib.import_module(rooms[name], module)
    # The room of "rules" is the submodule `rules` itself.
    return room if rooms[name] == f".{name}" else getattr(room, name)

  return load
