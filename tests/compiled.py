"""What XLA made of a function: memory, kernels, traffic between devices."""

import contextlib
import logging
import re

import jax


def compile_donated(step, params, state, *rest):
  """Returns `step` compiled, in place for parameters and state.

  Args:
    step: takes and returns parameters and a state.
    params: the parameters.
    state: the optimizer's state.
    *rest: what else `step` takes.
  """
  jitted = jax.jit(step, donate_argnums=(0, 1))
  return jitted.lower(params, state, *rest).compile()


def temporaries(compiled):
  """Returns the bytes that XLA keeps beside arguments and results."""
  return compiled.memory_analysis().temp_size_in_bytes


def size(tree):
  """Returns the bytes of all arrays in a tree."""
  return sum(leaf.nbytes for leaf in jax.tree.leaves(tree))


def between_devices(compiled):
  """Returns the lines of HLO that move data between devices."""
  operations = (
    "all-reduce|all-gather|all-to-all|collective-permute|reduce-scatter"
  )
  return [
    line
    for line in compiled.as_text().splitlines()
    if re.search(rf" ({operations})(-start)?\(", line)
  ]


def to_the_host(compiled):
  """Returns the lines of HLO that talk to the host."""
  operations = "infeed|outfeed|send|recv|custom-call"
  return [
    line
    for line in compiled.as_text().splitlines()
    if re.search(rf" ({operations})(-start)?\(", line)
  ]


@contextlib.contextmanager
def listening_to_compilations(names):
  """Appends the name of every function that JAX compiles meanwhile."""

  class Handler(logging.Handler):
    def emit(self, record):
      match = re.search(r"Compiling (?:jit\()?(\w+)", record.getMessage())
      if match:
        names.append(match.group(1))

  logger = logging.getLogger("jax")
  handler = Handler()
  logger.addHandler(handler)
  try:
    with jax.log_compiles():
      yield
  finally:
    logger.removeHandler(handler)
