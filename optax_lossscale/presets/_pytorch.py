"""PyTorch's scalers, and those of the systems built on it."""

from typing import Any
from typing import Literal

from optax_lossscale import _arguments
from optax_lossscale.presets import _preset

# `locals()`, at the top of each function, is its arguments.


def torch(
  *,
  init_scale: float = 2.0**16,
  growth_factor: float = 2.0,
  backoff_factor: float = 0.5,
  growth_interval: int = 2000,
  enabled: bool = True,
) -> _preset.PresetLossScale:
  """PyTorch's `torch.amp.GradScaler`.

  S shrinks on every overflow and grows after `growth_interval` clean steps in a
  row. There is no floor.

  Args:
    init_scale: the first S.
    growth_factor: S is multiplied by it on growth; above 1.
    backoff_factor: S is multiplied by it on overflow; between 0 and 1.
    growth_interval: clean steps in a row before S grows.
    enabled: False leaves S at 1 and skips no step.

  Returns:
    The rule.

  Raises:
    TypeError: if an argument is not of its kind.
    ValueError: if an argument is out of its range.

  Examples:
    >>> import optax_lossscale as ols
    >>> rule = ols.presets.torch(growth_interval=100)
    >>> print(rule.update(rule.init(), overflow=True).loss_scale)
    32768.0

  References:
    PyTorch 2.13.0, torch/amp/grad_scaler.py and the kernel
    _amp_update_scale_. S goes to 0 there and is held here.
  """
  enabled = _arguments.check_flag("enabled", enabled)
  if not enabled:
    return _preset.switched_off("torch", locals())
  return _preset.dynamic("torch", locals())


def torch_sharded(
  *,
  init_scale: float = 2.0**16,
  backoff_factor: float = 0.5,
  growth_factor: float = 2.0,
  growth_interval: int = 2000,
  enabled: bool = True,
) -> _preset.PresetLossScale:
  """PyTorch's `torch.distributed.fsdp.ShardedGradScaler`.

  The rule of `torch`. Its signature has the factors the other way round than
  GradScaler's, and than its own documentation: by position they get swapped.

  Args:
    init_scale: the first S.
    backoff_factor: S is multiplied by it on overflow; between 0 and 1.
    growth_factor: S is multiplied by it on growth; above 1.
    growth_interval: clean steps in a row before S grows.
    enabled: False leaves S at 1 and skips no step.

  Returns:
    The rule.

  Raises:
    TypeError: if an argument is not of its kind.
    ValueError: if an argument is out of its range.

  Examples:
    >>> import optax_lossscale as ols
    >>> print(ols.presets.torch_sharded(init_scale=8.0).init().loss_scale)
    8.0

  References:
    PyTorch 2.13.0, torch/distributed/fsdp/sharded_grad_scaler.py. S goes to 0
    there, with S on the CPU also to inf, and is held here.
  """
  enabled = _arguments.check_flag("enabled", enabled)
  if not enabled:
    return _preset.switched_off("torch_sharded", locals())
  return _preset.dynamic("torch_sharded", locals())


def megatron(
  *,
  initial_scale: float = 2.0**32,
  min_scale: float = 1.0,
  growth_factor: float = 2.0,
  backoff_factor: float = 0.5,
  growth_interval: int = 1000,
  hysteresis: int = 2,
  refill: Literal["growth", "clean"] = "growth",
) -> _preset.PresetLossScale:
  """Megatron-LM's `DynamicGradScaler`, with the defaults of OptimizerConfig.

  S shrinks on the `hysteresis`-th overflow since it last grew, and on each one
  after that until it grows. Megatron's documentation says "consecutive", but in
  its code a clean step forgives no overflow.

  Args:
    initial_scale: the first S.
    min_scale: the floor, at most `initial_scale`.
    growth_factor: S is multiplied by it on growth; above 1.
    backoff_factor: S is multiplied by it when it shrinks; between 0 and 1.
    growth_interval: clean steps in a row before S grows.
    hysteresis: overflows before S shrinks.
    refill: what forgives overflows: "growth", as in the code, or "clean", any
      clean step, as documented. This one is not Megatron's.

  Returns:
    The rule.

  Raises:
    TypeError: if an argument is not of its kind.
    ValueError: if an argument is out of its range.

  Examples:
    >>> import optax_lossscale as ols
    >>> rule = ols.presets.megatron(initial_scale=8.0)
    >>> state = rule.init()
    >>> for overflow in (True, False, True):
    ...   state = rule.update(state, overflow)
    ...   print(state.loss_scale)
    8.0
    8.0
    4.0

  References:
    megatron-core 0.19.2, megatron/core/optimizer/grad_scaler.py. S grows to
    inf there and is held here.
  """
  return _preset.dynamic("megatron", locals())


