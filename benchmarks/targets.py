"""`python -m benchmarks targets`: what loss scaling adds on absent hardware.

It compiles the update phase and a whole train step of GPT-2 small for GPUs and
TPUs, and a sharded step for 16 and 256 chips, each as the bare optimizer, with
this library and with two others. The update is also compiled with three more
optimizers, and for four GPUs. Nothing is run, so times are unknown.
`optax-lossscale doctor --make-compilers` installs the compilers.
"""

from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
import functools
import json
import math
import shlex
from typing import Any
from typing import NamedTuple
from unittest import mock

import jax
import jax.numpy as jnp
import optax

from benchmarks import command
from benchmarks import gpt2
from benchmarks import phase
from benchmarks import report
from benchmarks.peers import PEERS
from benchmarks.peers import settings
import optax_lossscale as ols
from optax_lossscale.compiled import compiling

# Those of docs/costs.md; the bare optimizer is what the others are beside.
CONTENDERS = ("bare", "optax_lossscale", "apply_if_finite", "flax")
GPUS = ("v100", "t4", "a100", "h100", "h200", "b200")
TARGETS = (*GPUS, "v5e", "v6e", "tpu7x")
MESHES = {"16 x v5e": "v5e:4x4", "256 x v5e": "v5e:16x16"}
# Small, but with leaves that 256 chips can share.
_SHARDED = gpt2.Size(4, 8, 512, tokens=8000, vocabulary=8192, context=256)
_LEAST_SHARED = 2**14
_FIGURES = ("temporaries", "total", "kernels", "conditionals")

Step = tuple[Callable[..., Any], Any, Any]


class Part(NamedTuple):
  """A program of several contenders.

  Attributes:
    make: returns the program of a contender, by the contender's name.
    targets: what it is compiled for.
    contenders: their names.
    devices: how many the library sees.
  """

  make: Callable[[str], Step]
  targets: Sequence[str]
  contenders: Sequence[str] = CONTENDERS
  devices: int = 1


def _sizes(target: str) -> list[int]:
  return list(map(int, target.partition(":")[2].split("x")))


def update(
  name: str,
  dtype: str = "float16",
  *,
  inner: optax.GradientTransformation | None = None,
  placed: Callable[[Any], Any] = lambda x: x,
) -> Step:
  """Returns the update phase of GPT-2 small, and the shapes it takes.

  Args:
    name: the contender's.
    dtype: of the gradients.
    inner: the optimizer of `bare` or `optax_lossscale`; by default AdamW.
    placed: returns a shape with its sharding.
  """
  contender = PEERS[name].make(*([] if inner is None else [inner]))
  params = _params(gpt2.SIZES["small"])
  grads = [jax.ShapeDtypeStruct(x.shape, dtype) for x in params]
  step = jax.jit(contender.update, donate_argnums=0)
  state = jax.eval_shape(contender.init, params)
  return step, *jax.tree.map(placed, (state, grads))


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
  step, state, _ = train(name, _SHARDED)
  tokens = jax.ShapeDtypeStruct((256, _SHARDED.context), jnp.int32)
  place = functools.partial(on_mesh, devices=devices)
  return step, *jax.tree.map(place, (state, (tokens, tokens)))


def on_mesh(x: Any, devices: int, *, is_shared: bool = True) -> Any:
  """Returns a shape on a mesh of devices.

  Args:
    x: the shape.
    devices: how many.
    is_shared: whether each device has a part of it, or all of it.
  """
  auto = (jax.sharding.AxisType.Auto,)
  mesh = jax.sharding.AbstractMesh((devices,), ("data",), axis_types=auto)
  # The largest axis, as fully sharded data parallelism has it; each device has
  # all of a bias.
  axis = max(range(x.ndim), key=lambda i: x.shape[i], default=0)
  if not is_shared or x.size < _LEAST_SHARED or x.shape[axis] % devices:
    spec = jax.P()
  else:
    spec = jax.P(*(None for _ in range(axis)), "data")
  return x.update(sharding=jax.NamedSharding(mesh, spec))


