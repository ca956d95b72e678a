"""Scales the loss by S, differentiates it and unscales the gradients."""

from collections.abc import Callable
from collections.abc import Sequence
import dataclasses
import functools
from typing import Any
from typing import NamedTuple

from chex import ArrayTree
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
import numpy as np
import optax

from optax_lossscale._base import arguments
from optax_lossscale._base import leaves
from optax_lossscale._base import promises
from optax_lossscale._jaxpr import interpreter
from optax_lossscale._step import provenance
from optax_lossscale._step import requirements
from optax_lossscale._step import states

# Remedies for leaves that have no gradient, by the library of the model.
_REMEDIES = {
  "'flax.nnx.": "of an NNX model pass the parameters alone, nnx.split(model, "
  "nnx.Param, ...); optax_lossscale.nnx.scaled_value_and_grad takes all of it",
  "'equinox.": "of an Equinox model pass the arrays alone, eqx.partition(model,"
  " eqx.is_inexact_array); scaled_value_and_grad takes all of it with "
  "value_and_grad=eqx.filter_value_and_grad",
  "": "pass it in another argument",
}


class Bound(NamedTuple):
  """The fields of `ScaledValueAndGrad.bind`, for a scan over micro-batches."""

  loss_scale: jax.Array
  places: arguments.Places  # Of the arguments to differentiate and to split.
  given: Any  # The arguments to differentiate.
  like: Any  # A tree like the gradients; None if only a trace can tell.
  variables: object  # The values that a call changes in place.
  # The function without such changes. It takes the variables first, and returns
  # their next values last.
  pure: Callable[..., Any]
  store: Callable[[Any], None]  # Stores the last values.


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class ScaledValueAndGrad:
  """The function that a `scaled_value_and_grad` returns; `accumulate` takes it.

  A subclass may find S in another place by its own `loss_scale`, differentiate
  in another way by its own `at`, or change objects in place by its own `bind`.

  Attributes:
    fun: the loss function.
    opt_state: the state of the wrapper, which holds S, or S itself.
    argnums: which positional arguments to differentiate with respect to.
    has_aux: whether `fun` returns a pair of the loss and auxiliary data.
    allow_int: whether to allow differentiation with respect to integers.
    value_and_grad: the function that differentiates.

  Examples:
    >>> import jax.numpy as jnp
    >>> import optax_lossscale as ols
    >>> value_and_grad = ols.scaled_value_and_grad(jnp.sum, 1024.0)
    >>> isinstance(value_and_grad, ols.ScaledValueAndGrad)
    True
    >>> value_and_grad.at(jnp.float32(8.0))(jnp.array([1.0, 2.0]))
    (Array(3., dtype=float32), Array([8., 8.], dtype=float32))
  """

  fun: Callable[..., Any]
  opt_state: optax.OptState
  argnums: int | Sequence[int] = 0
  has_aux: bool = False
  allow_int: bool = False
  value_and_grad: Callable[..., Any] = dataclasses.field(
    default_factory=lambda: jax.value_and_grad  # No method of the class.
  )

  def __post_init__(self) -> None:
    check_argnums(self.argnums, arguments.argnums_as_tuple(self.argnums))
    arguments.check_function(self.value_and_grad, "value_and_grad")
    arguments.check_fields(
      self, has_aux=arguments.check_flag, allow_int=arguments.check_flag
    )
    # As `functools.wraps` does, which a frozen object refuses. The attributes
    # of a callable `fun` must not replace those above.
    for name in functools.WRAPPER_ASSIGNMENTS:
      if hasattr(self.fun, name):
        vars(self)[name] = getattr(self.fun, name)
    vars(self)["__wrapped__"] = self.fun

  def __call__(self, *args: object, **kwargs: object) -> tuple[Any, ArrayTree]:
    loss_scale = self.loss_scale()
    value, scaled_grads = self.at(loss_scale)(*args, **kwargs)
    loss, *aux = value if self.has_aux else (value,)
    loss = promises.noted("loss", loss)
    value = (loss, *aux) if self.has_aux else loss
    provenance.note(scaled_grads, "scaled", loss_scale, self.opt_state)
    return value, scaled_grads

  def loss_scale(self) -> jax.Array:
    """Returns S as float32[]; raises if compiling would freeze it."""
    return states.scale_in_use(self.opt_state)

  def at(self, loss_scale: jax.Array) -> Callable[..., tuple[Any, ArrayTree]]:
    """Returns the function at a given S, float32[], usable or not."""
    loss_scale = jnp.asarray(arguments.as_real_scalar("loss_scale", loss_scale))
    options = {} if self.argnums == 0 else {"argnums": self.argnums}
    if self.allow_int:
      options["allow_int"] = self.allow_int
    # Other versions, such as Flax NNX's, may keep the changes that `fun` makes.
    may_change = self.value_and_grad is not jax.value_and_grad
    scaled_fun = _scaled_loss_fn(
      self.fun, loss_scale, self.has_aux, may_change=may_change
    )
    try:
      differentiated = self.value_and_grad(scaled_fun, has_aux=True, **options)
      arguments.check_function(differentiated)
    except TypeError as error:
      raise _unlike_value_and_grad(self.value_and_grad) from error

    def scaled_value_and_grad_fun(
      *args: object, **kwargs: object
    ) -> tuple[Any, ArrayTree]:
      try:
        result = differentiated(*args, **kwargs)
      except TypeError as error:
        # JAX raises this for leaves without gradients. Other errors pass.
        is_jax = self.value_and_grad in (jax.value_and_grad, jax.grad)
        if is_jax and not self.allow_int:
          numbers = arguments.argnums_as_tuple(self.argnums)
          for i, x in enumerate(args):
            if i in numbers or i - len(args) in numbers:
              _refuse_unless_arrays({f"args[{i}]": x}, error)
        raise
      match result:
        case ((_, (loss, value)), gradients):
          return value, _inf_where_unusable(loss_scale, loss.dtype, gradients)
      raise _unlike_value_and_grad(self.value_and_grad)

    return scaled_value_and_grad_fun

  def bind(
    self, args: tuple[object, ...], batch_argnums: object = None
  ) -> tuple[Any, ...]:
    """Returns what `accumulate` needs of a call, for its scan.

    Args:
      args: the arguments of a call.
      batch_argnums: which of them to split; None for all but those that are
        differentiated.

    Returns:
      The fields of a `Bound`.
    """
    if not isinstance(args, tuple):
      raise TypeError(f"`args` must be a tuple, got {arguments.shown(args)}.")
    loss_scale = self.loss_scale()
    places = arguments.find_places(self.argnums, batch_argnums, len(args))
    differentiated = self.at(loss_scale)
    given = arguments.like_argnums(
      self.argnums, tuple(args[i] for i in places.differentiated)
    )
    like = None  # A model may hold more than its gradients.
    is_own = type(self).at is ScaledValueAndGrad.at
    if is_own and self.value_and_grad is jax.value_and_grad:
      like = given = leaves.as_arrays(given)

    def pure(
      variables: object, *args: object, **kwargs: object
    ) -> tuple[object, ...]:
      return (*differentiated(*args, **kwargs), variables)

    return Bound(
      loss_scale, places, given, like, (), pure, lambda variables: None
    )


