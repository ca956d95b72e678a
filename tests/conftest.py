"""Eight devices in the test process, on any machine."""

import jax
import pytest

from optax_lossscale import _amax

jax.config.update("jax_num_cpu_devices", 8)


@pytest.fixture
def strict_promotion():
  """Forbids implicit promotion, so that every cast in the source is meant."""
  with jax.numpy_dtype_promotion("strict"):
    yield


@pytest.fixture
def one_cpu(monkeypatch):
  """Lets the check read arrays as it does where there is one CPU device."""
  monkeypatch.setattr(_amax, "_is_one_cpu", lambda: True)
