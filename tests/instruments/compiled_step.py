"""A small step, whose compiled programs are stored beside this file.

`python -m tests.instruments.compiled_step` makes them again. It needs XLA's
compilers.
"""

import json
import pathlib

import jax
from jax import lax
import jax.numpy as jnp

import optax_lossscale as ols
from optax_lossscale.instruments import compiling

FOLDER = pathlib.Path(__file__).parent / "compiled"
TARGETS = "h200", "v5e"
F16, F32 = jnp.float16, jnp.float32


def step(x, w, u, v):
  with jax.named_scope("narrow"):
    narrow = x.astype(F16) @ w.astype(F16)
  with jax.named_scope("wide"):
    wide = x @ w
  dropped = (u + 1).astype(F16).astype(F32)
  kept = lax.optimization_barrier((v + 1).astype(jnp.bfloat16)).astype(F32)

  def shrink(w):
    return w / jnp.max(jnp.abs(w))

  # It mixes the examples, which devices share.
  total = jnp.sum(narrow.astype(F32) * wide, axis=0)
  looped = lax.fori_loop(0, 3, lambda _, x: jnp.sin(x) + 1, total)
  return lax.cond(looped[0] > 0, shrink, lambda w: w, w), dropped, kept


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
