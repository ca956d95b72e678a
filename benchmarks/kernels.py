"""How many kernels a compiled program launches, and in how many bytes."""

import re
from typing import Any

_CONTROL = "while", "conditional", "call"
# XLA launches nothing for these, or has launched it already.
_FREE = re.compile(
  r"parameter|constant|tuple|get-tuple-element|bitcast|after-all|domain|"
  r"opt-barrier|partition-id|replica-id|.*-done"
)
_INSTRUCTION = re.compile(r" +(?:ROOT )?%?[\w.-]+ = .*? ([a-z][\w-]*)\((.*)")


def count(text: str) -> int:
  """Returns how many kernels, copies and library calls a program launches.

  The body of a loop counts once, and so does every branch.

  Args:
    text: the optimized HLO, from `compiled.as_text()`.
  """
  bodies: dict[str, list[Any]] = {}
  for line in text.splitlines():
    if start := re.match(r"(?:ENTRY )?%?([\w.-]+) .*\{$", line):
      body = bodies.setdefault(start[1], [])
      entry = start[1] if line.startswith("ENTRY") else ""
    elif found := _INSTRUCTION.match(line):
      body.append(found.groups())
    if line == "}" and entry:
      break

  def launches(name: str) -> int:
    total = 0
    for opcode, rest in bodies[name]:
      if opcode in _CONTROL:
        # Such as body=%a, or branch_computations={%a, %b}.
        called = " ".join(re.findall(r"\w=\{?((?:%[\w.-]+(?:, )?)+)", rest))
        names = re.findall(r"[\w.-]+", called)
        total += sum(launches(name) for name in names if name in bodies)
      else:
        total += not _FREE.fullmatch(opcode)
    return total

  return launches(entry)


def figures(compiled: Any) -> dict[str, int]:
  """Returns `kernels`, and in bytes, if known, `temporaries` and `peak`."""
  kernels = {"kernels": count(compiled.as_text())}
  memory = compiled.memory_analysis()
  if memory is None:
    return kernels
  return kernels | {
    "temporaries": memory.temp_size_in_bytes,
    "peak": memory.argument_size_in_bytes
    + memory.output_size_in_bytes
    - memory.alias_size_in_bytes
    + memory.temp_size_in_bytes,
  }
