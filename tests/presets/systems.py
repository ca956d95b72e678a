"""The arguments of every preset: the kind of each, and values of each kind.

The declaration of a preset says which column an argument fills. The column
gives the kind, except for the arguments in `SPECIAL`.
"""

import functools
import inspect
import math
from typing import NamedTuple

import numpy as np

from optax_lossscale import presets
from optax_lossscale.presets import declaration
from tests import support

# The arguments of each original, in its order and with its defaults.
SIGNATURES = {
  "torch": "init_scale=2.0**16, growth_factor=2.0, backoff_factor=0.5,"
  "growth_interval=2000, enabled=True",
  "torch_sharded": "init_scale=2.0**16, backoff_factor=0.5, growth_factor=2.0,"
  "growth_interval=2000, enabled=True",
  "megatron": "initial_scale=2.0**32, min_scale=1.0, growth_factor=2.0,"
  "backoff_factor=0.5, growth_interval=1000, hysteresis=2, refill='growth'",
  "megatron_constant": "initial_scale",
  "deepspeed": "init_scale=2.0**16, scale_window=1000, min_scale=1.0,"
  "delayed_shift=2, consecutive_hysteresis=False,"
  "raise_error_at_min_scale=True",
  "deepspeed_legacy": "init_scale=2.0**32, scale_factor=2.0, scale_window=1000,"
  "min_scale=1.0, delayed_shift=1, consecutive_hysteresis=False,"
  "raise_error_at_min_scale=True",
  "apex": "loss_scale='dynamic', init_scale=2.0**16, scale_factor=2.0,"
  "scale_window=2000, min_loss_scale=None, max_loss_scale=2.0**24",
  "apex_hysteresis": "init_scale=2.0**16, growth_factor=2.0,"
  "backoff_factor=0.5, growth_interval=2000, hysteresis=1",
  "fairseq": "init_scale=2.0**15, scale_factor=2.0, scale_window=2000,"
  "tolerance=0.0, threshold=None, min_loss_scale=1e-4",
  "metaseq": "init_scale=4.0, scale_factor=2.0, scale_window=256,"
  "tolerance=0.0, threshold=None, min_loss_scale=2.0**-5",
  "colossalai": "initial_scale=2.0**16, growth_factor=2.0, backoff_factor=0.5,"
  "growth_interval=1000, min_scale=None, max_scale=None, hysteresis=2",
  "npu_exponential": "init_loss_scale, incr_every_n_steps,"
  "decr_every_n_nan_or_inf=2, incr_ratio=2.0, decr_ratio=0.8",
  "npu_fixed": "loss_scale, enable_overflow_check=True",
  "tf_exponential": "init_loss_scale, incr_every_n_steps,"
  "decr_every_n_nan_or_inf=2, incr_ratio=2.0, decr_ratio=0.8",
  "tensorflow": "initial_loss_scale=2.0**15, increment_period=2000,"
  "multiplier=2.0",
  "keras": "initial_scale=2.0**15, dynamic_growth_steps=2000",
  "mindspore": "init_loss_scale=2.0**24, scale_factor=2, scale_window=2000",
  "mindspore_fixed": "loss_scale=128.0, drop_overflow_update=True",
  "mindspore_amp": "scale_value, scale_factor, scale_window",
  "mindspore_cell": "loss_scale_value, scale_factor, scale_window",
  "paddle": "enable=True, init_loss_scaling=2.0**16, incr_ratio=2.0,"
  "decr_ratio=0.5, incr_every_n_steps=2000, decr_every_n_nan_or_inf=1,"
  "use_dynamic_loss_scaling=True",
  "paddle_op": "init_loss_scaling=2.0**16, incr_every_n_steps=2000,"
  "decr_every_n_nan_or_inf=1, incr_ratio=2.0, decr_ratio=0.5",
  "flax": "scale=65536.0, growth_factor=2.0, backoff_factor=0.5,"
  "growth_interval=2000, minimum_scale=2.0**-126",
  "jmp": "loss_scale, period=2000, factor=2, min_loss_scale=1.0",
}
SYSTEMS = list(SIGNATURES)

