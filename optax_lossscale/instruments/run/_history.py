"""The last steps of a run: kept on the device, read on the host."""

from typing import Any
from typing import NamedTuple

from chex import ArrayTree
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
import numpy as np
import numpy.typing as npt
import optax

from optax_lossscale._base import arguments
from optax_lossscale._base import formats
from optax_lossscale._base import leaves
from optax_lossscale._base import switches
from optax_lossscale._base.arguments import shown
from optax_lossscale._step import requirements
from optax_lossscale._step import states
from optax_lossscale.instruments import shared


class History(NamedTuple):
  """Steps of a run in order: the S that each used, and what the rule saw.

  Get a `History` from `get_history` or `read_history`, and pass it to `replay`,
  `advise` or the functions of `plot`.

  Attributes:
    step: int64[n], the number of the step, from 1, counting steps that an
      overflow skipped, but not those that `skip=` did.
    loss_scale: float32[n], the S that the step used.
    amax: float32[n], the largest absolute value among the step's scaled
      gradients; NaN if one of them was NaN.
    overflow: bool[n], True if the step's gradients were unusable.

  Examples:
    >>> import numpy as np
    >>> import optax_lossscale as ols
    >>> history = ols.instruments.History(
    ...   step=np.array([1, 2]),
    ...   loss_scale=np.float32([1024.0, 1024.0]),
    ...   amax=np.float32([65504 / 4, np.inf]),
    ...   overflow=np.array([False, True]),
    ... )
    >>> print(history.headroom())
    [ 2. nan]
  """

  step: np.ndarray
  loss_scale: np.ndarray
  amax: np.ndarray
  overflow: np.ndarray

  @property
  def unscaled_amax(self) -> npt.NDArray[np.float64]:
    """float64[n], amax / S."""
    amax = np.asarray(self.amax, np.float64)
    return amax / np.asarray(self.loss_scale, np.float64)

  def headroom(self, dtype: DTypeLike = jnp.float16) -> npt.NDArray[np.float64]:
    """Returns how many more times S could have doubled on each step.

    Args:
      dtype: the computation's dtype.

    Returns:
      float64[n], in bits; NaN if amax is inf, NaN or 0, since the headroom is
      then unknown. It may exceed 126 bits, the most that a step reports.

    Raises:
      TypeError: if `dtype` is not a floating-point dtype.
    """
    dtype = arguments.check_dtype("dtype", dtype)
    amax = np.asarray(self.amax, np.float64)
    is_known = np.isfinite(amax) & (amax > 0)
    largest = formats.largest(dtype)
    return np.log2(largest / np.where(is_known, amax, np.nan))


def record(
  tx: optax.GradientTransformation, capacity: int, *, path: str | None = None
) -> optax.GradientTransformationExtraArgs:
  """Wraps an optimizer so that its state records the last steps.

  For each step, S, amax and the overflow flag, 9 bytes in all, are written to
  arrays in the state, also inside jit, and never wait for the host. Steps that
  `skip=` skipped are left out and not counted: the rule does not see them.

  Args:
    tx: an optimizer with `loss_scaling` in it, at any depth.
    capacity: how many steps to keep. Later steps replace the oldest ones.
    path: which scale, if `tx` holds several. See `get_loss_scale`.

  Returns:
    A transformation whose state is a `RecordState` around the state of `tx`.

  Raises:
    TypeError: if an argument has the wrong type.
    ValueError: if `capacity` is below 1; from `init`, if `tx` holds no loss
      scaling, or several and no path is given; from `update`, if the state is a
      record with a different capacity.

  Examples:
    >>> import jax.numpy as jnp
    >>> import optax
    >>> import optax_lossscale as ols
    >>> tx = ols.loss_scaling(optax.sgd(0.1), ols.DynamicLossScale(8.0))
    >>> tx = ols.instruments.record(tx, capacity=2)
    >>> state = tx.init(jnp.zeros(1))
    >>> for gradient in (1.0, jnp.inf, 2.0):
    ...   _, state = tx.update(jnp.array([gradient]), state)
    >>> history = ols.instruments.get_history(state)
    >>> print(history.step, history.loss_scale, history.amax, history.overflow)
    [2 3] [8. 4.] [inf  2.] [ True False]
  """
  capacity = arguments.check_count("capacity", capacity)
  tx = requirements.as_optimizer("tx", tx)

  def init(params: optax.Params) -> shared.RecordState:
    recorded_state = tx.init(params)
    states.find_state(recorded_state, path)
    return shared.RecordState(
      recorded_state=recorded_state,
      recorded_steps=jnp.full((), 0, jnp.int32),
      recorded_scale=jnp.full(capacity, 0, jnp.float32),
      recorded_amax=jnp.full(capacity, 0, jnp.float32),
      recorded_overflow=jnp.full(capacity, False),
    )

  def update(
    updates: optax.Updates,
    state: Any,
    params: optax.Params | None = None,
    **extra_args: object,
  ) -> tuple[optax.Updates, shared.RecordState]:
    loss_scale = states.get_loss_scale(state.recorded_state, path=path)
    updates, recorded_state = tx.update(
      updates, state.recorded_state, params, **extra_args
    )
    last = states.find_state(recorded_state, path)
    size = state.recorded_scale.shape[-1]
    if size != capacity:
      raise ValueError(
        "`capacity` must stay what it was in the run that is continued, got "
        f"{capacity} for a record of {size} steps; take {size}, or begin a new "
        "record: tx.init(params)._replace(recorded_state=state.recorded_state)."
      )
    place = state.recorded_steps % capacity
    steps = jnp.asarray(optax.safe_increment(state.recorded_steps))
    if extra_args.get("skip", False) is not False:
      # A step that `skip` skipped is not recorded, since a replay would show it
      # to the rule. JAX writes nothing to a place outside of an array.
      is_unseen = last.skipped & ~last.overflow
      place = jnp.where(is_unseen, capacity, place)
      steps = jnp.where(is_unseen, state.recorded_steps, steps)
    return updates, shared.RecordState(
      recorded_state=recorded_state,
      recorded_steps=steps,
      recorded_scale=state.recorded_scale.at[place].set(loss_scale),
      recorded_amax=state.recorded_amax.at[place].set(last.amax),
      recorded_overflow=state.recorded_overflow.at[place].set(last.overflow),
    )

  return optax.GradientTransformationExtraArgs(init, update)


