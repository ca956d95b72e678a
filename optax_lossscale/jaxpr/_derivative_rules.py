"""Functions with derivative rules of their own, in mixed precision.

The function and its rule are evaluated alike: the rule is recorded as it is
written, of the dtypes that it is written for, and evaluated like anything else.
"""

from collections.abc import Callable
from collections.abc import Sequence
import functools
from typing import Any

import jax
from jax.extend import core
import jax.numpy as jnp
import numpy as np

from optax_lossscale.jaxpr import _dtypes
from optax_lossscale.jaxpr import _evaluate
from optax_lossscale.jaxpr import _value

# Evaluates a jaxpr; returns its outputs.
Interpret = Callable[[Any, Sequence[_value.Value]], list[_value.Value]]


def custom_jvp(
  equation: core.JaxprEqn,
  inputs: Sequence[_value.Value],
  interpret: Interpret,
) -> list[_value.Value]:
  """Returns the outputs of a `jax.custom_jvp`, which stays one.

  Args:
    equation: the call.
    inputs: the values of its inputs.
    interpret: evaluates the function, and its rule.
  """
  types = [atom.aval for atom in equation.invars]
  run, outputs = _function(equation, inputs, interpret)
  dtypes = [x.dtype for x in outputs]
  function = jax.custom_jvp(run)

  @functools.partial(function.defjvp, symbolic_zeros=True)
  def jvp(primals: Any, tangents: Any) -> Any:
    places = [i for i, x in enumerate(tangents) if not _is_zero(x)]

    def rule(primals: Any, tangents: Any) -> Any:
      def of_places(*active: Any) -> Any:
        arguments = list(primals)
        for place, x in zip(places, active, strict=True):
          arguments[place] = x
        return _evaluate.bind(equation, arguments)

      outputs, of_outputs = jax.jvp(
        of_places, [primals[place] for place in places], list(tangents)
      )
      return list(outputs), [x for x in of_outputs if _is_float(x)]

    jaxpr = jax.make_jaxpr(rule)(types, [types[place] for place in places])
    outputs = interpret(
      jaxpr,
      [
        *_received(inputs, primals),
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

  return _values(equation, function(*_value.arrays(inputs)), outputs)


def custom_vjp(
  equation: core.JaxprEqn,
  inputs: Sequence[_value.Value],
  interpret: Interpret,
) -> list[_value.Value]:
  """Returns the outputs of a `jax.custom_vjp`, which stays one.

  Args:
    equation: the call.
    inputs: the values of its inputs.
    interpret: evaluates the function, and both parts of its rule.
  """
  types = [atom.aval for atom in equation.invars]
  is_input = [_is_float(x) for x in types]
  is_output = [_is_float(variable.aval) for variable in equation.outvars]
  run, outputs = _function(equation, inputs, interpret)
  dtypes = [x.dtype for x in outputs]

  @functools.cache
  def record_forward() -> Any:
    def forward(*arguments: Any) -> Any:
      def of_floats(*floats: Any) -> Any:
        of_place = iter(floats)
        outputs = _evaluate.bind(
          equation,
          [
            next(of_place) if is_float else x
            for is_float, x in zip(is_input, arguments, strict=True)
          ],
        )
        return _chosen(outputs, is_output), list(outputs)

      _, vjp, outputs = jax.vjp(
        of_floats, *_chosen(arguments, is_input), has_aux=True
      )
      return outputs, vjp

    return jax.make_jaxpr(forward, return_shape=True)(*types)

  def forward(*arguments: Any) -> Any:
    jaxpr, (_, vjp) = record_forward()
    results = interpret(jaxpr, _received(inputs, arguments))
    kept = _value.arrays(results[len(dtypes) :])
    del vjp
    return _cast(results[: len(dtypes)], dtypes), kept

  def backward(kept: Any, cotangents: Any) -> Any:
    _, (of_outputs, vjp) = record_forward()
    shapes, structure = jax.tree.flatten(vjp)

    def rule(kept: Any, cotangents: Any) -> Any:
      return jax.tree.unflatten(structure, kept)(cotangents)

    of_floats = _chosen(of_outputs, is_output)
    jaxpr = jax.make_jaxpr(rule)(shapes, of_floats)
    results = iter(
      interpret(
        jaxpr,
        [
          *map(_value.Value, kept, [x.dtype for x in shapes]),
          *(
            _value.Value(x, shape.dtype)
            for x, shape in zip(
              _chosen(cotangents, is_output), of_floats, strict=True
            )
          ),
        ],
      )
    )
    return tuple(
      next(results).in_dtype(x.dtype) if is_float else None
      for is_float, x in zip(is_input, inputs, strict=True)
    )

  function = jax.custom_vjp(run)
  function.defvjp(forward, backward)
  return _values(equation, function(*_value.arrays(inputs)), outputs)


def _function(
  equation: core.JaxprEqn,
  inputs: Sequence[_value.Value],
  interpret: Interpret,
) -> tuple[Callable[..., list[Any]], list[Any]]:
  """Returns the function itself, and the types of what it returns."""

  def run(*arguments: Any) -> list[Any]:
    return _value.arrays(
      interpret(equation.params["call_jaxpr"], _received(inputs, arguments))
    )

  return run, jax.eval_shape(run, *_value.arrays(inputs))


def _values(
  equation: core.JaxprEqn, arrays: Sequence[Any], types: Sequence[Any]
) -> list[_value.Value]:
  del types
  return [
    _value.Value(array, variable.aval.dtype)
    for variable, array in zip(equation.outvars, arrays, strict=True)
  ]


def _received(
  values: Sequence[_value.Value], arrays: Sequence[Any]
) -> list[_value.Value]:
  return [x.received(array) for x, array in zip(values, arrays, strict=True)]


def _cast(values: Sequence[_value.Value], dtypes: Sequence[Any]) -> list[Any]:
  return [
    x.in_dtype(dtype) if x.is_float else x.array
    for x, dtype in zip(values, dtypes, strict=True)
  ]


def _chosen(values: Sequence[Any], is_chosen: Sequence[bool]) -> list[Any]:
  return [x for x, chosen in zip(values, is_chosen, strict=True) if chosen]


def _is_zero(tangent: Any) -> bool:
  return isinstance(
    tangent, jax.custom_derivatives.SymbolicZero
  ) or not _is_float(tangent)


def _is_float(x: Any) -> bool:
  return _dtypes.part_dtype(x) is not None
