"""The whole train step of GPT-2, contender beside contender."""

from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
import dataclasses
import functools
import importlib.util
import math
from typing import Any
from typing import Protocol

import jax

from benchmarks import flax_training
from benchmarks import gpt2
from benchmarks import rounds as rounds_lib
import optax_lossscale as ols

# GradScaler starts at 2**16 by itself; both get the same.
INIT_SCALE = 2.0**15
UNSCALED = {"jax": "jax float16", "torch": "torch float16"}
_WARM_UP = 3
_BATCHES = 4  # Taken in turns.


class Training(Protocol):
  """A contender."""

  def step(self) -> float:
    """Trains on the next batch, and returns its loss."""

  def memory(self) -> Mapping[str, int]:
    """Returns `peak` and `temporaries` in bytes, as far as they are known."""

  def loss_scaling(self) -> Mapping[str, float]:
    """Returns `loss_scale` and `skipped_steps`, as far as they are known."""


@dataclasses.dataclass(frozen=True)
class Contest:
  """What is to be timed.

  Attributes:
    size: of the model.
    batch: sequences in a batch.
    length: positions of each sequence.
    rounds: how many turns each contender has.
    steps: in each turn.
    seed: of the weights, the tokens, and the order in each round.
    attention: "auto", "cudnn", "xla" or "plain", of the contenders in JAX.
    float32_matmul: "default", "tf32" or "float32", of all.
    torch_compile: whether the contenders in torch are compiled.
    autocast: levels at which the float32 model takes part as well.
  """

  size: gpt2.Size
  batch: int
  length: int
  rounds: int
  steps: int
  seed: int
  attention: str = "auto"
  float32_matmul: str = "default"
  torch_compile: bool = False
  autocast: tuple[str, ...] = ()


def run(
  contest: Contest,
  *,
  with_torch: bool,
  on_contender: Callable[[str], None] = lambda line: None,
) -> dict[str, Any]:
  """Times the contenders in turns.

  Args:
    contest: what is to be timed.
    with_torch: whether torch takes part.
    on_contender: called with a line before each contender is made.

  Returns:
    For JSON: `settings`, and `not_run`, the reasons by name; and `contenders`,
    with `seconds` of a step as quartiles, the quartiles of its ratios to
    others' steps without loss scaling (`over_jax_float32`, `over_jax_float16`,
    `over_torch_float16`, and `over_own_float16`, of the contender's own
    framework), the first `losses` and the last one, memory, and where the loss
    scale ended.
  """
  settings: dict[str, str] = {}
  not_run: dict[str, str] = {}
  params = gpt2.init(contest.size, contest.seed)
  batches = gpt2.make_batches(
    contest.size,
    batch=contest.batch,
    length=contest.length,
    count=_BATCHES,
    seed=contest.seed,
  )
  makers = _in_jax(contest, params, batches, settings)
  if with_torch:
    reason = _why_not_torch()
    if reason:
      not_run["torch"] = reason
    else:
      makers |= _in_torch(contest, params, batches, settings)

  trainings: dict[str, Training] = {}
  figures: dict[str, dict[str, Any]] = {}
  for name, make in makers.items():
    on_contender(f"compiling {name}")
    try:
      training = make()
      losses = [_finite(training.step()) for _ in range(_WARM_UP)]
    except Exception as error:  # Out of memory, say; the others can still run.
      not_run[name] = _described(error)
      continue
    trainings[name] = training
    figures[name] = {"losses": losses, **training.memory()}

  on_contender(f"timing {contest.rounds} rounds")
  seconds = _seconds(contest, trainings)
  for name, training in trainings.items():
    figures[name] |= {
      "last_loss": _finite(training.step()),
      **training.loss_scaling(),
      **_times(name, seconds),
    }
  return {"settings": settings, "not_run": not_run, "contenders": figures}


def _seconds(
  contest: Contest, trainings: Mapping[str, Training]
) -> dict[str, list[float]]:
  """Returns the seconds of a step in each round, by contender."""

  def turn(training: Training) -> rounds_lib.Turn:
    def run() -> None:
      for _ in range(contest.steps):
        training.step()

    return rounds_lib.Turn(run)

  turns = {name: turn(training) for name, training in trainings.items()}
  seconds = rounds_lib.interleave(turns, contest.rounds, seed=contest.seed)
  return {
    name: [duration / contest.steps for duration in durations]
    for name, durations in seconds.items()
  }


