"""Emulates hardware in saturation mode on any backend."""

from collections.abc import Callable
from collections.abc import Collection
from collections.abc import Sequence
import dataclasses
import functools
import itertools
from typing import ParamSpec
from typing import TypeVar

import jax
from jax import lax
from jax.extend import core
from jax.interpreters import ad
import jax.numpy as jnp
from jax.typing import DTypeLike
import numpy as np

from optax_lossscale._base import arguments
from optax_lossscale._base import bits
from optax_lossscale._base import formats
from optax_lossscale._base import promises
from optax_lossscale._base import switches
from optax_lossscale._jaxpr import interpreter
from optax_lossscale._jaxpr import operations
from optax_lossscale._jaxpr import throughout
from optax_lossscale._jaxpr.interpreter import Array
from optax_lossscale.hardware import operation_overflow

_P = ParamSpec("_P")
_R = TypeVar("_R")
# The derivative of a function with respect to the inputs at some positions.
_Vjp = Callable[[Sequence[object]], tuple[dict[int, jax.Array]]]


def emulate_saturation(
  fun: Callable[_P, _R],
  *,
  dtypes: DTypeLike | Collection[DTypeLike] = (jnp.float16,),
) -> Callable[_P, _R]:
  """Returns `fun` as hardware in saturation mode would compute it.

  After every operation, inf becomes the largest finite value of its dtype with
  the same sign, and NaN becomes 0. Check with `saturated`, since all gradients
  are finite.

  Every operation of `fun` is clamped, including those in loops, branches, calls
  and `shard_map`, and those of the backward pass: the gradient is that of
  `emulate_saturation(jax.grad(fun))`. Forward mode is not supported; wrap the
  function that calls `jax.jvp`. Of an operation that contains a program of its
  own, such as a kernel, only the results are clamped. A `custom_vmap` rule
  applies only to a `vmap` inside `fun`.

  Args:
    fun: any function that JAX can trace. Arguments other than arrays, such as
      `train=True`, are passed unchanged.
    dtypes: one or more floating dtypes whose operations saturate. A complex
      dtype counts as that of its parts: complex64 as float32.

  Returns:
    A function with the same arguments as `fun`. It traces `fun` on each call,
    so jit it.

  Raises:
    TypeError: if `fun` is not a function, or `dtypes` holds anything but
      floating dtypes. When called: if `dtypes` holds a float8 dtype without
      inf, and `fun` not only casts to it but also computes in it.

  Examples:
    >>> import jax
    >>> import jax.numpy as jnp
    >>> import optax_lossscale as ols
    >>> loss_fn = lambda x: x * 40000 + x * 40000
    >>> loss_fn = ols.hardware.emulate_saturation(loss_fn)
    >>> loss, grad = jax.value_and_grad(loss_fn)(jnp.float16(1))
    >>> print(float(loss), float(grad))
    65504.0 65504.0

  References:
    Ascend 910A's saturation mode; MindSpore's `MS_ASCEND_CHECK_OVERFLOW_MODE`.
  """
  arguments.check_function(fun)
  dtypes = operation_overflow.check_dtypes(dtypes)

  @functools.wraps(fun)
  def saturating_fun(*args: _P.args, **kwargs: _P.kwargs) -> _R:
    recording = interpreter.record(fun, args, kwargs)
    run = _differentiable(recording.without_values(), dtypes)
    if jax.sharding.get_abstract_mesh().manual_axes:
      # In an eager `shard_map`, JAX accepts custom derivatives only under jit.
      run = jax.jit(run)
    return recording.result(run(*recording.operands))

  return saturating_fun


