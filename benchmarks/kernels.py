"""How many kernels a compiled program launches, and in how many bytes."""

from typing import Any

from optax_lossscale.compiled import _compiled_program


def figures(compiled: Any) -> dict[str, int]:
  """Returns `kernels`, and in bytes, if known, `temporaries` and `peak`."""
  program = _compiled_program.parse(compiled.as_text())
  kernels = {"kernels": _compiled_program.kernels(program)}
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
