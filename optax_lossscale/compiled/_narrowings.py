"""Finds which narrowings of a program XLA keeps, and which it drops.

XLA removes a narrowing together with what widens its result again, for all that
take it or only for some. So what counts is what each operation takes in the
compiled program: numbers that were rounded, or others.
"""

import collections
from collections.abc import Iterator
from collections.abc import Sequence
import itertools
import re
from typing import NamedTuple

import jax.numpy as jnp

from optax_lossscale._jaxpr import scopes
from optax_lossscale.compiled import _compiled_program
from optax_lossscale.compiled._compiled_program import Instruction
from optax_lossscale.compiled._compiled_program import Program

# They give numbers unchanged; XLA looks through these, too.
_MOVES = re.compile(
  r"all-gather|bitcast(-convert)?|broadcast|collective-permute|copy|copy-done|copy-start|"
  r"dynamic-slice|gather|pad|reshape|reverse|slice|transpose"
)

_PRODUCTS = "dot", "convolution"
_COMMUTATIVE = "add", "multiply", "maximum", "minimum"


class Narrowing(NamedTuple):
  """A conversion to a float of fewer bits that a program asks for.

  Attributes:
    wide: the dtype before it.
    narrow: the dtype after it.
    kept: whether all that use it get rounded numbers in the compiled program;
      None if that is not to be seen there.
    scope: the scope of the model, or an empty string.
    line: the user's line of code, or an empty string.
  """

  wide: str
  narrow: str
  kept: bool | None
  scope: str
  line: str


def find(before: Program, after: Program) -> list[Narrowing]:
  """Returns what became of each narrowing, from JAX's program and XLA's."""
  asked, compiled = _Asked(before), _Compiled(after)
  return [
    Narrowing(
      _compiled_program.dtype_name(before.dtypes_of(x)[0]),
      _compiled_program.dtype_name(x.dtypes[0]),
      _is_kept(asked, compiled, x),
      asked.scope(x),
      before.line_of(x),
    )
    for x in before.instructions.values()
    if x.opcode == "convert" and _compiled_program.is_narrower(before, x)
  ]


def _is_kept(
  asked: "_Asked", compiled: "_Compiled", x: Instruction
) -> bool | None:
  """Returns whether all that use a narrowing get rounded numbers."""
  found = [*_rounded(asked, compiled, x, x.dtypes[0])]
  if found:
    return all(found)
  # All that use it have gone, or have other names.
  return any(map(compiled.parts.get, asked.marks(x))) or None


def _rounded(
  asked: "_Asked", compiled: "_Compiled", x: Instruction, narrow: str
) -> Iterator[bool]:
  """Yields whether it gets rounded numbers, for each use that is found."""
  for user, i in asked.uses(x.name):
    if user is None:
      found = [compiled.is_rounded(compiled.result(i), narrow)]
    else:
      parts = (compiled.parts[mark] for mark in asked.marks(user))
      is_twice = asked.is_also(user, 1 - i, narrow)
      found = [
        compiled.takes(part, user, i, narrow, is_twice=is_twice)
        for part in itertools.chain(*parts)
      ]
    known = [y for y in found if y is not None]
    if known:
      yield all(known)
    elif user and user.opcode == "convert":
      # It has gone; what takes its result tells whether that lost a rounding.
      yield from _rounded(asked, compiled, user, narrow)


class _Flow(NamedTuple):
  """How arrays go into what an instruction calls, and out of it."""

  # A computation, and which operand its parameters are; None if each parameter
  # is the operand of its own number.
  into: Sequence[tuple[str, int | None]]
  # The computations whose result is the instruction's.
  out: Sequence[str]
  # The computations whose result goes into `into` the next time.
  again: Sequence[str] = ()


def _flow(x: Instruction) -> _Flow:
  called = x.called
  if x.opcode in ("call", "fusion"):
    return _Flow([(called[0], None)], called[:1])
  if x.opcode == "while":
    body = re.findall(r"\bbody=%?([\w.-]+)", x.rest)
    return _Flow([(y, 0) for y in called], body, body)
  if x.opcode == "conditional":
    return _Flow([(y, i) for i, y in enumerate(called, 1)], called)
  return _Flow([], [])


