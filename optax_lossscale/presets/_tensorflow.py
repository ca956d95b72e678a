"""The scalers of TensorFlow, of Keras, and of npu_bridge on Ascend."""

from optax_lossscale._base import arguments
from optax_lossscale.presets import _preset

# `locals()`, at the top of each function, is its arguments.


def tf_exponential(
  *,
  init_loss_scale: float,
  incr_every_n_steps: int,
  decr_every_n_nan_or_inf: int = 2,
  incr_ratio: float = 2.0,
  decr_ratio: float = 0.8,
) -> _preset.PresetLossScale:
  """tf.contrib's `ExponentialUpdateLossScaleManager`.

  S shrinks on the `decr_every_n_nan_or_inf`-th overflow since it last moved:
  clean steps between them do not matter. The documentation says that a shrink
  below 1 is not applied; in the code S is then 1.

  Args:
    init_loss_scale: the first S.
    incr_every_n_steps: clean steps in a row before S grows.
    decr_every_n_nan_or_inf: overflows before S shrinks.
    incr_ratio: S is multiplied by it on growth; above 1.
    decr_ratio: S is multiplied by it when it shrinks; between 0 and 1.

  Returns:
    The rule.

  Raises:
    TypeError: if an argument is not of its kind.
    ValueError: if an argument is out of its range.

  Examples:
    >>> import optax_lossscale as ols
    >>> rule = ols.presets.tf_exponential(
    ...   init_loss_scale=8.0, incr_every_n_steps=1000, decr_ratio=0.5
    ... )
    >>> state = rule.init()
    >>> for overflow in (True, False, True):
    ...   state = rule.update(state, overflow)
    >>> print(state.loss_scale)
    4.0

  References:
    TensorFlow 1.15.5,
    tensorflow/contrib/mixed_precision/python/loss_scale_manager.py.
  """
  return _preset.dynamic("tf_exponential", locals())


def npu_exponential(
  *,
  init_loss_scale: float,
  incr_every_n_steps: int,
  decr_every_n_nan_or_inf: int = 2,
  incr_ratio: float = 2.0,
  decr_ratio: float = 0.8,
) -> _preset.PresetLossScale:
  """npu_bridge's `ExponentialUpdateLossScaleManager`, for Ascend.

  The rule of `tf_exponential`, but S grows only from below
  3.4e38 / `incr_ratio`. The documentation calls the ratios percentages; they
  are factors. On hardware in saturation mode give the wrapper
  `check=ols.saturated(jnp.float16)`.

  Args:
    init_loss_scale: the first S.
    incr_every_n_steps: clean steps in a row before S grows.
    decr_every_n_nan_or_inf: overflows before S shrinks.
    incr_ratio: S is multiplied by it on growth; above 1.
    decr_ratio: S is multiplied by it when it shrinks; between 0 and 1.

  Returns:
    The rule.

  Raises:
    TypeError: if an argument is not of its kind.
    ValueError: if an argument is out of its range.

  Examples:
    >>> import optax_lossscale as ols
    >>> rule = ols.presets.npu_exponential(
    ...   init_loss_scale=2.0**32, incr_every_n_steps=1000, decr_ratio=0.5
    ... )
    >>> state = rule.update(rule.init(), overflow=True)
    >>> print(state.loss_scale == 2.0**32, state.overflows)
    True 1

  References:
    Ascend's npu_bridge for TensorFlow 1, npu_loss_scale_manager.py at 0561ecb.
  """
  return _preset.dynamic("npu_exponential", locals())


def npu_fixed(
  *, loss_scale: float, enable_overflow_check: bool = True
) -> _preset.PresetLossScale:
  """npu_bridge's `FixedLossScaleManager`, for Ascend: S stays.

  Args:
    loss_scale: S, at least 1.
    enable_overflow_check: False applies every step, overflow or not.

  Returns:
    The rule.

  Raises:
    TypeError: if an argument is not of its kind.
    ValueError: if S is out of its range.

  Examples:
    >>> import optax_lossscale as ols
    >>> ols.presets.npu_fixed(loss_scale=1024, enable_overflow_check=False).skip
    False

  References:
    Ascend's npu_bridge for TensorFlow 1, npu_loss_scale_manager.py at 0561ecb.
  """
  enable_overflow_check = arguments.check_flag(
    "enable_overflow_check", enable_overflow_check
  )
  return _preset.fixed(
    "npu_fixed", locals(), "loss_scale", least=1.0, skip=enable_overflow_check
  )


def tensorflow(
  *,
  initial_loss_scale: float = 2.0**15,
  increment_period: int = 2000,
  multiplier: float = 2.0,
) -> _preset.PresetLossScale:
  """TensorFlow's `DynamicLossScale`.

  S shrinks on every overflow, to 1 at the least, and grows after
  `increment_period` clean steps in a row. Inside a `tf.function` TensorFlow
  multiplies by the reciprocal of the multiplier, which rounds otherwise; here S
  is divided, as it is outside.

  Args:
    initial_loss_scale: the first S; one below 1 is raised to 1 by an overflow.
    increment_period: clean steps in a row before S grows.
    multiplier: S is multiplied or divided by it; above 1.

  Returns:
    The rule.

  Raises:
    TypeError: if an argument is not of its kind.
    ValueError: if an argument is out of its range.

  Examples:
    >>> import optax_lossscale as ols
    >>> rule = ols.presets.tensorflow(initial_loss_scale=1.5)
    >>> print(rule.update(rule.init(), overflow=True).loss_scale)
    1.0

  References:
    TensorFlow 2.21.0, tensorflow/python/training/experimental/loss_scale.py.
  """
  return _preset.dynamic("tensorflow", locals())


def keras(
  *, initial_scale: float = 2.0**15, dynamic_growth_steps: int = 2000
) -> _preset.PresetLossScale:
  """Keras 3's `LossScaleOptimizer`.

  S halves on every overflow and doubles after `dynamic_growth_steps` clean
  steps in a row. There is neither floor nor ceiling. A saved file numbers the
  optimizer's variables: "2" is `step_counter`, "3" is `dynamic_scale`.

  Args:
    initial_scale: the first S.
    dynamic_growth_steps: clean steps in a row before S grows.

  Returns:
    The rule.

  Raises:
    TypeError: if an argument is not of its kind.
    ValueError: if an argument is out of its range.

  Examples:
    >>> import optax_lossscale as ols
    >>> rule = ols.presets.keras(dynamic_growth_steps=1)
    >>> print(rule.update(rule.init(), overflow=False).loss_scale)
    65536.0

  References:
    Keras 3.15.1, keras/src/optimizers/loss_scale_optimizer.py. S goes to 0 and
    inf there and is held here.
  """
  return _preset.dynamic("keras", locals())


PRESETS = (
  tf_exponential,
  npu_exponential,
  npu_fixed,
  tensorflow,
  keras,
)
