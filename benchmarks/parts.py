"""`python -m benchmarks parts`: what each part of the library costs.

Programs with a part take turns with the same ones without it. `--only compile`
gives the seconds to trace and compile an update, in three rounds; with
JAX_NUM_CPU_DEVICES=2 also those of arrays on a mesh.
"""

import argparse
from collections.abc import Callable
from collections.abc import Sequence
import dataclasses
import functools
import shlex
import statistics
from typing import Any

import flax.linen as nn
import jax
from jax import lax
import jax.numpy as jnp
import optax

from benchmarks import autocast_models
from benchmarks import cases
from benchmarks import command
from benchmarks import compilation
from benchmarks import gpt2
from benchmarks import jax_training
from benchmarks import memory
from benchmarks import report
from benchmarks import rounds as rounds_lib
import optax_lossscale as ols

_PARTS = (
  *("step", "batch norm", "accumulation", "16-bit parameters", "autocast"),
  "compile",
)
_COLUMNS = (
  *("", "over", "bytes", "ms", "ratio", "temporaries", "trace ms"),
  "compile ms",
)
_ADAMW = optax.adamw(1e-4)
_SCALED = ols.loss_scaling(_ADAMW, ols.DynamicLossScale(2.0**10))
_MICROBATCHES = 4
_GPT2 = gpt2.Size(6, 6, 384, tokens=8000, vocabulary=8192, context=128)


@dataclasses.dataclass
class Contender:
  """Something to time.

  Attributes:
    run: is timed, and returns when its results are there.
    over: whom it is compared with, by name.
    figures: others than its time, for JSON; `run` may add to them.
    prepare: runs before `run` and is not timed.
  """

  run: Callable[[], None]
  over: str
  figures: dict[str, Any] = dataclasses.field(default_factory=dict)
  prepare: Callable[[], None] = lambda: None


class Program(Contender):
  """A compiled program that goes on from its own last state."""

  def __init__(self, step: Any, state: Any, batch: Any, over: str) -> None:
    """Compiles.

    Args:
      step: from a state and a batch to the next state and anything else.
      state: the parameters, and more; a copy of it is donated.
      batch: the same for every step.
      over: whom it is compared with.
    """
    self.state = jax.tree.map(jnp.copy, state)
    self.result: Any = None
    compiled, cost = compilation.compile_ahead(step, self.state, batch)

    def run() -> None:
      self.state, self.result = compiled(self.state, batch)
      jax.block_until_ready((self.state, self.result))

    params = sum(x.nbytes for x in jax.tree.leaves(state[0]))
    super().__init__(run, over)
    if cost.temporary_bytes is not None:
      self.figures["temporaries"] = cost.temporary_bytes / params


Contenders = dict[str, Any]


def main(argv: Sequence[str]) -> int:
  """Measures, prints a table for each part, and writes them as JSON.

  Args:
    argv: the words after the command's name.

  Returns:
    The exit code.
  """
  arguments = _parse(argv)
  path = arguments.out / "parts.json"
  content = command.begin("parts", argv) | {"parts": {}}
  with compilation.without_persistent_cache():
    for name, make in _makers(arguments.tiny).items():
      if name.partition(",")[0] in arguments.only:
        # A compilation takes as long as a hundred steps.
        count = 3 if name.startswith("compile") else arguments.rounds
        rows = content["parts"][name] = _measure(make(), count)
        report.show(name, _COLUMNS, [_cells(*row) for row in rows.items()])
        report.write(path, content)
        memory.release()
  print(f"wrote {path}")
  return 0


