"""Helpers for tests of several packages: bits, meshes, rules, programs."""

import contextlib
import dataclasses
import itertools
import logging
import math
import re
from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_lossscale as ols

SMALLEST = 2.0**-126  # The smallest normal float32.
LARGEST = 2.0**126  # The largest power of two with a normal reciprocal.

AXIS_TYPES = ("Auto", "Explicit")  # What `make_mesh` takes.
SPREAD = jax.P("data")  # The first axis of an array, over the devices.


class StubState(NamedTuple):
  loss_scale: jax.Array


@dataclasses.dataclass(frozen=True)
class Stub(ols.LossScale):
  """Moves S at every step: an overflow halves it, a clean step doubles it.

  It is for tests of everything but rules. A stale S shows at once, and a defect
  of the rules that the library has does not.
  """

  start: float = 8.0

  def init(self):
    return StubState(jnp.float32(self.start))

  def update(self, state, overflow, *, amax=None):
    return StubState(state.loss_scale * jnp.where(overflow, 0.5, 2.0))


# Every float8 dtype that has a sign.
SIGNED_FLOAT8 = (
  "float8_e3m4",
  "float8_e4m3",
  "float8_e4m3b11fnuz",
  "float8_e4m3fn",
  "float8_e4m3fnuz",
  "float8_e5m2",
  "float8_e5m2fnuz",
)
# Every one that JAX has.
FLOAT8 = (*SIGNED_FLOAT8, "float8_e8m0fnu")


def slow_but(quick, values, mark=pytest.mark.slow):
  """Returns the cases of a test; all but the quick ones are slow, or long."""
  return [x if x in quick else pytest.param(x, marks=mark) for x in values]


def every_sequence(steps):
  """Returns every sequence of overflows, bool[2**steps, steps]."""
  return np.array(list(itertools.product([False, True], repeat=steps)))


def to_numpy(x):
  """Returns a copy of an array, of random keys their data."""
  if jnp.issubdtype(jnp.result_type(x), jax.dtypes.prng_key):
    x = jax.random.key_data(x)
  return np.array(x)


def to_bits(tree):
  """Returns the bytes of every leaf, so that NaN and -0.0 compare too."""
  return [to_numpy(leaf).tobytes() for leaf in jax.tree.leaves(tree)]


def describe(tree):
  """Returns what must stay the same for a program not to recompile."""
  leaves, structure = jax.tree.flatten(tree)
  return structure, [
    (x.shape, x.dtype, getattr(x, "weak_type", False)) for x in leaves
  ]


def same_bits(left, right):
  """Returns whether two trees have the same structure, shapes and bits."""
  try:
    assert_same_bits(left, right)
  except AssertionError:
    return False
  return True


def assert_same_bits(got, expected):
  """Asserts equal structures, shapes, dtypes and bits."""

  def is_same(x, y):
    return jnp.shape(x) == jnp.shape(y) and (
      jnp.result_type(x) == jnp.result_type(y) and to_bits(x) == to_bits(y)
    )

  chex.assert_trees_all_equal_comparator(
    is_same, lambda x, y: f"got {x}, expected {y}", got, expected
  )


def relative_error(found, true):
  """Returns how far an array is from the true one, as a share of it."""
  return np.linalg.norm(found - true) / np.linalg.norm(true)


def make_mesh(axis_type="Auto", **axes):
  """Returns a mesh of axes of one type; eight devices along "data" by default.

  Args:
    axis_type: the name of the type, as in `AXIS_TYPES`.
    **axes: how many devices each axis has.
  """
  axes = axes or {"data": 8}
  shape = tuple(axes.values())
  return jax.make_mesh(
    shape,
    tuple(axes),
    axis_types=(jax.sharding.AxisType[axis_type],) * len(axes),
    devices=jax.devices()[: math.prod(shape)],
  )


def scale_of(state):
  """Returns S, or 1 without loss scaling."""
  found = optax.tree.get(state, "loss_scale")
  return jnp.float32(1) if found is None else found


class Recorded(NamedTuple):
  updates: object
  params: object
  extra_args: object


def recording(calls):
  """Returns a transformation that notes its arguments and passes them on."""

  def init(params):
    calls.append(Recorded(None, params, None))
    return optax.EmptyState()

  def update(updates, state, params=None, **extra_args):
    calls.append(Recorded(updates, params, extra_args))
    return updates, state

  return optax.GradientTransformationExtraArgs(init, update)


class Boxed:
  """An array in a box of its own, as NNX keeps them."""

  dtype, shape = jnp.dtype("float32"), ()

  def __init__(self, value):
    self.value = value

  def __jax_array__(self):
    return jnp.asarray(self.value, jnp.float32)


class ExponentState(NamedTuple):
  exponent: jax.Array

  @property
  def loss_scale(self):
    return jnp.exp2(self.exponent)


class Exponent(Stub):
  """A rule whose S is computed, so that nobody can set it."""

  def init(self):
    return ExponentState(jnp.float32(3))

  def update(self, state, overflow, *, amax=None):
    return state


def on_each_device(function, out_specs, check_vma=True, in_specs=SPREAD):
  """Returns a function mapped over eight devices, the axis "data"."""
  return jax.shard_map(
    function,
    mesh=make_mesh(),
    in_specs=in_specs,
    out_specs=out_specs,
    check_vma=check_vma,
  )


def with_jvp(function, rule=lambda tangent: tangent):
  """Returns a function of one argument whose tangents go through a rule."""
  wrapped = jax.custom_jvp(function)
  wrapped.defjvp(lambda x, dx: (wrapped(*x), rule(*dx)))
  return wrapped


def with_vjp(function, rule=lambda cotangent: cotangent):
  """Returns a function of one argument whose cotangents go through a rule."""
  wrapped = jax.custom_vjp(function)
  wrapped.defvjp(lambda x: (wrapped(x), ()), lambda _, dy: (rule(dy),))
  return wrapped


def with_vmap(function, batched):
  """Returns a function that under `vmap` is another one, of whole batches."""
  wrapped = jax.custom_batching.custom_vmap(function)
  wrapped.def_vmap(lambda size, is_batched, *args: (batched(*args), True))
  return wrapped


def equations(jaxpr):
  """Yields all equations of a jaxpr, and of those in its parameters."""
  for equation in getattr(jaxpr, "jaxpr", jaxpr).eqns:
    yield equation
    for parameter in jax.tree.leaves(list(equation.params.values())):
      if hasattr(getattr(parameter, "jaxpr", parameter), "eqns"):
        yield from equations(parameter)


def equation_of(function, *args):
  """Returns the one equation that a function is recorded as."""
  (equation,) = jax.make_jaxpr(function)(*args).eqns
  return equation


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


def take_for(platform, monkeypatch, devices=None):
  """Makes programs that are traced on a CPU those of another platform.

  Args:
    platform: as `jax.lax.platform_dependent` takes it.
    monkeypatch: of pytest.
    devices: how many JAX is to see; by default as many as there are.
  """
  monkeypatch.setattr(
    jax.lax,
    "platform_dependent",
    lambda *args, default, **ways: ways.get(platform, default)(*args),
  )
  if devices is not None:
    monkeypatch.setattr(jax, "device_count", lambda: devices)


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


def owners_of_masters(state):
  """Returns the states in `state` that can return masters."""
  is_owner = lambda x: hasattr(x, "wide")  # noqa: E731
  return [x for x in jax.tree.leaves(state, is_leaf=is_owner) if is_owner(x)]
