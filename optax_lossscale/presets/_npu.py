"""The scalers of npu_bridge on Ascend, and the optimizer that takes them."""

from chex import ArrayTree
import jax
import jax.numpy as jnp
import optax

from optax_lossscale._base import arguments
from optax_lossscale._rules import base
from optax_lossscale._step import checks
from optax_lossscale._step import devices
from optax_lossscale._step import loss_scaling
from optax_lossscale._step import requirements
from optax_lossscale.presets import _tensorflow
from optax_lossscale.presets.declaration import Argument
from optax_lossscale.presets.declaration import check_scale_from_one
from optax_lossscale.presets.declaration import preset
from optax_lossscale.presets.declaration import PresetLossScale


@preset(
  **_tensorflow.EXPONENTIAL,
  growth_factor=Argument("incr_ratio"),
  growth_below=Argument("incr_ratio", lambda ratio: 3.4e38 / ratio),
  saves=_tensorflow.EXPONENTIAL_KEYS,
)
def npu_exponential(
  *,
  init_loss_scale: float,
  incr_every_n_steps: int,
  decr_every_n_nan_or_inf: int = 2,
  incr_ratio: float = 2.0,
  decr_ratio: float = 0.8,
) -> PresetLossScale:
  """npu_bridge's `ExponentialUpdateLossScaleManager`, for Ascend.

  Like `tf_exponential`, but S grows only while it is below 3.4e38 /
  `incr_ratio`. The documentation calls the ratios percentages, but they are
  factors. On hardware in saturation mode, pass
  `check=ols.saturated(jnp.float16)` to the wrapper.

  Examples:
    >>> rule = ols.presets.npu_exponential(
    ...   init_loss_scale=2.0**32, incr_every_n_steps=1000, decr_ratio=0.5
    ... )
    >>> print(rule.update(rule.init(), overflow=True).overflows)
    1

  References:
    Ascend's npu_bridge for TensorFlow 1, npu_loss_scale_manager.py at 0561ecb.
  """


@preset(
  scale=Argument("loss_scale", check=check_scale_from_one),
  skip=Argument("enable_overflow_check"),
)
def npu_fixed(
  *, loss_scale: float, enable_overflow_check: bool = True
) -> PresetLossScale:
  """npu_bridge's `FixedLossScaleManager`, for Ascend: S is fixed, at 1 or more.

  Examples:
    >>> ols.presets.npu_fixed(loss_scale=1024, enable_overflow_check=False).skip
    False

  References:
    Ascend's npu_bridge for TensorFlow 1, npu_loss_scale_manager.py at 0561ecb.
  """


def npu_loss_scale_optimizer(
  opt: optax.GradientTransformation | optax.MultiSteps,
  loss_scale_manager: base.LossScale,
  is_distributed: bool = False,
  *,
  axis_name: devices.AxisNames | None = None,
  check: checks.Check = checks.saturated(jnp.float16),
) -> optax.GradientTransformationExtraArgs:
  """npu_bridge's `NPULossScaleOptimizer`, for Ascend.

  This is `loss_scaling` with the original's three arguments, in the same
  positions, and with the check for hardware in saturation mode. The original's
  global step is the state's `applied_steps`.

  The original reads overflows from a status register; here they are found in
  the scaled gradients. Pass any that does not reach these as `overflow=`.

  Args:
    opt: the optimizer, which `loss_scaling` calls `inner`.
    loss_scale_manager: the rule, usually `npu_fixed` or `npu_exponential`.
    is_distributed: whether all workers skip the same steps. True needs
      `axis_name` under `shard_map` and `pmap`, but not under plain jit. With
      False, each worker decides for itself, and `axis_name` is not used.
    axis_name: the mapped axes of the workers, as in `loss_scaling`.
    check: what counts as an overflow, in the dtype of the computation.

  Returns:
    A transformation like that of `loss_scaling`, with a `LossScalingState`.

  Raises:
    TypeError: if an argument has the wrong type.
    ValueError: from `update`, when traced inside `shard_map` or `pmap`, if
      `is_distributed` is True without `axis_name`, or False for workers that
      share an S; and as in `loss_scaling`.

  Examples:
    >>> import jax.numpy as jnp
    >>> import optax
    >>> import optax_lossscale as ols
    >>> manager = ols.presets.npu_fixed(loss_scale=8.0)
    >>> opt = ols.presets.npu_loss_scale_optimizer(optax.sgd(0.5), manager)
    >>> state = opt.init(jnp.zeros(2))
    >>> updates, state = opt.update(jnp.array([8.0, 65504.0]), state)
    >>> print(updates, ols.get_loss_scale(state))
    [-0. -0.] 8.0

  References:
    Ascend's npu_bridge for TensorFlow 1, npu_loss_scale_optimizer.py.
  """
  opt = requirements.as_optimizer("opt", opt)
  requirements.check_rule("loss_scale_manager", loss_scale_manager)
  is_distributed = arguments.check_flag("is_distributed", is_distributed)
  names = devices.axis_names("axis_name", axis_name)
  tx = loss_scaling.loss_scaling(
    opt,
    loss_scale_manager,
    check=check,
    # () says that the mapped axes are left out on purpose.
    axis_name=(names if is_distributed else ()) if names else None,
  )
  if names or not is_distributed:
    return tx

  def update(
    updates: optax.Updates,
    state: optax.OptState,
    params: optax.Params | None = None,
    **extra_args: object,
  ) -> tuple[optax.Updates, optax.OptState]:
    # No axes under vmap or plain jit, even with sharded arrays.
    axes = sorted(map(str, jax.sharding.get_abstract_mesh().manual_axes))
    if axes:
      raise ValueError(
        "`axis_name` must be given where `is_distributed` is True inside "
        f"shard_map or pmap, got None with the mapped axes {', '.join(axes)}; "
        "pass those that the workers are along: npu_loss_scale_optimizer(..., "
        f"is_distributed=True, axis_name={axes[0]!r})."
      )
    return tx.update(updates, state, params, **extra_args)

  return optax.GradientTransformationExtraArgs(tx.init, update)