@switches.lifted()
def get_history(
  opt_state: optax.OptState, *, path: str | None = None
) -> History:
  """Returns the steps that `record` has kept, in order.

  It fetches the steps from the device, so call it outside of jit. See `record`
  for an example.

  Args:
    opt_state: the state of an optimizer wrapped by `record`, or any pytree that
      holds it.
    path: which record, if `opt_state` holds several. The error lists the paths.

  Returns:
    The steps so far, but at most the last `capacity` steps.

  Raises:
    ValueError: if `opt_state` holds no record, or several and no path is given;
      if the record is a stack of several runs; or if it is being traced.
  """
  found = _find_record(opt_state, path)
  ring = found[1:]
  if any(isinstance(x, jax.core.Tracer) for x in ring):
    raise ValueError(
      "`opt_state` must be known, got one that JAX is tracing: read the "
      "history outside of jit, of the state that the train step returned."
    )
  # JAX converts the arrays first, since Flax NNX keeps each in a variable.
  steps, scales, amaxes, overflows = (np.asarray(jnp.asarray(x)) for x in ring)
  if steps.ndim:
    raise ValueError(
      "`opt_state` must be the state of one run, got a record of shape "
      f"{steps.shape}; choose one: jax.tree.map(lambda x: x[0], opt_state)."
    )
  step = np.arange(max(0, int(steps) - len(scales)), int(steps))
  places = step % len(scales)
  return History(step + 1, scales[places], amaxes[places], overflows[places])


def check_history(history: object) -> None:
  """Raises TypeError if `history` is not a History."""
  if not isinstance(history, History):
    raise TypeError(
      f"`history` must be a History, got {arguments.kind_of(history)}; "
      "instruments.get_history takes one out of a training state, and "
      "instruments.read_history reads one from a file."
    )


def _find_record(opt_state: object, path: str | None) -> shared.RecordState:
  nodes = jax.tree.leaves_with_path(
    opt_state, is_leaf=lambda x: isinstance(x, shared.RecordState)
  )
  records = {
    key: node for key, node in nodes if isinstance(node, shared.RecordState)
  }
  if not records:
    raise ValueError(
      "`opt_state` must hold a record, got a "
      f"{arguments.kind_of(opt_state)} without one; wrap the optimizer: tx = "
      "record(loss_scaling(inner, rule), capacity=1000)."
    )
  chosen = [
    x for key, x in records.items() if path is None or leaves.is_at(key, path)
  ]
  if len(chosen) != 1:
    raise ValueError(
      f"`path` must be the path of one record, got {shown(path)}; there are "
      f"records at {leaves.listed(leaves.path_names(records).values())}."
    )
  return chosen[0]
