"""Reads optimized HLO, the text of a compiled program, as a graph."""

import collections
from collections.abc import Iterator
from collections.abc import Mapping
from collections.abc import Sequence
import re
from typing import NamedTuple

import jax.numpy as jnp

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
_DTYPE = re.compile(r"(b?f|c|s|u)(\d+)(e\w+)?")
_KINDS = {"bf": "bfloat", "f": "float", "c": "complex", "s": "int", "u": "uint"}

# JAX's names for what control flow calls.
_FLOW = re.compile(
  r"(while/(body|cond)|cond/branch_\d+_fun|closed_call|eval_jaxpr)/"
)
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


# Pallas's kernels on GPUs and TPUs, and cuDNN's attention.
_HAND_WRITTEN = re.compile(
  r'custom_call_target="(__gpu\$xla\.gpu\.triton|mosaic_gpu[\w.$]*|'
  r'tpu_custom_call|__cudnn\$fmha\w*)"'
)


class Instruction(NamedTuple):
  """An instruction of a program."""

  # With the name of the computation that it is in, and so unique.
  name: str
  # Of its results, with shapes, as HLO writes it.
  type: str
  opcode: str
  # The names of its operands; the number of a parameter.
  operands: tuple[str, ...]
  # Its attributes.
  rest: str

  @property
  def op_name(self) -> str:
    """JAX's name of the operation, with the scopes and functions around it."""
    found = re.search(r'op_name="((?:[^"\\]|\\.)*)"', self.rest)
    name = found[1] if found else ""
    return f"{name}/".rpartition("call_exported/")[2].rstrip("/")

  @property
  def dtypes(self) -> list[str]:
    """The dtypes of its results."""
    return re.findall(r"\b([a-z]\w*)\[", self.type)

  @property
  def mark(self) -> str:
    """The number of the operation of JAX's program that it is a part of."""
    return self.op_name.rpartition("#")[2]

  @property
  def computation(self) -> str:
    """The name of the computation that it is in."""
    return self.name.partition("/")[0]

  @property
  def scope(self) -> str:
    """The scope of the model, or an empty string."""
    return scopes.join("", _FLOW.sub("", self.op_name).rpartition("/")[0])

  @property
  def called(self) -> list[str]:
    """The computations that it calls."""
    found = " ".join("".join(x) for x in _CALLED.findall(self.rest))
    return re.findall(r"[\w.-]+", found)


class Program(NamedTuple):
  """A parsed program."""

  # By name.
  instructions: Mapping[str, Instruction]
  # The names of each one's instructions; the last is its result.
  computations: Mapping[str, Sequence[str]]
  # The computation that runs.
  entry: str
  # The user's line of code of each stack frame, as "file:line".
  lines: Mapping[str, str]

  def line_of(self, x: Instruction) -> str:
    """Returns the user's line of code, or an empty string."""
    frame = re.search(r"stack_frame_id=(\d+)", x.rest)
    return self.lines.get(frame[1], "") if frame else ""

  def dtypes_of(self, x: Instruction) -> list[str]:
    """Returns the dtypes of its operands."""
    found = map(self.instructions.get, x.operands)
    return [y.dtypes[0] for y in found if y and y.dtypes]

  def element(self, name: str) -> int:
    """Returns which element of a tuple an instruction takes, or -1."""
    found = re.search(r"\bindex=(\d+)", self.instructions[name].rest)
    return int(found[1]) if found else -1

  def parameter(self, computation: str, number: int) -> str:
    """Returns the name of a parameter of a computation."""
    names = self.computations[computation]
    x = self.instructions
    return next(
      y
      for y in names
      if x[y].opcode == "parameter" and x[y].operands[0] == str(number)
    )

  def running(
    self, name: str = "", within: Instruction | None = None
  ) -> Iterator[tuple[Instruction, Instruction | None]]:
    """Yields what runs, and the kernel that it is part of, if any."""
    for key in self.computations.get(name or self.entry, ()):
      x = self.instructions[key]
      yield x, within
      # The function of a reduction does not run by itself.
      is_kernel = x.opcode in ("fusion", "async-start")
      # The body of a loop comes once, and so does every branch.
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
        of_type,
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
    found[number] = next(filter(source_lines.is_own_line, lines), lines[0])
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