@arguments.explained
def scaled_value_and_grad(
  fun: Callable[..., Any],
  opt_state: optax.OptState,
  argnums: int | Sequence[int] = 0,
  has_aux: bool = False,
  *,
  allow_int: bool = False,
  path: str | None = None,
  value_and_grad: Callable[..., Any] = jax.value_and_grad,
) -> ScaledValueAndGrad:
  """Returns a function that computes the loss and its *scaled* gradients.

  The function differentiates `S * fun` like `jax.value_and_grad`, but returns
  the true loss. Pass the scaled gradients to the `update` of `loss_scaling`
  with the same `opt_state`; `unscale` returns the true ones.

  A float16 loss works, because it is multiplied by S in float32. If the loss's
  dtype cannot hold S, all gradients are set to inf, so the wrapper sees an
  overflow and S comes down.

  Args:
    fun: a function that returns a real scalar, or `(loss, aux)` with `has_aux`.
    opt_state: an optimizer state that holds a loss scale, or the scale itself.
    argnums: which positional arguments to differentiate with respect to.
    has_aux: whether `fun` returns a pair of the loss and auxiliary data.
    allow_int: whether to allow differentiation with respect to integers. Their
      gradients have dtype float0, which most optimizers of optax refuse.
    path: which scale, if `opt_state` holds several. See `get_loss_scale`.
    value_and_grad: the function that differentiates, for models that are not
      pytrees of arrays: `eqx.filter_value_and_grad` or `nnx.value_and_grad`. It
      is called with has_aux=True, and any `argnums` and `allow_int` you set.

  Returns:
    A `ScaledValueAndGrad`, which takes the arguments of `fun` and returns
    `(loss, scaled_grads)`, or `((loss, aux), scaled_grads)`.

  Raises:
    ValueError: if `opt_state` holds no scale, or several without a `path`, or
      if `argnums` is empty or repeats a number; when called, if a function
      being traced (jit, scan, shard_map ...) closes over `opt_state`, so that S
      would never change, or if `fun` changes an object in place.
    TypeError: if `argnums` is not made of integers; when called, if `fun` does
      not return a floating-point scalar, or if `value_and_grad` returns only
      gradients, like jax.grad.

  Warns:
    WiringWarning: if `optax.MultiSteps` or `optax.apply_if_finite` is around
      `loss_scaling`. `check_step` finds what else belongs inside.

  Examples:
    >>> import jax.numpy as jnp
    >>> import optax
    >>> import optax_lossscale as ols
    >>> tx = ols.loss_scaling(optax.sgd(0.1), ols.FixedLossScale(1024.0))
    >>> params = jnp.array([1.0, 2.0])
    >>> opt_state = tx.init(params)
    >>> loss_fn = lambda params: jnp.sum(params**2)
    >>> ols.scaled_value_and_grad(loss_fn, opt_state)(params)
    (Array(5., dtype=float32), Array([2048., 4096.], dtype=float32))
  """
  return ScaledValueAndGrad(
    fun,
    check_arguments(opt_state, argnums, path),
    argnums,
    has_aux,
    allow_int=allow_int,
    value_and_grad=value_and_grad,
  )