class _Asked:
  """JAX's program, with what takes the result of each instruction."""

  def __init__(self, program: Program):
    self.program = program
    self.users = collections.defaultdict[str, list[tuple[str, int]]](list)
    self.owners = collections.defaultdict[str, list[Instruction]](list)
    self.equal = dict[str, list[str]]()
    classes = collections.defaultdict[tuple[object, ...], list[str]](list)
    for x in program.instructions.values():
      for i, operand in enumerate(x.operands):
        self.users[operand].append((x.name, i))
      for name in dict.fromkeys(_flow(x).out):
        self.owners[name].append(x)
      # XLA merges operations that are the same.
      operands = (self.equal.get(y, [y])[0] for y in x.operands)
      about = re.sub(r"metadata=\{.*?\}", "", x.rest)
      own = x.name if x.opcode == "parameter" else ""
      self.equal[x.name] = classes[own, x.type, x.opcode, *operands, about]
      self.equal[x.name].append(x.name)

  def uses(self, name: str) -> Iterator[tuple[Instruction | None, int]]:
    """Yields what takes the numbers of an instruction, and as which operand."""
    program = self.program
    # Values and, of a tuple, which element.
    values: list[tuple[str, int]] = [(name, -1)]
    for at, element in values:
      following = list[tuple[str, int]]()
      x = program.instructions[at]
      if at == program.computations[x.computation][-1]:
        if x.computation == program.entry:
          # None stands for the result of the program.
          yield None, max(element, 0)
        for owner in self.owners[x.computation]:
          following.append((owner.name, element))
          for into, _ in _flow(owner).into if _flow(owner).again else ():
            following.append((program.parameter(into, 0), element))
      for user, i in self.users[at]:
        y = program.instructions[user]
        flow = _flow(y)
        if _MOVES.fullmatch(y.opcode):
          following.append((user, element))
        elif y.opcode == "tuple":
          following.append((user, i))
        elif y.opcode == "get-tuple-element":
          following += [(user, -1)] * (program.element(user) == element)
        elif flow.into:
          following += [
            (program.parameter(into, i if of is None else 0), element)
            for into, of in flow.into
            if of in (None, i)
          ]
        else:
          yield y, i
      values += [y for y in following if y not in values]

  def scope(self, x: Instruction) -> str:
    """Returns the scope of an instruction, with those of the calls around."""
    scope = x.scope
    while owners := self.owners[x.computation]:
      x = owners[0]
      if x.opcode == "call":
        scope = scopes.join(scopes.join("", x.op_name), scope)
    return scope

  def is_also(self, x: Instruction, i: int, narrow: str) -> bool:
    """Returns whether another operand of an instruction is rounded, too."""
    names = [*x.operands[i : i + 1]] if i >= 0 else []
    while names:
      found = self.program.instructions.get(names.pop())
      if found and narrow in found.dtypes:
        return True
      if found and (
        found.opcode == "convert" or _MOVES.fullmatch(found.opcode)
      ):
        names += found.operands[:1]
    return False

  def marks(self, x: Instruction) -> set[str]:
    """Returns the marks of an instruction and its equals."""
    found = {self.program.instructions[y].mark for y in self.equal[x.name]}
    return found - {""}


class _Compiled:
  """XLA's program, with the parts of each operation of JAX's."""

  def __init__(self, program: Program):
    self.program = program
    self.parts = collections.defaultdict[str, list[Instruction]](list)
    self.callers = collections.defaultdict[
      str, list[tuple[Instruction, int | None]]
    ](list)
    for x, _ in program.running():
      for name, operand in _flow(x).into:
        self.callers[name].append((x, operand))
      if not (_flow(x).into or "tuple" in x.opcode):
        self.parts[x.mark].append(x)

  def takes(
    self,
    part: Instruction,
    x: Instruction,
    i: int,
    narrow: str,
    *,
    is_twice: bool,  # Whether the other operand is rounded as well.
  ) -> bool | None:
    """Returns whether a part of the operation `x` takes operand `i` rounded."""
    found = [self.is_rounded(y, narrow) for y in part.operands]
    is_whole = part.opcode == x.opcode
    if x.opcode in _PRODUCTS:
      is_whole = part.opcode in (*_PRODUCTS, "custom-call", "multiply")
    if not is_whole or i >= len(found):
      # One of several parts, which may take what another has computed.
      return True if True in found else None
    may_swap = x.opcode in (*_PRODUCTS, *_COMMUTATIVE) and True in found[:2]
    if may_swap and not found[i]:
      return None if is_twice else True
    return found[i]

  def result(self, i: int) -> str:
    """Returns the name of a result of the program."""
    root = self.program.computations[self.program.entry][-1]
    x = self.program.instructions[root]
    return x.operands[i] if x.opcode == "tuple" else root

  def is_rounded(self, name: str, narrow: str) -> bool | None:
    """Returns whether a value was rounded; None if that is unknown."""
    finfo = jnp.finfo(_compiled_program.dtype_name(narrow))
    as_narrow = f"exponent_bits={finfo.nexp}, mantissa_bits={finfo.nmant}"
    found = False
    values: list[tuple[str, int]] = [(name, -1)]
    for at, element in values:
      x = self.program.instructions.get(at)
      operand = x and self.program.instructions.get("".join(x.operands[:1]))
      if x is None or "constant" in (x.opcode, operand and operand.opcode):
        continue  # XLA writes one in whichever dtype.
      dtypes = x.dtypes if element < 0 else []
      if x.opcode == "convert":
        dtypes = [*dtypes, *self.program.dtypes_of(x)]
      if dtypes.count(narrow) or as_narrow in x.rest:
        return True
      before = self._before(x, element)
      found |= not before
      values += [y for y in before if y not in values]
    return False if found else None

  def _before(self, x: Instruction, element: int) -> list[tuple[str, int]]:
    """Returns the values that an instruction only passes on."""
    program = self.program
    if x.opcode == "parameter":
      found = list[tuple[str, int]]()
      for caller, i in self.callers[x.computation]:
        number = int(x.operands[0]) if i is None else i
        found.append((caller.operands[number], element))
        again = _flow(caller).again
        found += [(program.computations[y][-1], element) for y in again]
      return found
    if x.opcode == "get-tuple-element":
      return [(x.operands[0], program.element(x.name))]
    if x.opcode == "tuple" and element >= 0:
      return [(x.operands[element], -1)]
    if out := _flow(x).out:
      return [(program.computations[y][-1], element) for y in out]
    if _MOVES.fullmatch(x.opcode):
      return [(x.operands[0], element)]
    return []
