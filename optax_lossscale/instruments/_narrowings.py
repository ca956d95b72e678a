"""What became of each narrowing of a program: XLA keeps it, or drops it.

XLA removes a narrowing together with what widens its result again, for all that
take it or only for some. So what counts is what each operation takes in the
compiled program: numbers that were rounded, or others.
"""

import collections
from collections.abc import Iterator
import re
from typing import NamedTuple

from optax_lossscale.instruments import _compiled_program
from optax_lossscale.instruments._compiled_program import Instruction
from optax_lossscale.instruments._compiled_program import Program

# They give numbers unchanged; XLA looks through these, too.
_MOVES = re.compile(
  r"all-gather|bitcast|broadcast|call|collective-permute|copy|copy-done|"
  r"copy-start|dynamic-slice|gather|pad|parameter|reshape|reverse|slice|transpose"
)

_PRODUCTS = "dot", "convolution"


class Narrowing(NamedTuple):
  """A conversion to a float of fewer bits that a program asks for.

  Attributes:
    wide: the dtype before it.
    narrow: the dtype after it.
    kept: whether all that use it get rounded numbers in the compiled program.
    scope: the scope of the model, or an empty string.
    line: the user's line of code, or an empty string.
  """

  wide: str
  narrow: str
  kept: bool
  scope: str
  line: str


def find(before: Program, after: Program) -> list[Narrowing]:
  """Returns what became of each narrowing of a program.

  Args:
    before: the program that JAX made.
    after: the program that XLA made of it.
  """
  asked, compiled = _Asked(before), _Compiled(after)
  return [
    Narrowing(
      _compiled_program.dtype_name(before.dtypes_of(x)[0]),
      _compiled_program.dtype_name(x.dtypes[0]),
      _is_kept(asked, compiled, x),
      x.scope,
      before.line_of(x),
    )
    for x in before.instructions.values()
    if x.opcode == "convert" and _compiled_program.is_narrower(before, x)
  ]


def _is_kept(asked: "_Asked", compiled: "_Compiled", x: Instruction) -> bool:
  """Returns whether all that use a narrowing get rounded numbers."""
  found = [*_rounded(asked, compiled, x, x.dtypes[0])]
  # What XLA has renamed says nothing, and then the narrowing itself does.
  return all(found) if found else any(map(compiled.parts.get, asked.marks(x)))


def _rounded(
  asked: "_Asked", compiled: "_Compiled", x: Instruction, narrow: str
) -> Iterator[bool]:
  """Yields whether it gets rounded numbers, for each use that is found."""
  for user, i in asked.uses(x.name):
    if user is None:
      found = compiled.result(i, narrow)
    elif user.opcode in ("tuple", "while", "conditional"):
      # A loop carries arrays of the dtypes that it is given.
      found = [True] * (x.dtypes == [narrow])
    else:
      marks = asked.marks(user)
      found = [
        y
        for mark in marks
        for part in compiled.parts[mark]
        for y in compiled.takes(part, user, i, narrow)
      ]
    if found:
      yield all(found)
    elif user and user.opcode == "convert":
      # It has gone; what takes its result tells whether that lost a rounding.
      yield from _rounded(asked, compiled, user, narrow)


