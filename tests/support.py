"""What tests of several rooms share: ids, bits, meshes, and what XLA made."""

import contextlib
import itertools
import logging
import re

import jax
import jax.numpy as jnp
import numpy as np

SMALLEST = 2.0**-126  # The smallest normal float32.
LARGEST = 2.0**126  # The largest power of two with a normal reciprocal.


def pairs(first, second):
  """Returns every pair of one from each."""
  return list(itertools.product(first, second))


def every_sequence(steps):
  """Returns every sequence of overflows, bool[2**steps, steps]."""
  return np.array(list(itertools.product([False, True], repeat=steps)))


def name(value):
  """Returns a test id without spaces, so that `pytest -k` can select it."""
  if isinstance(value, dict):
    return ",".join(f"{key}={value[key]}" for key in value)
  return repr(value).replace(" ", "")


def to_bits(tree):
  """Returns the bytes of every leaf, so that NaN and -0.0 compare too."""
  return [
    np.asarray(
      jax.random.key_data(leaf)
      if jnp.issubdtype(jnp.result_type(leaf), jax.dtypes.prng_key)
      else leaf
    ).tobytes()
    for leaf in jax.tree.leaves(tree)
  ]


def describe(tree):
  """Returns what must stay the same for a program not to recompile."""
  return jax.tree.map(
    lambda x: (x.shape, x.dtype, getattr(x, "weak_type", False)), tree
  )


def same_bits(left, right):
  """Returns whether two trees are the same in structure, dtypes and bits."""
  return (
    jax.tree.structure(left) == jax.tree.structure(right)
    and [x.dtype for x in jax.tree.leaves(left)]
    == [x.dtype for x in jax.tree.leaves(right)]
    and to_bits(left) == to_bits(right)
  )


def assert_same_bits(got, expected):
  """Asserts equal structures, shapes, dtypes and bits."""
  assert jax.tree.structure(got) == jax.tree.structure(expected)
  for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
    assert (jnp.shape(x), jnp.result_type(x)) == (
      jnp.shape(y),
      jnp.result_type(y),
    )
    assert to_bits(x) == to_bits(y), f"got {x}, expected {y}"


def make_mesh(axis_type="Auto", devices=8):
  """Returns a mesh of one axis, "data", of a kind given by its name."""
  types = (getattr(jax.sharding.AxisType, axis_type),)
  return jax.make_mesh(
    (devices,), ("data",), axis_types=types, devices=jax.devices()[:devices]
  )


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
