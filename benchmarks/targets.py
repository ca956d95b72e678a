"""`python -m benchmarks targets`: what loss scaling adds on absent hardware.

It compiles the update phase and a whole train step of GPT-2 small for GPUs and
TPUs, and a sharded step for 16 and 256 chips, each as the bare optimizer, with
this library and with two others. Nothing is run, so times are unknown.
`optax-lossscale doctor --make-compilers` installs the compilers.
"""

from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks import command
from benchmarks import gpt2
from benchmarks import report
from benchmarks.peers import PEERS
import optax_lossscale as ols
from optax_lossscale.instruments import compiling

# Those of docs/costs.md; the bare optimizer is what the others are beside.
CONTENDERS = ("bare", "optax_lossscale", "apply_if_finite", "flax")
TARGETS = (
  *("v100", "t4", "a100", "h100", "h200", "b200"),
  *("v5e", "v6e", "tpu7x"),
)
MESHES = {"16 x v5e": "v5e:4x4", "256 x v5e": "v5e:16x16"}
# Small, but with leaves that 256 chips can share.
_SHARDED = gpt2.Size(4, 8, 512, tokens=8000, vocabulary=8192, context=256)
_LEAST_SHARED = 2**14
_FIGURES = ("temporaries", "total", "kernels", "conditionals")

Step = tuple[Callable[..., Any], Any, Any]


def _sizes(target: str) -> list[int]:
  return list(map(int, target.partition(":")[2].split("x")))


def update(name: str, dtype: str = "float16") -> Step:
  """Returns the update phase of GPT-2 small, and the shapes it takes.

  Args:
    name: the contender's.
    dtype: of the gradients.
  """
  contender = PEERS[name].make()
  params = _params(gpt2.SIZES["small"])
  grads = [jax.ShapeDtypeStruct(x.shape, dtype) for x in params]
  step = jax.jit(contender.update, donate_argnums=0)
  return step, jax.eval_shape(contender.init, params), grads


def train(name: str, size: gpt2.Size = gpt2.SIZES["small"]) -> Step:
  """Returns a train step in float16 by autocast, and the shapes it takes.

  Args:
    name: the contender's.
    size: of the model.
  """
  contender = PEERS[name].make()
  loss_of_tree = gpt2.make_loss_fn(
    gpt2.Autocast(gpt2.GPT2(size, jnp.float32), "O1")
  )
  structure = jax.tree.structure(_tree(size))

  def loss_fn(params: Any, batch: gpt2.Batch) -> jax.Array:
    return loss_of_tree(jax.tree.unflatten(structure, params), batch)

  def step(state: Any, batch: gpt2.Batch) -> tuple[Any, jax.Array]:
    scale = _loss_scale(name, state)
    value_and_grad = ols.scaled_value_and_grad(loss_fn, scale)
    loss, scaled_grads = value_and_grad(state.params, batch)
    return contender.update(state, scaled_grads), loss

  state = jax.eval_shape(contender.init, _params(size))
  tokens = jax.ShapeDtypeStruct((2, size.context), jnp.int32)
  return jax.jit(step, donate_argnums=0), state, (tokens, tokens)


def sharded(name: str, devices: int) -> Step:
  """Returns a train step whose state and batch are shared by devices.

  Args:
    name: the contender's.
    devices: how many.
  """
  auto = (jax.sharding.AxisType.Auto,)
  mesh = jax.sharding.AbstractMesh((devices,), ("data",), axis_types=auto)
  step, state, _ = train(name, _SHARDED)

  def shared(x: Any) -> Any:
    # The largest axis, as fully sharded data parallelism has it; each device
    # has all of a bias.
    axis = max(range(x.ndim), key=lambda i: x.shape[i], default=0)
    whole = x.size < _LEAST_SHARED or x.shape[axis] % devices
    spec = () if whole else (*(None for _ in range(axis)), "data")
    return x.update(sharding=jax.NamedSharding(mesh, jax.P(*spec)))

  tokens = jax.ShapeDtypeStruct((256, _SHARDED.context), jnp.int32)
  return step, jax.tree.map(shared, state), (shared(tokens), shared(tokens))


