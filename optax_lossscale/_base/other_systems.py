"""Names that people try first, since another system has them."""

from collections.abc import Callable
from collections.abc import Iterable
import functools
import inspect
from typing import ParamSpec
from typing import TypeVar

from optax_lossscale._base import arguments

_P = ParamSpec("_P")
_R = TypeVar("_R")

_FLAX, _MINDSPORE = "flax_jmp", "mindspore"

# Names in other packages, each with the line to write here and its page of
# docs/porting. A preset goes into `loss_scaling`.
_NAMES = {
  "GradScaler": ("presets.torch()", "torch"),
  "ShardedGradScaler": ("presets.torch_sharded()", "torch"),
  "unscale_": ("unscale(scaled_grads, opt_state)", "README"),
  "clip_grad_norm_": (
    "optax.chain(optax.clip_by_global_norm(1.0), ...)",
    "README",
  ),
  "amp": ("autocast(loss_fn) and presets.torch()", "torch"),
  "DynamicScale": ("presets.flax()", _FLAX),
  "StaticLossScale": ("FixedLossScale(scale)", _FLAX),
  "NoOpLossScale": ("loss_scaling(inner, None)", _FLAX),
  "all_finite": ('loss_scale_metrics(opt_state)["overflow"]', _FLAX),
  "select_tree": ("select_on_skip(opt_state, new, old)", _FLAX),
  "initialize": ('autocast(loss_fn, "O1") and presets.apex()', "apex_fairseq"),
  "LossScaler": ("presets.apex()", "apex_fairseq"),
  "FP16_Optimizer": ("presets.deepspeed()", "megatron_deepspeed"),
  "DynamicLossScaler": ("presets.deepspeed()", "megatron_deepspeed"),
  "DynamicGradScaler": ("presets.megatron()", "megatron_deepspeed"),
  "ConstantGradScaler": ("presets.megatron_constant()", "megatron_deepspeed"),
  "LossScaleOptimizer": ("presets.keras()", "tensorflow_keras"),
  "NPULossScaleOptimizer": ("presets.npu_loss_scale_optimizer", "ascend"),
  "ExponentialUpdateLossScaleManager": ("presets.npu_exponential()", "ascend"),
  "FixedLossScaleManager": ("presets.mindspore_fixed()", _MINDSPORE),
  "DynamicLossScaleManager": ("presets.mindspore()", _MINDSPORE),
  "auto_mixed_precision": ("autocast(loss_fn, level)", _MINDSPORE),
  "decorate": ("autocast(loss_fn) and master_weights(inner)", "paddle"),
}
# Names of presets that are close to none of ours.
_PRESETS = {"pytorch": "torch", "ascend": "npu_exponential", "tf": "tensorflow"}
# Arguments of rules and functions.
_ARGUMENTS = {
  "enabled": "loss_scaling(inner, None) switches loss scaling off, and the "
  "level O0 switches autocast off",
  "fin_steps": "the count is in the state",
  "backoff": "the argument is `backoff_factor`",
  "period": "the argument is `growth_interval`",
  "factor": "the arguments are `growth_factor` and `backoff_factor`",
  "scale_factor": "the arguments are `growth_factor` and `backoff_factor`",
  "scale_window": "the argument is `growth_interval`",
  "device": "a rule has no device",
  "loss_scale": "the argument is `rule`",
  "compute_dtype": "the argument is `dtype`",
}


def of_name(name: str, known: Iterable[str]) -> str:
  """Returns the end of an error about a name that the library lacks."""
  if name not in _NAMES:
    return arguments.did_you_mean(name, [*known, *_NAMES], cutoff=0.75)
  code, page = _NAMES[name]
  return f"; write {code} instead, see docs/porting/{page}.md"


def of_preset(name: str, presets: Iterable[str]) -> str:
  """Returns the end of an error about a preset that does not exist."""
  if name in _PRESETS:
    return f"; did you mean {_PRESETS[name]!r}?"
  return arguments.did_you_mean(name, presets)


def check_arguments(
  rule: str, names: Iterable[str], given: Iterable[str]
) -> None:
  """Raises for an argument that is unknown here, but not to another system."""
  for name in given:
    if name not in names and name in _ARGUMENTS:
      raise TypeError(
        f"`{rule}` takes the arguments {', '.join(names)}, got {name!r}; "
        f"{_ARGUMENTS[name]}."
      )
  arguments.check_known(rule, names, given)


def explained(function: Callable[_P, _R]) -> Callable[_P, _R]:
  """Returns a function that explains arguments that it does not have."""
  names = list(inspect.signature(function).parameters)

  @functools.wraps(function)
  def call(*args: _P.args, **kwargs: _P.kwargs) -> _R:
    check_arguments(function.__name__, names, kwargs)
    return function(*args, **kwargs)

  return call