class _Asked:
  """JAX's program, with what takes the result of each instruction."""

  def __init__(self, program: Program):
    self.program = program
    self.users = collections.defaultdict[str, list[tuple[str, int]]](list)
    self.equal = dict[str, list[str]]()
    classes = collections.defaultdict[tuple[object, ...], list[str]](list)
    for x in program.instructions.values():
      inner = program.computations[x.called[0]] if x.opcode == "call" else ()
      numbered = {
        program.instructions[y].operands[0]: y
        for y in inner
        if program.instructions[y].opcode == "parameter"
      }
      for i, operand in enumerate(x.operands):
        self.users[operand].append((numbered.get(str(i), x.name), i))
      for result in inner[-1:]:
        self.users[result].append((x.name, 0))
      # XLA merges operations that are the same.
      operands = (self.equal.get(y, [y])[0] for y in x.operands)
      about = re.sub(r"metadata=\{.*?\}", "", x.rest)
      own = x.name if x.opcode == "parameter" else ""
      self.equal[x.name] = classes[own, x.type, x.opcode, *operands, about]
      self.equal[x.name].append(x.name)

  def uses(self, name: str) -> Iterator[tuple[Instruction | None, int]]:
    """Yields what takes the numbers of an instruction, and as which operand.

    None stands for the result of the program.
    """
    names, seen = list(self.equal[name]), set[str]()
    root = self.program.computations[self.program.entry][-1]
    while names:
      at = names.pop()
      if at == root:
        yield None, 0
      if at in seen:
        continue
      seen.add(at)
      for user, i in self.users[at]:
        x = self.program.instructions[user]
        if _MOVES.fullmatch(x.opcode):
          names.append(user)
        elif user == root and x.opcode == "tuple":
          yield None, i
        elif calls := self._calls(x):
          taken = [y for call in calls for y, _ in self.users[call]]
          names += [y for y in taken if self.program.element(y) == i]
        else:
          yield x, i

  def _calls(self, x: Instruction) -> list[str]:
    """Returns the calls of a function that has these several results."""
    takers = [y for y, _ in self.users[x.name] if x.opcode == "tuple"]
    return [y for y in takers if self.program.instructions[y].opcode == "call"]

  def marks(self, x: Instruction) -> set[str]:
    """Returns the marks of an instruction and its equals."""
    found = {self.program.instructions[y].mark for y in self.equal[x.name]}
    return found - {""}


class _Compiled:
  """XLA's program, with the parts of each operation of JAX's."""

  def __init__(self, program: Program):
    self.program = program
    self.parts = collections.defaultdict[str, list[Instruction]](list)
    self.callers = dict[str, Instruction]()
    for x, _ in program.running():
      if x.opcode == "fusion":
        self.callers[x.called[0]] = x
      elif "tuple" not in x.opcode:
        self.parts[x.mark].append(x)

  def takes(
    self, part: Instruction, x: Instruction, i: int, narrow: str
  ) -> list[bool]:
    """Returns whether a part of an operation takes rounded numbers.

    Args:
      part: of the operation in the compiled program.
      x: the operation itself.
      i: which operand of it.
      narrow: the dtype.
    """
    is_whole = part.opcode == x.opcode
    if x.opcode in _PRODUCTS:
      is_whole = part.opcode in (*_PRODUCTS, "custom-call", "multiply")
    if is_whole and i < len(part.operands):
      return self._is_rounded(part.operands[i], narrow)
    # One of several parts, which may take what another has computed.
    found = (self._is_rounded(x, narrow) for x in part.operands)
    return [True for x in found if True in x]

  def result(self, i: int, narrow: str) -> list[bool]:
    """Returns whether a result of the program is rounded."""
    root = self.program.computations[self.program.entry][-1]
    x = self.program.instructions[root]
    operands = x.operands if x.opcode == "tuple" else [root] * (i + 1)
    return self._is_rounded(operands[i], narrow)

  def _is_rounded(self, name: str, narrow: str) -> list[bool]:
    """Returns whether a value was rounded, or nothing if that is unknown."""
    source = self._source(name)
    # What a loop or a branch is given may have been rounded before.
    is_inner = source and source.computation != self.program.entry
    if not source or (is_inner and source.opcode == "parameter"):
      return []
    is_cast = source.opcode == "convert"
    dtypes = [*source.dtypes, *(self.program.dtypes_of(source) * is_cast)]
    return [narrow in dtypes or source.opcode == "reduce-precision"]

  def _source(self, name: str) -> Instruction | None:
    """Returns what computed an operand, in whichever kernel."""
    index = list[int]()
    while x := self.program.instructions.get(name):
      if x.opcode == "parameter" and x.computation in self.callers:
        name = self.callers[x.computation].operands[int(x.operands[0])]
      elif x.opcode == "fusion":
        name = self.program.computations[x.called[0]][-1]
      elif x.opcode == "get-tuple-element":
        index.append(self.program.element(name))
        name = x.operands[0]
      elif x.opcode == "tuple" and index:
        name = x.operands[index.pop()]
      elif _MOVES.fullmatch(x.opcode) and x.opcode != "parameter":
        name = x.operands[0]
      else:
        return x
    return None
