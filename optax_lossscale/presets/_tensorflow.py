"""The scalers of TensorFlow and Keras, and npu_bridge's for Ascend."""

from typing import Any

import numpy as np

from optax_lossscale.presets._keys import Key
from optax_lossscale.presets.declaration import preset
from optax_lossscale.presets.declaration import PresetLossScale

# npu_bridge's manager for Ascend began as a copy of TensorFlow's.
EXPONENTIAL: dict[str, Any] = {
  "refill": frozenset({"growth", "backoff"}),
  "min_scale": 1.0,
}
EXPONENTIAL_KEYS: dict[str, object] = {
  "loss_scale": Key("S", np.float32),
  "good_steps": Key("clean_steps", np.int32),
  "bad_steps": Key("overflows", np.int32),
}


@preset(**EXPONENTIAL, saves=EXPONENTIAL_KEYS)
def tf_exponential(
  *,
  init_loss_scale: float,
  incr_every_n_steps: int,
  decr_every_n_nan_or_inf: int = 2,
  incr_ratio: float = 2.0,
  decr_ratio: float = 0.8,
) -> PresetLossScale:
  """tf.contrib's `ExponentialUpdateLossScaleManager`.

  S shrinks on the `decr_every_n_nan_or_inf`-th overflow since it last moved,
  even with clean steps in between. The documentation says that a shrink below 1
  is not applied, but in the code S becomes 1.

  Examples:
    >>> rule = ols.presets.tf_exponential(
    ...   init_loss_scale=8.0, incr_every_n_steps=1000, decr_ratio=0.5
    ... )
    >>> state = rule.update(rule.init(), overflow=True)
    >>> print(state.loss_scale, rule.update(state, overflow=True).loss_scale)
    8.0 4.0

  References:
    TensorFlow 1.15.5,
    tensorflow/contrib/mixed_precision/python/loss_scale_manager.py.
  """


@preset(
  min_scale=1.0,
  saves={
    "current_loss_scale": Key("S", np.float32),
    "good_steps": Key("clean_steps", np.int64),
  },
)
def tensorflow(
  *,
  initial_loss_scale: float = 2.0**15,
  increment_period: int = 2000,
  multiplier: float = 2.0,
) -> PresetLossScale:
  """TensorFlow's `DynamicLossScale`.

  An overflow shrinks S, or raises it to 1 if it would be less. S grows after
  `increment_period` clean steps in a row. Inside a `tf.function`, TensorFlow
  shrinks S with the reciprocal of the multiplier, which rounds differently.
  Here S is divided, as TensorFlow does outside of it.

  Examples:
    >>> rule = ols.presets.tensorflow(initial_loss_scale=1.0)
    >>> print(rule.update(rule.init(), overflow=True).loss_scale)
    1.0

  References:
    TensorFlow 2.21.0, tensorflow/python/training/experimental/loss_scale.py.
  """


@preset(
  growth_factor=2.0,
  backoff_factor=0.5,
  growth_test="equal",
  saves={
    "step_counter": Key("clean_steps", np.int32),
    "dynamic_scale": Key("S", np.float32),
  },
)
def keras(
  *, initial_scale: float = 2.0**15, dynamic_growth_steps: int = 2000
) -> PresetLossScale:
  """Keras 3's `LossScaleOptimizer`.

  S halves on every overflow and doubles after `dynamic_growth_steps` clean
  steps in a row. S has neither a floor nor a ceiling.

  Examples:
    >>> rule = ols.presets.keras(dynamic_growth_steps=1)
    >>> print(rule.update(rule.init(), overflow=False).loss_scale)
    65536.0

  References:
    Keras 3.15.1, keras/src/optimizers/loss_scale_optimizer.py.
  """
