"""The user's lines of code that operations come from."""

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
  """Returns the user's line of code, or the nearest one, as "file:line"."""
  # The operation comes last, after the calls around it, outermost first.
  *around, equation = equations
  frames = _frames(equation)
  for call in reversed(around):
    if call.primitive is not primitives.jit_p:
      continue
    # JAX traces a jitted function once. A library's function that runs no code
    # of the user's has the frames of its first caller.
    name = call.params["name"]
    is_foreign = all(x.split(".")[-1] != name for _, x in frames)
    if is_foreign and any(is_own_line(x) for x, _ in _frames(call)):
      frames = _frames(call)
  if not frames or frames[0][0].startswith(_INTERPRETERS):
    # `autocast` or the like evaluated the equation; its frames say nothing.
    return None
  # The user's line is farther out than the library code that it calls.
  own = [x for x in frames if is_own_line(x[0])]
  outer = user_line(around) if not own and around else None
  return outer or (own or frames)[0][0]


def is_own_line(line: str) -> bool:
  """Returns whether a line is the user's, not one of an installed library."""
  return not line.startswith(_LIBRARIES)


def _frames(equation: core.JaxprEqn) -> list[tuple[str, str]]:
  """Returns lines of code and their functions, the innermost first."""
  text = source_info_util.summarize(equation.source_info, num_frames=1000)
  return [(x["line"], x["function"]) for x in _FRAME.finditer(text)][::-1]
