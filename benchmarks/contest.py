"""The whole train step of GPT-2, contender beside contender."""

from collections.abc import Mapping
from collections.abc import Sequence
import functools
import importlib.util
import math
import time
from typing import Any
from typing import NamedTuple

import jax

from benchmarks import gpt2
from benchmarks import jax_training
from benchmarks import rounds as rounds_lib
from benchmarks import traffic
import optax_lossscale as ols

# GradScaler starts at 2**16 by itself; both get the same.
INIT_SCALE = 2.0**15
FLOAT16 = "jax float16"
_WARM_UP = 3
_BATCHES = 4  # Taken in turns.


class Variant(NamedTuple):
  """How a contender in JAX computes.

  Attributes:
    dtype: of the layers.
    scaled: whether with loss scaling.
    level: of `autocast`, which makes float16 of float32 layers; or None.
    attention: None for the fastest, which is marked for autocast; or "plain".
    float32_matmul: "tf32", "float32", or "default".
    options: of the compiler.
  """

  dtype: str
  scaled: bool = False
  level: str | None = None
  attention: str | None = None
  float32_matmul: str = "default"
  options: Mapping[str, str] | None = None


# The most important first: time may run out.
VARIANTS = {
  FLOAT16: Variant("float16"),
  "jax float16, loss_scaling": Variant("float16", True),
  "jax float16, O1, loss_scaling": Variant("float32", True, "O1", "plain"),
  "jax float16, O1, marked attention, loss_scaling": Variant(
    "float32", True, "O1"
  ),
  "jax bfloat16": Variant("bfloat16"),
  "jax TF32": Variant("float32", float32_matmul="tf32"),
  "jax float16, plain attention": Variant("float16", attention="plain"),
  "jax float16, O2, loss_scaling": Variant("float32", True, "O2", "plain"),
  "jax float16, loss_scaling, no command buffers": Variant(
    "float16", True, options=traffic.NO_COMMAND_BUFFERS
  ),
  "jax float32": Variant("float32", float32_matmul="float32"),
  "jax float16, O1": Variant("float32", False, "O1", "plain"),
  "jax float16, O2": Variant("float32", False, "O2", "plain"),
  "jax float32, loss_scaling": Variant(
    "float32", True, float32_matmul="float32"
  ),
  "jax bfloat16, loss_scaling": Variant("bfloat16", True),
  "jax TF32, loss_scaling": Variant("float32", True, float32_matmul="tf32"),
}
# By name, the dtype of torch's autocast and whether GradScaler scales.
TORCH = {
  "torch float16": ("float16", False),
  "torch float16, GradScaler": ("float16", True),
  "torch bfloat16": ("bfloat16", False),
  "torch TF32": ("float32", False),
}


class Contest:
  """Contenders that train the same model from the same weights.

  Attributes:
    rows: the figures of each, for JSON: `kernels`, `temporaries`, `peak` and
      the first `losses`, and after `time` also `seconds` of a step, its ratio
      `over_float16` in JAX without loss scaling, and where S ended; or
      `left_out`, the reason.
  """

  def __init__(self, size: gpt2.Size, *, batch: int, length: int) -> None:
    self.rows: dict[str, dict[str, Any]] = {}
    self._trainings: dict[str, Any] = {}
    self._size = size
    self._shape = {"batch": batch, "length": length}
    self._params = gpt2.init(size, 0)
    self._batches = gpt2.make_batches(size, **self._shape, count=_BATCHES)

  def add(self, names: Sequence[str], until: float) -> None:
    """Compiles contenders, and warms them up.

    Args:
      names: of `VARIANTS` or `TORCH`.
      until: of `time.monotonic`; after it the others are left out.
    """
    for name in names:
      with rounds_lib.attempt(self.rows, name):
        rounds_lib.check_time(until)
        make = self._in_jax if name in VARIANTS else self._in_torch
        start = time.monotonic()
        training, attention = make(name)
        losses = [_finite(training.step()) for _ in range(_WARM_UP)]
        self.rows[name] = {
          "attention": attention,
          "losses": losses,
          "seconds_to_compile": time.monotonic() - start,
          **training.figures(),
        }
        self._trainings[name] = training

  def time(self, *, rounds: int, steps: int, until: float) -> None:
    """Times all contenders so far in turns.

    Args:
      rounds: how many turns each contender has.
      steps: in each turn.
      until: of `time.monotonic`; after it no round starts.
    """

    def run(training: Any) -> None:
      for _ in range(steps):
        training.step()

    turns = {
      name: rounds_lib.Turn(functools.partial(run, training))
      for name, training in self._trainings.items()
    }
    seconds = rounds_lib.interleave(turns, rounds, until=until)
    for name, training in self._trainings.items():
      self.rows[name] |= {
        "seconds": rounds_lib.quartiles([x / steps for x in seconds[name]]),
        "last_loss": _finite(training.step()),
        **training.loss_scaling(),
      }
      if FLOAT16 in seconds:
        self.rows[name]["over_float16"] = rounds_lib.quartiles(
          rounds_lib.ratios(seconds[name], seconds[FLOAT16])
        )

  def _in_jax(self, name: str) -> tuple[Any, str]:
    variant = VARIANTS[name]
    attention = variant.attention or gpt2.fastest_attention(
      self._size,
      variant.dtype if variant.level is None else "float16",
      **self._shape,
    )
    model: Any = gpt2.GPT2(self._size, variant.dtype, attention)
    if variant.level is not None:
      model = gpt2.Autocast(model, variant.level)
    training = jax_training.Training(
      model,
      self._params,
      self._batches,
      rule=ols.DynamicLossScale(INIT_SCALE) if variant.scaled else None,
      float32_matmul=variant.float32_matmul,
      options=variant.options,
    )
    return training, attention

  def _in_torch(self, name: str) -> tuple[Any, str]:
    backend = jax.default_backend()
    if importlib.util.find_spec("torch") is None:
      raise ModuleNotFoundError("torch is not installed")
    # Only now, since it need not be installed.
    import torch

    from benchmarks import torch_training

    if backend == "gpu" and not torch.cuda.is_available():
      raise RuntimeError("torch sees no GPU, and JAX computes on one")
    dtype, scaled = TORCH[name]
    training = torch_training.Training(
      self._size,
      self._params,
      self._batches,
      dtype=dtype,
      init_scale=INIT_SCALE if scaled else None,
      device="cuda" if backend == "gpu" else "cpu",
    )
    return training, "torch's choice"


def _finite(loss: float) -> float | None:
  """Returns a number that JSON has; float16 alone may end in NaN."""
  return loss if math.isfinite(loss) else None
