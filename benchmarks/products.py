"""`python -m benchmarks products`: the gradient's error in each product format.

Each workload of docs/does_it_matter.md is differentiated in float32 and with
products in 16 bits, with float32 results, and in float8: with the parameters
that it begins with, and with those after some steps of Adam in float32. The
error is that of the whole gradient, of one batch, relative to its norm. Beside
it stand the bytes that are kept for the backward pass.
"""

from collections.abc import Mapping
from collections.abc import Sequence
import dataclasses
from typing import Any

import jax
from jax import lax
import jax.numpy as jnp
import optax

from benchmarks import autocast_counts
from benchmarks import command
from benchmarks import report
from benchmarks.truth import workload as workload_lib
from benchmarks.truth.workloads import WORKLOADS
import optax_lossscale as ols

_WIDE = {"preferred_element_type": jnp.float32}
_E4M3 = jnp.float8_e4m3fn
FORMATS: Mapping[str, Mapping[str, Any]] = {
  "bfloat16": {},
  "float32 results": _WIDE,
  "float8": {"dot_dtype": _E4M3},
  "float8, e4m3 alone": {"dot_dtype": (_E4M3, _E4M3)},
}
STEPS = 50


def main(argv: Sequence[str]) -> int:
  """Measures, prints the table, and writes it as JSON.

  Args:
    argv: the words after the command's name.

  Returns:
    The exit code.
  """
  arguments = command.parser("products", __doc__).parse_args(argv)
  content = command.begin("products", argv) | {"workloads": {}}
  for name, make in WORKLOADS.items():
    print(f"... {name}", flush=True)
    found = measure(make(), steps=1 if arguments.tiny else STEPS)
    content["workloads"][name] = found
    if arguments.tiny:
      break
  print(f"\n{page(content)}\n")
  report.write(path := arguments.out / "products.json", content)
  print(f"wrote {path}")
  return 0


def measure(workload: workload_lib.Workload, *, steps: int) -> dict[str, Any]:
  """Returns the figures of a workload, for JSON.

  Args:
    workload: any.
    steps: of training, before the second measurement.

  Returns:
    By format, `errors` (with the first parameters, and after the steps),
    `float8` and `products` (how many of the gradient's are in float8, and how
    many there are) and `kept`, bytes.
  """
  key = jax.random.key(0)
  with jax.default_matmul_precision("highest"):
    first = jax.jit(workload.init)(key)
    trained = _train(workload, first, steps)
  found: dict[str, Any] = {}
  for name, options in FORMATS.items():
    low = ols.autocast(workload.loss, dtype=jnp.bfloat16, **options)
    errors = []
    for params in (first, trained):
      # A batch of the training data that no step has seen.
      batch = jax.jit(workload.draw)(jax.random.key(2**31 - 1), params)
      error = ols.instruments.gradient_error(
        workload.loss, low, loss_scales=[1]
      )(params, batch)
      errors.append(error.errors[1])
    products = ols.instruments.precision_report(
      jax.grad(low), first, batch
    ).products
    found[name] = {
      "errors": errors,
      "float8": sum(n for x, n in products.items() if x.startswith("float8")),
      "products": sum(products.values()),
      "kept": autocast_counts.bytes_kept(low, first, batch),
    }
  return found


def _train(workload: workload_lib.Workload, params: Any, steps: int) -> Any:
  """Returns the parameters after some steps of Adam in float32."""
  workload = dataclasses.replace(workload, steps=10 * steps)

  @jax.jit
  def run(params: Any) -> Any:
    def step(state: Any, number: jax.Array) -> Any:
      params, opt_state = state
      key = jax.random.fold_in(jax.random.key(1), number)
      grads = jax.grad(workload.loss)(params, workload.draw(key, params))
      updates, opt_state = workload.optimizer.update(grads, opt_state)
      return (optax.apply_updates(params, updates), opt_state), None

    state = params, workload.optimizer.init(params)
    return lax.scan(step, state, jnp.arange(steps))[0][0]

  return run(params)


def page(content: Mapping[str, Any]) -> str:
  """Returns the table; what is kept is beside what bfloat16 alone keeps."""
  errors = ("bfloat16", "float32 results", "float8")
  rows = []
  for name, found in content["workloads"].items():
    shown = (found[x]["errors"] for x in errors)
    cells = [", ".join(f"{100 * x:.2f}%" for x in pair) for pair in shown]
    alone, *kept = (found[x]["kept"] for x in errors)
    rows.append(
      [name, *cells, *(f"{100 * (x / alone - 1):+.0f}%" for x in kept)]
    )
  return report.markdown(
    ["training", *errors, *(f"kept, {x}" for x in errors[1:])], rows
  )
