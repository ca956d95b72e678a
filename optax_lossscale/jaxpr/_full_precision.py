"""Functions that must be in full precision as they are written."""

from collections.abc import Callable
import functools
from typing import Any

from jax.extend import core
import jax.numpy as jnp

from optax_lossscale.jaxpr import _calls
from optax_lossscale.jaxpr import _operations
from optax_lossscale.jaxpr import _record
from optax_lossscale.precision import _operation_lists


def in_full_precision(fun: Callable[..., Any]) -> Callable[..., Any]:
  """Returns `fun`, as a function that refuses to run in low precision.

  That shows in its products, whatever made them so: `autocast` somewhere
  inside, the dtype of a layer, that of the parameters. What else there is in
  low precision, such as images that are stored so, does not matter.

  Args:
    fun: any function that JAX can trace.

  Raises:
    ValueError: when called, if a product is below float32.
  """

  @functools.wraps(fun)
  def checked_fun(*args: Any, **kwargs: Any) -> Any:
    jaxpr = _record.record(fun, args, kwargs).jaxpr
    for scope, equation in _calls.equations(jaxpr):
      name = _operations.listed_name(equation)
      if name in _operation_lists.PRODUCTS and _is_low(equation):
        raise ValueError(
          "`loss_fn` must be in full precision as it is written, since that is "
          f"how training ends, got {name!r} below float32"
          f"{f' in the scope {scope!r}' if scope else ''}; leave out autocast "
          "and `dtype=float16` in layers, and let the parameters be float32."
        )
    return fun(*args, **kwargs)

  return checked_fun


def _is_low(equation: core.JaxprEqn) -> bool:
  # An input that is stored so does not make a product low.
  return any(map(_is_narrow, equation.outvars)) or all(
    map(_is_narrow, equation.invars)
  )


def _is_narrow(value: Any) -> bool:
  dtype = value.aval.dtype
  is_float = jnp.issubdtype(dtype, jnp.floating)
  return bool(is_float and jnp.finfo(dtype).bits < 32)
