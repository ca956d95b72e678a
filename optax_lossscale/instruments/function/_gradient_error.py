"""The error of a whole gradient in low precision, by loss scale."""

from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Iterator
from collections.abc import Mapping
from collections.abc import Sequence
import dataclasses
import functools
import math
from typing import Any

from chex import ArrayTree
import jax
import numpy as np
import numpy.typing as npt
import optax

from optax_lossscale._autocast import autocast
from optax_lossscale._base import arguments
from optax_lossscale._base import formats
from optax_lossscale._base import leaves
from optax_lossscale._base import switches
from optax_lossscale._base import tables
from optax_lossscale._jaxpr import interpreter
from optax_lossscale._step import backward
from optax_lossscale.instruments import shared
from optax_lossscale.instruments.function import _precision_report

# Errors up to this many times the rounding count as rounding alone. So do those
# that a few roundings to float16 could make, whatever made them.
_AS_GOOD = 1.1
_TINY = 2.0**-9

# A rounding above this deserves a warning.
_LARGE = 0.1


@dataclasses.dataclass(frozen=True)
class GradientErrorReport:
  """The findings of `gradient_error`; print it for a table and a sentence.

  Attributes:
    precision: the dtypes below float32 that the gradient was computed in, such
      as "float16".
    errors: for each S, the norm of the difference from the float32 gradient,
      divided by that gradient's norm; inf if the gradient overflows at that S.
    zeros: for each S, the share that underflowed to 0, of the elements that are
      not 0 in float32.
    by_leaf: the same findings for each parameter alone, by path, such as
      "Dense_0/kernel". Parameters whose gradient is 0 in float32 are left out.
  """

  precision: str
  errors: Mapping[float, float]
  zeros: Mapping[float, float]
  by_leaf: Mapping[str, "GradientErrorReport"] = dataclasses.field(repr=False)

  @property
  def rounding(self) -> float:
    """The error at the largest S that does not overflow; inf without one."""
    return next(reversed(self._finite.values()), math.inf)

  @property
  def least_loss_scale(self) -> float | None:
    """The smallest S that leaves only rounding, if the findings show one.

    Its error is at most 1.1 times `rounding`, and a larger S does no better. Or
    its error is at most 0.2 %. None if most of the gradient is 0 even at the
    largest S that does not overflow.
    """
    good = [scale for scale in self._finite if self._is_rounding(scale)]
    is_shown = len(good) > 1 or self.rounding <= _TINY
    return good[0] if is_shown and not self._is_lost else None

  @property
  def _finite(self) -> dict[float, float]:
    return {x: e for x, e in sorted(self.errors.items()) if math.isfinite(e)}

  @property
  def _is_lost(self) -> bool:
    """True if most of the gradient is 0 at every S that does not overflow."""
    return bool(self._finite) and self.zeros[max(self._finite)] > 0.5

  def _is_rounding(self, loss_scale: float) -> bool:
    limit = max(_AS_GOOD * self.rounding, _TINY)
    return self.errors.get(loss_scale, math.inf) <= limit

  def __str__(self) -> str:
    rows = []
    for scale, error in self.errors.items():
      found = "overflow"
      if math.isfinite(error):
        found = f"error {error:7.2%}, {self.zeros[scale]:6.1%} zeros"
      rows.append((f"  S = {_shown(scale)}", found))
    title = f"Gradient in {self.precision}, compared with float32"
    return "\n".join([title, *tables.aligned(rows, "<<"), *self._sentences()])

  def _sentences(self) -> Iterator[str]:
    """Yields what the errors mean for the choice of S."""
    least, finite = self.least_loss_scale, self._finite
    if not finite:
      yield "The gradient overflows at every S that was tried. Try a smaller S."
      yield (
        "If it overflows there too, the forward pass does: see "
        "ols.instruments.where_overflow(low_loss_fn)."
      )
      return
    largest = max(finite)
    if least is None:
      told = "One S does not tell underflow from rounding."
      if self._is_lost:
        told = f"Most of the gradient is 0 at S = {_shown(largest)}."
      elif len(finite) > 1:
        told = f"The error still falls at S = {_shown(largest)}."
      above = [scale for scale in self.errors if scale > largest]
      larger = "Try a larger S."
      if above:
        larger = f"S = {_shown(min(above))} overflows: try S between the two."
      yield f"{told} {larger}"
      return
    needs_none = self._is_rounding(1.0)
    worst = self.errors[1.0 if needs_none else least]
    left = f"the error is at most {worst:.2%}, which is small"
    if worst <= _AS_GOOD * self.rounding:
      left = f"the error is rounding, {self.rounding:.2%}, which no S changes"
    if needs_none:
      yield f"This gradient needs no loss scaling: {left}."
    elif least == largest:
      yield f"At S = {_shown(least)}, {left}."
    else:
      yield f"From S = {_shown(least)} to {_shown(largest)}, {left}."
    if self.rounding > _LARGE:
      yield (
        "That is a large part of this gradient. Either it is small, as near an "
        "optimum, or some operation should stay in float32, as `overrides` of "
        "`autocast` makes it."
      )


