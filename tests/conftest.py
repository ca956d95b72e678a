"""Eight devices in the test process, on any machine."""

import jax
import pytest

jax.config.update("jax_num_cpu_devices", 8)


@pytest.fixture
def strict_promotion():
  """Forbids implicit promotion, so that every cast in the source is meant."""
  with jax.numpy_dtype_promotion("strict"):
    yield
