"""Functions with custom derivative rules, in mixed precision.

A rule is first recorded with the dtypes of the original program. The recording
is then evaluated in mixed precision, like the function itself.
"""

from collections.abc import Callable
from collections.abc import Sequence
import contextlib
import functools
import itertools
from typing import Any

import jax
from jax.extend import core
import jax.numpy as jnp
import numpy as np

from optax_lossscale._autocast import _value
from optax_lossscale._base import leaves
from optax_lossscale._jaxpr import interpreter
from optax_lossscale._jaxpr.interpreter import Array
from optax_lossscale._jaxpr.interpreter import Arrays

_Values = Sequence[_value.Value]
_EvaluateRule = Callable[[core.Jaxpr, _Values], _Values]
# Lowers the marked functions that a rule calls while it is recorded.
_Lowering = Callable[[], contextlib.AbstractContextManager[object]]


class Function:
  """A function of arrays, for an `evaluate` that takes and returns values."""

  def __init__(
    self, inputs: _Values, evaluate: Callable[[_Values], _Values]
  ) -> None:
    # JAX keeps a function that has a rule, but must not keep its inputs alive.
    self.inputs = [x.outline for x in inputs]
    self._evaluate = evaluate
    self._outputs: list[_value.Value] | None = None

  def run(self, *arguments: Array) -> list[Array]:
    """Runs the function, and keeps the outlines of its outputs."""
    outputs = self._evaluate(_value.with_arrays(self.inputs, arguments))
    self._outputs = [x.outline for x in outputs]
    return _value.get_arrays(outputs)

  @property
  def outputs(self) -> _Values:
    """The outlines of the outputs."""
    if self._outputs is None:
      # JAX calls only the rule if the inputs are already being differentiated.
      jax.eval_shape(self.run, *_value.get_arrays(self.inputs))
    return self._outputs or []


def keep_jvp(
  equation: core.JaxprEqn,
  itself: Function,
  evaluate_rule: _EvaluateRule,
  lowering: _Lowering,
) -> Callable[..., list[Array]]:
  """Returns the function of a `jax.custom_jvp`, with its derivative rule."""
  types: list[Any] = [atom.aval for atom in equation.invars]
  function = jax.custom_jvp(itself.run)

  @functools.partial(function.defjvp, symbolic_zeros=True)
  def jvp(primals: Arrays, tangents: Arrays) -> tuple[list[Array], list[Array]]:
    zero = jax.custom_derivatives.SymbolicZero
    moving = [
      not isinstance(x, zero) and leaves.is_gradient(x) for x in tangents
    ]
    places = [i for i, x in enumerate(moving) if x]
    with lowering():
      jaxpr = _record_tangents(equation, types, places)
    dtypes = [x.dtype for x in itself.outputs]
    outputs = evaluate_rule(
      jaxpr,
      [
        *_value.with_arrays(itself.inputs, primals),
        *(_value.Value(tangents[i], types[i].dtype) for i in places),
      ],
    )
    primals_out = _cast(outputs[: len(dtypes)], dtypes)
    of_floats = iter(outputs[len(dtypes) :])
    return primals_out, [
      next(of_floats).in_dtype(dtype)
      if jnp.issubdtype(dtype, jnp.inexact)
      else np.zeros(x.shape, jax.dtypes.float0)
      for x, dtype in zip(primals_out, dtypes, strict=True)
    ]

  return function


