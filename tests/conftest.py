"""Eight devices in the test process, on any machine; what runs where."""

import gc
import os
import pathlib
import re

import chex
import hypothesis
import jax
import pytest

jax.config.update("jax_num_cpu_devices", 8)

# Every run has the same examples, without a database of failures. No
# example has a deadline, since the first one waits for JAX to compile.
# Hypothesis caches its data beside pytest's own cache.
os.environ.setdefault(
  "HYPOTHESIS_STORAGE_DIRECTORY",
  str(pathlib.Path(__file__).parents[1] / ".pytest_cache" / "hypothesis"),
)
hypothesis.settings.register_profile(
  "repeatable",
  derandomize=True,
  database=None,
  deadline=None,
  suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.load_profile("repeatable")


# These take longest. They are begun first, or one worker would still run one
# of them when the others have nothing left.
LONGEST = (
  "tests/test_notebooks.py",
  "tests/step/test_contract.py",
  "tests/step/test_devices.py",
)


# Tests of programs that readers copy, which may give no warning at all.
PAGES = (
  "optax_lossscale/",
  "tests/examples/",
  "tests/guides/",
  "tests/test_pages.py",
  "tests/test_porting.py",
)


@pytest.fixture
def without_older_objects():
  """Hides what other tests have left, or to look for leaks takes seconds."""
  gc.collect()
  gc.freeze()
  yield
  gc.unfreeze()


@pytest.fixture(autouse=True)
def no_traces_of_other_tests():
  """Lets `chex.assert_max_traces` count anew in each test."""
  chex.clear_trace_counter()


@pytest.fixture(autouse=True)
def steps_of_pages_are_proved(request):
  """Proves the train steps that the tests of a page run, as a reader could."""
  if not request.node.nodeid.startswith(PAGES[1:]):
    yield
    return
  from tests import documents  # They import all of Flax, which few tests need.
  from tests import proofs

  if request.node.originalname in proofs.EXPECTED:
    yield
    return
  with proofs.proving(request.module, documents) as found:
    yield
  assert not any(found.values()), found


def pytest_make_parametrize_id(val):
  """Names a row of a test by its values or its line, not by a number."""
  name = getattr(val, "__name__", None)
  if name == "<lambda>":
    return f"line {val.__code__.co_firstlineno}"
  made = getattr(val, "__qualname__", "").partition(".<locals>.")
  if made[1] and getattr(val, "__closure__", None):
    # A function that another one has made, as steps are for a test of many.
    return f"{made[0]}{_shown([x.cell_contents for x in val.__closure__])}"
  # pytest names these itself, as it does what has a name.
  if name or isinstance(val, (str, bytes, int, float)):
    return None
  return _shown(val)


def _shown(value):
  """Returns a value's text on one line."""
  # An address would differ from process to process.
  text = " ".join(re.sub(r" at 0x\w+", "", repr(value)).split())
  return text if len(text) <= 60 else f"{text[:57]}..."


def pytest_itemcollected(item):
  """Lets other tests use float16 parameters, and an S of any value."""
  if not item.nodeid.startswith(PAGES):
    for text in "parameters in float16 should", ".* should be a power of two":
      item.add_marker(pytest.mark.filterwarnings(f"ignore:{text}"))


def pytest_collection_modifyitems(config, items):
  """Moves the longest files to the front, where workers share the tests.

  The examples of docstrings run under JAX's switches that change no result.
  """
  for item in items:
    if isinstance(item, pytest.DoctestItem):
      item.runtest = without_promotion(item.runtest)
  if hasattr(config, "workerinput"):
    rank = {path: i for i, path in enumerate(LONGEST)}
    items.sort(
      key=lambda item: rank.get(item.nodeid.partition("::")[0], len(rank))
    )


def without_promotion(run):
  """Returns a function that runs without implicit promotion."""

  def run_strictly():
    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
      run()

  return run_strictly


def pytest_collection_finish(session):
  """Keeps Python's garbage collector off what lives as long as the tests.

  Tracing allocates so much that it runs all the time; to look again and again
  at all modules and tests is what makes it slow.
  """
  gc.collect()
  gc.freeze()
  gc.set_threshold(100_000, 20, 100)


def pytest_terminal_summary(terminalreporter, config):
  """Says how to run the tests that the markers leave out."""
  if "not slow" in config.option.markexpr:
    terminalreporter.write_line(
      "The slow tests were left out. All there are: pytest -n auto -m ''"
    )


@pytest.fixture
def strict_promotion():
  """Forbids implicit promotion, so that every cast in the source is meant."""
  with jax.numpy_dtype_promotion("strict"):
    yield


@pytest.fixture(autouse=True, scope="module")
def quick_compilation():
  """Compiles without LLVM's optimizations, where no test is about them.

  The program is the same operation for operation; it takes a quarter less time
  to compile. Tests of XLA's vectorized kernels, such as those for NaN,
  need `full_compilation`.
  """
  with_optimizations(False)


@pytest.fixture(scope="module")
def full_compilation(quick_compilation):
  """Compiles as users do, for tests of what LLVM makes of the numbers.

  On the oldest end .ci/run has all tests without its optimizations.
  """
  with_optimizations(
    os.environ.get("JAX_DISABLE_MOST_OPTIMIZATIONS", "0") == "0"
  )
  yield
  with_optimizations(False)


def with_optimizations(on):
  jax.config.update("jax_disable_most_optimizations", not on)
