"""Updates that change nothing, one by one against sums of NumPy."""

import jax
import jax.numpy as jnp
from jax.sharding import AxisType
import ml_dtypes
import numpy as np
import pytest

from optax_lossscale import instruments
from tests import support


def share(where, x):
  with np.errstate(invalid="ignore"):  # Some NaN are signalling ones.
    of = np.sum(x != 0)
  return np.float32(np.sum(where)) / np.float32(max(of, 1))


@pytest.mark.parametrize("tree", [{}, None, jnp.arange(3), jnp.zeros(3)])
def test_where_nothing_is_there_nothing_is_swallowed(tree):
  assert instruments.swallowed_share(tree, tree) == 0.0


def kept(params, updates):
  """Returns where a sum of NumPy leaves a parameter as it was."""
  with np.errstate(all="ignore"):
    new = (params + updates).astype(params.dtype)
  is_same = (new == params) | (np.isnan(new) & np.isnan(params))
  return (updates != 0) & is_same


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float32])
def test_updates_are_swallowed_where_a_sum_changes_nothing(dtype):
  shape = (60, 50)
  rng = np.random.default_rng(2)
  params = rng.normal(size=shape).astype(dtype)
  updates = np.exp2(rng.integers(-28, 2, size=shape)).astype(dtype)
  updates.flat[:2] = [0, -0.0]
  found = instruments.swallowed_share(jnp.asarray(params), jnp.asarray(updates))
  assert found == share(kept(params, updates), updates)
  assert 0 < found < 1


def test_an_update_of_half_a_step_is_swallowed_where_a_tie_goes_back():
  params = jnp.bfloat16([1.0, 1.0 + 2.0**-7])
  updates = jnp.full(2, 2.0**-8, jnp.bfloat16)
  assert instruments.swallowed_share(params, updates) == 0.5


def test_a_parameter_that_changes_its_sign_has_changed():
  params = jnp.array([1.0, -2.0])
  assert instruments.swallowed_share(params, -2 * params) == 0.0


def test_float32_updates_are_rounded_as_apply_updates_does():
  params = {"w": jnp.bfloat16([1.0, 1.0]), "none": None, "n": jnp.arange(2)}
  updates = {"w": jnp.array([2.0**-20, 1.0]), "none": None, "n": jnp.ones(2)}
  updates["n"] = updates["n"].astype(int)
  found = jax.jit(instruments.swallowed_share)(params, updates)
  assert found == 0.5


def test_a_complex_update_is_swallowed_if_both_its_parts_are():
  params = jnp.complex64([1 + 1j, 1 + 1j, 1 + 1j])
  updates = jnp.complex64([1e-12j, 1e-12 + 1j, 0])
  assert instruments.swallowed_share(params, updates) == 0.5


def test_updates_for_other_parameters_are_refused():
  with pytest.raises(ValueError, match=r"for the parameters, got one for 'b'"):
    instruments.swallowed_share({"a": jnp.ones(1)}, {"b": jnp.ones(1)})
  with pytest.raises(ValueError, match=r"the shapes .* got \(2,\) for"):
    instruments.swallowed_share({"a": jnp.ones(1)}, {"a": jnp.ones(2)})


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
def test_shares_of_sharded_arrays_are_made_where_they_are(axis_type):
  mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(axis_type,) * 2)
  sharding = jax.NamedSharding(mesh, jax.P("data", "model"))
  x = np.exp2(np.random.default_rng(3).integers(-50, 1, size=(8, 30)))
  x = x.astype(np.float32)
  params = np.ones_like(x)
  sharded = [jax.device_put(array, sharding) for array in (params, x)]

  function = jax.jit(instruments.swallowed_share).lower(*sharded).compile()
  assert function(*sharded) == share(kept(params, x), x)
  moved = support.between_devices(function)
  assert moved and all(" all-reduce" in line for line in moved)