def training(
  loss_fn: gpt2.LossFn, params: Any, batch: gpt2.Batch
) -> Contenders:
  """Returns whole train steps: of the optimizer alone, and with more.

  Args:
    loss_fn: the loss of parameters and a batch.
    params: where they start.
    batch: for every step.
  """
  scaled = jax_training.make_step(loss_fn, _SCALED, is_scaled=True)

  def with_metrics(state: Any, batch: Any) -> Any:
    state, loss = scaled(state, batch)
    return state, (loss, ols.loss_scale_metrics(state[1]))

  def program(tx: Any, over: str, step: Any = None) -> Program:
    step = step or jax_training.make_step(
      loss_fn, tx, is_scaled=tx is not _ADAMW
    )
    return Program(step, (params, tx.init(params)), batch, over)

  return {
    "bare": program(_ADAMW, "bare"),
    "loss_scaling": program(_SCALED, "bare", scaled),
    "loss_scale_metrics": program(_SCALED, "loss_scaling", with_metrics),
    "record": program(ols.instruments.record(_SCALED, 1000), "loss_scaling"),
  }


def batch_norm(model: nn.Module, batch: autocast_models.Batch) -> Contenders:
  """Returns train steps that select batch statistics, or take the new ones.

  Args:
    model: has batch norms.
    batch: for every step.
  """

  def make_step(select: Any) -> Any:
    def step(state: Any, batch: Any) -> Any:
      params, opt_state, old = state

      def loss_fn(params: Any) -> Any:
        variables = {"params": params, "batch_stats": old}
        logits, new = model.apply(variables, batch[0], mutable=["batch_stats"])
        losses = optax.losses.softmax_cross_entropy_with_integer_labels(
          logits, batch[1]
        )
        return jnp.mean(losses), new["batch_stats"]

      (loss, new), scaled_grads = ols.scaled_value_and_grad(
        loss_fn, opt_state, has_aux=True
      )(params)
      updates, opt_state = _SCALED.update(scaled_grads, opt_state, params)
      params = optax.apply_updates(params, updates)
      return (params, opt_state, select(opt_state, new, old)), loss

    return step

  first = jax.jit(model.init)(jax.random.key(0), batch[0])
  state = first["params"], _SCALED.init(first["params"]), first["batch_stats"]
  return {
    name: Program(make_step(select), state, batch, "loss_scaling")
    for name, select in {
      "loss_scaling": lambda opt_state, new, old: new,
      "select_on_skip": ols.select_on_skip,
    }.items()
  }


def accumulation(
  loss_fn: gpt2.LossFn, params: Any, batch: gpt2.Batch
) -> Contenders:
  """Returns gradients of micro-batches, scaled by the same S.

  Args:
    loss_fn: the loss of parameters and a batch.
    params: are differentiated.
    batch: is split.
  """

  def plain(state: Any, batch: Any) -> Any:
    value_and_grad = ols.scaled_value_and_grad(loss_fn, state[1])

    def add(sums: Any, batch: Any) -> Any:
      new = value_and_grad(state[0], batch)
      return jax.tree.map(jnp.add, sums, new), None

    def split(x: jax.Array) -> jax.Array:
      return x.reshape(-1, _MICROBATCHES, *x.shape[1:]).swapaxes(0, 1)

    zeros = jnp.zeros(()), jax.tree.map(jnp.zeros_like, state[0])
    sums, _ = lax.scan(add, zeros, jax.tree.map(split, batch))
    return state, jax.tree.map(lambda x: x / _MICROBATCHES, sums)

  def accumulated(drop: bool, state: Any, batch: Any) -> Any:
    return state, ols.accumulate(
      ols.scaled_value_and_grad(loss_fn, state[1]),
      microbatches=_MICROBATCHES,
      drop=drop,
    )(state[0], batch)

  state = params, jnp.float32(2.0**10)
  return {
    name: Program(step, state, batch, "lax.scan")
    for name, step in {
      "lax.scan": plain,
      "accumulate": functools.partial(accumulated, False),
      "the same, drop=True": functools.partial(accumulated, True),
    }.items()
  }


