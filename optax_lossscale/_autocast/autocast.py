"""Mixed precision for any function; docs/autocast.md says how it works."""

from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
import functools
from typing import Any
import warnings

import jax.numpy as jnp
from jax.typing import DTypeLike

from optax_lossscale._autocast import _demand
from optax_lossscale._autocast import _program
from optax_lossscale._autocast import _value
from optax_lossscale._autocast import full_precision
from optax_lossscale._autocast import levels
from optax_lossscale._base import arguments
from optax_lossscale._jaxpr import interpreter
from optax_lossscale._jaxpr import operation_table
from optax_lossscale._jaxpr import scopes


def autocast(
  fun: Callable[..., Any],
  level: str = "O1",
  *,
  dtype: DTypeLike = jnp.float16,
  overrides: Mapping[str, DTypeLike] | None = None,
  operations: Mapping[str, Sequence[str]] | None = None,
) -> Callable[..., Any]:
  """Returns `fun` in mixed precision: every operation in the dtype it needs.

  `fun` is written in float32 and knows nothing of it. When it is traced, its
  matrix products and convolutions get inputs in `dtype`, forward and backward,
  and what would lose range or accuracy stays in float32. Nothing of this is
  left when the program runs.

  What `fun` returns has the dtypes that it has without, and so have gradients.
  A value is converted once for all operations that want it in a dtype. Sums are
  accumulated in float32, products of two vectors among them. A number that
  `dtype` cannot hold keeps what it is added to or multiplied with in float32.
  The derivative rules of `custom_jvp` and `custom_vjp` hold, loops carry the
  dtypes that they are written for, and `remat` computes again what it did. The
  rule of a `custom_vmap` is used where `fun` itself maps it, a `composite`
  becomes what it is made of, and a `custom_linear_solve` stays in the precision
  that it is written in. Only what is written in float32 or in `dtype` takes
  part: integers, keys, float64 and other dtypes are left alone.

  The levels:

  - "O0": as written, but for `overrides` and `operations`.
  - "O1": matrix products and convolutions in `dtype`; exp, log, powers, sums,
    norms and losses in float32; the others follow their inputs. What is given
    from outside and added or multiplied with, such as a bias, follows too.
  - "O2": everything in `dtype` but norms and losses.
  - "O3": everything in `dtype` but losses.
  - "auto": as "O1", and additions and concatenations are in the widest dtype
    among their inputs, a bias included.
  - "OD": matrix products and convolutions in `dtype`, everything else as
    written.

  A norm is known by its scope (a part of it is like "*Norm*", and there is no
  product inside) or by its operations. A loss is known by its scope ("*loss*",
  "*cross_entropy*") or by its place: what follows the last matrix product of
  `fun` is in float32 at every level. So the loss is the same whether `fun` is
  the model and the loss is taken outside, or the whole loss function.

  Args:
    fun: any function that JAX can trace: a loss function, `model.apply`.
      Arguments that are no arrays, such as `train=True`, it gets as they are.
    level: "O0", "O1", "O2", "O3", "auto" or "OD".
    dtype: the low precision, float16 or bfloat16.
    overrides: dtypes by scope, such as `{"LeNet5/conv1": jnp.float16}`. They
      are float16, bfloat16 or float32, and for all operations inside, whatever
      the level says. Flax Linen names scopes after modules; elsewhere
      `jax.named_scope` does. A pattern matches a scope from its first part on,
      "*" stands for anything, and of several that match the longest one wins.
    operations: edits the lists of the level, such as `{"black": ["tanh"],
      "gray": ["exp"]}`. What is in "white" is in `dtype`, in "black" in
      float32, in "gray" it follows its inputs, in "promote" it is in the widest
      dtype among them. The names are those of JAX's primitives, and "square",
      "cube", "reciprocal" and "vecdot".

  Returns:
    A function with the arguments of `fun`. It traces `fun` on each call, so jit
    it, or what is around it.

  Raises:
    TypeError: if `fun` is no function, or another argument of a wrong type.
    ValueError: if a level, list or dtype does not exist; when called, if a
      pattern matches no scope of `fun`, JAX has no operation of a name, `fun`
      changes an object in place, such as an NNX model in training (use
      `nnx.autocast`), or it runs inside what a precision schedule lowers.

  Warns:
    UserWarning: when called, of an operation that holds a program which nothing
      is known of, such as a kernel. It runs as written.

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
    The levels of Apex and MindSpore, PyTorch 2.13's autocast; Micikevicius et
    al., Mixed Precision Training, https://arxiv.org/abs/1710.03740.
  """
  arguments.check_function(fun)
  recipe = levels.make_recipe(level, dtype, overrides, operations)

  if recipe.is_idle:
    return fun

  @functools.wraps(fun)
  def autocast_fun(*args: Any, **kwargs: Any) -> Any:
    full_precision.refuse_autocast()
    recording = interpreter.record(fun, args, kwargs)
    jaxpr = recording.jaxpr
    operations_of_fun = {
      (scope, operation_table.name_of(equation))
      for scope, equation, _ in scopes.operations(jaxpr)
    }
    of_fun = recipe.of(operations_of_fun, operation_table.NAMES)
    variables = [*jaxpr.jaxpr.constvars, *jaxpr.jaxpr.invars]
    consts, inputs = recording.consts_and_arguments(
      [
        _value.given(x, variable.aval)
        for x, variable in zip(recording.operands, variables, strict=True)
      ]
    )
    program = _program.MixedProgram(of_fun)
    outputs = program.evaluate(
      jaxpr, inputs, [_demand.Use()] * len(jaxpr.out_avals), consts
    )
    for operation in sorted(program.unknown):
      warnings.warn(
        f"`autocast` cannot look into the operation {operation}, which runs as "
        "written.",
        stacklevel=2,
      )
    return recording.result(
      [x.in_dtype(x.written) if x.is_float else x.array for x in outputs]
    )

  return autocast_fun
