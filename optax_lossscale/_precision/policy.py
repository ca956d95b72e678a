"""Policies: the dtypes of parameters, computation and output, by name."""

from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Mapping
import dataclasses
import functools
from typing import Any
from typing import ParamSpec
from typing import TypeVar

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
import numpy as np

from optax_lossscale._autocast import levels
from optax_lossscale._autocast.autocast import autocast
from optax_lossscale._base import arguments
from optax_lossscale._base import formats
from optax_lossscale._base import leaves
from optax_lossscale._base.arguments import shown
from optax_lossscale._jaxpr import interpreter

FIELDS = ("param_dtype", "compute_dtype", "output_dtype")

_P = ParamSpec("_P")
_R = TypeVar("_R")


@dataclasses.dataclass(frozen=True)
class Policy:
  """The dtypes of the parameters, the computation and the output.

  A policy replaces casts throughout a program. A configuration can hold it as a
  string, which `get_policy` reads.

  It casts real floating arrays of JAX and NumPy, and real floating
  `jax.ShapeDtypeStruct`s. It returns everything else unchanged, including
  Flax's `_overwrite_with_gradient` collection, whose dtypes FP8 depends on.

  Attributes:
    param_dtype: the dtype of the parameters between steps, or its name. None,
      here and below, keeps each value's dtype. Casting to float64 requires
      `jax_enable_x64`.
    compute_dtype: the dtype in which a function computes; with a `level`, the
      dtype of only the operations that the level lowers.
    output_dtype: the dtype of a function's results.
    level: None, or a level of `autocast`: "O0", "O1", "O2", "O3", "auto", "OD".
      At every level but "O0" the compute dtype must be float16 or bfloat16.

  Raises:
    TypeError: if a dtype is not a floating-point one; from `autocast`, if `fun`
      is not a function.
    ValueError: if `level` is unknown or cannot lower to the compute dtype; from
      the cast methods, if float64 is not enabled; from the function that
      `autocast` returns, if `fun` changes an object in place.

  Examples:
    >>> import jax.numpy as jnp
    >>> import optax_lossscale as ols
    >>> policy = ols.Policy(jnp.float32, jnp.float16, jnp.float32)
    >>> print(policy)
    params=float32,compute=float16,output=float32
    >>> policy.cast_to_compute({"step": 3, "weights": jnp.ones(2)})
    {'step': 3, 'weights': Array([1., 1.], dtype=float16)}

  References:
    jmp's policies, https://github.com/google-deepmind/jmp, which have no level.
  """

  param_dtype: DTypeLike | None
  compute_dtype: DTypeLike | None
  output_dtype: DTypeLike | None
  level: str | None = dataclasses.field(default=None, kw_only=True)

  def __post_init__(self) -> None:
    arguments.check_fields(self, **dict.fromkeys(FIELDS, _check_dtype))
    if self.level is None:
      return
    levels.find_level(self.level)
    if self.level != "O0" and _name(self.compute_dtype) not in formats.LOW:
      raise ValueError(
        "`compute_dtype` must be float16 or bfloat16 at level "
        f"{self.level!r}, got {_name(self.compute_dtype)}; take one of these, "
        "or no level."
      )

  def cast_to_param(self, tree: leaves.Tree) -> leaves.Tree:
    """Returns `tree` in the dtype of the parameters.

    Args:
      tree: any tree. Its real floating arrays are cast, whatever their shape.
    """
    return _cast("param_dtype", self.param_dtype, tree)

  def cast_to_compute(self, tree: leaves.Tree) -> leaves.Tree:
    """Returns `tree` in the dtype of the computation. See `cast_to_param`."""
    return _cast("compute_dtype", self.compute_dtype, tree)

  def cast_to_output(self, tree: leaves.Tree) -> leaves.Tree:
    """Returns `tree` in the dtype of the output. See `cast_to_param`."""
    return _cast("output_dtype", self.output_dtype, tree)

  def autocast(self, fun: Callable[_P, _R]) -> Callable[_P, _R]:
    """Returns a function that computes `fun` as the policy says.

    If the policy has a level, the function applies `autocast` at this level,
    with the compute dtype as the low precision. If not, it casts all arguments
    to the compute dtype, including statistics and labels, but not the values
    that `fun` closes over. In both cases it casts the results to the output
    dtype.

    Args:
      fun: a function such as a loss function or `model.apply`. If the policy
        has a level, JAX must be able to trace it.
    """
    arguments.check_function(fun)

    if self.level not in (None, "O0"):
      low: Any = self.compute_dtype  # `autocast` raises an error for None.
      fun = autocast(fun, self.level, dtype=low)

    @functools.wraps(fun)
    def fun_in_policy(*args: _P.args, **kwargs: _P.kwargs) -> _R:
      if self.level is not None or self.compute_dtype is None:
        return self.cast_to_output(fun(*args, **kwargs))
      # Pass a copy, so that the caller does not see changes that `fun` makes.
      args, kwargs = cast = self.cast_to_compute((args, kwargs))
      before = jax.tree.leaves(cast)
      output = fun(*args, **kwargs)
      interpreter.check_unchanged(before, cast)
      return self.cast_to_output(output)

    return fun_in_policy

  def __str__(self) -> str:
    text = (
      f"params={_name(self.param_dtype)},compute={_name(self.compute_dtype)},"
      f"output={_name(self.output_dtype)}"
    )
    return text if self.level is None else f"{text},level={self.level}"


