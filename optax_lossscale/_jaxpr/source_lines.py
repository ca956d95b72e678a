"""Finds the line of code that an operation of a jaxpr comes from."""

from collections.abc import Sequence
import pathlib
import re
import sysconfig

from jax.extend import core
from jax.extend import source_info_util
from jax.extend.core import primitives

# A stack frame as JAX writes it: the line of code, column and function.
_FRAME = re.compile(r"(?P<line>.+?:\d+)(?::\d+)? \((?P<function>.*)\)")
_HERE = pathlib.Path(__file__).parents[1]
_INTERPRETERS = (str(_HERE / "_autocast"), str(_HERE / "_jaxpr"))

_LIBRARIES = (
  str(_HERE),
  sysconfig.get_path("purelib"),
  sysconfig.get_path("platlib"),
)


def user_line(equations: Sequence[core.JaxprEqn]) -> str | None:
  """Returns the user's line of code as "file:line", or the line nearest to it.

  The operation comes last, after the calls around it, outermost first.
  """
  *around, equation = equations
  frames = _frames(equation)
  for call in reversed(around):
    if call.primitive is not primitives.jit_p:
      continue
    # JAX traces a jitted function once. A library's function that runs no code
    # of the user's has the frames of its first caller.
    name = call.params["name"]
    is_foreign = all(x.split(".")[-1] != name for _, x in frames)
    if is_foreign and any(map(_is_own, _frames(call))):
      frames = _frames(call)
  if not frames or frames[0][0].startswith(_INTERPRETERS):
    # `autocast` or the like evaluated the equation; its frames say nothing.
    return None
  # The user's line is farther out than the library code that it calls.
  own = [x for x in frames if _is_own(x)]
  outer = user_line(around) if not own and around else None
  return outer or (own or frames)[0][0]


def _is_own(frame: tuple[str, str]) -> bool:
  return not frame[0].startswith(_LIBRARIES)


def _frames(equation: core.JaxprEqn) -> list[tuple[str, str]]:
  """Returns lines of code and their functions, the innermost first."""
  text = source_info_util.summarize(equation.source_info, num_frames=1000)
  return [(x["line"], x["function"]) for x in _FRAME.finditer(text)][::-1]