def megatron_constant(*, initial_scale: float) -> _preset.PresetLossScale:
  """Megatron-LM's `ConstantGradScaler`: S stays.

  Args:
    initial_scale: S.

  Returns:
    The rule; an overflow skips the step.

  Raises:
    TypeError: if S is not a number.
    ValueError: if S is out of its range.

  Examples:
    >>> import optax_lossscale as ols
    >>> rule = ols.presets.megatron_constant(initial_scale=4096.0)
    >>> ols.presets.to_state_dict(rule, rule.init())
    {}

  References:
    megatron-core 0.19.2, megatron/core/optimizer/grad_scaler.py.
  """
  return _preset.fixed("megatron_constant", locals(), "initial_scale")


def deepspeed(
  *,
  init_scale: float = 2.0**16,
  scale_window: int = 1000,
  min_scale: float = 1.0,
  delayed_shift: int = 2,
  consecutive_hysteresis: bool = False,
  raise_error_at_min_scale: bool = True,
) -> _preset.PresetLossScale:
  """DeepSpeed's `DynamicLossScaler` since 0.17.1, with the config's defaults.

  S halves on the `delayed_shift`-th overflow since it last grew and on each one
  after that, and doubles. The first growth after the start or an overflow waits
  for `scale_window` + 1 clean steps, each one after that for `scale_window`.
  The config calls these `initial_scale_power` (the exponent),
  `loss_scale_window`, `min_loss_scale`, `hysteresis`, `consecutive_hysteresis`.

  Args:
    init_scale: the first S.
    scale_window: clean steps in a row before S grows.
    min_scale: the floor. An `init_scale` below it is raised to it by the first
      overflow.
    delayed_shift: overflows before S shrinks.
    consecutive_hysteresis: whether every clean step forgives earlier overflows.
    raise_error_at_min_scale: whether `raise_if_failed` raises once a step
      overflowed with S at `min_scale`.

  Returns:
    The rule.

  Raises:
    TypeError: if an argument is not of its kind.
    ValueError: if an argument is out of its range.

  Examples:
    >>> import optax_lossscale as ols
    >>> rule = ols.presets.deepspeed(init_scale=8.0, scale_window=2)
    >>> state = rule.init()
    >>> for _ in range(3):
    ...   state = rule.update(state, overflow=False)
    ...   print(state.loss_scale)
    8.0
    8.0
    16.0

  References:
    DeepSpeed 0.19.8, deepspeed/runtime/fp16/loss_scaler.py. S grows to inf
    there, in double, and is held here. DeepSpeed divides the gradients by the S
    of the next step, which halves them where S doubles; the wrapper does not.
  """
  return _preset.dynamic("deepspeed", locals())


def deepspeed_legacy(
  *,
  init_scale: float = 2.0**32,
  scale_factor: float = 2.0,
  scale_window: int = 1000,
  min_scale: float = 1,
  delayed_shift: int = 1,
  consecutive_hysteresis: bool = False,
  raise_error_at_min_scale: bool = True,
) -> _preset.PresetLossScale:
  """DeepSpeed's `DynamicLossScaler` before 0.17.1.

  As `deepspeed`, but every growth waits for `scale_window` clean steps, and the
  factor is an argument.

  Args:
    init_scale: the first S.
    scale_factor: S is multiplied or divided by it; above 1.
    scale_window: clean steps in a row before S grows.
    min_scale: the floor. An `init_scale` below it is raised to it by the first
      overflow.
    delayed_shift: overflows before S shrinks.
    consecutive_hysteresis: whether every clean step forgives earlier overflows.
    raise_error_at_min_scale: whether `raise_if_failed` raises once a step
      overflowed with S at `min_scale`.

  Returns:
    The rule.

  Raises:
    TypeError: if an argument is not of its kind.
    ValueError: if an argument is out of its range.

  Examples:
    >>> import optax_lossscale as ols
    >>> rule = ols.presets.deepspeed_legacy(init_scale=8.0, scale_window=1)
    >>> print(rule.update(rule.init(), overflow=False).loss_scale)
    16.0

  References:
    DeepSpeed 0.17.0, deepspeed/runtime/fp16/loss_scaler.py. S grows to inf
    there, in double, and is held here.
  """
  return _preset.dynamic("deepspeed_legacy", locals())