def gradient_error(
  loss_fn: Callable[..., Any],
  low_loss_fn: Callable[..., Any] | None = None,
  *,
  loss_scales: float | Sequence[float] = (1, 2**10, 2**15),
  has_aux: bool = False,
) -> Callable[..., GradientErrorReport]:
  """Returns a function that measures the error of a gradient at each S.

  Does a model need loss scaling, and which S? The gradient of one batch is
  computed in float32, and in low precision at each S. An error that falls with
  S is underflow, in the backward pass. The error that is left at the largest S
  that does not overflow is rounding, which no S cures.

  Gradients usually shrink during training, so measure with the first parameters
  and again with trained ones. An error need not harm training: see
  docs/does_it_matter.md.

  Args:
    loss_fn: a function of parameters and anything else that computes a scalar
      loss in float32, not under `autocast` and without `dtype=` in layers.
    low_loss_fn: the same loss in low precision, with the same arguments; None
      for `autocast(loss_fn)`.
    loss_scales: one S or several.
    has_aux: whether the losses return a pair of the loss and auxiliary data.

  Returns:
    A function with the arguments of `loss_fn` that returns a
    `GradientErrorReport`. It differentiates with respect to the first argument,
    and leaves out its integers. It compiles on each call, asks for the highest
    precision of the reference's products, and compares on the host, in float64.

  Raises:
    TypeError: if an argument has the wrong type. When called: if a loss is not
      a floating-point scalar.
    ValueError: if `loss_scales` is empty or holds an S that is not usable. When
      called: if `loss_fn` does not compute in float32 or wider, if
      `low_loss_fn` does, if the float32 gradient is 0 or not finite, or under
      jit, grad or vmap.

  Examples:
    >>> import jax.numpy as jnp
    >>> import optax_lossscale as ols
    >>> def loss_fn(weights, x):
    ...   return jnp.mean((x @ weights) ** 2)
    >>> weights, x = jnp.full((8, 4096), 2.0**-12), jnp.ones((64, 8))
    >>> print(ols.instruments.gradient_error(loss_fn)(weights, x))
    Gradient in float16, compared with float32
      S = 1      error 100.00%, 100.0% zeros
      S = 1024   error   0.00%,   0.0% zeros
      S = 32768  error   0.00%,   0.0% zeros
    From S = 1024 to 32768, the error is rounding, 0.00%, which no S changes.
  """
  arguments.check_function(loss_fn, "loss_fn")
  if low_loss_fn is None:
    low_loss_fn = autocast.autocast(loss_fn)
  arguments.check_function(low_loss_fn, "low_loss_fn")
  arguments.check_flag("has_aux", has_aux)
  scales = _check_scales(loss_scales)

  @functools.wraps(loss_fn)
  @switches.lifted()
  def gradient_error_fun(
    params: optax.Params, /, *args: object, **kwargs: object
  ) -> GradientErrorReport:
    reference = compute_reference(loss_fn, has_aux, (params, *args), kwargs)
    in_low = Gradient(low_loss_fn, has_aux, (params, *args), kwargs)
    precision = ", ".join(sorted({x for *_, x in in_low.low_operations()}))
    if not precision:
      raise ValueError(
        "`low_loss_fn` must compute below float32, got no such operation; see "
        "ols.instruments.precision_report(low_loss_fn, ...). By default it is "
        "ols.autocast(loss_fn)."
      )
    true = _sums(reference.values(), reference.values())
    found = {
      scale: _differences(in_low.at(scale), reference) for scale in scales
    }

    def report(rows: slice) -> GradientErrorReport:
      square, number = true[rows].sum(axis=0).tolist()
      of = {s: x[rows].sum(axis=0).tolist() for s, x in found.items()}
      return GradientErrorReport(
        precision,
        {scale: math.sqrt(x / square) for scale, (x, _) in of.items()},
        {scale: x / number for scale, (_, x) in of.items()},
        {},
      )

    by_leaf = {
      path: report(slice(i, i + 1))
      for i, path in enumerate(reference)
      if true[i, 1]
    }
    return dataclasses.replace(report(slice(None)), by_leaf=by_leaf)

  return gradient_error_fun


