"""What each system saves of its scaler: a table of state dictionaries."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from optax_lossscale._rules import engine
from optax_lossscale.presets import _keys
from optax_lossscale.presets import _table
from optax_lossscale.presets._keys import ArgumentKey
from optax_lossscale.presets._keys import ConstantKey
from optax_lossscale.presets._keys import DerivedKey
from optax_lossscale.presets._keys import StateKey
from optax_lossscale.presets._keys import UnneededKey

Layout = Mapping[
  tuple[str, ...],
  StateKey | ArgumentKey | DerivedKey | ConstantKey | UnneededKey,
]


_TORCH: dict[str, Any] = {
  "scale": StateKey("loss_scale", float),
  "growth_factor": ArgumentKey("growth_factor", float),
  "backoff_factor": ArgumentKey("backoff_factor", float),
  "growth_interval": ArgumentKey("growth_interval", int),
  "_growth_tracker": StateKey("clean_steps", int),
}
_DEEPSPEED: dict[str, Any] = {
  "cur_scale": StateKey("loss_scale", float),
  "cur_iter": StateKey("steps", int),
  "last_overflow_iter": StateKey("last_overflow", int),
  "scale_window": ArgumentKey("scale_window", int),
  "min_scale": ArgumentKey("min_scale", _keys.int_or_float),
  "delayed_shift": ArgumentKey("delayed_shift", int),
  "cur_hysteresis": StateKey("overflows_to_shrink", int),
  "consecutive_hysteresis": ArgumentKey("consecutive_hysteresis", bool),
  "raise_error_at_min_scale": ArgumentKey("raise_error_at_min_scale", bool),
  "dynamic": ConstantKey(True),
  "dtype": UnneededKey(),  # torch.float16, among the object's attributes.
}
_FAIRSEQ: dict[str, Any] = {"loss_scale": StateKey("loss_scale", float)}
_TF_EXPONENTIAL: dict[str, Any] = {
  "loss_scale": StateKey("loss_scale", np.float32),
  "good_steps": StateKey("clean_steps", np.int32),
  "bad_steps": StateKey("overflows", np.int32),
}
_PADDLE: dict[str, Any] = {
  "scale": StateKey("loss_scale", _keys.one_float32),
  "incr_ratio": ArgumentKey("incr_ratio", float),
  "decr_ratio": ArgumentKey("decr_ratio", float),
  "incr_every_n_steps": ArgumentKey("incr_every_n_steps", int),
  "decr_every_n_nan_or_inf": ArgumentKey("decr_every_n_nan_or_inf", int),
  "incr_count": StateKey("clean_steps", int),
  "decr_count": StateKey("overflows", int),
  "use_dynamic_loss_scaling": ArgumentKey("use_dynamic_loss_scaling", bool),
}

# What is not here saves nothing.
_LAYOUTS: dict[str, dict[str, Any]] = {
  "torch": _TORCH,
  "torch_sharded": _TORCH,
  "megatron": {
    "scale": StateKey("loss_scale", _keys.one_float32),
    "growth_tracker": StateKey("clean_steps", int),
    "hysteresis_tracker": StateKey("hysteresis_left", int),
  },
  "colossalai": {
    "scale": StateKey("loss_scale", _keys.one_float32),
    "growth_factor": ArgumentKey("growth_factor", _keys.int_or_float),
    "backoff_factor": ArgumentKey("backoff_factor", float),
    "hysteresis": ArgumentKey("hysteresis", int),
  },
  "deepspeed": _DEEPSPEED | {"scale_factor": ConstantKey(2.0)},
  "deepspeed_legacy": _DEEPSPEED
  | {"scale_factor": ArgumentKey("scale_factor", float)},
  "apex": {
    "loss_scaler0/loss_scale": StateKey("loss_scale", float),
    "loss_scaler0/unskipped": StateKey("clean_steps", int),
  },
  "apex_hysteresis": _TORCH
  | {
    "_hysteresis_tracker": StateKey(
      "hysteresis_left", _keys.one_int32, is_lost=True
    )
  },
  "fairseq": _FAIRSEQ,
  "metaseq": _FAIRSEQ,
  "tf_exponential": _TF_EXPONENTIAL,
  "npu_exponential": _TF_EXPONENTIAL,
  "tensorflow": {
    "current_loss_scale": StateKey("loss_scale", np.float32),
    "good_steps": StateKey("clean_steps", np.int64),
  },
  "keras": {
    "step_counter": StateKey("clean_steps", np.int32),
    "dynamic_scale": StateKey("loss_scale", np.float32),
  },
  "mindspore": {
    "loss_scale": StateKey("loss_scale", float),
    "scale_window": ArgumentKey("scale_window", int),
    "scale_factor": ArgumentKey("scale_factor", _keys.int_or_float),
    "increase_ratio": DerivedKey("scale_factor", _keys.int_or_float),
    "decrease_ratio": DerivedKey("scale_factor", _table.inverse),
    "bad_step_max": ConstantKey(engine.MOST_OVERFLOWS_IN_A_ROW),
    "cur_iter": StateKey("steps", int, first=1),
    "last_overflow_iter": StateKey("last_overflow", int, first=1),
    "bad_step": StateKey("overflows", int),
  },
  "mindspore_amp": {
    "scale_value": StateKey("loss_scale", np.float32),
    "counter": StateKey("window_steps", np.int32),
  },
  "mindspore_cell": {
    "scale_sense": StateKey("loss_scale", np.float32),
    "current_iterator_step": StateKey("steps", np.int32, first=1),
    "last_overflow_iterator_step": StateKey("last_overflow", np.int32, first=1),
  },
  "paddle": _PADDLE,
  "paddle_op": {
    "loss_scaling_0": StateKey("loss_scale", _keys.one_float32),
    "num_good_steps_0": StateKey("clean_steps", _keys.one_int32),
    "num_bad_steps_0": StateKey("overflows", _keys.one_int32),
  },
  "flax": {
    "fin_steps": StateKey("clean_steps", np.int32),
    "scale": StateKey("loss_scale", np.float32),
  },
  "jmp": {
    "loss_scale": StateKey("loss_scale", np.float32),
    "counter": StateKey("window_steps", np.int32),
  },
}


def is_switched_off(arguments: Mapping[str, Any]) -> bool:
  """Returns whether arguments switch a scaler off."""
  return not arguments.get("enabled", arguments.get("enable", True))


def layout(system: str, arguments: Mapping[str, Any]) -> Layout:
  """Returns the keys of a system by their paths."""
  if is_switched_off(arguments):
    return {}
  return {
    tuple(path.split("/")): key
    for path, key in _LAYOUTS.get(system, {}).items()
  }