def apex(
  *,
  loss_scale: Any = "dynamic",
  init_scale: float = 2.0**16,
  scale_factor: float = 2.0,
  scale_window: int = 2000,
  min_loss_scale: float | None = None,
  max_loss_scale: float = 2.0**24,
) -> _preset.PresetLossScale:
  """NVIDIA Apex's `apex.amp` loss scaler.

  S halves on every overflow and doubles after `scale_window` clean steps in a
  row. With a number for `loss_scale` S stays there, and overflows do not skip
  the step.

  Args:
    loss_scale: "dynamic", or the S that stays.
    init_scale: the first S, if it is not above `max_loss_scale`.
    scale_factor: 2; Apex takes another number and does not use it.
    scale_window: clean steps in a row before S grows.
    min_loss_scale: the floor; None, as Apex's 0, for none.
    max_loss_scale: the ceiling.

  Returns:
    The rule.

  Raises:
    TypeError: if an argument is not of its kind.
    ValueError: if an argument is out of its range.

  Examples:
    >>> import optax_lossscale as ols
    >>> float(ols.presets.apex(init_scale=2.0**30).init().loss_scale)
    16777216.0

  References:
    NVIDIA Apex, apex/amp/scaler.py. Without a floor S goes to 0 there, in
    double, and is held here.
  """
  scale_factor = _arguments.check_number("scale_factor", scale_factor)
  if scale_factor != 2:
    raise ValueError(
      f"`scale_factor` must be 2, got {scale_factor!r}: Apex moves S by 2 "
      "whatever it is given."
    )
  if loss_scale == "dynamic":
    return _preset.dynamic("apex", locals())
  if isinstance(loss_scale, str):
    raise TypeError(
      f"`loss_scale` must be 'dynamic' or a number, got {loss_scale!r}."
    )
  loss_scale = _arguments.check_scale("loss_scale", loss_scale)
  return _preset.switched_off("apex", locals(), "loss_scale")


def apex_hysteresis(
  *,
  init_scale: float = 2.0**16,
  growth_factor: float = 2.0,
  backoff_factor: float = 0.5,
  growth_interval: int = 2000,
  hysteresis: int = 1,
) -> _preset.PresetLossScale:
  """NVIDIA Apex's kernel `update_scale_hysteresis`, NeMo's GradScaler.

  The rule of `torch`, but S shrinks on the `hysteresis`-th overflow in a row,
  and on each further one of that row. NeMo saves where in such a row it is, but
  does not find it again (it reads a key spelled otherwise); so it is here.

  Args:
    init_scale: the first S.
    growth_factor: S is multiplied by it on growth; above 1.
    backoff_factor: S is multiplied by it when it shrinks; between 0 and 1.
    growth_interval: clean steps in a row before S grows.
    hysteresis: overflows in a row before S shrinks.

  Returns:
    The rule.

  Raises:
    TypeError: if an argument is not of its kind.
    ValueError: if an argument is out of its range.

  Examples:
    >>> import optax_lossscale as ols
    >>> rule = ols.presets.apex_hysteresis(init_scale=8.0, hysteresis=2)
    >>> state = rule.update(rule.init(), overflow=True)
    >>> print(state.loss_scale, rule.update(state, overflow=True).loss_scale)
    8.0 4.0

  References:
    NVIDIA Apex 79b7f4f, csrc/update_scale_hysteresis.cu, with the class and
    the defaults of NVIDIA NeMo 2.7.3. S goes to 0 there and is held here.
  """
  return _preset.dynamic("apex_hysteresis", locals())


