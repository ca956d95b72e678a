"""A run that is killed in the middle of a save, and the one that resumes it.

  python -m tests.checkpoint_worker train FOLDER OUTPUT
  python -m tests.checkpoint_worker resume FOLDER OUTPUT

`train` saves after step `SAVED` in both formats, and dies during the saves
after step `KILLED`: SIGKILL, when half of the file is written and Orbax has
written its arrays, but not yet what is in them. `resume` goes on from the last
checkpoint that is complete, once for each format, to the end. OUTPUT: what a
format's run saw and ended with, {name}.npz.
"""

import functools
import os
import pathlib
import signal
import sys

from flax import serialization
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp

import optax_lossscale as ols

STEPS, SAVED, KILLED = 30, 13, 20
# Of these the targets are so far off that float16 overflows. The last skips
# before the save leave counts behind that are neither 0 nor full.
BAD = frozenset({2, 10, 11, 16, 24})
TX = optax.chain(
  ols.loss_scaling(
    optax.chain(
      optax.clip_by_global_norm(1.0),
      optax.adamw(optax.cosine_decay_schedule(0.1, STEPS)),
    ),
    ols.DynamicLossScale(2.0**10, growth_interval=4, hysteresis=2),
  )
)


def init():
  """Returns the whole of what a run needs to go on."""
  params = {
    "hidden": jnp.linspace(-1, 1, 24).reshape(3, 8),
    "out": jnp.linspace(-1, 1, 8).reshape(8, 1),
  }
  return {
    "params": params,
    "opt_state": TX.init(params),
    "key": jax.random.key_data(jax.random.key(0)),
    "step": jnp.int32(0),
  }


@jax.jit
def train_step(state, is_bad):
  """Returns the next state. The key moves on applied steps only."""
  data_key, dropout_key, next_key = jax.random.split(
    jax.random.wrap_key_data(state["key"]), 3
  )
  x = jax.random.normal(data_key, (16, 3), jnp.float16)
  y = jnp.sum(x, axis=1, keepdims=True) * jnp.where(is_bad, 3e4, 1)

  def loss_fn(params):
    params = jax.tree.map(lambda p: p.astype(jnp.float16), params)
    hidden = jax.nn.relu(x @ params["hidden"])
    kept = jax.random.bernoulli(dropout_key, 0.9, hidden.shape)
    error = (hidden * kept) @ params["out"] - y.astype(jnp.float16)
    return jnp.mean(jnp.square(error.astype(jnp.float32)))

  params, opt_state = state["params"], state["opt_state"]
  _, grads = ols.scaled_value_and_grad(loss_fn, opt_state)(params)
  updates, opt_state = TX.update(grads, opt_state, params)
  return {
    "params": optax.apply_updates(params, updates),
    "opt_state": opt_state,
    "key": ols.select_on_skip(
      opt_state, jax.random.key_data(next_key), state["key"]
    ),
    "step": state["step"] + 1,
  }


def train(state, save=lambda state: None):
  """Trains to the end; returns what it saw on each step, and the last state."""
  seen = {"loss_scale": [], "skipped": []}
  # As Orbax returns it, so that one compilation is for all.
  state = jax.device_put(state, jax.devices()[0])
  while state["step"] < STEPS:
    state = train_step(state, int(state["step"]) in BAD)
    metrics = ols.loss_scale_metrics(state["opt_state"])
    for name, values in seen.items():
      values.append(np.asarray(metrics[name]))
    if state["step"] in (SAVED, KILLED):
      save(state)
  return seen, state


def save_file(path, state):
  """Saves in one file, which is there complete or not at all."""
  unfinished = path.with_suffix(".unfinished")
  with open(unfinished, "wb") as file:
    file.write(serialization.to_bytes(state))
    file.flush()
    os.fsync(file.fileno())
  os.replace(unfinished, path)


def restore_file(path):
  return serialization.from_bytes(init(), path.read_bytes())


def save_orbax(manager, state):
  step = int(state["step"])
  manager.save(step, args=ocp.args.StandardSave(state))
  manager.wait_until_finished()


def restore_orbax(manager):
  target = ocp.args.StandardRestore(jax.eval_shape(init))
  return manager.restore(manager.latest_step(), args=target)


def die_in_orbax(folder, event, arguments):
  """Kills the process when Orbax is about to write what its arrays are."""
  if event == "open" and "w" in str(arguments[1]):
    path = str(arguments[0])
    if path.startswith(str(folder)) and path.endswith("/_METADATA"):
      os.kill(os.getpid(), signal.SIGKILL)


def train_and_die(file, manager):
  def save(state):
    if state["step"] == SAVED:
      save_file(file, state)
      save_orbax(manager, state)
    else:
      data = serialization.to_bytes(state)
      file.with_suffix(".unfinished").write_bytes(data[: len(data) // 2])
      sys.addaudithook(functools.partial(die_in_orbax, manager.directory))
      save_orbax(manager, state)

  train(init(), save)


def write(path, seen, state):
  """Writes all bits of a run."""
  leaves = jax.tree.leaves_with_path(state)
  final = {jax.tree_util.keystr(key): np.asarray(leaf) for key, leaf in leaves}
  np.savez(path, **seen, **final)


def resume(file, manager, output):
  """Goes on twice, over what the killed run left behind."""
  state = restore_file(file)
  write(output / "file", *train(state, functools.partial(save_file, file)))
  state = restore_orbax(manager)
  write(output / "orbax", *train(state, functools.partial(save_orbax, manager)))


def main(command, folder, output):
  # As in the process of the tests.
  jax.config.update("jax_disable_most_optimizations", True)
  folder = pathlib.Path(folder)
  with ocp.CheckpointManager(folder / "orbax") as manager:
    if command == "train":
      train_and_die(folder / "state.msgpack", manager)
    else:
      resume(folder / "state.msgpack", manager, pathlib.Path(output))


if __name__ == "__main__":
  main(*sys.argv[1:])
