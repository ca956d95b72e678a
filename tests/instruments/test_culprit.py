"""The gradient with the least headroom, and amax leaf by leaf."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import optax_lossscale as ols
from optax_lossscale import instruments

HALF = ols.nonfinite(jnp.float16)


def tree(**leaves):
  return {name: jnp.asarray(leaf) for name, leaf in leaves.items()}


def test_the_culprit_is_the_leaf_with_the_largest_gradient():
  found = instruments.culprit(tree(a=[1.0], b=[-16376.0, 2], c=[8.0]), HALF)
  assert found == instruments.CulpritLeaf("b", 16376.0, 2.0)


@pytest.mark.parametrize(
  ("leaves", "path"),
  [
    ({"a": [1.0], "b": [np.inf], "c": [np.inf]}, "b"),
    ({"a": [np.nan], "b": [1.0, -np.inf], "c": [2.0]}, "b"),
    ({"a": [70000.0], "b": [np.nan], "c": [np.nan]}, "b"),
    ({"a": [0.0], "b": [0.0]}, "a"),
    ({"a": [0.0], "b": [2.0], "c": [2.0]}, "b"),
  ],
  ids=["inf", "inf before nan", "nan", "zeros", "equals"],
)
def test_what_overflowed_comes_first_and_the_first_among_equals(leaves, path):
  assert instruments.culprit(tree(**leaves), HALF).path == path


@pytest.mark.parametrize(
  ("amax", "headroom"),
  [
    (np.inf, -math.inf),
    (np.nan, math.nan),
    (0.0, math.inf),
    (131008.0, -1.0),
    # A subnormal number.
    (2.0**-149, math.log2(65504.0) + 149),
  ],
)
def test_headroom_is_told_of_any_amax(amax, headroom):
  found = instruments.culprit({"a": np.float32([amax])}, HALF)
  np.testing.assert_equal(found, ("a", amax, headroom))


def test_headroom_is_that_of_each_leafs_computation():
  scaled_grads = {
    "half": jnp.array([2.0], jnp.float16),
    "single": jnp.array([2.0**60]),
  }
  assert instruments.culprit(scaled_grads).path == "half"
  named = ols.nonfinite({"half": None, "single": "float16"})
  assert instruments.culprit(scaled_grads, named).path == "single"
  check = ols.saturated(lambda path: "float16" if path == "half" else None)
  found = instruments.culprit(scaled_grads, check)
  assert found == ("half", 2.0, math.log2(65504.0) - 1)


def test_a_tree_of_dtypes_passes_by_what_is_no_gradient():
  scaled_grads = {
    "_overwrite_with_gradient": {"scale": jnp.full(2, jnp.inf)},
    "integer": jnp.arange(3),
    "none": None,
    "w": [jnp.ones(2), 4.0],
  }
  check = ols.nonfinite(
    {
      "_overwrite_with_gradient": None,
      "integer": None,
      "none": None,
      "w": "float16",
    }
  )
  assert instruments.culprit(scaled_grads, check).path == "w/1"
  amaxes = instruments.amax_by_leaf(scaled_grads)
  assert {path: float(x) for path, x in amaxes.items()} == {"w/0": 1, "w/1": 4}


def test_each_part_of_a_complex_number_can_be_the_largest():
  scaled_grads = {"a": jnp.complex64([3 + 4j]), "b": jnp.array([4.5])}
  assert instruments.culprit(scaled_grads, HALF).path == "b"
  assert instruments.culprit({"a": scaled_grads["a"]}, HALF).amax == 4.0


def test_a_large_float64_keeps_its_headroom():
  with jax.enable_x64(True):
    scaled_grads = {"a": jnp.array([2.0**1000]), "b": jnp.array([1.0])}
    found = instruments.culprit(scaled_grads)
    assert found.path == "a"
    assert found.amax == 2.0**1000
    assert found.headroom == pytest.approx(24.0)
    assert (
      instruments.amax_by_leaf(scaled_grads)["a"] == jnp.finfo(jnp.float32).max
    )


def test_amaxes_by_leaf_are_those_of_the_leaves_under_jit():
  grads = {"a": {"b": jnp.array([1.0, -3.0])}, "c": jnp.float16([jnp.inf, 1])}
  found = jax.jit(instruments.amax_by_leaf)({**grads, "d": jnp.array(np.nan)})
  assert list(found) == ["a/b", "c", "d"]
  np.testing.assert_array_equal([*found.values()], [3.0, np.inf, np.nan])
  assert all(x.dtype == jnp.float32 for x in found.values())


def test_the_culprit_is_found_among_sharded_gradients():
  mesh = jax.make_mesh((8,), ("data",))
  sharding = jax.NamedSharding(mesh, jax.P("data"))
  scaled_grads = jax.device_put(
    {"a": np.ones(16, np.float32), "b": np.arange(16.0, dtype=np.float32)},
    sharding,
  )
  assert instruments.culprit(scaled_grads, HALF)[:2] == ("b", 15.0)


def test_the_culprit_is_looked_for_outside_of_jit():
  with pytest.raises(TypeError, match=r"amax_by_leaf inside"):
    jax.jit(lambda x: instruments.culprit(x).amax)(jnp.ones(1))


@pytest.mark.parametrize("scaled_grads", [{}, {"a": None}, jnp.arange(3)])
def test_without_a_gradient_there_is_no_culprit(scaled_grads):
  with pytest.raises(ValueError, match="must have a floating or complex leaf"):
    instruments.culprit(scaled_grads)


def test_what_is_no_check_is_refused():
  with pytest.raises(TypeError, match="`check` must be made by"):
    instruments.culprit(jnp.ones(1), jnp.float16)