def _refuse_unless_arrays(given: dict[str, object], error: TypeError) -> None:
  """Raises an error that names the first leaf without a gradient, if any."""
  classes: set[type] = set()

  def note(x: object) -> bool:
    classes.update(type(x).__mro__)
    return False

  for path, leaf in jax.tree.leaves_with_path(leaves.as_arrays(given), note):
    if not leaves.is_gradient(leaf):
      remedies = [_REMEDIES[x] for x in _REMEDIES if x in str(classes)]
      raise TypeError(
        "the differentiated values must be floating-point arrays, got "
        f"{getattr(leaf, 'dtype', type(leaf).__name__)} at "
        f"{leaves.path_name(path)!r}; {remedies[0]}."
      ) from error


def _unlike_value_and_grad(function: object) -> TypeError:
  """Returns the error for a function that is not like `jax.value_and_grad`."""
  name = getattr(function, "__name__", type(function).__name__)
  return TypeError(
    "`value_and_grad` must be like jax.value_and_grad: it takes the loss "
    "function with has_aux=True, and returns a function that returns ((loss, "
    f"aux), gradients), got {name}; leave it out, or pass "
    "eqx.filter_value_and_grad or nnx.value_and_grad itself."
  )


def check_arguments(
  opt_state: optax.OptState, argnums: object, path: str | None
) -> optax.OptState:
  """Checks arguments; returns the state that holds S, or S itself."""
  check_argnums(argnums, arguments.argnums_as_tuple(argnums))
  states.get_loss_scale(opt_state, path=path)  # Raises if there is not one.
  requirements.check_surroundings(opt_state)
  is_scale = isinstance(opt_state, states.SCALES)
  return opt_state if is_scale else states.find_state(opt_state, path)