def compute_reference(
  loss_fn: Callable[..., object],
  has_aux: bool,
  args: tuple[object, ...],
  kwargs: Mapping[str, object],
) -> dict[str, np.ndarray]:
  """Returns the gradient in float32 of each parameter, as rows of float64."""
  params = shared.named(args[0])
  if not params:
    raise ValueError(
      "`params` must hold floating-point arrays, got "
      f"{arguments.shown(args[0])}."
    )
  # Otherwise float32 products are TF32 on some GPUs, and bfloat16 on TPUs.
  with jax.default_matmul_precision("highest"):
    in_float32 = Gradient(loss_fn, has_aux, args, kwargs)
  remedy = (
    "gradients are compared with float32: pass float32 parameters, and a "
    "`loss_fn` without autocast and without low dtypes (`dtype=` of layers)"
  )
  for path, x in params.items():
    if formats.is_low(x.dtype):
      raise ValueError(
        f"The parameters must be float32 or wider, got {x.dtype.name} at "
        f"{path!r}; {remedy}."
      )
  for scope, name, dtype in in_float32.low_operations():
    raise ValueError(
      f"`loss_fn` must compute in float32, got {name!r} in {dtype}"
      f"{f' in the scope {scope!r}' if scope else ''}; {remedy}."
    )
  reference = in_float32.at(1.0)
  for path, row in reference.items():
    if not np.all(np.isfinite(row)):
      raise ValueError(
        "the gradient of `loss_fn` must be finite in float32, got inf or NaN "
        f"at {path!r}; take another batch, or see "
        "ols.instruments.where_overflow(jax.grad(loss_fn), "
        "check=ols.nonfinite(jnp.float32))."
      )
  if not any(map(np.any, reference.values())):
    raise ValueError(
      "the gradient of `loss_fn` must not be 0 everywhere, got zeros in "
      "float32; take another batch or other parameters."
    )
  return reference


def difference(
  first: Mapping[str, np.ndarray], second: Mapping[str, np.ndarray]
) -> float:
  """Returns how far two gradients are apart, relative to their mean norm."""
  one, other = distance(first, second), distance(second, first)
  return 2 / (1 / one + 1 / other) if one and other else 0.0


def distance(
  gradient: Mapping[str, np.ndarray], reference: Mapping[str, np.ndarray]
) -> float:
  """Returns how far a gradient is from another, relative to the latter."""
  square, _ = _sums(reference.values(), reference.values()).sum(axis=0)
  return math.sqrt(_differences(gradient, reference).sum(axis=0)[0] / square)


