"""Policies: their casts, their names, and functions in a policy."""

import dataclasses
import functools
import pickle
import re
from types import SimpleNamespace

import chex
import jax
import jax.numpy as jnp
import jmp
import numpy as np
import pytest

import optax_lossscale as ols
from tests import documents
from tests.autocast.programs import dtypes_of
from tests.autocast.programs import products

PAGE = documents.read("docs/porting/README.md")
SECTION = PAGE.partition("\n## Mixed precision: policies by name\n")[2]
SECTION = SECTION[: SECTION.index("\n## ")]

F16, BF16, F32, F64 = "float16", "bfloat16", "float32", "float64"
MIXED = ols.Policy(F32, F16, F32)

# Strings of jmp, which is the authority.
OF_JMP = (
  *("f16", "float16", "bf16", "bfloat16", "f32", "full", "float32", "f64"),
  *("float64", "half", "p=f16", "c=f16", "o=f16", "p=f32,c=f16,o=f32"),
  *("params=float32,compute=float16,output=float32", "p=bf16,o=f32"),
  *("params=f32,c=half,output=float32", "o=full,c=bfloat16,p=f64"),
)


def described(policy):
  """Returns the names of a policy's dtypes."""
  dtypes = (policy.param_dtype, policy.compute_dtype, policy.output_dtype)
  return tuple(np.dtype(dtype).name for dtype in dtypes)


@pytest.mark.parametrize("string", OF_JMP)
def test_a_string_of_jmp_means_the_same(string):
  policy, of_jmp = ols.get_policy(string), jmp.get_policy(string)
  assert described(policy) == described(of_jmp)
  assert policy.level is None
  assert isinstance(policy.param_dtype, np.dtype)
  assert ols.get_policy(of_jmp) == policy


def test_half_is_bfloat16_on_a_tpu(monkeypatch):
  tpu = SimpleNamespace(platform="tpu")
  monkeypatch.setattr(jax, "local_devices", lambda: [tpu])
  assert described(ols.get_policy("c=half,o=f32")) == (F32, BF16, F32)


def of_the_page():
  """Returns the policy that the page gives for each name."""
  lines = re.findall(r"^\| (`.*`) \|.*\| `(.*)` \|$", SECTION, re.MULTILINE)
  return {
    name: policy
    for names, policy in lines
    for name in re.findall(r"`([^`]+)`", names)
  }


@pytest.mark.parametrize("name", of_the_page())
def test_a_name_is_the_policy_that_the_page_shows(name):
  policy = ols.get_policy(name)
  assert str(policy) == of_the_page()[name]
  assert ols.get_policy(str(policy)) == policy


def test_the_page_has_every_name():
  with pytest.raises(ValueError) as caught:
    ols.get_policy("")
  names = str(caught.value).partition("The names are ")[2][:-1].split(", ")
  assert len(names) > 25
  # The page explains these two in words.
  assert set(names) - set(of_the_page()) == {"half", "none"}


def test_policies_are_equal_by_value_and_can_be_static():
  same = ols.Policy(jnp.float32, np.dtype(F16), np.float32)
  assert same == MIXED
  assert hash(same) == hash(MIXED)
  assert same != dataclasses.replace(MIXED, level="O1")
  assert pickle.loads(pickle.dumps(MIXED)) == MIXED
  cast = jax.jit(
    chex.assert_max_traces(lambda policy, x: policy.cast_to_compute(x), n=1),
    static_argnums=0,
  )
  assert cast(same, jnp.ones(2)).dtype == F16
  assert cast(MIXED, jnp.ones(2)).dtype == F16


