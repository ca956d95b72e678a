"""Proves the train steps of a page while its tests run them.

A reader copies the steps of a page, so they must be provable from shapes.
`check_step` also gets each function that a page compiles, and each block that
makes a step by itself, when it runs for the first time in a test.
"""

import contextlib
import functools
import inspect
import re
from unittest import mock
import warnings

import equinox as eqx
from flax import nnx
import jax
from jax.extend import source_info_util
import numpy as np

import optax_lossscale as ols
from optax_lossscale._step import states

# Code of a page has no file, and code of a cell has a file of IPython.
# A step that a precision schedule makes for a page counts, too.
_PAGE = re.compile(r"<|docs/|.*/ipykernel_|.*/precision_schedule\.py")
_COMPILERS = [(jax, "jit"), (jax, "pmap"), (nnx, "jit"), (eqx, "filter_jit")]
_PROVED = ("proved", "not applied")
# A report must name the lines that it names without the functions below.
source_info_util.register_exclusion(__file__)
# Tests that run other steps than right ones, and why.
_HISTORIES = "scales of FP8 layers come from histories that follow S"
_MISTAKES = "the mistakes that the page names are made on purpose"
EXPECTED = {
  "test_an_fp8_history_is_looked_at_in_each_micro_batch": _HISTORIES,
  "test_check_step_finds_the_places_where_something_moves": _MISTAKES,
  "test_gradients_that_are_not_scaled_are_named": _MISTAKES,
  "test_each_stack_skips_and_then_makes_the_step_of_float32": (
    "their counts move, and an accumulator holds scaled gradients"
  ),
  "test_save_and_resume_with_orbax": "its step counts skipped steps, too",
  "test_the_step_is_checked_and_statistics_set_after_it_are_named": _MISTAKES,
  "test_the_step_is_checked_and_what_is_forgotten_is_named": _MISTAKES,
  "test_what_is_saved_comes_back_and_trains_on": "its step counts skips, too",
}
# The last of these proves: one test compiles a page, and others call it.
_provers = []
# Steps of notebooks.
IN_NOTEBOOKS = {"clipping_step": _MISTAKES}
# The report on functions and blocks that take a state but are not steps.
_NO_STEP = re.compile("must return the next value|`update` .* does not run")
# The report on a block that leaves the parameters to the lines after it.
_NO_PARAMETERS = "No output was found to be the next value of the parameters."


def shapes(tree):
  """Returns a tree, possibly of NNX objects, with shapes for its arrays."""
  definition, state = nnx.split(tree)
  return nnx.merge(definition, jax.tree.map(_shape, state))


def _shape(x):
  if not isinstance(x, (jax.Array, np.ndarray)):
    return x
  is_traced = isinstance(x, (jax.core.Tracer, np.ndarray))
  sharding = None if is_traced else x.sharding
  return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)


def not_proved(step, *args, **kwargs):
  """Returns what `check_step` cannot prove of a step from shapes, by law."""
  with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    report = ols.instruments.check_step(step, *args, **kwargs)
  return {
    law.name: f"{law.verdict}: {law.text}"
    for law in report.laws
    if law.name != "precision"
    and law.verdict not in _PROVED
    and not law.text.endswith(_NO_PARAMETERS)
  }


@contextlib.contextmanager
def proving(*modules):
  """Yields the steps that run, by name, each with what is not proved of it.

  Args:
    *modules: those whose `exec` runs blocks of pages.
  """
  found = {}
  running = []

  def prove(name, *args, **kwargs):
    if running:
      return
    running.append(name)
    try:
      problems = not_proved(*args, **kwargs)
    except Exception as error:
      problems = {"error": f"{type(error).__name__}: {error}"}
    finally:
      running.clear()
    if not any(map(_NO_STEP.search, problems.values())):
      found.setdefault(name, {}).update(problems)

  with contextlib.ExitStack() as patches:
    for owner, name in _COMPILERS:
      compiler = functools.partial(_compile, getattr(owner, name))
      patches.enter_context(mock.patch.object(owner, name, compiler))
    scan = functools.partial(_scan, jax.lax.scan)
    patches.enter_context(mock.patch.object(jax.lax, "scan", scan))
    for module in modules:
      patch = mock.patch.object(module, "exec", _exec, create=True)
      patches.enter_context(patch)
    _provers.append(prove)
    patches.callback(_provers.pop)
    yield found


def _compile(compiler, *args, **kwargs):
  """Returns a compiled function that is proved when it is first called."""
  if not args:
    return functools.partial(_compile, compiler, **kwargs)
  compiled, function = compiler(*args, **kwargs), args[0]
  while isinstance(function, functools.partial):
    function = function.func
  name = _name_in_page(function)
  return _Compiled(compiled, name) if name else compiled


def _name_in_page(function):
  """Returns the name of a function if it is of a page, or None."""
  code = getattr(inspect.unwrap(function), "__code__", None)
  return code.co_name if code and _PAGE.match(code.co_filename) else None


def _scan(scan, step, init, xs=None, *args, **kwargs):
  """Runs `lax.scan` after its body is proved, if that is a step of a page."""
  name = _name_in_page(step)
  if name and _provers and states.find_states(init):
    given = jax.tree.map(lambda x: x[0], xs)
    _provers[-1](name, step, *shapes((init, given)))
  return scan(step, init, xs, *args, **kwargs)


class _Compiled:
  """A compiled function that is proved when it is first called."""

  def __init__(self, compiled, name):
    self.compiled, self.name, self.is_proved = compiled, name, False

  def __getattr__(self, name):
    return getattr(self.compiled, name)

  def __call__(self, *args, **kwargs):
    is_traced = any(
      isinstance(x, jax.core.Tracer) for x in jax.tree.leaves((args, kwargs))
    )
    is_done = self.is_proved or not _provers
    if is_traced or is_done or not states.find_states(args):
      return self.compiled(*args, **kwargs)
    self.is_proved = True
    given = shapes(args)  # Arrays may be donated, and objects change.
    result = self.compiled(*args, **kwargs)
    step = functools.partial(self.compiled, **kwargs)
    _provers[-1](self.name, step, *given)
    return result


def _exec(code, names):
  """Runs a block, which is proved if it makes a step by itself."""
  if isinstance(code, str):
    code = compile(code, "<block>", "exec")
  before = dict(names)
  exec(code, names)
  makes_gradients = any("value_and_grad" in x for x in code.co_names)
  if not (makes_gradients and "update" in code.co_names):
    return
  changed = [x for x in before if names.get(x) is not before[x]]
  if not states.find_states([before[x] for x in changed]):
    return

  def step(*args):
    after = before | dict(zip(changed, args, strict=True))
    exec(code, after)
    return [after[x] for x in changed]

  carry = {i: i for i in range(len(changed))}
  given = shapes([before[x] for x in changed])
  _provers[-1]("block", step, *given, carry=carry)