# Arguments that do not take the values of their column.
SPECIAL = {
  ("apex", "loss_scale"): "dynamic or scale",
  ("apex", "scale_factor"): "two",
  ("colossalai", "max_scale"): "ceiling or none",
  ("megatron", "min_scale"): "floor",
  ("megatron", "refill"): "refill",
  ("deepspeed", "consecutive_hysteresis"): "flag",
  ("deepspeed_legacy", "consecutive_hysteresis"): "flag",
  ("mindspore", "init_loss_scale"): "scale from one",
  ("mindspore_amp", "scale_value"): "scale from one",
  ("mindspore_fixed", "loss_scale"): "scale from one",
  ("npu_fixed", "loss_scale"): "scale from one",
}
_OF_COLUMN = {
  "scale": "scale",
  "init_scale": "scale",
  "growth_factor": "growth",
  "backoff_factor": "backoff",
  "growth_interval": "count",
  "hysteresis": "count",
  "min_scale": "bound",
  "max_scale": "ceiling",
  "hold_below": "bound",
  "tolerance": "share",
  "moves": "flag",
  "skip": "flag",
  "enabled": "flag",
  "notes_failure": "flag",
}


class Kind(NamedTuple):
  """Values of a kind of argument.

  Attributes:
    other: a value that differs from the defaults, except for a flag.
    allowed: the ends of the range, and numbers of other types.
    out_of_range: a ValueError refuses them.
    wrong: a TypeError refuses them.
  """

  other: object
  allowed: tuple = ()
  out_of_range: tuple = ()
  wrong: tuple = ("8", True, [8.0], None)

  def or_none(self):
    """Returns the kind that also takes None."""
    return self._replace(
      allowed=(None, 0, *self.allowed), wrong=self.wrong[:-1]
    )


_ENDS = (support.SMALLEST, 2.0**127, 1, np.float32(8))
_NO_SCALES = (0, -1.0, math.nan, math.inf, 2.0**-127, 2.0**128)
_NO_BOUNDS = (-1.0, math.nan, math.inf, 2.0**128)
_NO_GROWTH = (1, 0.5, 1.00000001, 2.0**128, math.nan)
_NO_BACKOFF = (0, 1.0, -0.5, 0.99999999, 2.0**-127, math.nan)

KINDS = {
  "scale": Kind(2.0**30 / 3, _ENDS, _NO_SCALES),
  "scale from one": Kind(
    2.0**30 / 3, (1, 2.0**127), (*_NO_SCALES, 1 - 2.0**-24)
  ),
  "dynamic or scale": Kind(
    128.0,
    ("dynamic", support.SMALLEST),
    _NO_SCALES,
    ("static", "Dynamic", True, None),
  ),
  "growth": Kind(8.0, (1 + 2.0**-23, 2.0**100, np.int32(2)), _NO_GROWTH),
  "backoff": Kind(0.25, (2.0**-100, 1 - 2.0**-24), _NO_BACKOFF),
  "count": Kind(
    7,
    (1, 2**31 - 1, np.int32(3), 2.0),
    (0, -1, 2**31, 10**400),
    (1.5, True, "2", [2], None),
  ),
  "bound": Kind(2.0, (2.0**-20, np.float32(0.5)), _NO_BOUNDS),
  "floor": Kind(2.0, (support.SMALLEST,), (0.0, *_NO_BOUNDS)),
  "ceiling": Kind(2.0**20, (2.0**24, 2.0**127), _NO_SCALES),
  "ceiling or none": Kind(2.0**20, (2.0**127,), _NO_BOUNDS).or_none(),
  "share": Kind(0.5, (0, 1.0), (-0.1, 1.1, math.nan)),
  "flag": Kind(False, (True, np.False_), (), (0, 1.0, "yes", [True], None)),
  "refill": Kind("clean", ("growth",), ("never", None, True, ["growth"]), ()),
  "two": Kind(2.0, (2,), (3, 1.0, math.nan)),
}
KINDS["bound or none"] = KINDS["bound"].or_none()


@functools.cache
def parameters(system):
  """Returns the arguments in a preset's signature."""
  return dict(inspect.signature(getattr(presets, system)).parameters)


@functools.cache
def kinds(system):
  """Returns the name of each argument's kind, in the signature's order."""
  preset = declaration.PRESETS[system]
  found = {}
  for column, cell in (*preset.columns.items(), *preset.switches.items()):
    if isinstance(cell, declaration.Argument) and cell.name not in found:
      special = SPECIAL.get((system, cell.name))
      suffix = " or none" if cell.is_optional else ""
      found[cell.name] = special or f"{_OF_COLUMN[column]}{suffix}"
  return {name: found[name] for name in parameters(system)}


# For arguments without a default.
_REQUIRED = {"scale": 8.0, "scale from one": 8.0, "growth": 2, "count": 3}


def make(system, **arguments):
  """Returns a preset's rule, with a value for each argument that needs one."""
  required = {
    name: _REQUIRED[kind]
    for name, kind in kinds(system).items()
    if parameters(system)[name].default is inspect.Parameter.empty
  }
  return getattr(presets, system)(**(required | arguments))
