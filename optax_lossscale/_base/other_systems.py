"""Names that people try first, since another system has them."""

from collections.abc import Iterable

from optax_lossscale._base import arguments

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


def of_name(name: str, known: Iterable[str]) -> str:
  """Returns the end of an error about a name that the library lacks."""
  if name not in _NAMES:
    return arguments.did_you_mean(name, [*known, *_NAMES], cutoff=0.75)
  code, page = _NAMES[name]
  return f"; write {code} instead, see docs/porting/{page}.md"
