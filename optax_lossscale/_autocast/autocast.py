"""Mixed precision for any function; docs/autocast.md explains the design."""

from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
import functools
from typing import ParamSpec
from typing import TypeVar
import warnings

import jax.numpy as jnp
from jax.typing import DTypeLike

from optax_lossscale._autocast import _plan
from optax_lossscale._autocast import _program
from optax_lossscale._autocast import _value
from optax_lossscale._autocast import full_precision
from optax_lossscale._autocast import levels
from optax_lossscale._autocast import marks
from optax_lossscale._base import arguments
from optax_lossscale._jaxpr import scopes
from optax_lossscale._jaxpr.operations import name_of

_P = ParamSpec("_P")
_R = TypeVar("_R")
_Q = ParamSpec("_Q")
_S = TypeVar("_S")


def _explained(function: Callable[_Q, _S]) -> Callable[_Q, _S]:
  """Returns `autocast`, which explains that it takes a function."""

  @functools.wraps(function)
  def explained(*args: _Q.args, **kwargs: _Q.kwargs) -> _S:
    fun = args[0] if args else kwargs.get("fun")
    if fun is None or isinstance(fun, str):
      got = "none" if fun is None else arguments.shown(fun)
      raise TypeError(
        f"`fun` must be the function to run in mixed precision, got {got}; "
        "it is neither a block to enter, as in torch, nor a decorator with "
        "arguments: write mixed_loss_fn = "
        "autocast(loss_fn, dtype=jnp.float16), see docs/porting/torch.md."
      )
    return function(*args, **kwargs)

  return explained


