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

SYSTEMS = list(declaration.PRESETS)

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
