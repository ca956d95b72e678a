"""Flax NNX: loss scaling with an unmodified `nnx.Optimizer`."""

from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Mapping
from collections.abc import Sequence
import contextlib
import dataclasses
import functools
import types
from typing import Any

from flax import nnx
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from optax_lossscale._autocast import autocast as plain_autocast
from optax_lossscale._base import arguments
from optax_lossscale._base import leaves
from optax_lossscale._base.arguments import kind_of
from optax_lossscale._jaxpr import interpreter
from optax_lossscale._step import backward
from optax_lossscale._step import requirements
from optax_lossscale._step import skipping
from optax_lossscale._step import states

# The path of a variable.
_Place = tuple[Any, ...]

__all__ = ["autocast", "scaled_value_and_grad", "undo_on_skip"]


@dataclasses.dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class _ScaledValueAndGrad(backward.ScaledValueAndGrad):
  """A function of NNX objects, whose optimizer changes in place."""

  optimizer: nnx.Optimizer[Any]
  filters: dict[int, Any]  # Chooses the variables to differentiate.
  path: str | None

  def loss_scale(self) -> jax.Array:
    """Returns the present S, since each step moves it in place."""
    return states.scale_in_use(_find_state(self.optimizer, self.path))

  def bind(
    self, args: tuple[object, ...], batch_argnums: object = None
  ) -> tuple[Any, ...]:
    """Returns what `accumulate` needs, with the variables of the objects."""
    # The arguments that hold variables, by position.
    objects = {i: x for i, x in enumerate(args) if _variables(x)}
    if batch_argnums is None:
      whole = {*objects, *arguments.argnums_as_tuple(self.argnums)}
      batch_argnums = [i for i in range(len(args)) if i not in whole]
    *bound, _, call, _ = super().bind(args, batch_argnums)
    graphdef, state = nnx.split(objects)
    differentiated = {
      place
      for place, variable in _variables(objects).items()
      if place[0] in self.filters
      and nnx.filterlib.to_predicate(self.filters[place[0]])(place, variable)
    }
    before = _values(objects)
    changing = before.keys() - differentiated

    def pure(
      variables: Any, *args: object, **kwargs: object
    ) -> tuple[object, ...]:
      if _variables(kwargs):
        raise ValueError(
          "NNX objects must be passed by position to a function that "
          f"accumulates, got some in {', '.join(kwargs)}; they are not split."
        )
      # A scan may not change the objects outside of it.
      own = nnx.merge(graphdef, state, copy=True)
      nnx.update(own, nnx.from_flat_state(variables))
      current = dict(enumerate(args)) | own
      value, scaled_grads, _ = call((), *current.values(), **kwargs)
      after = _values(own)
      return value, scaled_grads, {place: after[place] for place in changing}

    def store(variables: Any) -> None:
      nnx.update(objects, nnx.from_flat_state(variables))

    changed = {place: before[place] for place in changing}
    return *bound, changed, pure, store