@pytest.mark.parametrize(
  ("cast", "dtype"),
  [
    (ols.Policy(F16, F32, F32).cast_to_param, jnp.float16),
    (ols.Policy(F32, F16, F32).cast_to_compute, jnp.float16),
    (ols.Policy(F32, F32, F16).cast_to_output, jnp.float16),
    (ols.get_policy("bf16").cast_to_param, jnp.bfloat16),
    (ols.get_policy("f32").cast_to_output, jnp.float32),
  ],
)
@pytest.mark.usefixtures("strict_promotion")
def test_real_floating_arrays_are_cast(cast, dtype):
  tree = {
    "jax": [jnp.ones(2), jnp.ones((), jnp.bfloat16), jnp.ones(2, jnp.float16)],
    "weak": jnp.asarray(1.0),
    "float8": jnp.ones(2, jnp.float8_e4m3fn),
    "numpy": (np.ones(2), np.ones((0, 3), np.float32)),
    "scalar": np.float32(1.0),
    "shape": jax.ShapeDtypeStruct((2,), jnp.float32),
  }
  found = cast(tree)
  assert jax.tree.structure(found) == jax.tree.structure(tree)
  for new, old in zip(
    jax.tree.leaves(found), jax.tree.leaves(tree), strict=True
  ):
    assert new.dtype == dtype
    assert new.shape == old.shape
    assert not getattr(new, "weak_type", False)
    assert isinstance(new, np.ndarray) == isinstance(old, np.ndarray)


OTHERS = {
  "integer": jnp.arange(2),
  "bool": np.ones(2, bool),
  "complex": jnp.ones(2, jnp.complex64),
  "key": jax.random.key(0),
  "float0": np.zeros(2, jax.dtypes.float0),
  "None": None,
  "float": 3.0,
  "string": "adam",
  "function": jnp.tanh,
  "_overwrite_with_gradient": {"scale": jnp.ones(2)},
}


@pytest.mark.parametrize("name", OTHERS)
def test_a_cast_leaves_other_values_alone(name):
  found = MIXED.cast_to_compute({name: OTHERS[name], "x": jnp.ones(2)})
  assert found["x"].dtype == F16
  before, after = jax.tree.leaves(OTHERS[name]), jax.tree.leaves(found[name])
  assert all(x is y for x, y in zip(before, after, strict=True))


def test_a_large_value_becomes_inf_in_numpy_as_in_jax():
  found = MIXED.cast_to_compute([np.float32(1e6), jnp.float32(1e6)])
  assert found == [np.inf, np.inf]


def test_a_policy_without_dtypes_returns_its_argument():
  tree = {"low": jnp.ones(2, jnp.float16), "wide": np.ones(2)}
  policy = ols.get_policy("origin")
  for cast in (
    policy.cast_to_param,
    policy.cast_to_compute,
    policy.cast_to_output,
  ):
    assert cast(tree) is tree


def test_float64_is_an_error_unless_jax_has_it():
  policy = ols.get_policy("params=float64")
  with pytest.raises(ValueError, match="`param_dtype` .* got float64; call"):
    policy.cast_to_param(jnp.ones(2))
  with jax.enable_x64(True):
    assert policy.cast_to_param(jnp.ones(2, jnp.float32)).dtype == F64


PARAMS = {"first": jnp.eye(2) / 2, "second": jnp.ones((2, 2))}
X = jnp.ones((3, 2))


def two_layers(params, x, *, power=1.0):
  return jnp.exp(jnp.tanh(x @ params["first"]) @ params["second"]) * power


def in_policy(policy):
  """Returns the two layers, and the dtypes of products, tanh, and exp."""
  function = ols.get_policy(policy).autocast(two_layers)
  dtypes = [set(products(function, PARAMS, X))]
  dtypes += [set(dtypes_of(x, function, PARAMS, X)) for x in ("tanh", "exp")]
  return function, [dtype for (dtype,) in dtypes]


@pytest.mark.parametrize(
  ("policy", "expected"),
  [
    ("mixed_float16", [F16, F16, F32]),
    ("mixed_bfloat16", [BF16, BF16, F32]),
    ("O0", [F32, F32, F32]),
    ("params=float32,compute=float16,output=float32", [F16, F16, F16]),
    ("origin", [F32, F32, F32]),
  ],
)
def test_a_function_computes_in_the_policy(policy, expected):
  function, dtypes = in_policy(policy)
  assert dtypes == expected
  result = function(PARAMS, X, power=2.0)
  assert result.dtype == F32
  np.testing.assert_allclose(result, two_layers(PARAMS, X) * 2, rtol=1e-2)


