"""Trains a small float16 model, data-parallel, on any number of processes.

If a cluster manager starts the processes (Slurm, TPU pods, Open MPI ...),
each process finds the others by itself:

  srun python cluster.py

Otherwise start each process by hand and pass the address of the first one:

  python cluster.py --coordinator localhost:1234 --processes 2 --process 0 &
  python cluster.py --coordinator localhost:1234 --processes 2 --process 1

Loss scaling itself needs no setup for several processes. If one device's
gradients overflow, all devices skip the step.
"""

import argparse
import functools

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np
import optax

import optax_lossscale as ols

RULE = ols.DynamicLossScale(growth_interval=20)


def main(argv=None):
  """Joins the processes, trains, and prints from the first process."""
  # Without the usage, an error is one line.
  parser = argparse.ArgumentParser(usage=argparse.SUPPRESS)
  parser.add_argument("--coordinator", help="host:port of the first process")
  parser.add_argument("--processes", type=int, help="how many there are")
  parser.add_argument("--process", type=int, help="which one this is, from 0")
  parser.add_argument("--steps", type=int, default=200)
  args = parser.parse_args(argv)
  if args.steps < 1:
    parser.error(f"--steps must be at least 1, got {args.steps}")
  process, processes = args.process, args.processes
  if processes is not None and not 0 <= (process or 0) < processes:
    parser.error(
      f"--process must be from 0 and below {processes}, got {process}"
    )
  # Must be the first JAX call. The cluster manager provides missing values.
  jax.distributed.initialize(args.coordinator, processes, process)
  train(local_batches(args.steps), report=print_now_and_then)
  if jax.process_index() == 0:
    print("Next: docs/guides/devices.md")


def local_batches(steps):
  """Yields this process's part of each batch: 64 rows for each local device."""
  random = np.random.default_rng(jax.process_index())
  rows = 64 * jax.local_device_count()
  for _ in range(steps):
    x = random.normal(size=(rows, 16)).astype(np.float32)
    yield {"x": x, "y": np.sin(x[:, :1]) + x[:, 1:2]}


def init_params(key):
  """Returns float32 parameters, the same in every process."""
  keys = jax.random.split(key)
  return {
    "hidden": jax.random.normal(keys[0], (16, 64)) / 4,
    "out": jax.random.normal(keys[1], (64, 1)) / 8,
  }


def loss_fn(params, batch):
  """Returns the mean loss of a batch; the model runs in float16."""
  hidden, out = (params[k].astype(jnp.float16) for k in ("hidden", "out"))
  prediction = jnp.tanh(batch["x"].astype(jnp.float16) @ hidden) @ out
  return jnp.mean((prediction.astype(jnp.float32) - batch["y"]) ** 2)


def train(batches, loss_fn=loss_fn, rule=RULE, report=lambda *_: None):
  """Trains, calling `report(step, params, opt_state, metrics)` each step.

  Args:
    batches: yields this process's part of each batch, a tree of NumPy arrays.
    loss_fn: takes the parameters and one device's rows, returns the mean loss.
    rule: the rule that moves S.
    report: called in every process, with arrays that are equal in all of them.
  """
  mesh = jax.make_mesh((jax.device_count(),), ("data",))  # In all processes.
  replicated = jax.NamedSharding(mesh, jax.P())
  by_rows = jax.NamedSharding(mesh, jax.P("data"))
  tx = ols.loss_scaling(
    # The mean over devices goes inside the wrapper, so the check sees each
    # device's own gradients. On saturating hardware also pass
    # `check=ols.saturated(jnp.float16)`.
    optax.chain(ols.pmean_gradients("data"), optax.adam(1e-2)),
    rule,
    axis_name="data",  # Devices along this axis skip together.
  )

  @functools.partial(jax.jit, out_shardings=replicated)
  def init():
    params = init_params(jax.random.key(0))
    return params, tx.init(params)

  params, opt_state = init()
  train_step = make_train_step(loss_fn, tx, mesh)
  for step, rows in enumerate(batches):
    batch = jax.make_array_from_process_local_data(by_rows, rows)
    params, opt_state, metrics = train_step(params, opt_state, batch)
    report(step, params, opt_state, metrics)


def make_train_step(loss_fn, tx, mesh):
  """Returns the compiled step, in which each device gets its own rows."""

  @functools.partial(jax.jit, donate_argnums=(0, 1))
  @functools.partial(
    jax.shard_map,
    mesh=mesh,
    in_specs=(jax.P(), jax.P(), jax.P("data")),
    out_specs=jax.P(),
  )
  def train_step(params, opt_state, batch):
    # Varying parameters keep each device's gradients separate. Otherwise JAX
    # would sum the gradients before the check sees them.
    loss, scaled_grads = ols.scaled_value_and_grad(loss_fn, opt_state)(
      ols.make_varying(params, "data"), batch
    )
    updates, opt_state = tx.update(scaled_grads, opt_state, params)
    params = optax.apply_updates(params, updates)
    # Computed inside the step, since all processes must run the same program.
    # A single process may print the results but not compute them.
    metrics = ols.loss_scale_metrics(opt_state)
    return params, opt_state, metrics | {"loss": lax.pmean(loss, "data")}

  return train_step


def print_now_and_then(step, params, opt_state, metrics):
  """Prints every 20th step, from the first process only."""
  del params, opt_state  # Saving them requires a call in every process.
  if jax.process_index() == 0 and step % 20 == 19:
    print(
      f"step {step + 1}: loss {metrics['loss']:.4f}, "
      f"S {metrics['loss_scale']:g}, applied {metrics['applied_steps']}, "
      f"skipped {metrics['skipped_steps']}",
      flush=True,
    )


if __name__ == "__main__":
  main()