def _differentiable(
  recording: interpreter.Recording, dtypes: frozenset[np.dtype]
) -> Callable[..., Sequence[Array]]:
  """Returns the recorded function, saturating in its backward pass too."""

  @jax.custom_vjp
  def run(*operands: jax.Array) -> Sequence[Array]:
    consts, arguments = recording.consts_and_arguments(operands)
    outputs, _ = throughout.evaluate(
      recording.jaxpr, arguments, _Clamping(dtypes), consts
    )
    return outputs

  emulate = functools.partial(emulate_saturation, dtypes=dtypes)
  is_output = [
    formats.part_dtype(aval) is not None for aval in recording.jaxpr.out_avals
  ]

  def forward(
    *operands: jax.custom_derivatives.CustomVJPPrimal,
  ) -> tuple[list[jax.Array], _Vjp]:
    # Differentiates with respect to these inputs only. Other inputs may go
    # through a while loop or a callback to the host, which have no derivative.
    inputs = {
      place: operand.value
      for place, operand in enumerate(operands)
      if operand.perturbed and formats.part_dtype(operand.value) is not None
    }

    def of_inputs(
      inputs: dict[int, jax.Array],
    ) -> tuple[list[jax.Array], list[jax.Array]]:
      outputs = recording.evaluate(
        *(inputs.get(place, x.value) for place, x in enumerate(operands))
      )
      return list(itertools.compress(outputs, is_output)), outputs

    treedefs: list[jax.tree_util.PyTreeDef] = []

    def outputs_and_vjp(
      inputs: dict[int, jax.Array],
    ) -> tuple[list[jax.Array], list[jax.Array]]:
      _, vjp, outputs = jax.vjp(of_inputs, inputs, has_aux=True)
      # JAX keeps the output structure of a recorded function. The structure of
      # `vjp` would keep its program alive, so only the leaves are returned.
      residuals, treedef = jax.tree.flatten(vjp)
      treedefs.append(treedef)
      return outputs, residuals

    # This function is recorded too, so its derivative also saturates.
    outputs, residuals = emulate(outputs_and_vjp)(inputs)
    return outputs, jax.tree.unflatten(treedefs[0], residuals)

  def backward(
    vjp: _Vjp, cotangents: Sequence[object]
  ) -> tuple[jax.Array | None, ...]:
    cotangents = [
      _zero_if_symbolic(x) for x in itertools.compress(cotangents, is_output)
    ]
    (of_inputs,) = emulate(vjp)(cotangents)
    return tuple(of_inputs.get(i) for i in range(len(recording.operands)))

  run.defvjp(forward, backward, symbolic_zeros=True)
  return run


@dataclasses.dataclass(frozen=True)
class _Clamping(throughout.CountingRule):
  """Evaluates each operation unchanged and clamps its results."""

  dtypes: frozenset[np.dtype]

  def apply(
    self,
    around: tuple[core.JaxprEqn, ...],
    equation: core.JaxprEqn,
    inputs: Sequence[Array],
  ) -> tuple[Sequence[Array], tuple[()]]:
    """See the base class."""
    del around
    # A `jax.Ref` is not an array; its values are clamped when they are read.
    dtypes = [
      formats.part_dtype(v.aval)
      if isinstance(v.aval, jax.core.ShapedArray)
      else None
      for v in equation.outvars
    ]
    found = self.dtypes.intersection(dtypes)
    if not found:
      return interpreter.bind(equation, inputs), ()
    name = equation.primitive.name
    without_inf = [x for x in found if not formats.has_inf(x)]
    if without_inf and name == "convert_element_type":
      # The cast would turn values that are too large into NaN, so clamp first.
      with interpreter.context(equation):
        inputs = [_clip(x, without_inf[0]) for x in inputs]
    elif without_inf and not operations.moves(equation):
      raise TypeError(
        "`emulate_saturation` must be able to tell inf from NaN, got the "
        f"operation {name} in {without_inf[0].name}, which has no inf: compute "
        "in float16 or float32 and cast the result."
      )
    # No inf or NaN leaves a saturating operation.
    with switches.lifted():
      outputs = interpreter.bind(equation, inputs)
      # Outputs on another mesh can only be used in the equation's context.
      with interpreter.context(equation):
        return [
          _saturate(x) if dtype in found else x
          for dtype, x in zip(dtypes, outputs, strict=True)
        ], ()


@promises.promise("unsaturated", assume=lambda x: x)
def _saturate(x: jax.Array) -> jax.Array:
  """Returns `x` with inf replaced by the largest finite value, and NaN by 0."""
  # A compiler that computes in a wider dtype has to round to this one before it
  # reads the bits, or what is `held`.
  if jnp.iscomplexobj(x):
    return lax.complex(_saturate(x.real), _saturate(x.imag))
  if not formats.has_inf(x.dtype):
    x = bits.held(x)
    return jnp.where(jnp.isnan(x), jnp.zeros((), x.dtype), x)
  magnitude = bits.magnitude_bits(x)
  unsigned = magnitude.dtype
  pattern = lax.bitcast_convert_type(x, unsigned)
  inf = np.array(np.inf, x.dtype).view(unsigned)
  # Subtracting 1 from the bits of inf gives those of the largest finite value.
  pattern = jnp.where(
    magnitude > inf,
    jnp.zeros((), unsigned),
    pattern - (magnitude == inf).astype(unsigned),
  )
  return lax.bitcast_convert_type(pattern, x.dtype)


@promises.promise("unsaturated", assume=lambda x, dtype: x)
def _clip(x: Array, dtype: np.dtype) -> jax.Array:
  largest = formats.largest(dtype)
  return jnp.where(jnp.isnan(x), 0, jnp.clip(x, -largest, largest))


def _zero_if_symbolic(cotangent: object) -> object:
  """Converts a symbolic zero to `ad.Zero`, JAX's internal form."""
  # JAX then leaves this path out of the backward pass, where 0 times inf would
  # be NaN. It does not document that what `jax.vjp` returns accepts `ad.Zero`.
  if isinstance(cotangent, jax.custom_derivatives.SymbolicZero):
    return ad.Zero(cotangent.aval)
  return cotangent