def sixteen_bit(case: cases.Case) -> Contenders:
  """Returns updates of AdamW on parameters in float32 and in bfloat16.

  Args:
    case: the parameters, and gradients of the parameters' dtype.
  """
  small = ols.low_precision_state(_ADAMW)
  remainders = functools.partial(ols.master_weights, store="remainder")

  def program(
    tx: optax.GradientTransformation, dtype: jax.typing.DTypeLike
  ) -> Program:
    def step(state: Any, grads: Any) -> Any:
      updates, opt_state = tx.update(grads, state[1], state[0])
      return (optax.apply_updates(state[0], updates), opt_state), None

    params, grads = (
      [jnp.asarray(x, dtype) for x in tree]
      for tree in (case.make_params(), cases.unscaled(case.make_scaled_grads()))
    )
    state = params, tx.init(params)
    made = Program(step, state, grads, "float32")
    stored = sum(x.nbytes for x in jax.tree.leaves(state))
    made.figures["bytes"] = stored / case.parameters
    return made

  return {"float32": program(_ADAMW, jnp.float32)} | {
    name: program(tx, jnp.bfloat16)
    for name, tx in {
      "bfloat16, to the nearest": _ADAMW,
      "a copy": ols.master_weights(_ADAMW),
      "a remainder": remainders(_ADAMW),
      "stochastic rounding": ols.stochastic_rounding(_ADAMW),
      "a remainder, bfloat16 moments": remainders(small),
      "stochastic rounding, bfloat16 moments": ols.stochastic_rounding(small),
    }.items()
  }


def autocast(
  loss_fn: gpt2.LossFn, params: Any, batch: gpt2.Batch
) -> Contenders:
  """Returns traces of a loss and of its gradient, with and without autocast.

  Args:
    loss_fn: the loss of parameters and a batch.
    params: its parameters.
    batch: its batch.
  """

  def trace(level: str, transform: Any) -> None:
    fun = ols.autocast(loss_fn, level)  # At O0 it is the loss itself.
    jax.make_jaxpr(transform(lambda *args: fun(*args)))(params, batch)

  return {
    f"{level}, {of}": Contender(
      functools.partial(trace, level, transform),
      f"O0, {of}",
      prepare=jax.clear_caches,
    )
    for of, transform in {"loss": lambda f: f, "gradient": jax.grad}.items()
    for level in ("O0", "O1")
  }


def compilations(leaves: int, layout: str, shape: Sequence[int]) -> Contenders:
  """Returns compilations of Adam's update, in `apply_if_finite` as well.

  Args:
    leaves: how many.
    layout: "plain", or "mesh" for leaves that all devices hold.
    shape: of each leaf.
  """
  params = {f"leaf_{i}": jnp.zeros(shape) for i in range(leaves)}
  if layout == "mesh":
    axis_type = (jax.sharding.AxisType.Auto,)
    mesh = jax.make_mesh((jax.device_count(),), ("data",), axis_types=axis_type)
    params = jax.device_put(params, jax.NamedSharding(mesh, jax.P()))

  def contender(tx: Any) -> Contender:
    state = jax.jit(tx.init)(params)
    figures: dict[str, list[float]] = {
      "trace_seconds": [],
      "compile_seconds": [],
    }

    def run() -> None:
      _, cost = compilation.compile_ahead(
        lambda state, scaled_grads: tx.update(
          scaled_grads, state, scaled_grads
        ),
        state,
        params,
      )
      for name, seconds in figures.items():
        seconds.append(getattr(cost, name))

    return Contender(run, "bare", figures, prepare=jax.clear_caches)

  bare = optax.adam(1e-3)
  return {
    "bare": contender(bare),
    "loss_scaling": contender(ols.loss_scaling(bare, ols.DynamicLossScale())),
    "apply_if_finite": contender(optax.apply_if_finite(bare, 100)),
  }


