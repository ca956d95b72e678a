"""`python -m benchmarks autocast`: what it makes of a model's products.

Each model is given to `autocast` in float32 at every level, and beside it
stands the same model with `dtype=float16` in its layers, written by hand.
Counted is the gradient of the loss: in its jaxpr, and in XLA's program for this
device. `python -m benchmarks gpu` times it. On a CPU XLA computes float16 in
float32, so that low precision takes longer whoever asks for it.
"""

from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks import autocast_counts as counts
from benchmarks import autocast_models as models
from benchmarks import command
from benchmarks import report
import optax_lossscale as ols

LEVELS = ("O0", "O1", "O2", "O3", "auto")
FLOAT32, BY_HAND = "float32", "float16 by hand"
_COLUMNS = (
  "",
  "products in float16",
  "conversions",
  "MB kept",
  "loss - float32's",
  "times by hand",
  "FLOPs, times by hand",
  "bytes",
  "temporaries",
  "unfused bytes",
)
_LOW = jnp.float16
_OF_A_CPU = """\
XLA computes float16 in float32 on a CPU. So FLOPs, bytes and temporaries, which
are of its program, say how autocast compares with by hand, and not what float16
saves; the last column is of the program as it was written, nothing fused.
"""


def main(argv: Sequence[str]) -> int:
  """Counts, prints the tables, and writes them as JSON.

  Args:
    argv: the words after the command's name.

  Returns:
    The exit code.
  """
  arguments = command.parser("autocast", __doc__).parse_args(argv)
  content = command.begin("autocast", argv) | {"models": {}}
  if jax.default_backend() == "cpu":
    print(_OF_A_CPU)
  for name, make in models.makers(tiny=arguments.tiny).items():
    print(f"... {name}", flush=True)
    rows = measure(make())
    content["models"][name] = rows
    report.show(name, _COLUMNS, [(n, *_cells(r)) for n, r in rows.items()])
  report.write(path := arguments.out / "autocast.json", content)
  print(f"wrote {path}")
  return 0


def measure(model: models.Model) -> dict[str, dict[str, Any]]:
  """Returns the figures of a model, for JSON, by who chose the precision.

  Args:
    model: any.

  Returns:
    `products` in float16 and `all_products`; float `conversions` that are not
    in float32; `kept`, the bytes kept for the backward pass without parameters;
    `loss`, and its `loss_difference` to float32; what XLA says of the gradient
    as `compiled`, and `unfused`, as it was written; and `over_by_hand`, the
    ratios to the model by hand.
  """
  written = model.make_loss_fn(jnp.float32)
  functions = {
    FLOAT32: written,
    BY_HAND: model.make_loss_fn(_LOW),
    **{level: ols.autocast(written, level, dtype=_LOW) for level in LEVELS},
  }
  rows = {name: _count(f, model) for name, f in functions.items()}
  original, by_hand = rows[FLOAT32], rows[BY_HAND]
  already, true_loss = original["conversions"], original["loss"]
  for row in rows.values():
    row["conversions"] -= already
    row["loss_difference"] = row["loss"] - true_loss
    row["over_by_hand"] = {
      "kept": row["kept"] / by_hand["kept"],
      "compiled": _ratios(row["compiled"], by_hand["compiled"]),
      "unfused": _ratios(row["unfused"], by_hand["unfused"]),
    }
  return rows


def _count(loss_fn: models.LossFn, model: models.Model) -> dict[str, Any]:
  step = jax.jit(jax.value_and_grad(loss_fn))
  traced = step.trace(model.params, model.batch)
  lowered = traced.lower()
  compiled = lowered.compile()
  loss, _ = compiled(model.params, model.batch)
  products = counts.products(traced.jaxpr, _LOW)
  return {
    "products": products.lowered,
    "all_products": products.all,
    "conversions": counts.float_conversions(traced.jaxpr),
    "kept": counts.bytes_kept(
      lambda params: loss_fn(params, model.batch), model.params
    ),
    "loss": float(loss),
    "compiled": counts.costs(compiled)._asdict(),
    "unfused": counts.costs(lowered)._asdict(),
  }


def _ratios(
  figures: Mapping[str, float | None], baseline: Mapping[str, float | None]
) -> dict[str, float | None]:
  """Returns the ratio of each figure; None where there is none."""
  return {
    name: value / baseline[name] if value and baseline[name] else None
    for name, value in figures.items()
  }


def _cells(row: Mapping[str, Any]) -> list[str]:
  compiled, unfused = (
    row["over_by_hand"][name] for name in ("compiled", "unfused")
  )
  return [
    f"{row['products']} of {row['all_products']}",
    str(row["conversions"]),
    f"{row['kept'] / 1e6:.3f}",
    f"{row['loss_difference']:+.1e}",
    *(
      "-" if ratio is None else f"{ratio:.3f}"
      for ratio in (
        row["over_by_hand"]["kept"],
        compiled["flops"],
        compiled["bytes_accessed"],
        compiled["temporaries"],
        unfused["bytes_accessed"],
      )
    ),
  ]
