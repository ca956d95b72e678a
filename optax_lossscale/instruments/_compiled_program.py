"""Reads optimized HLO, the text of a compiled program, as a graph."""

import collections
from collections.abc import Iterator
from collections.abc import Mapping
from collections.abc import Sequence
import re
from typing import NamedTuple

from optax_lossscale._jaxpr import scopes
from optax_lossscale._jaxpr import source_lines

_HEAD = re.compile(r"(ENTRY )?%?([\w.-]+) .*\{$")
_INSTRUCTION = re.compile(
  r" +(?:ROOT )?%?([\w.-]+) = (.*?) ([a-z][\w-]*)\((.*?)\)(?:, (.*))?$"
)
_ROW = re.compile(r'(\d+) (?:"(.*)"|\{(.*)\})$')
_CALLED = re.compile(
  r"\b(?:calls|to_apply|body|condition|\w+_computations?)"
  r"=(?:\{([^}]*)\}|%?([\w.-]+))"
)
_DTYPE = re.compile(r"(b?f|s|u)(\d+)(e\w+)?")
_KINDS = {"f": "float", "bf": "bfloat", "s": "int", "u": "uint"}

_CONTROL = "while", "conditional", "call"
# XLA launches nothing for these, or has launched it already.
_FREE = re.compile(
  r"parameter|constant|tuple|get-tuple-element|bitcast|after-all|domain|"
  r"opt-barrier|partition-id|replica-id|.*-done"
)
_COLLECTIVE = re.compile(
  r"(all-reduce|all-gather|reduce-scatter|(?:ragged-)?all-to-all|"
  r"collective-broadcast|collective-permute)(?:-start)?"
)
# XLA looks through these for the other end of a pair of conversions.
_MOVES = re.compile(
  r"bitcast-convert|broadcast|call|concatenate|copy|dynamic-slice|gather|pad|"
  r"parameter|reshape|reverse|slice|transpose"
)
_SUM = "a sum in a fusion"


class Instruction(NamedTuple):
  """An instruction; names are unique in the program.

  Attributes:
    name: with the name of the computation that it is in.
    dtypes: those of its results, as HLO writes them.
    opcode: what it does.
    operands: the names of its operands; the number of a parameter.
    rest: its attributes.
  """

  name: str
  dtypes: tuple[str, ...]
  opcode: str
  operands: tuple[str, ...]
  rest: str

  @property
  def op_name(self) -> str:
    """JAX's name of the operation, with the scopes and functions around it."""
    found = re.search(r'op_name="((?:[^"\\]|\\.)*)"', self.rest)
    return found[1].rpartition("call_exported/")[2] if found else ""

  @property
  def scope(self) -> str:
    """The scope of the model, or an empty string."""
    return scopes.join("", self.op_name.rpartition("/")[0])

  @property
  def called(self) -> list[str]:
    """The computations that it calls."""
    found = " ".join("".join(x) for x in _CALLED.findall(self.rest))
    return re.findall(r"[\w.-]+", found)


class Program(NamedTuple):
  """A parsed program.

  Attributes:
    instructions: all of them, by name.
    computations: the names of each one's instructions; the last is its result.
    entry: the computation that runs.
    lines: the user's line of code of each stack frame, as "file:line".
  """

  instructions: Mapping[str, Instruction]
  computations: Mapping[str, Sequence[str]]
  entry: str
  lines: Mapping[str, str]

  def line_of(self, x: Instruction) -> str:
    """Returns the user's line of code, or an empty string."""
    frame = re.search(r"stack_frame_id=(\d+)", x.rest)
    return self.lines.get(frame[1], "") if frame else ""

  def dtypes_of(self, x: Instruction) -> list[str]:
    """Returns the dtypes of its operands."""
    found = map(self.instructions.get, x.operands)
    return [y.dtypes[0] for y in found if y and y.dtypes]

  def running(
    self, name: str = "", within: Instruction | None = None
  ) -> Iterator[tuple[Instruction, Instruction | None]]:
    """Yields what runs, and the kernel that it is part of, if any.

    The body of a loop comes once, and so does every branch.
    """
    for key in self.computations.get(name or self.entry, ()):
      x = self.instructions[key]
      yield x, within
      # The function of a reduction does not run by itself.
      is_kernel = x.opcode in ("fusion", "async-start")
      if is_kernel or x.opcode in _CONTROL:
        for called in x.called:
          yield from self.running(called, x if is_kernel else within)