def _makers(tiny: bool) -> dict[str, Callable[[], Contenders]]:
  """Returns how to make the contenders of each part."""
  size = gpt2.SIZES["tiny"] if tiny else _GPT2
  batch, length = (4, 8) if tiny else (8, 128)
  channels, side = (2, 4) if tiny else (32, 32)
  counts, shape = ((2,), (2,)) if tiny else ((100, 1000), (64, 128))

  def of_gpt2(use: Any, layers: int = size.layers) -> Contenders:
    model = dataclasses.replace(size, layers=layers)
    return use(
      gpt2.make_loss_fn(gpt2.GPT2(model, jnp.float32)),
      gpt2.init(model, 0),
      gpt2.make_batches(model, batch=batch, length=length, count=1)[0],
    )

  def of_mlp(use: Any, batch: int) -> Contenders:
    width = 8 if tiny else 2048
    *params, x = jax.random.normal(jax.random.key(0), (7, width, width))
    params = [each / width**0.5 for each in params]
    return use(_mlp_loss, params, (x[:batch], -x[:batch]))

  def of_resnet() -> Contenders:
    images = jax.random.normal(jax.random.key(0), (32, side, side, 3))
    model = autocast_models.ResNet(jnp.float32, channels)
    return batch_norm(model, (images, jnp.arange(32) % 10))

  partial = functools.partial
  mlp = 8 if tiny else 128
  return {
    "step, GPT-2": partial(of_gpt2, training),
    "step, MLP, batch 16": partial(of_mlp, training, 16),
    "step, MLP, batch 128": partial(of_mlp, training, 128),
    "batch norm": of_resnet,
    "accumulation, GPT-2": partial(of_gpt2, accumulation),
    "accumulation, MLP, batch 128": partial(of_mlp, accumulation, mlp),
    "16-bit parameters": lambda: sixteen_bit(
      cases.make_case("73", "float32", tiny=tiny)
    ),
    "autocast, 48 layers": partial(of_gpt2, autocast, 2 if tiny else 48),
    **{
      f"compile, {count} leaves, {layout}": partial(
        compilations, count, layout, shape
      )
      # A mesh of one device is none.
      for layout in ("plain", "mesh")[: jax.device_count()]
      for count in counts
    },
  }


def _mlp_loss(params: Any, batch: gpt2.Batch) -> jax.Array:
  x, y = batch
  for weights in params:
    x = jnp.tanh(x @ weights)
  return jnp.mean((x - y) ** 2)


def _measure(contenders: Contenders, count: int) -> dict[str, Any]:
  """Returns the seconds of contenders in turns, and ratios, as quartiles."""
  turns = {
    name: rounds_lib.Turn(each.run, each.prepare)
    for name, each in contenders.items()
  }
  seconds = rounds_lib.interleave(turns, count)
  return {
    name: {
      "over": each.over,
      "seconds": rounds_lib.quartiles(seconds[name]),
      "ratio": rounds_lib.quartiles(
        rounds_lib.ratios(seconds[name], seconds[each.over])
      ),
      **each.figures,
    }
    for name, each in contenders.items()
  }


def _cells(name: str, row: dict[str, Any]) -> list[str]:
  low, median, high = row["ratio"]
  # The first compilation of a process starts XLA as well.
  split = [row.get(f"{kind}_seconds", [])[1:] for kind in ("trace", "compile")]
  return [
    name,
    row["over"],
    f"{row['bytes']:.2f}" if "bytes" in row else "",
    f"{1e3 * row['seconds'].median:,.1f}",
    f"{median:.3f} [{low:.3f}, {high:.3f}]",
    f"{row['temporaries']:.1%}" if "temporaries" in row else "",
    *(f"{1e3 * statistics.median(x):,.0f}" if x else "" for x in split),
  ]


def _parse(argv: Sequence[str]) -> argparse.Namespace:
  parser = command.parser("parts", __doc__, rounds=21)
  parser.add_argument(
    "--only",
    nargs="+",
    choices=_PARTS,
    default=_PARTS,
    metavar="PART",
    help=f"some of {shlex.join(_PARTS)} (default: all)",
  )
  return parser.parse_args(argv)