@pytest.mark.parametrize(
  ("policy", "dtype"),
  [
    ("float16", F16),
    ("c=f16,o=bf16", BF16),
    ("c=f16,o=none,level=O1", F32),
    ("c=none,o=f16", F16),
    ("o=f16,level=O0", F16),
  ],
)
def test_results_have_the_output_dtype(policy, dtype):
  def function(x):
    return {"y": x @ x, "count": jnp.arange(2)}

  found = ols.get_policy(policy).autocast(function)(jnp.eye(2))
  assert found["y"].dtype == dtype
  assert found["count"].dtype == jnp.int32


@functools.partial(
  jax.tree_util.register_dataclass, data_fields=["value"], meta_fields=[]
)
@dataclasses.dataclass
class Box:
  """A variable that can be changed in place, or an object that holds one."""

  value: object


def test_a_change_in_place_is_an_error():
  def count(model, x):
    model.value.value = model.value.value + jnp.sum(x)
    return x

  function = ols.get_policy("c=f16,o=f32").autocast(count)
  with pytest.raises(ValueError, match="must not change .* in place.*value"):
    function(Box(Box(jnp.zeros(()))), X)


def test_without_a_cast_a_change_in_place_is_kept():
  def count(model):
    model.value.value += 1

  model = Box(Box(jnp.zeros(())))
  ols.get_policy("origin").autocast(count)(model)
  assert model.value.value == 1


def test_only_functions_can_be_in_a_policy():
  assert MIXED.autocast(two_layers).__name__ == "two_layers"
  with pytest.raises(TypeError, match="`fun` must be a function, got dict"):
    MIXED.autocast(PARAMS)


@pytest.mark.parametrize(
  ("arguments", "error", "message"),
  [
    ((int, F16, F32), TypeError, "`param_dtype` must be .* got int64"),
    ((F32, jnp.int8, F32), TypeError, "`compute_dtype` must be .* got int8"),
    ((F32, F32, jnp.complex64), TypeError, "`output_dtype` .* got complex64"),
    ((F32, "f16", F32), TypeError, "its full name, .* got 'f16'"),
  ],
)
def test_a_field_must_be_a_floating_point_dtype(arguments, error, message):
  with pytest.raises(error, match=message):
    ols.Policy(*arguments)


@pytest.mark.parametrize("dtype", [F32, F64, None, jnp.float8_e5m2])
def test_a_level_needs_float16_or_bfloat16(dtype):
  with pytest.raises(ValueError, match="16 at level 'O1', got .*; take one of"):
    ols.Policy(F32, dtype, F32, level="O1")


@pytest.mark.parametrize(
  ("string", "message"),
  [
    ("", "got ''. The names are O0, "),
    ("o1", "got 'o1'; did you mean 'O1'? The names are "),
    ("p:f16,c:f16", "got 'p:f16,c:f16'"),
    ("p=f16;c=f16", "with a comma between"),
    ("p=f16=f16", "got 'p=f16=f16' in 'p=f16=f16'"),
    ("p=f16,", "got '' in 'p=f16,'"),
    ("p=f32, c=f16", "got ' c' in 'p=f32, c=f16'; did you mean 'c'?"),
    ("param=f32", "did you mean 'params'?"),
    ("p=f32,params=f16", "got a second 'params'"),
    ("c=", "must have a dtype for 'compute', one of half, float16, "),
    ("c=fp16", "got 'fp16' in 'c=fp16'; did you mean 'f16'"),
    ("p=f32,level=O1", "`compute_dtype` must be float16 or bfloat16 at level"),
    ("level=O4", "`level` must be one of O0, "),
  ],
)
def test_an_unknown_string_is_an_error_that_helps(string, message):
  with pytest.raises(ValueError) as caught:
    ols.get_policy(string)
  assert message in str(caught.value)


def test_an_object_without_the_dtypes_is_an_error():
  for policy in (None, jnp.float16, ("f32", "f16"), jmp.Policy):
    with pytest.raises(TypeError, match="`policy` must be a string, a Policy"):
      ols.get_policy(policy)


def test_a_policy_of_jmp_with_integers_is_an_error():
  with pytest.raises(TypeError, match="`compute_dtype` must be"):
    ols.get_policy(jmp.Policy(F32, jnp.int32, F32))


def test_a_level_alone_is_the_name_of_that_level():
  for level in ("O0", "O1", "OD"):
    assert ols.get_policy(f"level={level}") == ols.get_policy(level)