def parse(text: str) -> Program:
  """Returns a program from its HLO, as `compiled.as_text()` returns it."""
  instructions: dict[str, Instruction] = {}
  computations = collections.defaultdict[str, list[str]](list)
  tables = collections.defaultdict[str, dict[str, str]](dict)
  entry = table = inside = ""
  for line in text.splitlines():
    if head := _HEAD.match(line):
      inside = head[2]
      entry = inside if head[1] else entry
    elif found := _INSTRUCTION.match(line):
      name, of_type, opcode, given, rest = found.groups()
      # Each may have its type before its name.
      operands = re.findall(r"%?([\w.-]+)(?:, |$)", given)
      if opcode != "parameter":
        operands = [f"{inside}/{x}" for x in operands]
      computations[inside].append(f"{inside}/{name}")
      instructions[f"{inside}/{name}"] = Instruction(
        f"{inside}/{name}",
        tuple(re.findall(r"\b([a-z]\w*)\[", of_type)),
        opcode,
        tuple(operands),
        rest or "",
      )
    elif row := _ROW.match(line):
      tables[table][row[1]] = row[2] or row[3]
    elif line and line[0].isalpha():
      table = line.strip()
  return Program(instructions, computations, entry, _lines(tables))


def _lines(tables: Mapping[str, Mapping[str, str]]) -> dict[str, str]:
  """Returns the user's line, or else the innermost one, of each stack frame."""

  def rows(table: str) -> dict[str, dict[str, str]]:
    fields = re.compile(r"(\w+)=(\d+)")
    return {x: dict(fields.findall(y)) for x, y in tables[table].items()}

  frames = rows("StackFrames")
  places = {
    x: f"{tables['FileNames'].get(y['file_name_id'], '')}:{y['line']}"
    for x, y in rows("FileLocations").items()
  }
  # XLA writes each parent's number plus one, so that none of them is 0.
  parents = {x: int(y["parent_frame_id"]) for x, y in frames.items()}
  shift = any(y >= int(x) for x, y in parents.items())
  found = {}
  for number in frames:
    lines, frame = [], number
    while frame in frames:
      lines.append(places.get(frames[frame]["file_location_id"], ""))
      frame = str(parents[frame] - shift)
    found[number] = next(filter(source_lines.is_own, lines), lines[0])
  return found


def kernels(program: Program) -> int:
  """Returns how many kernels, copies and library calls a program launches."""
  return sum(
    not (within or x.opcode in _CONTROL or _FREE.fullmatch(x.opcode))
    for x, within in program.running()
  )


def collectives(program: Program) -> dict[str, int]:
  """Returns how many collectives of each kind a program has."""
  found = (_COLLECTIVE.fullmatch(x.opcode) for x, _ in program.running())
  return dict(collections.Counter(x[1] for x in found if x))


def conditionals(program: Program) -> int:
  """Returns how many branches are decided while a program runs."""
  return sum(x.opcode == "conditional" for x, _ in program.running())


class Product(NamedTuple):
  """A compiled matrix product or convolution.

  Attributes:
    operands: the dtypes that it multiplies.
    result: the dtype of its result.
    through: what computes it, such as "cuBLAS" or "a fusion".
    scope: the scope of the model, or an empty string.
    line: the user's line of code, or an empty string.
  """

  operands: tuple[str, ...]
  result: str
  through: str
  scope: str
  line: str


def products(program: Program, is_tpu: bool) -> list[Product]:
  """Returns the products of a program, each as often as it is compiled in."""
  found: list[tuple[str, Product]] = []
  sums: list[tuple[str, Product]] = []
  for x, kernel in program.running():
    if through := _through(x, kernel, is_tpu):
      product = Product(
        tuple(map(_dtype_name, program.dtypes_of(x)[:2])),
        _dtype_name(x.dtypes[0]),
        through,
        x.scope,
        program.line_of(x),
      )
      (sums if through == _SUM else found).append((x.op_name, product))
  # A product that is split into parts has sums of these, too.
  names = {name for name, _ in found}
  return [x for _, x in found] + [x for name, x in sums if name not in names]


def _through(x: Instruction, kernel: Instruction | None, is_tpu: bool) -> str:
  """Returns what computes a product, or an empty string."""
  if x.opcode == "custom-call":
    found = re.search(r'custom_call_target="__(cublas|cudnn)(.*?)"', x.rest)
    if not found:
      return ""
    library = {"cublas": "cuBLAS", "cudnn": "cuDNN"}[found[1]]
    return library + " in float8" * found[2].endswith("$f8")
  if x.opcode in ("dot", "convolution"):
    is_triton = kernel and "triton" in kernel.rest
    by_gpu = "Triton" if is_triton else "a fusion"
    return "the matrix unit" if is_tpu else by_gpu
  is_product = re.search(r"(dot_general|conv_general_dilated)$", x.op_name)
  return _SUM if x.opcode == "reduce" and is_product else ""


