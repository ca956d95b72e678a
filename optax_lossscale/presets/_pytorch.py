"""The scalers of PyTorch and NVIDIA Apex."""

from optax_lossscale._base import arguments as _arguments
from optax_lossscale._base.arguments import shown
from optax_lossscale.presets._keys import Key
from optax_lossscale.presets._keys import one_int32
from optax_lossscale.presets.declaration import Argument
from optax_lossscale.presets.declaration import preset
from optax_lossscale.presets.declaration import PresetLossScale

_TORCH_KEYS: dict[str, object] = {
  "scale": Key("S", float),
  "growth_factor": float,
  "backoff_factor": float,
  "growth_interval": int,
  "_growth_tracker": Key("clean_steps", int),
}


def _check_dynamic_or_scale(name: str, value: object) -> float | str:
  if not isinstance(value, str):
    return _arguments.check_scale(name, value)
  if value != "dynamic":
    raise TypeError(
      f"`{name}` must be 'dynamic' or a number, got {shown(value)}."
    )
  return value


def _check_two(name: str, value: object) -> float:
  factor = _arguments.check_number(name, value)
  if factor != 2:
    raise ValueError(
      f"`{name}` must be 2, got {value!r}: Apex moves S by 2 whatever it is "
      "given."
    )
  return factor


@preset(growth_test="equal", enabled=Argument("enabled"), saves=_TORCH_KEYS)
def torch(
  *,
  init_scale: float = 2.0**16,
  growth_factor: float = 2.0,
  backoff_factor: float = 0.5,
  growth_interval: int = 2000,
  enabled: bool = True,
) -> PresetLossScale:
  """PyTorch's `torch.amp.GradScaler`.

  S shrinks on every overflow and grows after `growth_interval` clean steps in a
  row. S has no floor.

  Examples:
    >>> rule = ols.presets.torch(growth_interval=100)
    >>> print(rule.update(rule.init(), overflow=True).loss_scale)
    32768.0

  References:
    PyTorch 2.13.0, torch/amp/grad_scaler.py and the kernel _amp_update_scale_.
  """


@preset(growth_test="equal", enabled=Argument("enabled"), saves=_TORCH_KEYS)
def torch_sharded(
  *,
  init_scale: float = 2.0**16,
  backoff_factor: float = 0.5,
  growth_factor: float = 2.0,
  growth_interval: int = 2000,
  enabled: bool = True,
) -> PresetLossScale:
  """PyTorch's `torch.distributed.fsdp.ShardedGradScaler`.

  The same rule as `torch`. GradScaler, and even this scaler's documentation,
  list the two factors in the other order, so passing by position swaps them.

  Examples:
    >>> print(ols.presets.torch_sharded(init_scale=8.0).init().loss_scale)
    8.0

  References:
    PyTorch 2.13.0, torch/distributed/fsdp/sharded_grad_scaler.py.
  """


@preset(
  scale=Argument(
    "loss_scale",
    lambda scale: None if scale == "dynamic" else scale,
    _check_dynamic_or_scale,
  ),
  skip=Argument("loss_scale", lambda scale: scale == "dynamic"),
  growth_factor=Argument("scale_factor", check=_check_two),
  backoff_factor=0.5,
  growth_test="equal",
  saves={
    "loss_scaler0/loss_scale": Key("S", float),
    "loss_scaler0/unskipped": Key("clean_steps", int),
  },
)
def apex(
  *,
  loss_scale: float | str = "dynamic",
  init_scale: float = 2.0**16,
  scale_factor: float = 2.0,
  scale_window: int = 2000,
  min_loss_scale: float | None = None,
  max_loss_scale: float = 2.0**24,
) -> PresetLossScale:
  """NVIDIA Apex's `apex.amp` loss scaler.

  S halves on every overflow and doubles after `scale_window` clean steps in a
  row. If `loss_scale` is a number, S is fixed at that number, and overflows do
  not skip the step.

  Args:
    loss_scale: "dynamic", or a fixed S.
    init_scale: the first S, unless it is above `max_loss_scale`.
    scale_factor: must be 2; Apex accepts other numbers but ignores them.
    max_loss_scale: the ceiling.

  Examples:
    >>> float(ols.presets.apex(init_scale=2.0**30).init().loss_scale)
    16777216.0

  References:
    NVIDIA Apex, apex/amp/scaler.py, as in the fork HYGON-AI/apex-das 5051199.
  """


@preset(
  growth_test="equal",
  saves={
    **_TORCH_KEYS,
    "_hysteresis_tracker": Key("hysteresis_left", one_int32, is_read=False),
  },
)
def apex_hysteresis(
  *,
  init_scale: float = 2.0**16,
  growth_factor: float = 2.0,
  backoff_factor: float = 0.5,
  growth_interval: int = 2000,
  hysteresis: int = 1,
) -> PresetLossScale:
  """NVIDIA Apex's kernel `update_scale_hysteresis`, as in NeMo's GradScaler.

  Like `torch`, but S shrinks on the `hysteresis`-th overflow in a row, and on
  each further one until a clean step. Like NeMo, this preset saves the count
  but does not restore it.

  Examples:
    >>> rule = ols.presets.apex_hysteresis(init_scale=8.0, hysteresis=2)
    >>> state = rule.update(rule.init(), overflow=True)
    >>> print(state.loss_scale, rule.update(state, overflow=True).loss_scale)
    8.0 4.0

  References:
    NVIDIA Apex 79b7f4f, csrc/update_scale_hysteresis.cu, with the class and
    the defaults of NVIDIA NeMo 2.7.3.
  """
