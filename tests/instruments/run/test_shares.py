"""The share of updates that change nothing, compared with sums in NumPy."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from optax_lossscale.instruments import swallowed_share


def expected_share(params, updates):
  """Returns the share of non-zero updates that change nothing in NumPy."""
  new = (params + updates).astype(params.dtype)
  is_nonzero = updates != 0
  return np.float32(np.sum(is_nonzero & (new == params)) / np.sum(is_nonzero))


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float32])
def test_an_update_that_a_sum_rounds_away_is_swallowed(dtype):
  rng = np.random.default_rng(2)
  params = rng.normal(size=(60, 50)).astype(dtype)
  updates = np.exp2(rng.integers(-28, 2, size=(60, 50))).astype(dtype)
  updates.flat[:2] = [0, -0.0]
  found = swallowed_share(jnp.asarray(params), jnp.asarray(updates))
  assert found == expected_share(params, updates)
  assert 0 < found < 1


def test_paths_of_one_text_are_two_parameters():
  params = {"a": {"b": jnp.ones(1)}, "a/b": jnp.zeros(1)}
  updates = {"a": {"b": None}, "a/b": jnp.full(1, 2.0**-30)}
  assert swallowed_share(params, updates) == 0


CASES = {
  # A tie goes to the even neighbor.
  "half a step": (
    jnp.bfloat16([1.0, 1.0 + 2.0**-7]),
    jnp.full(2, 2.0**-8, jnp.bfloat16),
    0.5,
  ),
  "another sign": (jnp.array([1.0, -2.0]), jnp.array([-2.0, 4.0]), 0.0),
  "zero that loses its sign": (jnp.float16([-0.0]), jnp.array([2.0**-40]), 1.0),
  "NaN": (jnp.array([jnp.nan, 1.0]), jnp.array([1.0, 1.0]), 0.5),
  # A sum sets its highest bit, as a GPU sets all of them.
  "signaling NaN": (
    np.array([0x7F800001, 0x3F800000], np.uint32).view(np.float32),
    jnp.array([1.0, 1.0]),
    0.5,
  ),
  # `apply_updates` rounds a float32 update to the dtype of the parameter.
  "float32": (jnp.bfloat16([1.0, 1.0]), jnp.array([2.0**-20, 1.0]), 0.5),
  # Both parts of a complex update must be lost.
  "complex": (
    jnp.complex64([1 + 1j, 1 + 1j, 1 + 1j]),
    jnp.complex64([1e-12j, 1e-12 + 1j, 0]),
    0.5,
  ),
  "integers": (jnp.arange(2), jnp.ones(2, int), 0.0),
  "no updates": (jnp.zeros(3), jnp.zeros(3), 0.0),
}


@pytest.mark.parametrize("name", CASES)
def test_the_swallowed_share_of_a_tree(name):
  params, updates, share = CASES[name]
  found = jax.jit(swallowed_share)(
    {"w": params, "none": None}, {"w": updates, "none": None}
  )
  assert found == share and found.dtype == jnp.float32


def test_updates_for_other_parameters_are_refused():
  with pytest.raises(ValueError, match=r"for the parameters, got one for 'b'"):
    swallowed_share({"a": jnp.ones(1)}, {"b": jnp.ones(1)})
  with pytest.raises(ValueError, match=r"the shapes .* got \(2,\) for"):
    swallowed_share({"a": jnp.ones(1)}, {"a": jnp.ones(2)})