def keep_vjp(
  equation: core.JaxprEqn,
  itself: Function,
  evaluate_rule: _EvaluateRule,
  lowering: _Lowering,
) -> Callable[..., list[Array]]:
  """Returns the function of a `jax.custom_vjp`, with its derivative rule."""
  types: list[Any] = [atom.aval for atom in equation.invars]
  is_input = [leaves.is_gradient(x) for x in types]
  is_output = [
    leaves.is_gradient(variable.aval) for variable in equation.outvars
  ]

  @functools.cache
  def recorded() -> tuple[core.Jaxpr, Sequence[jax.ShapeDtypeStruct], object]:
    with lowering():
      return _record_forward(equation, types, is_input, is_output)

  def forward(*arguments: Array) -> tuple[list[Array], list[Array]]:
    jaxpr, _, _ = recorded()
    dtypes = [x.dtype for x in itself.outputs]
    results = evaluate_rule(jaxpr, _value.with_arrays(itself.inputs, arguments))
    kept = _value.get_arrays(results[len(dtypes) :])
    return _cast(results[: len(dtypes)], dtypes), kept

  def backward(kept: Arrays, cotangents: Arrays) -> tuple[Array | None, ...]:
    with lowering():
      jaxpr, dtypes = _record_backward(*recorded()[1:], is_output)
    arguments = [*kept, *itertools.compress(cotangents, is_output)]
    results = iter(
      evaluate_rule(jaxpr, list(map(_value.Value, arguments, dtypes)))
    )
    return tuple(
      next(results).in_dtype(x.dtype) if is_float else None
      for is_float, x in zip(is_input, itself.inputs, strict=True)
    )

  function = jax.custom_vjp(itself.run)
  function.defvjp(forward, backward)
  return function


def _record_tangents(
  equation: core.JaxprEqn, types: Sequence[Any], places: Sequence[int]
) -> core.Jaxpr:
  """Records a `custom_jvp` rule for tangents of the inputs in `places`."""

  def rule(
    primals: Arrays, tangents: Arrays
  ) -> tuple[list[Array], list[Array]]:
    def of_places(*active: Array) -> Arrays:
      arguments = list(primals)
      for place, x in zip(places, active, strict=True):
        arguments[place] = x
      return interpreter.bind(equation, arguments)

    outputs, of_outputs = jax.jvp(
      of_places, [primals[place] for place in places], list(tangents)
    )
    return list(outputs), [x for x in of_outputs if leaves.is_gradient(x)]

  return jax.make_jaxpr(rule)(types, [types[place] for place in places])


def _record_forward(
  equation: core.JaxprEqn,
  types: Sequence[Any],
  is_input: Sequence[bool],
  is_output: Sequence[bool],
) -> tuple[core.Jaxpr, Sequence[jax.ShapeDtypeStruct], object]:
  """Records the forward pass of a `custom_vjp` rule."""

  def forward(*arguments: Array) -> tuple[object, object]:
    def of_floats(*floats: Array) -> tuple[list[Array], list[Array]]:
      of_place = iter(floats)
      outputs = interpreter.bind(
        equation,
        [
          next(of_place) if is_float else x
          for is_float, x in zip(is_input, arguments, strict=True)
        ],
      )
      return list(itertools.compress(outputs, is_output)), list(outputs)

    _, vjp, outputs = jax.vjp(
      of_floats, *itertools.compress(arguments, is_input), has_aux=True
    )
    return outputs, vjp

  jaxpr, (outputs, vjp) = jax.make_jaxpr(forward, return_shape=True)(*types)
  return jaxpr, outputs, vjp


def _record_backward(
  outputs: Sequence[jax.ShapeDtypeStruct],
  vjp: object,
  is_output: Sequence[bool],
) -> tuple[core.Jaxpr, list[np.dtype]]:
  """Records a rule's backward pass, and returns it with its input dtypes."""
  kept, structure = jax.tree.flatten(vjp)
  of_floats = list(itertools.compress(outputs, is_output))
  jaxpr = jax.make_jaxpr(
    lambda kept, cotangents: jax.tree.unflatten(structure, kept)(cotangents)
  )(kept, of_floats)
  return jaxpr, [x.dtype for x in (*kept, *of_floats)]


def _cast(values: _Values, dtypes: Sequence[np.dtype]) -> list[Array]:
  return [
    x.in_dtype(dtype) if x.is_float else x.array
    for x, dtype in zip(values, dtypes, strict=True)
  ]
