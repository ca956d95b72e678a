"""A small step, whose compiled programs are stored beside this file.

`python -m tests.compiled.compiled_step` makes them again. It needs XLA's
compilers.
"""

import json
import pathlib

import jax
from jax import lax
import jax.numpy as jnp

import optax_lossscale as ols
from optax_lossscale.compiled import compiling

FOLDER = pathlib.Path(__file__).parent / "programs"
TARGETS = "h200", "v5e"
F16, BF16, F32 = jnp.float16, jnp.bfloat16, jnp.float32


def step(x, w, u, v):
  with jax.named_scope("narrow"):
    narrow = x.astype(F16) @ w.astype(F16)
  with jax.named_scope("wide"):
    wide = x @ w
  with jax.named_scope("vector"):
    vector = x @ w[:, 0]
  with jax.named_scope("exact"):
    exact = jnp.dot(u.T, v, precision="highest")
  dropped = (u + 1).astype(F16).astype(F32)
  kept = lax.optimization_barrier((v + 1).astype(BF16)).astype(F32)
  computed_in_float32 = jnp.tanh((u + 2).astype(BF16))

  def add(so_far, row):
    total, lost = so_far
    row = row - lost
    rounded = (total.astype(F32) + row).astype(BF16)
    lost = rounded.astype(F32) - total.astype(F32) - row
    return (rounded, lost), None

  def shrink(w):
    return w / jnp.max(jnp.abs(w))

  with jax.named_scope("compensated"):
    compensated, _ = lax.scan(add, (u[0].astype(BF16), v[0]), u)
  # It mixes the examples, which devices share.
  total = jnp.sum(narrow.astype(F32) * wide * vector[:, None], axis=0)
  w = lax.cond(total[0] > 0, shrink, lambda w: w, w)
  return w, exact, dropped, kept, computed_in_float32, compensated


def program():
  """Returns the step and its arguments, on a mesh of four devices."""
  mesh = jax.sharding.AbstractMesh(
    (4,), ("data",), axis_types=(jax.sharding.AxisType.Auto,)
  )

  def shape(*sizes, spec=()):
    sharding = jax.NamedSharding(mesh, jax.P(*spec))
    return jax.ShapeDtypeStruct(sizes, F32, sharding=sharding)

  args = (
    shape(256, 512, spec=("data",)),
    shape(512, 128),
    shape(32, 64),
    shape(32, 64),
  )
  return jax.jit(step, donate_argnums=1), *args


def load(target):
  """Returns what the compilers gave, as `read_program` takes it."""
  return json.loads((FOLDER / f"{target}.json").read_text())


def main():
  compile_for = compiling.compile_for

  def storing(target, *args, **kwargs):
    versions, found = compile_for(target, *args, **kwargs)
    text = json.dumps(found["step"], indent=1)
    text = text.replace(f"{FOLDER.parents[2]}/", "")
    (FOLDER / f"{target.name}.json").write_text(f"{text}\n")
    return versions, found

  compiling.compile_for = storing
  print(ols.instruments.compile_report(*program(), targets=TARGETS))


if __name__ == "__main__":
  main()
