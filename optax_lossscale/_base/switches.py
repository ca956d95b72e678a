"""JAX's switches that a program sets for its steps."""

from collections.abc import Iterator
import contextlib

import jax


@contextlib.contextmanager
def lifted() -> Iterator[None]:
  """Allows inf, NaN and transfers, for a function that runs between steps."""
  with (
    jax.debug_nans(False),
    jax.debug_infs(False),
    jax.transfer_guard("allow"),
  ):
    yield