def _on_four_gpus(*, is_shared: bool) -> Part:
  place = functools.partial(on_mesh, devices=4, is_shared=is_shared)
  make = functools.partial(update, placed=place)
  return Part(make, ("h100", "h200"), CONTENDERS[:2], devices=4)


LAMB = "update with LAMB"
PARTS: Mapping[str, Part] = {
  "update, float16 gradients": Part(update, TARGETS),
  "update, float32 gradients": Part(
    functools.partial(update, dtype="float32"), TARGETS
  ),
  **{
    name: Part(functools.partial(update, inner=inner), GPUS, CONTENDERS[:2])
    for name, inner in {
      "update with clipping and AdamW": optax.chain(
        optax.clip_by_global_norm(1.0), settings.adamw()
      ),
      "update with momentum": optax.sgd(0.1, momentum=0.9),
      LAMB: optax.lamb(settings.LEARNING_RATE),
    }.items()
  },
  "update on four GPUs, replicated": _on_four_gpus(is_shared=False),
  "update on four GPUs, sharded": _on_four_gpus(is_shared=True),
  "train step": Part(train, TARGETS),
  **{
    f"sharded train step, {name}": Part(
      functools.partial(sharded, devices=math.prod(_sizes(target))), (target,)
    )
    for name, target in MESHES.items()
  },
}


def figures(
  part: str, target: str, names: Sequence[str] = ()
) -> dict[str, dict[str, Any]]:
  """Returns the figures of contenders in one part, for one target.

  Args:
    part: one of `PARTS`.
    target: as `compile_report` takes it.
    names: of an even number of contenders; by default all of the part.
  """
  make, _, contenders, devices = PARTS[part]
  names = names or contenders
  rows = {}
  for first, second in zip(names[::2], names[1::2], strict=True):
    with mock.patch.object(jax, "device_count", lambda: devices):
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
  parser.add_argument(
    "--only",
    nargs="+",
    choices=tuple(PARTS),
    default=tuple(PARTS),
    metavar="PART",
    help=f"some of {shlex.join(PARTS)} (default: all)",
  )
  parser.add_argument(
    "--keep",
    action="store_true",
    help="keep the other figures of targets.json, of the same update",
  )
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
  path = arguments.out / "targets.json"
  parts: dict[str, Any] = {part: {} for part in PARTS}
  content = command.begin("targets", argv)
  content |= {"update": phase.digest(), "parts": parts}
  if arguments.keep:
    stored = json.loads(path.read_text("utf-8")) if path.exists() else {}
    if _measured(stored) != _measured(content):
      parser.error(
        f"argument --keep: {path} must have figures of this update and these "
        "versions"
      )
    parts |= stored["parts"]
  has_failed = False
  for part in arguments.only:
    for target in filter(targets.__contains__, PARTS[part].targets):
      rows = parts[part][target] = figures(part, target)
      has_failed |= any("error" in row for row in rows.values())
      report.write(path, content)
  print(page(content))
  return int(has_failed)


def _measured(content: Mapping[str, Any]) -> Any:
  """Returns the update and the versions of a file of figures."""
  return content.get("update"), content.get("machine", {}).get("versions")


def page(content: Mapping[str, Any]) -> str:
  """Returns the table; targets with the same figures share a row."""
  rows: dict[tuple[str, ...], list[str]] = {}
  for part, by_target in content["parts"].items():
    for target, found in by_target.items():
      cells = (_cell(found.get(name)) for name in CONTENDERS)
      rows.setdefault((part, *cells), []).append(target)
  return report.markdown(
    ["operations, temporaries", *CONTENDERS],
    [[f"{x[0]}: {', '.join(its)}", *x[1:]] for x, its in rows.items()],
  )


def _cell(row: Mapping[str, Any] | None) -> str:
  if row is None:
    return ""
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
