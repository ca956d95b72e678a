"""Checks that functions are in full precision and do not call `autocast`."""

from collections.abc import Callable
import contextvars
import functools
from typing import ParamSpec
from typing import TypeVar

from jax.extend import core

from optax_lossscale._autocast import levels
from optax_lossscale._base import formats
from optax_lossscale._jaxpr import interpreter
from optax_lossscale._jaxpr import operations
from optax_lossscale._jaxpr import scopes

_is_refused: contextvars.ContextVar[bool] = contextvars.ContextVar(
  "_is_refused", default=False
)

_P = ParamSpec("_P")
_R = TypeVar("_R")


def in_full_precision(
  fun: Callable[_P, _R], *, keeps_products: bool
) -> Callable[_P, _R]:
  """Wraps `fun` so that it raises if part of it runs in low precision."""

  # Unless `keeps_products`, a product below float32 is such a part. It shows
  # that a layer or parameters have a low dtype, or that jit traced a function
  # under `autocast` earlier. Other values in low precision, such as stored
  # images, are allowed.
  @functools.wraps(fun)
  def checked_fun(*args: _P.args, **kwargs: _P.kwargs) -> _R:
    recording = interpreter.record(without_autocast(fun), args, kwargs)
    if not keeps_products:
      _check_products(recording.jaxpr)
    return recording.result(recording.evaluate(*recording.operands))

  return checked_fun


def without_autocast(fun: Callable[_P, _R]) -> Callable[_P, _R]:
  """Wraps `fun` so that calling `autocast` inside it raises an error."""

  @functools.wraps(fun)
  def refusing_fun(*args: _P.args, **kwargs: _P.kwargs) -> _R:
    token = _is_refused.set(True)
    try:
      return fun(*args, **kwargs)
    finally:
      _is_refused.reset(token)

  return refusing_fun


def refuse_autocast() -> None:
  """Raises if called inside a function that must not use `autocast`."""
  if _is_refused.get():
    raise ValueError(
      "`loss_fn` must not be under autocast, since the precision schedule "
      "decides when to lower it; pass it in float32, without autocast."
    )


def _check_products(jaxpr: core.Jaxpr) -> None:
  for scope, equation, _ in scopes.operations(jaxpr):
    name = operations.name_of(equation)
    dtype = operations.dtype_of(equation)
    if name in levels.PRODUCTS and formats.is_low(dtype):
      raise ValueError(
        "`loss_fn` must be in full precision, since training ends in full "
        f"precision, got {name!r} below float32"
        f"{f' in the scope {scope!r}' if scope else ''}; remove autocast and "
        "`dtype=float16` in layers, and use float32 parameters (or cast them "
        "in `loss_fn`). If this product is intended, pass "
        "PrecisionSchedule(..., allow_low_products=True)."
      )
