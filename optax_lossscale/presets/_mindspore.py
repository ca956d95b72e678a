"""MindSpore's scalers."""

import numpy as np

from optax_lossscale._rules.engine import Failure
from optax_lossscale._rules.engine import MOST_OVERFLOWS_IN_A_ROW
from optax_lossscale.presets._keys import ConstantKey
from optax_lossscale.presets._keys import int_or_float
from optax_lossscale.presets._keys import Key
from optax_lossscale.presets.declaration import Argument
from optax_lossscale.presets.declaration import check_scale_from_one
from optax_lossscale.presets.declaration import preset
from optax_lossscale.presets.declaration import PresetLossScale


def _inverse(factor: float) -> float:
  return 1 / factor


@preset(
  init_scale=Argument("init_loss_scale", check=check_scale_from_one),
  growth_factor=Argument("scale_factor"),
  backoff_factor=Argument("scale_factor", _inverse),
  growth_test="multiple",
  min_scale=1.0,
  failure=Failure.TOO_MANY_OVERFLOWS,
  counts_steps=True,
  saves={
    "loss_scale": Key("S", float),
    "scale_window": int,
    "scale_factor": int_or_float,
    "increase_ratio": Key("scale_factor", int_or_float, is_read=False),
    "decrease_ratio": Key("scale_factor", _inverse, is_read=False),
    "bad_step_max": ConstantKey(MOST_OVERFLOWS_IN_A_ROW),
    "cur_iter": Key("steps", int, first=1),
    "last_overflow_iter": Key("last_overflow", int, first=1),
    "bad_step": Key("overflows", int),
  },
)
def mindspore(
  *,
  init_loss_scale: float = 2.0**24,
  scale_factor: float = 2,
  scale_window: int = 2000,
) -> PresetLossScale:
  """MindSpore's `DynamicLossScaleManager`.

  S is at least 1, from the start. It shrinks on every overflow, and grows after
  every `scale_window` clean steps in a row. After more than 1000 overflows in a
  row MindSpore ends the run; here `raise_if_failed` raises. `Model` and
  `build_train_network` use the manager's update cell instead: pass the same
  values to `mindspore_cell`.

  Examples:
    >>> rule = ols.presets.mindspore(scale_factor=4, scale_window=3000)
    >>> float(rule.update(rule.init(), overflow=True).loss_scale)
    4194304.0

  References:
    MindSpore 2.10.0, mindspore/train/loss_scale_manager.py.
  """


@preset(
  scale=Argument("loss_scale", check=check_scale_from_one),
  skip=Argument("drop_overflow_update"),
)
def mindspore_fixed(
  *, loss_scale: float = 128.0, drop_overflow_update: bool = True
) -> PresetLossScale:
  """MindSpore's `FixedLossScaleManager`: S is fixed, at 1 or more.

  Gradients are unscaled even if overflows do not skip the step; in MindSpore
  the optimizer must do that.

  Examples:
    >>> ols.presets.mindspore_fixed(drop_overflow_update=False).skip
    False

  References:
    MindSpore 2.10.0, mindspore/train/loss_scale_manager.py.
  """


@preset(
  init_scale=Argument("scale_value", check=check_scale_from_one),
  growth_test="multiple",
  min_scale=1.0,
  saves={
    "scale_value": Key("S", np.float32),
    "counter": Key("window_steps", np.int32),
  },
)
def mindspore_amp(
  *, scale_value: float, scale_factor: float, scale_window: int
) -> PresetLossScale:
  """MindSpore's `mindspore.amp.DynamicLossScaler`.

  S is at least 1, from the start. It shrinks on every overflow, and grows after
  `scale_window` clean steps in a row.

  Examples:
    >>> rule = ols.presets.mindspore_amp(
    ...   scale_value=2**10, scale_factor=2, scale_window=1
    ... )
    >>> print(rule.update(rule.init(), overflow=False).loss_scale)
    2048.0

  References:
    MindSpore 2.10.0, mindspore/amp.py.
  """


@preset(
  growth_factor=Argument("scale_factor"),
  # MindSpore inverts the factor after rounding it to float32.
  backoff_factor=Argument("scale_factor", lambda x: 1 / float(np.float32(x))),
  min_scale=1.0,
  counts_steps=True,
  saves={
    "scale_sense": Key("S", np.float32),
    "current_iterator_step": Key("steps", np.int32, first=1),
    "last_overflow_iterator_step": Key("last_overflow", np.int32, first=1),
  },
)
def mindspore_cell(
  *, loss_scale_value: float, scale_factor: float, scale_window: int
) -> PresetLossScale:
  """MindSpore's `nn.DynamicLossScaleUpdateCell`.

  An overflow shrinks S, or raises it to 1 if it would be less. S grows
  `scale_window` clean steps after the last growth or overflow.

  Examples:
    >>> rule = ols.presets.mindspore_cell(
    ...   loss_scale_value=2**12, scale_factor=2, scale_window=1000
    ... )
    >>> print(rule.update(rule.init(), overflow=True).loss_scale)
    2048.0

  References:
    MindSpore 2.10.0, mindspore/nn/wrap/loss_scale.py.
  """
