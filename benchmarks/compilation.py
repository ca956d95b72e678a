"""What it costs to compile a step, and what memory the step then needs."""

from collections.abc import Callable
from collections.abc import Iterator
import contextlib
import time
from typing import Any
from typing import NamedTuple

import jax


class Compilation(NamedTuple):
  """What a compilation cost and gave.

  Attributes:
    trace_seconds: from the Python function to the program for XLA.
    compile_seconds: XLA's share.
    temporary_bytes: what the step needs beside its arguments and results; None
      where XLA does not tell.
  """

  trace_seconds: float
  compile_seconds: float
  temporary_bytes: int | None

  @property
  def seconds(self) -> float:
    """Both together."""
    return self.trace_seconds + self.compile_seconds


def compile_ahead(
  step: Callable[..., Any], state: Any, *arguments: Any
) -> tuple[Any, Compilation]:
  """Compiles a step from nothing, and donates its state.

  Args:
    step: a pure function.
    state: its first argument, which is donated.
    *arguments: the others.

  Returns:
    The compiled step, and what it cost.
  """
  # Of an earlier contender, whose traces of JAX's own functions are still there
  # and would be had for nothing.
  jax.clear_caches()
  start = time.perf_counter()
  lowered = jax.jit(step, donate_argnums=0).lower(state, *arguments)
  traced = time.perf_counter()
  compiled = lowered.compile()
  done = time.perf_counter()
  memory = compiled.memory_analysis()
  return compiled, Compilation(
    trace_seconds=traced - start,
    compile_seconds=done - traced,
    temporary_bytes=None if memory is None else memory.temp_size_in_bytes,
  )


@contextlib.contextmanager
def without_persistent_cache() -> Iterator[None]:
  """Makes JAX compile, even if an earlier run has left the result on disk."""
  before = jax.config.jax_enable_compilation_cache
  jax.config.update("jax_enable_compilation_cache", False)
  try:
    yield
  finally:
    jax.config.update("jax_enable_compilation_cache", before)