class Gradient:
  """The gradient of a function at its arguments, compiled once for every S."""

  def __init__(
    self,
    fun: Callable[..., object],
    has_aux: bool,
    args: tuple[object, ...],
    kwargs: Mapping[str, object],
  ):
    # Integers are left out. The error about functions names another remedy.
    allow_int = not any(map(callable, jax.tree.leaves(args[0])))

    def gradient(
      loss_scale: jax.Array, *args: object, **kwargs: object
    ) -> dict[str, jax.Array]:
      differentiated = backward.ScaledValueAndGrad(
        fun, loss_scale, 0, has_aux, allow_int
      ).at(loss_scale)
      _, scaled_grads = differentiated(*args, **kwargs)
      return shared.named(leaves.unscale(scaled_grads, loss_scale))

    scale = np.float32(1.0)
    recording = interpreter.record(gradient, (scale, *args), kwargs)
    if any(isinstance(x, jax.core.Tracer) for x in recording.operands):
      raise ValueError(
        "Gradients are compared on the host, so this must be called outside of "
        "jit, grad, vmap and scan, got traced values."
      )
    self.jaxpr = recording.jaxpr
    self._recording = recording
    self._run = jax.jit(recording.evaluate)

  def at(self, loss_scale: float) -> dict[str, np.ndarray]:
    """Returns the gradient of each parameter at this S, as rows of float64."""
    operands: list[Any] = [*self._recording.operands]
    # The constants come before the arguments, and S is the first of these.
    operands[len(self.jaxpr.consts)] = np.float32(loss_scale)
    named = self._recording.result(self._run(*operands))
    return {path: _row(x) for path, x in jax.device_get(named).items()}

  def low_operations(self) -> Iterator[tuple[str, str, str]]:
    """Yields scope, name and dtype of each operation below float32."""
    for scope, _, _, name, dtype in _precision_report.computing(self.jaxpr):
      if formats.is_low(dtype):
        yield scope, name, dtype.name


def _check_scales(loss_scales: float | Sequence[float]) -> list[float]:
  """Returns the scales as floats, in ascending order."""
  values: Sequence[object] = [loss_scales]
  if isinstance(loss_scales, (np.ndarray, jax.Array)):
    values = np.ravel(loss_scales).tolist()
  elif isinstance(loss_scales, Iterable) and not isinstance(loss_scales, str):
    values = list(loss_scales)
  if not values:
    raise ValueError("`loss_scales` must hold at least one S, got none.")
  return sorted({arguments.check_scale("loss_scales", x) for x in values})


def _differences(
  low: Mapping[str, np.ndarray], reference: Mapping[str, np.ndarray]
) -> npt.NDArray[np.float64]:
  """Returns how far each parameter is off, and how much of it became 0."""
  lost = [(low[path] == 0) & (true != 0) for path, true in reference.items()]
  found = _sums([low[path] - true for path, true in reference.items()], lost)
  return np.where(np.isfinite(found), found, np.inf)


def _sums(
  rows: Iterable[np.ndarray], counted: Iterable[np.ndarray]
) -> npt.NDArray[np.float64]:
  """Returns float64[n, 2], the square of each row and what is counted in it."""
  pairs = zip(rows, counted, strict=True)
  return np.array([(row @ row, np.count_nonzero(x)) for row, x in pairs])


def _shown(loss_scale: float) -> str:
  """Returns S as a short number, or as a power of two."""
  fraction, exponent = math.frexp(loss_scale)
  if fraction == 0.5 and not 0 < exponent <= 17:
    return f"2**{exponent - 1}"
  return f"{loss_scale:g}"


def _row(x: np.ndarray) -> np.ndarray:
  """Returns a gradient as one row of float64; a complex one as its parts."""
  if np.iscomplexobj(x):
    x = np.stack([x.real, x.imag])
  return np.asarray(x, np.float64).reshape(-1)
