"""Policies by the names that they have in other systems."""

from collections.abc import Iterable
from collections.abc import Mapping
import difflib
from typing import Any

import jax
import jax.numpy as jnp

from optax_lossscale import _arguments
from optax_lossscale.precision import _levels
from optax_lossscale.precision import _policy

_EXAMPLE = "'params=float32,compute=float16,output=float32'"


def _mixed(level: str, low: Any = jnp.float16) -> _policy.Policy:
  return _policy.Policy(jnp.float32, low, jnp.float32, level=level)


def _all_in(dtype: Any, level: str | None = None) -> _policy.Policy:
  return _policy.Policy(dtype, dtype, dtype, level=level)


_NAMES: Mapping[str, _policy.Policy] = {
  # MindSpore's levels; OD is Paddle's.
  "O0": _all_in(jnp.float32, "O0"),
  **{level: _mixed(level) for level in ("O1", "O2", "O3", "auto", "OD")},
  # Keras's, and Ascend's precision_mode_v2. They mean the same.
  "mixed_float16": _mixed("O1"),
  "mixed_bfloat16": _mixed("O1", jnp.bfloat16),
  # Ascend's precision_mode, each with its name as a precision_mode_v2.
  "allow_fp32_to_fp16": _mixed("OD"),
  **dict.fromkeys(("force_fp16", "fp16"), _mixed("O3")),
  # What the matrix unit takes is not a policy's business.
  **dict.fromkeys(("force_fp32", "cube_fp16in_fp32out"), _all_in(jnp.float32)),
  **dict.fromkeys(("must_keep_origin_dtype", "origin"), _all_in(None)),
  **dict.fromkeys(
    ("allow_mix_precision", "allow_mix_precision_fp16"), _mixed("O1")
  ),
  "allow_mix_precision_bf16": _mixed("O1", jnp.bfloat16),
}

# jmp's; "half" depends on the machine.
_DTYPES: Mapping[str, Any] = {
  "none": None,
  "bf16": jnp.bfloat16,
  "f16": jnp.float16,
  "f32": jnp.float32,
  "f64": jnp.float64,
  "full": jnp.float32,
}
_DTYPE_NAMES = (
  *("half", "float16", "bfloat16", "float32", "float64"),
  *_DTYPES,
)

_KEYS: Mapping[str, str] = {
  **dict.fromkeys(("params", "p"), "params"),
  **dict.fromkeys(("compute", "c"), "compute"),
  **dict.fromkeys(("output", "o"), "output"),
  "level": "level",
}


def get_policy(policy: Any) -> _policy.Policy:
  """Returns the policy of a name, be it jmp's, MindSpore's, Keras's, Ascend's.

  So a flag of a script, or a line of a configuration that was written for
  another system, is enough.

  Strings with dtypes are jmp's, such as "params=float32,compute=float16" or
  "p=f32,c=f16,o=f32". What is left out of params (p), compute (c) and output
  (o) is as in jmp: parameters are float32, the computation is in the dtype of
  the parameters, and the output in that of the computation. One dtype alone is
  for all three. Dtypes are "float16" or "f16", "bfloat16" or "bf16", "float32",
  "f32" or "full", "float64" or "f64", any other floating-point dtype of JAX by
  its name, "half" (bfloat16 on a TPU, else float16) and "none", for what there
  is. "level=O1" makes it a policy with that level of `autocast`.

  The other names are policies with float32 parameters and output, but for
  "origin" and "must_keep_origin_dtype":

  - "O1", "O2", "O3", "auto", and "OD", MindSpore's and Paddle's levels:
    float16, at the level of that name. "O0" is float32 as written.
  - "mixed_float16" and "mixed_bfloat16": that dtype at O1. In Keras the output
    of a layer is in float16, and one is told to have the last one in float32;
    here the output is.
  - Ascend's `precision_mode` and `precision_mode_v2`: "allow_fp32_to_fp16" is
    OD; "force_fp16" or "fp16" is O3; "allow_mix_precision",
    "allow_mix_precision_fp16" or "mixed_float16" is O1, and
    "allow_mix_precision_bf16" or "mixed_bfloat16" that in bfloat16; "origin"
    or "must_keep_origin_dtype" leaves everything in the dtype that it has.
    "force_fp32" or "cube_fp16in_fp32out" is float32 everywhere. There the
    matrix unit rounds its inputs to float16 all the same; in JAX that is
    another setting, `jax.default_matmul_precision`.

  Names that two systems have mean the same in both: "mixed_float16" is Keras's
  and Ascend's, "float16" jmp's and Keras's, everything in float16 and no level.
  But names that look alike do not: Ascend's "fp16" is mixed precision, with
  parameters in float32.

  Args:
    policy: a string; or a `Policy`, which is returned; or an object with
      `param_dtype`, `compute_dtype` and `output_dtype`, such as a jmp.Policy.

  Raises:
    TypeError: if it is none of these, or has a dtype that is not a
      floating-point one.
    ValueError: if a string says nothing that is known.

  Examples:
    >>> import optax_lossscale as ols
    >>> print(ols.get_policy("c=bf16,o=f32"))
    params=float32,compute=bfloat16,output=float32
    >>> print(ols.get_policy("mixed_float16"))
    params=float32,compute=float16,output=float32,level=O1

  References:
    jmp 0.0.4; MindSpore's amp_level; Paddle's auto_cast; Keras 3's dtype
    policies; Ascend's precision_mode and precision_mode_v2.
  """
  if isinstance(policy, _policy.Policy):
    return policy
  if isinstance(policy, str):
    return _read(policy)
  if all(hasattr(policy, name) for name in _policy.FIELDS):
    return _policy.Policy(*(getattr(policy, name) for name in _policy.FIELDS))
  raise TypeError(
    "`policy` must be a string, a Policy, or an object with `param_dtype`, "
    "`compute_dtype` and `output_dtype` such as a jmp.Policy, got "
    f"{policy!r} of type {type(policy).__name__}; for one dtype everywhere "
    "pass its name, such as 'float16', and of a Keras policy its `name`."
  )