class Narrowing(NamedTuple):
  """A conversion to a float of fewer bits that a program asks for.

  Attributes:
    wide: the dtype before it.
    narrow: the dtype after it.
    kept: whether the compiled program rounds there.
    scope: the scope of the model, or an empty string.
    line: the user's line of code, or an empty string.
  """

  wide: str
  narrow: str
  kept: bool
  scope: str
  line: str


def narrowings(before: Program, after: Program) -> list[Narrowing]:
  """Returns what became of each narrowing of a program.

  XLA removes a narrowing only together with what widens its result again. So it
  is kept if one of both is found in the compiled program, by name and line, or
  if something else takes the narrow numbers.

  Args:
    before: the program that JAX made.
    after: the program that XLA made of it.
  """
  seen = collections.defaultdict[tuple[str, str, str], set[str]](set)
  for x, _ in after.running():
    line = after.line_of(x)
    for dtype in x.dtypes:
      seen["to", dtype, line].add(x.op_name)
    if x.opcode == "convert":
      seen["from", after.dtypes_of(x)[0], line].add(x.op_name)

  def is_in(way: str, dtype: str, x: Instruction) -> bool:
    # Only XLA adds the name of a jitted function to those inside it.
    names = seen[way, dtype, before.line_of(x)]
    return any(name.endswith(x.op_name) for name in names)

  # XLA merges conversions of one array to one dtype.
  groups = collections.defaultdict[tuple[str, ...], list[Instruction]](list)
  for x in before.instructions.values():
    if x.opcode == "convert" and _is_narrower(before, x):
      groups[*x.operands, *x.dtypes].append(x)
  flows = _flows(before)
  return [
    Narrowing(
      _dtype_name(before.dtypes_of(x)[0]),
      _dtype_name(narrow),
      any(is_in("to", narrow, y) for y in group)
      or any(
        y is None or is_in("from", narrow, y)
        for y in _ends(before, flows, [z.name for z in group])
      ),
      x.scope,
      before.line_of(x),
    )
    for (*_, narrow), group in groups.items()
    for x in group
  ]


def _flows(program: Program) -> Mapping[str, Sequence[str]]:
  """Returns what takes the numbers of each instruction, also in what it calls.

  The empty string stands for the caller, who takes the result.
  """
  flows = collections.defaultdict[str, list[str]](list)
  for x in program.instructions.values():
    inner = program.computations[x.called[0]] if x.opcode == "call" else ()
    numbered = {
      program.instructions[y].operands[0]: y
      for y in inner
      if program.instructions[y].opcode == "parameter"
    }
    for number, operand in enumerate(x.operands):
      flows[operand].append(numbered.get(str(number), x.name))
    for result in inner[-1:]:
      flows[result].append(x.name)
  flows[program.computations[program.entry][-1]].append("")
  return flows


def _ends(
  program: Program, flows: Mapping[str, Sequence[str]], names: list[str]
) -> Iterator[Instruction | None]:
  """Yields the conversions that widen numbers again, and None for all else."""
  seen = set[str]()
  while names:
    name = names.pop()
    if name not in seen:
      seen.add(name)
      for user in flows.get(name, ()):
        x = program.instructions.get(user)
        if x and _MOVES.fullmatch(x.opcode):
          names.append(user)
        elif x and x.opcode == "convert" and not _is_narrower(program, x):
          yield x
        else:
          yield None


def _is_narrower(program: Program, x: Instruction) -> bool:
  """Returns whether a conversion is between floats, to one of fewer bits."""
  wide, narrow = (
    _DTYPE.fullmatch(y) for y in (*program.dtypes_of(x), *x.dtypes)
  )
  if not (wide and narrow and "f" in wide[1] and "f" in narrow[1]):
    return False
  return int(narrow[2]) < int(wide[2])


def _dtype_name(name: str) -> str:
  """Returns NumPy's name of a dtype, as in float8_e4m3fn for f8e4m3fn."""
  found = _DTYPE.fullmatch(name)
  if not found:
    return name
  return "_".join(filter(None, (_KINDS[found[1]] + found[2], found[3])))