PARTS: Mapping[str, tuple[Callable[[str], Step], Sequence[str]]] = {
  "update, float16 gradients": (update, TARGETS),
  "update, float32 gradients": (
    functools.partial(update, dtype="float32"),
    TARGETS,
  ),
  "train step": (train, TARGETS),
  **{
    f"sharded train step, {name}": (
      functools.partial(sharded, devices=math.prod(_sizes(target))),
      (target,),
    )
    for name, target in MESHES.items()
  },
}


def figures(
  part: str, target: str, names: Sequence[str] = CONTENDERS
) -> dict[str, dict[str, Any]]:
  """Returns the figures of contenders in one part, for one target.

  Args:
    part: one of `PARTS`.
    target: as `compile_report` takes it.
    names: of an even number of contenders.
  """
  make, _ = PARTS[part]
  rows = {}
  for first, second in zip(names[::2], names[1::2], strict=True):
    found = ols.instruments.compile_report(
      *make(second), targets=target, baseline=make(first)
    )
    for name, step in (
      (first, found.baselines[target]),
      (second, found.steps[target]),
    ):
      if step.error:
        rows[name] = {"error": step.error.splitlines()[0]}
      else:
        of_kinds = {k.replace("-", "_"): n for k, n in step.collectives.items()}
        rows[name] = {x: getattr(step, x) for x in _FIGURES} | of_kinds
  return rows


def main(argv: Sequence[str]) -> int:
  """Compiles everything, and writes `targets.json` after each part.

  Args:
    argv: the words after the command's name.

  Returns:
    The exit code: 1 if something does not compile.
  """
  parser = command.parser("targets", __doc__)
  known = *TARGETS, *MESHES.values()
  parser.add_argument(
    "--on",
    default=",".join(known),
    help="the targets (default: all)",
  )
  arguments = parser.parse_args(argv)
  targets = arguments.on.split(",")
  for target in targets:
    if target not in known:
      parser.error(
        f"argument --on: invalid choice: {target!r} (choose from "
        f"{', '.join(map(repr, known))})"
      )
  try:
    compiling.find_python(None)
  except RuntimeError as error:
    parser.error(str(error))
  content = command.begin("targets", argv) | {"parts": {}}
  has_failed = False
  for part, (_, its_targets) in PARTS.items():
    for target in filter(targets.__contains__, its_targets):
      rows = figures(part, target)
      content["parts"].setdefault(part, {})[target] = rows
      has_failed |= any("error" in row for row in rows.values())
      report.write(arguments.out / "targets.json", content)
  print(page(content))
  return int(has_failed)


def page(content: Mapping[str, Any]) -> str:
  """Returns the table; targets with the same figures share a row."""
  rows: dict[tuple[str, ...], list[str]] = {}
  for part, by_target in content["parts"].items():
    for target, found in by_target.items():
      cells = (_cell(found[name]) for name in CONTENDERS if name in found)
      rows.setdefault((part, *cells), []).append(target)
  return report.markdown(
    ["operations, temporaries", *CONTENDERS],
    [[f"{x[0]}: {', '.join(its)}", *x[1:]] for x, its in rows.items()],
  )


def _cell(row: Mapping[str, Any]) -> str:
  if "error" in row:
    return str(row["error"])
  count = row.get("all_reduce")
  return ", ".join(
    [
      f"{row['kernels']:,}",
      f"{row['temporaries'] / 1e6:,.1f} MB",
      *([f"{count} all-reduces"] if count else []),
    ]
  )


def _tree(size: gpt2.Size) -> Any:
  return jax.eval_shape(lambda: gpt2.init(size, 0))


def _params(size: gpt2.Size) -> list[Any]:
  return jax.tree.leaves(_tree(size))


def _loss_scale(name: str, state: Any) -> Any:
  """Returns what the loss of a contender is multiplied by."""
  return {
    "bare": lambda: jnp.float32(1),
    "optax_lossscale": lambda: state.opt_state,
    "apply_if_finite": lambda: state.loss_scale,
    "flax": lambda: state.loss_scale.scale,
  }[name]()