def _read(policy: str) -> _policy.Policy:
  """Returns the policy of a string."""
  if "=" in policy:
    return _parse(policy)
  if policy in _NAMES:
    return _NAMES[policy]
  if _is_dtype(policy):
    return _all_in(_dtype(policy))
  known = (*_NAMES, *_DTYPE_NAMES)
  raise ValueError(
    f"`policy` must be a name that is known, or dtypes such as {_EXAMPLE}, got "
    f"{policy!r}{_nearest(policy, known)} The names are {', '.join(known)}."
  )


def _parse(policy: str) -> _policy.Policy:
  """Returns the policy of a string such as "p=f32,c=f16,level=O1"."""
  values: dict[str, str] = {}
  for part in policy.split(","):
    key, equals, value = part.partition("=")
    if not equals or "=" in value:
      raise ValueError(
        "`policy` must be dtypes with a comma between one and the next, such "
        f"as {_EXAMPLE}, got {part!r} in {policy!r}."
      )
    if key not in _KEYS:
      raise ValueError(
        "`policy` must have the keys params (p), compute (c), output (o) and "
        f"level, got {key!r} in {policy!r}{_nearest(key, _KEYS)}"
      )
    if _KEYS[key] in values:
      raise ValueError(
        "`policy` must have each key once, got a second "
        f"{_KEYS[key]!r} in {policy!r}; leave one of them out."
      )
    values[_KEYS[key]] = value
  level = values.pop("level", None)
  if level is not None and not values:
    _levels.find_level(level)
    return _NAMES[level]
  for key, value in values.items():
    if not _is_dtype(value):
      raise ValueError(
        f"`policy` must have a dtype for {key!r}, one of "
        f"{', '.join(_DTYPE_NAMES)}, got {value!r} in {policy!r}"
        f"{_nearest(value, _DTYPE_NAMES)}"
      )
  params = values.get("params", "float32")
  compute = values.get("compute", params)
  output = values.get("output", compute)
  return _policy.Policy(*map(_dtype, (params, compute, output)), level=level)


def _is_dtype(name: str) -> bool:
  if name in _DTYPE_NAMES:
    return True
  if not name.isidentifier():
    return False  # Not to NumPy, which reads whole records out of a string.
  # By its own name alone: NumPy has others, and another "half".
  found, _ = _arguments.read_dtype(name)
  return found is not None and str(found.name) == name


def _dtype(name: str) -> Any:
  if name == "half":
    is_tpu = jax.local_devices()[0].platform == "tpu"
    return jnp.bfloat16 if is_tpu else jnp.float16
  return _DTYPES.get(name, name)


def _nearest(got: str, known: Iterable[str]) -> str:
  """Returns the end of an error's sentence: the nearest names, if any are."""
  # Upper and lower case are easily mistaken, so they count as the same.
  names = {name.lower(): name for name in known}
  close = difflib.get_close_matches(got.lower(), names)
  if not close:
    return "."
  return f"; did you mean {' or '.join(repr(names[x]) for x in close)}?"