def _name(dtype: DTypeLike | None) -> str:
  return "none" if dtype is None else str(jnp.dtype(dtype).name)


def _check_dtype(name: str, dtype: object) -> np.dtype | None:
  """Returns the checked dtype, or None to keep each value's dtype."""
  if dtype is None:
    return None
  found, got = arguments.read_dtype(dtype)
  if found is None:
    got = shown(dtype) if isinstance(dtype, str) else got
    raise TypeError(
      f"`{name}` must be a floating-point dtype or its full name, such as "
      f"'float16', or None for the dtype that there is, got {got}."
    )
  return found


def _cast(name: str, dtype: DTypeLike | None, tree: leaves.Tree) -> leaves.Tree:
  """Returns `tree` with its real floating arrays in `dtype`."""
  if dtype is None:
    return tree
  arguments.check_enabled(name, dtype)

  def cast_leaf(is_gradient: bool, x: Any) -> object:
    kinds = jax.Array, np.ndarray, np.generic, jax.ShapeDtypeStruct
    if not (is_gradient and isinstance(x, kinds) and leaves.is_real(x)):
      return x
    if isinstance(x, jax.ShapeDtypeStruct):
      return x.update(dtype=dtype, weak_type=False)
    # Values that are too large become inf without a warning, as in JAX.
    with np.errstate(over="ignore"):
      return x.astype(dtype)

  return jax.tree.map(cast_leaf, leaves.are_gradients(tree), tree)


_EXAMPLE = "'params=float32,compute=float16,output=float32'"


# Each name stands for a policy in jmp's form.
_NAMES: Mapping[str, str] = {
  # MindSpore's levels, and Paddle's OD.
  "O0": "p=f32,level=O0",
  **{x: f"c=f16,o=f32,level={x}" for x in ("O1", "O2", "O3", "auto", "OD")},
  # Keras's names mean the same in Ascend's precision_mode_v2.
  "mixed_float16": "c=f16,o=f32,level=O1",
  "mixed_bfloat16": "c=bf16,o=f32,level=O1",
  # Values of Ascend's precision_mode, each with its precision_mode_v2 twin.
  "allow_fp32_to_fp16": "c=f16,o=f32,level=OD",
  **dict.fromkeys(("force_fp16", "fp16"), "c=f16,o=f32,level=O3"),
  # A policy does not control how the matrix unit rounds its inputs.
  **dict.fromkeys(("force_fp32", "cube_fp16in_fp32out"), "p=f32"),
  **dict.fromkeys(("must_keep_origin_dtype", "origin"), "p=none"),
  "allow_mix_precision": "c=f16,o=f32,level=O1",
  "allow_mix_precision_fp16": "c=f16,o=f32,level=O1",
  "allow_mix_precision_bf16": "c=bf16,o=f32,level=O1",
}