def scaled_value_and_grad(
  fun: Callable[..., Any],
  optimizer: nnx.Optimizer[Any],
  argnums: int | nnx.DiffState | Sequence[int | nnx.DiffState] | None = None,
  has_aux: bool = False,
  *,
  path: str | None = None,
) -> backward.ScaledValueAndGrad:
  """Returns a function that computes the loss and its *scaled* gradients.

  It differentiates S times the loss as `nnx.value_and_grad` does, but returns
  the true loss. Pass the scaled gradients to `optimizer.update`. The changes
  that `fun` makes to the model remain even if the step is then skipped; see
  `undo_on_skip`. Under `nnx.jit`, pass the optimizer as an argument.

  Args:
    fun: a function of a model and other arguments that returns a real scalar,
      or `(loss, aux)` with `has_aux`.
    optimizer: an `nnx.Optimizer` whose transformation holds `loss_scaling`.
    argnums: what to differentiate with respect to, as in `nnx.value_and_grad`;
      None for the variables of the first argument that the optimizer updates.
    has_aux: whether `fun` returns a pair of the loss and auxiliary data.
    path: which scale, if the optimizer holds several. See `get_loss_scale`.

  Returns:
    A `ScaledValueAndGrad`, which takes the arguments of `fun` and returns
    `(loss, scaled_grads)`, or `((loss, aux), scaled_grads)`.

  Raises:
    TypeError: if `optimizer` is not an `nnx.Optimizer`; when called, if `fun`
      does not return a floating-point scalar.
    ValueError: if the optimizer holds no scale, or several and `path` is None;
      when called, if a function that is being traced closes over the optimizer;
      with `argnums` None, if the first argument holds nothing that it updates.

  Warns:
    WiringWarning: as `optax_lossscale.scaled_value_and_grad` does.

  Examples:
    >>> from flax import nnx
    >>> import jax.numpy as jnp
    >>> import optax
    >>> import optax_lossscale as ols
    >>> model = nnx.Linear(2, 1, use_bias=False, rngs=nnx.Rngs(0))
    >>> tx = ols.loss_scaling(optax.sgd(0.5), ols.DynamicLossScale(1024.0))
    >>> optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    >>> loss_fn = lambda model, x: jnp.sum(model(x))
    >>> value_and_grad = ols.nnx.scaled_value_and_grad(loss_fn, optimizer)
    >>> _, scaled_grads = value_and_grad(model, jnp.array([[1.0, 2.0]]))
    >>> print(scaled_grads["kernel"][...].ravel())
    [1024. 2048.]
    >>> _ = optimizer.update(model, scaled_grads)
    >>> _, scaled_grads = value_and_grad(model, jnp.array([[1.0, jnp.inf]]))
    >>> _ = optimizer.update(model, scaled_grads)
    >>> print(ols.get_loss_scale(optimizer.opt_state), optimizer.step[...])
    512.0 2
  """
  _find_state(optimizer, path)  # Raises now rather than in the first step.
  requirements.check_surroundings(optimizer.opt_state)
  is_default = argnums is None
  chosen = nnx.DiffState(0, optimizer.wrt) if argnums is None else argnums
  places = arguments.argnums_as_tuple(chosen)
  numbers = [getattr(x, "argnum", x) for x in places]
  backward.check_argnums(argnums, numbers)
  of_places = (getattr(x, "filter", nnx.Param) for x in places)
  filters = dict(zip(numbers, of_places, strict=True))

  def differentiate(
    fun: Callable[..., Any], has_aux: bool, argnums: object = 0
  ) -> Callable[..., object]:
    del argnums  # `chosen` says more.
    # Flax's tree mode does not accept a DiffState, which `argnums` may hold.
    value_and_grad = nnx.value_and_grad(
      fun, argnums=chosen, has_aux=has_aux, graph=True, graph_updates=True
    )

    def checked(*args: object, **kwargs: object) -> object:
      if is_default:
        _check_first(optimizer, args)
      return value_and_grad(*args, **kwargs)

    return checked

  # Raises for a bound method, as Flax does; what is returned would hide it.
  nnx.value_and_grad(fun)

  return _ScaledValueAndGrad(
    fun,
    optimizer.opt_state,
    arguments.like_argnums(argnums, tuple(filters)),
    has_aux,
    value_and_grad=differentiate,
    optimizer=optimizer,
    filters=filters,
    path=path,
  )