def _times(
  name: str, seconds: Mapping[str, Sequence[float]]
) -> dict[str, rounds_lib.Quartiles | None]:
  baselines = {
    "over_jax_float32": "jax float32",
    "over_jax_float16": UNSCALED["jax"],
    "over_torch_float16": UNSCALED["torch"],
    "over_own_float16": UNSCALED[name.split()[0]],
  }
  times: dict[str, rounds_lib.Quartiles | None] = {
    "seconds": rounds_lib.quartiles(seconds[name])
  }
  for key, baseline in baselines.items():
    times[key] = None
    if baseline in seconds:
      times[key] = rounds_lib.quartiles(
        rounds_lib.ratios(seconds[name], seconds[baseline])
      )
  return times


def _in_jax(
  contest: Contest,
  params: Any,
  batches: Sequence[gpt2.Batch],
  settings: dict[str, str],
) -> dict[str, Callable[[], Training]]:
  """Returns how to make each contender, and notes the settings."""
  settings |= flax_training.settings(contest.float32_matmul)

  def make(
    dtype: str, rule: ols.LossScale | None, level: str | None = None
  ) -> Training:
    attention = gpt2.choose_attention(
      contest.attention,
      contest.size,
      dtype,
      batch=contest.batch,
      length=contest.length,
    )
    settings[f"jax attention, {dtype}"] = attention
    model = gpt2.GPT2(contest.size, dtype, attention)
    return flax_training.Training(
      model if level is None else gpt2.Autocast(model, level),
      params,
      batches,
      rule=rule,
      float32_matmul=contest.float32_matmul,
    )

  return {
    "jax float32": lambda: make("float32", None),
    "jax bfloat16": lambda: make("bfloat16", None),
    UNSCALED["jax"]: lambda: make("float16", None),
    "jax float16, loss_scaling": lambda: make(
      "float16", ols.DynamicLossScale(INIT_SCALE)
    ),
    **{
      f"jax float16, autocast {level}": functools.partial(
        make, "float32", None, level
      )
      for level in contest.autocast
    },
  }


def _in_torch(
  contest: Contest,
  params: Any,
  batches: Sequence[gpt2.Batch],
  settings: dict[str, str],
) -> dict[str, Callable[[], Training]]:
  """Returns how to make each contender, and notes the settings."""
  # Only now, since it need not be installed.
  from benchmarks import torch_training

  settings |= torch_training.configure(contest.float32_matmul)
  device = "cuda" if jax.default_backend() == "gpu" else "cpu"

  def make(dtype: str, init_scale: float | None) -> Training:
    return torch_training.Training(
      contest.size,
      params,
      batches,
      dtype=dtype,
      init_scale=init_scale,
      device=device,
      compiled=contest.torch_compile,
    )

  return {
    "torch float32": lambda: make("float32", None),
    "torch bfloat16": lambda: make("bfloat16", None),
    UNSCALED["torch"]: lambda: make("float16", None),
    "torch float16, GradScaler": lambda: make("float16", INIT_SCALE),
  }


def _why_not_torch() -> str:
  """Returns why torch cannot take part; nothing if it can."""
  if importlib.util.find_spec("torch") is None:
    return "not installed"
  backend = jax.default_backend()
  if backend not in ("cpu", "gpu"):
    return f"no comparison on JAX's backend {backend}"
  try:
    import torch
  except Exception as error:  # A broken installation, of which there are many.
    return _described(error)
  if backend == "gpu" and not torch.cuda.is_available():
    return "it sees no GPU, and JAX computes on one"
  return ""


def _described(error: Exception) -> str:
  """Returns an error in a line; the one for memory that is out has hundreds."""
  return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"


def _finite(loss: float) -> float | None:
  """Returns a number that JSON has; float16 alone may end in NaN."""
  return loss if math.isfinite(loss) else None