# jmp's dtype names, except for "half", which depends on the machine.
_DTYPES: Mapping[str, DTypeLike | None] = {
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


def get_policy(policy: object) -> Policy:
  """Returns the policy for a name from jmp, MindSpore, Keras or Ascend.

  Strings with dtypes are as in jmp: "params=float32,compute=float16" or
  "p=f32,c=f16,o=f32". By default the output has the dtype of the computation,
  which has that of the parameters, float32. A single dtype applies to all
  three. Dtypes are "f16", "bf16", "f32" or "full", "f64", every floating-point
  dtype of JAX by its name, "half" (bfloat16 on a TPU, else float16) and "none",
  which keeps each value's dtype. "level=O1" adds that level of `autocast`.

  The other names are MindSpore's and Paddle's levels, Keras's "mixed_float16"
  and "mixed_bfloat16", and the values of Ascend's `precision_mode` and
  `precision_mode_v2`. docs/porting/README.md has a table of them.

  Names that look alike may differ: "float16" of jmp and Keras puts everything
  in float16, while Ascend's "fp16" is mixed precision with float32 parameters.

  Args:
    policy: a string; or a `Policy`, which is returned; or an object with
      `param_dtype`, `compute_dtype` and `output_dtype`, such as a jmp.Policy.

  Raises:
    TypeError: if `policy` is none of these, or has a dtype that is not a
      floating-point one.
    ValueError: if a string is not a known name or cannot be parsed.

  Examples:
    >>> import optax_lossscale as ols
    >>> print(ols.get_policy("c=bf16,o=f32"))
    params=float32,compute=bfloat16,output=float32
    >>> print(ols.get_policy("mixed_float16"))
    params=float32,compute=float16,output=float32,level=O1

  References:
    jmp 0.0.4; MindSpore, Paddle, Keras 3 and Ascend as named above.
  """
  if isinstance(policy, Policy):
    return policy
  if isinstance(policy, str):
    return _read(policy)
  if all(hasattr(policy, name) for name in FIELDS):
    return Policy(*(getattr(policy, name) for name in FIELDS))
  raise TypeError(
    "`policy` must be a string, a Policy, or an object with `param_dtype`, "
    "`compute_dtype` and `output_dtype` such as a jmp.Policy, got "
    f"{shown(policy)} of type {arguments.kind_of(policy)}; for one dtype "
    "everywhere pass its name, such as 'float16', and of a Keras policy its "
    "`name`."
  )


def _read(policy: str) -> Policy:
  """Returns the policy that a string describes."""
  if "=" in policy:
    return _parse(policy)
  if policy in _NAMES:
    return _parse(_NAMES[policy])
  if _is_dtype(policy):
    return _parse(f"p={policy}")  # The other two follow the parameters.
  known = (*_NAMES, *_DTYPE_NAMES)
  raise ValueError(
    f"`policy` must be a name that is known, or dtypes such as {_EXAMPLE}, got "
    f"{shown(policy)}{_hint(policy, known)} The names are {', '.join(known)}."
  )


def _parse(policy: str) -> Policy:
  """Parses a policy string such as "p=f32,c=f16,level=O1"."""
  values: dict[str, str] = {}
  for part in policy.split(","):
    key, equals, value = part.partition("=")
    if not equals or "=" in value:
      raise ValueError(
        "`policy` must be dtypes with a comma between one and the next, such "
        f"as {_EXAMPLE}, got {shown(part)} in {shown(policy)}."
      )
    if key not in _KEYS:
      raise ValueError(
        "`policy` must have the keys params (p), compute (c), output (o) and "
        f"level, got {shown(key)} in {shown(policy)}{_hint(key, _KEYS)}"
      )
    if _KEYS[key] in values:
      raise ValueError(
        "`policy` must have each key once, got a second "
        f"{_KEYS[key]!r} in {shown(policy)}; leave one of them out."
      )
    values[_KEYS[key]] = value
  level = values.pop("level", None)
  if level is not None and not values:
    levels.find_level(level)
    return _parse(_NAMES[level])
  for key, value in values.items():
    if not _is_dtype(value):
      raise ValueError(
        f"`policy` must have a dtype for {shown(key)}, one of "
        f"{', '.join(_DTYPE_NAMES)}, got {shown(value)} in "
        f"{shown(policy)}{_hint(value, _DTYPE_NAMES)}"
      )
  params = values.get("params", "float32")
  compute = values.get("compute", params)
  output = values.get("output", compute)
  return Policy(*map(_dtype, (params, compute, output)), level=level)


def _is_dtype(name: str) -> bool:
  # Only JAX's own name counts: NumPy has aliases, and a different "half". NumPy
  # would also parse a string such as "p:f16" as a record dtype.
  found, jax_name = arguments.read_dtype(name if name.isidentifier() else None)
  return name in _DTYPE_NAMES or (found is not None and jax_name == name)


def _dtype(name: str) -> DTypeLike | None:
  if name == "half":
    is_tpu = jax.local_devices()[0].platform == "tpu"
    return jnp.bfloat16 if is_tpu else jnp.float16
  return _DTYPES.get(name, name)


def _hint(got: str, known: Iterable[str]) -> str:
  return arguments.did_you_mean(got, known, most=3) or "."
