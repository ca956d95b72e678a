"""The place of an operation in a program, in words."""

from collections.abc import Iterable
from collections.abc import Sequence
import functools
import pathlib
import re
import sysconfig
from typing import Any
from typing import NamedTuple

from jax.extend import core
from jax.extend import source_info_util
from jax.extend.core import primitives
import numpy as np

from optax_lossscale._detectors import operation_overflow
from optax_lossscale._jaxpr import calls
from optax_lossscale._jaxpr import scopes
from optax_lossscale.instruments import _first

# What JAX writes around the scopes of the backward pass.
_TRANSPOSE = "transpose("

# How JAX writes a line of code: with its column and its function.
_FRAME = re.compile(r"(?P<line>.+?:\d+)(?::\d+)? \((?P<function>.*)\)")

_HERE = pathlib.Path(__file__).parents[1]
_INTERPRETERS = (str(_HERE / "_autocast"), str(_HERE / "_jaxpr"))
_LIBRARIES = (
  str(_HERE),
  sysconfig.get_path("purelib"),
  sysconfig.get_path("platlib"),
)

# The kind of an argument that holds inf or NaN.
NONFINITE = "nonfinite"


class Place(NamedTuple):
  """An operation that overflowed; `str()` makes a sentence of it.

  Or an argument that was not finite, where no operation overflowed.

  Attributes:
    operation: JAX's name of it, such as "mul" or "dot_general"; "argument" of
      an argument.
    kind: "overflow", or "undefined" of what has no finite value in any dtype,
      such as 1/0 or log 0; "nonfinite" of an argument that holds inf or NaN.
    layer: the scope that it is in, such as "LeNet5/conv1", as Flax Linen and
      `jax.named_scope` write it; empty without one. Of an argument its path,
      such as "batch['x']".
    backward: whether it is in the backward pass.
    dtype: of its result.
    shape: of its result; in a `shard_map` that is one device's part.
    elements: how many elements of the result overflowed, on all devices.
    iterations: in which iteration of each loop around it, the outermost first,
      counted from 0. Of a scan that is the index into what it goes over, also
      where the backward pass goes over it in reverse.
    source: the line of code, as "file:line", None if JAX has not recorded one.
  """

  operation: str
  kind: str
  layer: str
  backward: bool
  dtype: Any
  shape: tuple[int, ...]
  elements: int
  iterations: tuple[int, ...]
  source: str | None

  def __str__(self) -> str:
    count = f"{self.elements} element" + "s" * (self.elements != 1)
    if self.kind == NONFINITE:
      verb = "is" if self.elements == 1 else "are"
      return f"argument {self.layer} holds {count} that {verb} not finite"
    is_overflow = self.kind == operation_overflow.OVERFLOW
    what = "overflow" if is_overflow else "undefined result"
    parts = [f'{self.dtype.name} {what} in "{self.operation}" {self.shape}']
    if self.layer:
      parts[0] += f" of layer {self.layer}"
    if self.backward:
      parts.append("backward pass")
    if len(self.iterations) == 1:
      parts.append(f"iteration {self.iterations[0]} of its loop")
    elif self.iterations:
      numbers = ", ".join(map(str, self.iterations))
      parts.append(f"iterations ({numbers}) of its loops, the outermost first")
    source = f" at {self.source}" if self.source else ""
    return f"{', '.join(parts)}: {count}{source}"


class Result(NamedTuple):
  """One result of an operation, and what may be found of it."""

  around: tuple[core.JaxprEqn, ...]  # What holds it, the outermost first.
  equation: core.JaxprEqn
  variable: core.Var
  kind: str  # As in `Place`.


def describe(result: Result, first: _first.First) -> Place:
  """Returns the place of a result."""
  equations = [*result.around, result.equation]
  stacks = [str(x.source_info.name_stack) for x in equations]
  aval: Any = result.variable.aval
  return Place(
    operation=result.equation.primitive.name,
    kind=result.kind,
    layer=functools.reduce(scopes.join, stacks, ""),
    backward=any(_TRANSPOSE in stack for stack in stacks),
    dtype=np.dtype(aval.dtype),
    shape=tuple(aval.shape),
    elements=int(first.elements),
    iterations=_iterations(result.around, first.iterations),
    source=_source(equations),
  )


def _iterations(
  around: Iterable[core.JaxprEqn], rounds: Iterable[Any]
) -> tuple[int, ...]:
  loops = [x for x in around if calls.is_loop(x)]
  # There may be deeper loops elsewhere.
  return tuple(
    loop.params["length"] - 1 - int(number)
    if loop.params.get("reverse")
    else int(number)
    for loop, number in zip(loops, rounds, strict=False)
  )


def _source(equations: Sequence[core.JaxprEqn]) -> str | None:
  """Returns the line of code that the user wrote, or the nearest to it."""
  *around, equation = equations
  frames = _frames(equation)
  for call in reversed(around):
    if call.primitive is not primitives.jit_p:
      continue
    # JAX traces a jitted function once. One of a library's own, in which there
    # is no line of the user's, shows the lines of who called it first.
    name = call.params["name"]
    if all(function.split(".")[-1] != name for _, function in frames):
      frames = _frames(call)
  if not frames or frames[0][0].startswith(_INTERPRETERS):
    # Evaluated again by `autocast` or the like, whose caller says nothing.
    return None
  lines = [line for line, _ in frames]
  # A library's layer is called from somewhere.
  own = [line for line in lines if not line.startswith(_LIBRARIES)]
  return (own or lines)[0]


def _frames(equation: core.JaxprEqn) -> list[tuple[str, str]]:
  """Returns lines of code and their functions, from the innermost on."""
  text = source_info_util.summarize(equation.source_info, num_frames=1000)
  return [(x["line"], x["function"]) for x in _FRAME.finditer(text)][::-1]