@_explained
@arguments.explained
def autocast(
  fun: Callable[_P, _R],
  level: str = "O1",
  *,
  dtype: DTypeLike = jnp.float16,
  overrides: Mapping[str, DTypeLike | None] | None = None,
  operations: Mapping[str, Sequence[str]] | None = None,
  preferred_element_type: DTypeLike | None = None,
  dot_dtype: DTypeLike | tuple[DTypeLike, DTypeLike] | None = None,
) -> Callable[_P, _R]:
  """Returns `fun` in mixed precision, with a suitable dtype for each operation.

  `fun` is written in float32 and needs no changes. When it is traced, its
  matrix products and convolutions get inputs in `dtype`, forward and backward.
  Operations that would lose range or accuracy stay in float32.

  The outputs of `fun` and the gradients keep their dtypes. Only values that are
  float32 or `dtype` in `fun` are affected. Custom derivative rules still apply,
  loops carry the same dtypes, and a `custom_linear_solve` keeps its precision.
  A `custom_vmap` rule applies only to a `vmap` inside `fun`.

  The levels, with more about each in docs/guides/mixed_precision.md:

  - "O0": as written, except for `overrides` and `operations`.
  - "O1": matrix products and convolutions in `dtype`; exp, log, powers, sums,
    norms and losses in float32. Other operations follow their inputs, and an
    added or multiplied parameter, such as a bias, follows the other input.
  - "O2": everything in `dtype` but sums, special functions, norms and losses.
  - "O3": everything in `dtype` but sums, special functions and losses.
  - "auto": like "O1", but additions and concatenations run in the widest dtype
    among their inputs, biases included.
  - "OD": matrix products and convolutions in `dtype`, everything else as
    written.

  A norm or loss is recognized by its scope or by its operations. All that
  follows the last matrix product of `fun` is a loss, except at "O0" and "OD",
  so the loss is the same whether `fun` is only the model or the whole loss
  function.

  With `preferred_element_type` or `dot_dtype`, products have no forward-mode
  derivative (`jax.jvp`), and a product in float8 has no second derivative.

  Args:
    fun: any function that JAX can trace, such as a loss or `model.apply`.
      Arguments other than arrays, such as `train=True`, are passed unchanged.
    level: "O0", "O1", "O2", "O3", "auto" or "OD".
    dtype: the low precision, float16 or bfloat16.
    overrides: a dict from patterns for scopes to float16, bfloat16 or float32,
      such as `{"LeNet5/conv1": jnp.float16}`. At every level, operations in a
      matching scope run in the pattern's dtype. A float8 dtype is for the
      matrix products alone, as in `dot_dtype`; None leaves a scope to the
      level. Flax Linen names scopes after modules; elsewhere, use
      `jax.named_scope`. A pattern starts at the outermost scope, "*" matches
      anything, and the longest match wins.
    operations: changes to the level's lists, such as `{"black": ["tanh"],
      "gray": ["exp"]}`. Operations in "white" run in `dtype`, those in "black"
      in float32. Those in "gray" follow their inputs, and those in "promote"
      run in the widest dtype of their inputs. The names are those of JAX's
      primitives, plus "square", "cube", "reciprocal" and "vecdot".
    preferred_element_type: float32 for products in `dtype` with float32
      results and gradients, named as in `jax.lax.dot_general`; None for `dtype`
      as JAX has it.
    dot_dtype: float8_e4m3fn (or float8_e4m3fnuz) for the matrix products with
      an argument of `fun`, forward and backward, each operand with a scale of
      its own; the gradients that come in are in float8_e5m2, or in the second
      of two dtypes: `(operands, gradients)`. docs/guides/fp8.md says for which
      devices. None for no float8.

  Returns:
    A function with the same arguments as `fun`. It traces `fun` on each call,
    so jit it or a function that calls it.

  Raises:
    TypeError: if `fun` is not a function, or an argument has the wrong type.
    ValueError: if a level, list or dtype does not exist, or the level lowers no
      products that have formats. When called: if a pattern matches no scope of
      `fun`, `operations` names an unknown operation, `fun` changes an object in
      place, such as an NNX model in training (use `nnx.autocast`), or a
      precision schedule lowers `fun`.

  Warns:
    UserWarning: when called, if an operation, such as a kernel, holds a program
      that `autocast` cannot look into. That operation runs as written, unless
      `cast_inputs` marks it.

  Examples:
    >>> import jax
    >>> import jax.numpy as jnp
    >>> import optax_lossscale as ols
    >>> x, weights = jnp.ones((1, 2)), jnp.eye(2)
    >>> model = ols.autocast(lambda x: jnp.exp(x @ weights), "O1")
    >>> for equation in jax.make_jaxpr(model)(x).eqns:
    ...   print(equation.primitive, equation.outvars[0].aval)
    convert_element_type float16[1,2]
    convert_element_type float16[2,2]
    dot_general float16[1,2]
    convert_element_type float32[1,2]
    exp float32[1,2]

  References:
    The levels of Apex and MindSpore; autocast in PyTorch 2.13.
  """
  arguments.check_function(fun)
  recipe = levels.make_recipe(
    level, dtype, overrides, operations, preferred_element_type, dot_dtype
  )

  if recipe.dot_dtypes and not recipe.level.lowers_products:
    raise ValueError(
      "`dot_dtype` is for the products that a level lowers, got "
      f"level={level!r}, which lowers none; the level O1 does."
    )
  if recipe.is_idle:
    if recipe.result_dtype:
      raise ValueError(
        "`preferred_element_type` is for products in `dtype`, got "
        f"level={level!r}, where there are none; the level O1 has them."
      )
    return fun

  @functools.wraps(fun)
  def autocast_fun(*args: _P.args, **kwargs: _P.kwargs) -> _R:
    full_precision.refuse_autocast()
    recording = marks.record(recipe, fun, args, kwargs)
    jaxpr = recording.jaxpr
    operations_of_fun = {
      (scope, name_of(equation))
      for scope, equation, _ in scopes.operations(jaxpr)
    }
    program = _program.MixedProgram(recipe.of(operations_of_fun))
    _, arrays = recording.consts_and_arguments(recording.operands)
    inputs = list(map(_value.make_given, arrays, jaxpr.in_avals))
    plan = _plan.make_plan(jaxpr, program.recipe, "", _plan.Use())
    outputs = program.evaluate(jaxpr, plan, inputs)
    for operation in sorted(program.unknown):
      warnings.warn(
        f"`autocast` cannot look into the operation {operation}, which runs as "
        "written; if 16 bits are safe, mark its function with cast_inputs.",
        stacklevel=2,
      )
    return recording.result([x.restore() for x in outputs])

  return autocast_fun
