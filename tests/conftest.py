"""Eight devices in the test process, on any machine."""

import os

import jax
import pytest

jax.config.update("jax_num_cpu_devices", 8)


@pytest.fixture
def strict_promotion():
  """Forbids implicit promotion, so that every cast in the source is meant."""
  with jax.numpy_dtype_promotion("strict"):
    yield


@pytest.fixture(scope="module")
def quick_compilation():
  """Compiles without LLVM's optimizations, where no test is about them.

  The program is the same operation for operation; it takes a quarter less time
  to compile. What XLA's vectorized kernels do with NaN, say, is not tested so.
  """
  jax.config.update("jax_disable_most_optimizations", True)
  yield
  # Unless all tests are run without them.
  stays = os.environ.get("JAX_DISABLE_MOST_OPTIMIZATIONS", "0") != "0"
  jax.config.update("jax_disable_most_optimizations", stays)