def autocast(
  fun: Callable[..., Any],
  level: str = "O1",
  *,
  dtype: DTypeLike = jnp.float16,
  overrides: Mapping[str, DTypeLike | None] | None = None,
  operations: Mapping[str, Sequence[str]] | None = None,
  preferred_element_type: DTypeLike | None = None,
  dot_dtype: DTypeLike | tuple[DTypeLike, DTypeLike] | None = None,
) -> Callable[..., Any]:
  """Returns `fun` in mixed precision, for a function of NNX objects.

  The changes that `fun` makes to its arguments (batch statistics, counts of
  random keys, sown values) remain, in the dtypes that they have without
  autocast. Each model must be an argument of `fun`, unless `fun` only reads it.
  If `fun` is a model, or a method of one, that model counts as an argument.

  Args:
    fun: a function of NNX objects, such as a loss function, or a model.
    level: as in `optax_lossscale.autocast`, as are the arguments below.
    dtype: the low precision, float16 or bfloat16.
    overrides: dtypes by scope; NNX records the scopes of `jax.named_scope`.
    operations: edits to the lists of the level.
    preferred_element_type: float32 for float32 results of products.
    dot_dtype: float8_e4m3fn for matrix products in float8.

  Returns:
    A function with the arguments of `fun`.

  Raises:
    TypeError: as in `optax_lossscale.autocast`.
    ValueError: likewise; also if `fun` changes objects that are not arguments.

  Examples:
    >>> from flax import nnx
    >>> import jax.numpy as jnp
    >>> import optax_lossscale as ols
    >>> model = nnx.BatchNorm(1, momentum=0.5, rngs=nnx.Rngs(0))
    >>> loss_fn = lambda model, x: jnp.mean((x @ model(x)) ** 2)
    >>> loss = ols.nnx.autocast(loss_fn, "O1")(model, jnp.full((1, 1), 3.0))
    >>> print(model.mean[...], model.mean[...].dtype)
    [1.5] float32
  """
  arguments.check_function(fun)

  @functools.wraps(fun)
  def pure(split: object) -> object:
    merged = nnx.from_tree(split, ctxtag="autocast", is_inner=True)
    called, args, kwargs = merged
    outputs = called(*args, **kwargs)
    after, outputs = nnx.to_tree((merged, outputs), ctxtag="autocast")
    is_split = lambda x: isinstance(x, nnx.NodeStates)  # noqa: E731
    # Arrays and flags among the arguments are left out: no call changes them.
    changed = filter(is_split, jax.tree.leaves(after, is_leaf=is_split))
    return list(changed), outputs

  mixed = plain_autocast.autocast(
    pure,
    level,
    dtype=dtype,
    overrides=overrides,
    operations=operations,
    preferred_element_type=preferred_element_type,
    dot_dtype=dot_dtype,
  )

  @functools.wraps(fun)
  def autocast_fun(*args: object, **kwargs: object) -> object:
    called: Any = (fun, args, kwargs)
    if isinstance(fun, types.MethodType) and isinstance(
      fun.__self__, nnx.Pytree
    ):
      # The object of a bound method is its first argument.
      called = (fun.__func__, (fun.__self__, *args), kwargs)
    with interpreter.explain_changes():
      # Fails now if a variable cannot be changed; Flax would fail too late.
      for variable in _variables(called).values():
        variable.set_raw_value(variable.get_raw_value())
    with nnx.update_context("autocast"):
      split = nnx.to_tree(called, ctxtag="autocast")
      # `from_tree` changes the arguments in place, and creates any new objects.
      return nnx.from_tree(mixed(split), ctxtag="autocast", is_inner=False)[1]

  return autocast_fun


@contextlib.contextmanager
def undo_on_skip(
  optimizer: nnx.Optimizer[Any], *nodes: object, path: str | None = None
) -> Iterator[None]:
  """Undoes the changes of a step to a model if the optimizer skips the step.

  A forward pass changes batch statistics and counts of random keys in place,
  before anyone knows that the gradients will overflow. Put one whole step into
  one `with` block: the loss, the optimizer's update and anything that follows
  from it. On a skip, each variable of `nodes` gets its old value back at the
  end of the block, bit for bit, also under `nnx.jit` and `nnx.scan`. Sown
  variables (`nnx.Intermediate`), and those that the step creates or removes,
  are left alone.

  Args:
    optimizer: an `nnx.Optimizer` whose transformation holds `loss_scaling`.
      Update it once in the block; it keeps its new S.
    *nodes: the model, and anything else that a skip must leave unchanged: an
      EMA model, `nnx.Rngs`, metrics, another optimizer.
    path: which scale, if the optimizer holds several. See `get_loss_scale`.

  Raises:
    TypeError: if `optimizer` is not an `nnx.Optimizer`, or a node is not an
      NNX object.
    ValueError: if the optimizer holds no scale, or several and `path` is None;
      if a node holds the optimizer's own state; at the end of the block, if the
      optimizer was not updated in it, or if a variable changed its shape.

  Examples:
    >>> from flax import nnx
    >>> import jax.numpy as jnp
    >>> import optax
    >>> import optax_lossscale as ols
    >>> model = nnx.BatchNorm(2, rngs=nnx.Rngs(0))
    >>> tx = ols.loss_scaling(optax.sgd(0.5), ols.DynamicLossScale(1024.0))
    >>> optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    >>> loss_fn = lambda model, x: jnp.sum(model(x) ** 2)
    >>> x = jnp.array([[0.0, 0.0], [0.0, jnp.inf]])
    >>> with ols.nnx.undo_on_skip(optimizer, model):
    ...   value_and_grad = ols.nnx.scaled_value_and_grad(loss_fn, optimizer)
    ...   loss, scaled_grads = value_and_grad(model, x)
    ...   _ = optimizer.update(model, scaled_grads)
    >>> print(model.mean[...], ols.get_loss_scale(optimizer.opt_state))
    [0. 0.] 512.0
  """
  skipped_steps = _find_state(optimizer, path).skipped_steps
  _check_nodes(optimizer, nodes)
  step = optimizer.step.get_value()
  old = _values(nodes)
  yield
  if optimizer.step.get_value() is step:
    raise ValueError(
      "`optimizer` must be updated in the block, got to its end without; call "
      "optimizer.update(model, scaled_grads) inside the with statement."
    )
  new = _values(nodes)
  # Compares counts, since the flag describes only the last update. The block
  # may hold several updates, or none if a condition leaves them out.
  skipped = _find_state(optimizer, path).skipped_steps != skipped_steps
  selected = {}
  for place in filter(old.__contains__, new):
    leaves.check_structure(
      "in a step that may be skipped a variable must keep its structure",
      {_name(place): new[place]},
      {_name(place): old[place]},
    )
    selected[place] = skipping.select(skipped, old[place], new[place])
  nnx.update(nodes, nnx.from_flat_state(selected))


