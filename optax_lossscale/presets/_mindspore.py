"""MindSpore's scalers."""

from optax_lossscale._base import arguments
from optax_lossscale.presets import _preset

# `locals()`, at the top of each function, is its arguments.


def mindspore(
  *,
  init_loss_scale: float = 2.0**24,
  scale_factor: float = 2,
  scale_window: int = 2000,
) -> _preset.PresetLossScale:
  """MindSpore's `DynamicLossScaleManager`.

  S shrinks on every overflow, to 1 at the least, and grows after every
  `scale_window` clean steps in a row. After more than 1000 overflows in a row
  MindSpore ends the run; here `raise_if_failed` raises. A published tutorial
  passes (scale_factor, scale_window) by position and so sets the wrong two.
  `Model` and `build_train_network` take the manager's update cell instead: for
  them it is `mindspore_cell`, with the same values. A factor that is no power
  of two may bring 2**-23 of S between the two with each change.

  Args:
    init_loss_scale: the first S, at least 1.
    scale_factor: S is multiplied or divided by it; above 1.
    scale_window: clean steps in a row before S grows.

  Returns:
    The rule.

  Raises:
    TypeError: if an argument is not of its kind.
    ValueError: if an argument is out of its range.

  Examples:
    >>> import optax_lossscale as ols
    >>> rule = ols.presets.mindspore(scale_factor=4, scale_window=3000)
    >>> float(rule.update(rule.init(), overflow=True).loss_scale)
    4194304.0

  References:
    MindSpore 2.10.0, mindspore/train/loss_scale_manager.py. S grows to inf
    there, in double, and is held here.
  """
  return _preset.dynamic("mindspore", locals())


def mindspore_fixed(
  *, loss_scale: float = 128.0, drop_overflow_update: bool = True
) -> _preset.PresetLossScale:
  """MindSpore's `FixedLossScaleManager`: S stays.

  Args:
    loss_scale: S, at least 1.
    drop_overflow_update: False applies every step, overflow or not. Gradients
      are unscaled in either case; MindSpore leaves that to the optimizer then.

  Returns:
    The rule.

  Raises:
    TypeError: if an argument is not of its kind.
    ValueError: if S is out of its range.

  Examples:
    >>> import optax_lossscale as ols
    >>> ols.presets.mindspore_fixed(drop_overflow_update=False).skip
    False

  References:
    MindSpore 2.10.0, mindspore/train/loss_scale_manager.py.
  """
  drop_overflow_update = arguments.check_flag(
    "drop_overflow_update", drop_overflow_update
  )
  return _preset.fixed(
    "mindspore_fixed",
    locals(),
    "loss_scale",
    least=1.0,
    skip=drop_overflow_update,
  )


def mindspore_amp(
  *, scale_value: float, scale_factor: float, scale_window: int
) -> _preset.PresetLossScale:
  """MindSpore's `mindspore.amp.DynamicLossScaler`.

  S shrinks on every overflow, to 1 at the least, and grows after `scale_window`
  clean steps in a row.

  Args:
    scale_value: the first S, at least 1.
    scale_factor: S is multiplied or divided by it; above 1.
    scale_window: clean steps in a row before S grows.

  Returns:
    The rule.

  Raises:
    TypeError: if an argument is not of its kind.
    ValueError: if an argument is out of its range.

  Examples:
    >>> import optax_lossscale as ols
    >>> rule = ols.presets.mindspore_amp(
    ...   scale_value=2**10, scale_factor=2, scale_window=1
    ... )
    >>> print(rule.update(rule.init(), overflow=False).loss_scale)
    2048.0

  References:
    MindSpore 2.10.0, mindspore/amp.py.
  """
  return _preset.dynamic("mindspore_amp", locals())


def mindspore_cell(
  *, loss_scale_value: float, scale_factor: float, scale_window: int
) -> _preset.PresetLossScale:
  """MindSpore's `nn.DynamicLossScaleUpdateCell`.

  S shrinks on every overflow, to 1 at the least, and grows after `scale_window`
  clean steps since it last grew or overflowed; at once, where a resumed run has
  a smaller window.

  Args:
    loss_scale_value: the first S; one below 1 is raised to 1 by an overflow.
    scale_factor: S is multiplied or divided by it; above 1.
    scale_window: clean steps before S grows.

  Returns:
    The rule.

  Raises:
    TypeError: if an argument is not of its kind.
    ValueError: if an argument is out of its range.

  Examples:
    >>> import optax_lossscale as ols
    >>> rule = ols.presets.mindspore_cell(
    ...   loss_scale_value=2**12, scale_factor=2, scale_window=1000
    ... )
    >>> print(rule.update(rule.init(), overflow=True).loss_scale)
    2048.0

  References:
    MindSpore 2.10.0, mindspore/nn/wrap/loss_scale.py. S grows to inf there and
    is held here.
  """
  return _preset.dynamic("mindspore_cell", locals())


PRESETS = (
  mindspore,
  mindspore_fixed,
  mindspore_amp,
  mindspore_cell,
)