def check_argnums(argnums: object, numbers: Sequence[object]) -> None:
  """Raises unless the numbers in `argnums` are integers, each there once."""
  for number in numbers:
    try:
      arguments.check_integer("argnums", number, unit="")
    except TypeError:
      raise TypeError(
        "`argnums` must be an integer or integers, got "
        f"{arguments.kind_of(number)}; the arguments of `fun` go to what is "
        "returned: scaled_value_and_grad(fun, opt_state)(params)."
      ) from None
  if len({*numbers}) < max(len(numbers), 1):
    raise ValueError(
      "`argnums` must name at least one argument, and each once, got "
      f"{arguments.shown(argnums)}."
    )


def _scaled_loss_fn(
  fun: Callable[..., Any],
  loss_scale: jax.Array,
  has_aux: bool,
  *,
  may_change: bool,
) -> Callable[..., tuple[jax.Array, Any]]:
  """Returns a function that returns S times the loss, with the loss as aux."""
  arguments.check_function(fun)

  @functools.wraps(fun)
  def scaled_fun(*args: object, **kwargs: object) -> tuple[jax.Array, Any]:
    before = jax.tree.leaves((args, kwargs))
    with interpreter.explain_changes():
      value = fun(*args, **kwargs)
    if not may_change:
      interpreter.check_unchanged(before, (args, kwargs))
    loss = _checked_loss(value, has_aux)
    provenance.check_loss(loss)
    return times(loss, loss_scale), (loss, value)

  return scaled_fun


def times(loss: jax.Array, loss_scale: jax.Array) -> jax.Array:
  # Multiply in float32, because S itself may be inf in the loss's dtype.
  dtype = leaves.at_least_float32(loss.dtype)
  return loss.astype(dtype) * loss_scale.astype(dtype)


@promises.promise(
  "held", assume=lambda loss_scale, loss_dtype, gradients: gradients
)
def _inf_where_unusable(
  loss_scale: jax.Array, loss_dtype: DTypeLike, gradients: ArrayTree
) -> ArrayTree:
  """Returns the gradients, all inf if the loss's dtype cannot hold S."""
  finfo = jnp.finfo(loss_dtype)
  smallest, largest = float(finfo.smallest_normal), float(finfo.max)
  # Let bfloat16 pass: an S above its maximum becomes inf, which the check sees.
  if smallest <= arguments.SMALLEST_SCALE and largest >= 2.0**127:
    return gradients
  # A dtype's subnormals are whole multiples of the smallest subnormal.
  multiple = loss_scale / float(finfo.smallest_subnormal)
  error = jnp.abs(jnp.round(multiple) - multiple)
  is_usable = (loss_scale <= largest) & (error <= float(finfo.eps) * multiple)
  is_gradient = leaves.are_gradients(gradients)
  return jax.tree.map(
    lambda is_gradient, x: (
      jnp.where(is_usable, x, np.asarray(np.inf, x.dtype))
      if is_gradient and leaves.is_gradient(x)
      else x
    ),
    is_gradient,
    gradients,
  )


def _checked_loss(value: Any, has_aux: bool) -> jax.Array:
  """Returns the loss in the value of `fun`, or raises if it is not a scalar."""
  if has_aux and not (isinstance(value, tuple) and len(value) == 2):
    raise TypeError(
      "the loss function must return (loss, aux) if has_aux=True, got "
      f"{arguments.kind_of(value)}."
    )
  loss = value[0] if has_aux else value
  got = ""
  if isinstance(loss, (tuple, list)):
    kind = f"a {type(loss).__name__} of {len(loss)}"
    got = f"{kind}; for (loss, aux) pass has_aux=True"
  else:
    check_float("the loss", loss)
    if jnp.shape(loss) != ():
      got = f"an array of shape {jnp.shape(loss)}; take its mean or sum"
  if got:
    raise TypeError(f"the loss function must return a scalar loss, got {got}.")
  return loss


def check_float(name: str, value: object) -> None:
  if not hasattr(value, "dtype") or not jnp.issubdtype(
    value.dtype, jnp.floating
  ):
    kind = getattr(value, "dtype", type(value).__name__)
    raise TypeError(f"{name} must be a floating-point array, got {kind}.")