def hand_written(program: Program) -> list[str]:
  """Returns the kernels that XLA did not make, with their operands' dtypes."""
  found = []
  for x, _ in program.running():
    target = _HAND_WRITTEN.search(x.rest)
    if x.opcode == "custom-call" and target:
      dtypes = dict.fromkeys(map(dtype_name, program.dtypes_of(x)))
      name = x.scope.rpartition("/")[2] or "a kernel"
      found.append(f"{name}: {', '.join(dtypes)}, through {target[1]}")
  return found


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


def products(
  before: Program, after: Program, *, is_tpu: bool, rounding: str
) -> list[Product]:
  """Returns the products of a program, each as often as it is compiled in."""
  # `before` is the program that JAX made, and `after` is what XLA made of it.
  # By default, a product rounds float32 to `rounding`, if to anything.
  asked = {
    x.mark: before.dtypes_of(x)[:2]
    for x in before.instructions.values()
    if x.opcode in ("dot", "convolution")
  }
  # A product in several parts has one name.
  parts = collections.defaultdict[str, list[tuple[int, Product]]](list)
  for x, kernel in after.running():
    through, rank = _through(x, kernel, is_tpu)
    if through and (rank < 2 or x.mark in asked):
      taken = after.dtypes_of(x)[:2] if rank < 3 else asked[x.mark]
      # A product of float32 that XLA converts before is one of float32.
      if rounding == dtype_name(taken[0]) and asked.get(x.mark) == ["f32"] * 2:
        taken = asked[x.mark]
      if "f32" in taken and rank < 2:
        through += _rounds(x, through, rounding)
      product = Product(
        tuple(map(dtype_name, taken)),
        dtype_name(x.dtypes[0]),
        through,
        x.scope,
        after.line_of(x),
      )
      parts[x.op_name or x.name].append((rank, product))
  return [min(x, key=lambda y: y[0])[1] for x in parts.values()]


def _rounds(x: Instruction, through: str, rounding: str) -> str:
  """Returns in which precision a product of float32 is computed."""
  found = re.search(r"algorithm\"?[=:]\"?(?:ALG_)?(dot_\w+)", x.rest, re.I)
  if found:
    return f" by {found[1].lower()}"
  asked = re.search(r"operand_precision\W+(\w+)", x.rest)
  precision = asked[1].lower() if asked else "default"
  # cuBLAS also takes TF32 for what JAX calls "high".
  low = ("default", "high") if through == "cuBLAS" else ("default",)
  return f" in {rounding}" if rounding and precision in low else ""


def _through(
  x: Instruction, kernel: Instruction | None, is_tpu: bool
) -> tuple[str, int]:
  """Returns what computes a product, and how surely; or an empty string."""
  if x.opcode == "custom-call":
    found = re.search(r'custom_call_target="__(cublas|cudnn)(.*?)"', x.rest)
    library = {"cublas": "cuBLAS", "cudnn": "cuDNN"}[found[1]] if found else ""
    is_float8 = found and found[2].endswith("$f8")
    return library + " in float8" * bool(is_float8), 0
  if x.opcode in ("dot", "convolution"):
    is_triton = kernel and "triton" in kernel.rest
    by_gpu = "Triton" if is_triton else "a fusion"
    return "the matrix unit" if is_tpu else by_gpu, 1
  # XLA makes sums of a product with a vector, and of others that are small. The
  # multiplication may have no name.
  rank = {"multiply": 2, "reduce": 3, "convert": 3}.get(x.opcode, 0)
  return "sums" if rank else "", rank


def is_narrower(program: Program, x: Instruction) -> bool:
  """Returns whether a conversion is to a float of less precision or range."""
  names = *program.dtypes_of(x), *x.dtypes
  if not all(map(re.compile(r"b?f\d").match, names)):
    return False
  wide, narrow = (jnp.finfo(dtype_name(y)) for y in names)
  return bool(
    narrow.nmant < wide.nmant
    or float(narrow.smallest_subnormal) > float(wide.smallest_subnormal)
  )


def dtype_name(name: str) -> str:
  """Returns NumPy's name of a dtype, as in float8_e4m3fn for f8e4m3fn."""
  found = _DTYPE.fullmatch(name)
  if not found:
    return name
  return "_".join(filter(None, (_KINDS[found[1]] + found[2], found[3])))