def fairseq(
  *,
  init_scale: float = 2.0**15,
  scale_factor: float = 2.0,
  scale_window: int = 2000,
  tolerance: float = 0.0,
  threshold: float | None = None,
  min_loss_scale: float = 1e-4,
) -> _preset.PresetLossScale:
  """Fairseq's `DynamicLossScaler`.

  S shrinks on an overflow, if the overflows since it last shrank are a share of
  at least `tolerance` of the steps since it last moved. It grows after every
  `scale_window` clean steps in a row. Where it would shrink to
  `min_loss_scale`, fairseq ends the run; here S is held and `raise_if_failed`
  raises. A checkpoint holds S alone, so a resumed run counts anew.

  Args:
    init_scale: the first S; the trainer's `--fp16-init-scale` is 2**7.
    scale_factor: S is multiplied or divided by it; above 1.
    scale_window: clean steps in a row before S grows; the trainer's own
      default is 2**14 over the numbers of workers and of accumulated batches.
    tolerance: share of overflows before S shrinks, between 0 and 1.
    threshold: the floor; None for none.
    min_loss_scale: S stays above it.

  Returns:
    The rule.

  Raises:
    TypeError: if an argument is not of its kind.
    ValueError: if an argument is out of its range.

  Examples:
    >>> import optax_lossscale as ols
    >>> rule = ols.presets.fairseq(init_scale=8.0, tolerance=0.5)
    >>> state = rule.init()
    >>> for overflow in (False, False, True, True):
    ...   state = rule.update(state, overflow)
    ...   print(state.loss_scale)
    8.0
    8.0
    8.0
    4.0

  References:
    fairseq 0.12.2, fairseq/optim/dynamic_loss_scaler.py. S grows to inf there,
    in double, and is held here.
  """
  return _preset.dynamic("fairseq", locals())


def metaseq(
  *,
  init_scale: float = 4.0,
  scale_factor: float = 2.0,
  scale_window: int = 256,
  tolerance: float = 0.0,
  threshold: float | None = None,
  min_loss_scale: float = 2.0**-5,
) -> _preset.PresetLossScale:
  """Metaseq's `DynamicLossScaler`.

  The rule of `fairseq`, but `scale_window` moves with S, and S that would
  shrink below `min_loss_scale` stays, without an end of the run. A checkpoint
  holds S alone, so a resumed run counts anew, from the first window.

  Args:
    init_scale: the first S.
    scale_factor: S and the window are multiplied or divided by it; above 1.
    scale_window: the first window, in clean steps in a row before S grows.
    tolerance: share of overflows before S shrinks, between 0 and 1.
    threshold: the floor; None for none.
    min_loss_scale: S does not shrink below it.

  Returns:
    The rule.

  Raises:
    TypeError: if an argument is not of its kind.
    ValueError: if an argument is out of its range.

  Examples:
    >>> import optax_lossscale as ols
    >>> rule = ols.presets.metaseq(scale_window=1)
    >>> state = rule.init()
    >>> for _ in range(3):
    ...   state = rule.update(state, overflow=False)
    ...   print(state.loss_scale)
    8.0
    16.0
    16.0

  References:
    metaseq 0ba5657, metaseq/optim/dynamic_loss_scaler.py. S grows to inf
    there, in double, and is held here; the window is a float32 here.
  """
  return _preset.dynamic("metaseq", locals())


def colossalai(
  *,
  initial_scale: float = 2.0**16,
  growth_factor: float = 2,
  backoff_factor: float = 0.5,
  growth_interval: int = 1000,
  min_scale: float | None = None,
  max_scale: float | None = None,
  hysteresis: int = 2,
) -> _preset.PresetLossScale:
  """ColossalAI's `DynamicGradScaler`.

  The rule of `megatron`, with a ceiling. A checkpoint lacks both counters, so a
  resumed run counts anew.

  Args:
    initial_scale: the first S.
    growth_factor: S is multiplied by it on growth; above 1.
    backoff_factor: S is multiplied by it when it shrinks; between 0 and 1.
    growth_interval: clean steps in a row before S grows.
    min_scale: the floor, at most `initial_scale`; None for none. ColossalAI's
      optimizers pass 1.
    max_scale: the ceiling, at least `initial_scale`; None for none.
      ColossalAI's optimizers pass 2**32.
    hysteresis: overflows since the last growth before S shrinks. ColossalAI
      takes 0 for 1.

  Returns:
    The rule.

  Raises:
    TypeError: if an argument is not of its kind.
    ValueError: if an argument is out of its range.

  Examples:
    >>> import optax_lossscale as ols
    >>> rule = ols.presets.colossalai(growth_interval=1, max_scale=2.0**16)
    >>> print(rule.update(rule.init(), overflow=False).loss_scale)
    65536.0

  References:
    ColossalAI 0.5.0,
    colossalai/amp/naive_amp/grad_scaler/dynamic_grad_scaler.py. Without bounds
    S goes to 0 or inf there and is held here.
  """
  return _preset.dynamic("colossalai", locals())


PRESETS = (
  torch,
  torch_sharded,
  megatron,
  megatron_constant,
  deepspeed,
  deepspeed_legacy,
  apex,
  apex_hysteresis,
  fairseq,
  metaseq,
  colossalai,
)