def _find_state(
  optimizer: nnx.Optimizer[Any], path: str | None
) -> states.LossScalingState:
  """Returns the state of loss scaling in an optimizer, as plain arrays."""
  if not isinstance(optimizer, nnx.Optimizer):
    remedy = (
      "with an optimizer's state, outside of NNX, use "
      "optax_lossscale.scaled_value_and_grad and "
      "optax_lossscale.select_on_skip"
    )
    if isinstance(optimizer, nnx.Pytree):
      remedy = (
        "the order is undo_on_skip(optimizer, model), and "
        "scaled_value_and_grad(loss_fn, optimizer)"
      )
    raise TypeError(
      f"`optimizer` must be an nnx.Optimizer, got {kind_of(optimizer)}; "
      f"{remedy}."
    )
  opt_state = nnx.as_pure(optimizer.opt_state)
  if not states.find_states(opt_state):
    raise ValueError(
      "`optimizer` must hold loss scaling, got one whose state is a "
      f"{kind_of(opt_state)} without it; wrap its transformation: "
      "nnx.Optimizer(model, loss_scaling(inner, rule), wrt=nnx.Param)."
    )
  state = states.find_state(opt_state, path)
  states.refuse_stack("optimizer", state.skipped_steps)
  return state


def _check_first(
  optimizer: nnx.Optimizer[Any], args: tuple[object, ...]
) -> None:
  """Raises if the first argument holds nothing that the optimizer updates."""
  is_updated = nnx.filterlib.to_predicate(optimizer.wrt)
  first = args[0] if args else None
  if not any(is_updated(*item) for item in _variables(first).items()):
    kind = kind_of(first) if args else "no argument by position"
    raise ValueError(
      "the first argument must hold variables that the optimizer updates, "
      f"wrt={optimizer.wrt}, got {kind}; for a model in another place pass its "
      "number: argnums=nnx.DiffState(1, optimizer.wrt)."
    )


def _check_nodes(
  optimizer: nnx.Optimizer[Any], nodes: tuple[object, ...]
) -> None:
  rule = "`nodes` must be NNX objects, which a step changes in place"
  if not nodes:
    raise TypeError(
      f"{rule}, got none; pass the model: undo_on_skip(optimizer, model)."
    )
  for node in nodes:
    if not isinstance(node, (nnx.Pytree, nnx.Variable)):
      raise TypeError(
        f"{rule}, got {kind_of(node)}; select what is returned anew by "
        "optax_lossscale.select_on_skip(optimizer.opt_state, new, old)."
      )
  # Excludes other variables, since nnx.ModelAndOptimizer also holds the model.
  state = optimizer.step, optimizer.opt_state
  own = {id(variable) for variable in _variables(state).values()}
  for place, variable in _variables(nodes).items():
    if id(variable) in own:
      raise ValueError(
        "`nodes` must not hold the state of `optimizer`, since its loss scale "
        f"moves on a skipped step, got it at {_name(place)!r}; pass the model "
        "alone. The optimizer keeps its own state on a skip."
      )


def _variables(node: object) -> dict[_Place, Any]:
  """Returns each variable by its path; a shared one appears once."""
  return {
    place: value
    for place, value in nnx.iter_graph(node, graph=True)
    if isinstance(value, nnx.Variable)
  }


def _values(nodes: object) -> dict[_Place, Any]:
  """Returns the current values of nodes, each by its path."""
  # Leaves out sown values, which report on a step and do not affect the next.
  state: Any = nnx.state(nodes, nnx.Not(nnx.Intermediate), graph=True)
  return dict(nnx.to_flat_state(nnx.as_pure(state)))


def _name(place: _Place) -> str:
  return "/".join(map(str, place))
