"""A run that is killed in the middle of a save, and those that resume it.

  python -m tests.checkpoint_worker train-file FOLDER
  python -m tests.checkpoint_worker train-orbax FOLDER
  python -m tests.checkpoint_worker resume FOLDER

Each `train` saves in its format after the first of `SAVED`, and dies within its
own save after the second: SIGKILL, when the file is written but has not taken
the place of the other yet, or when Orbax has written its arrays, but not yet
what is in them. `resume` goes on from the last checkpoint that is complete to
the end, and does so again from each later one that it then saves itself. What
a run saw and ended with is in {format}-{step}.npz, and in uninterrupted.npz
what one saw that went through. (In another process the last bits may differ:
XLA's settings and devices are not the same there.)
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

STEPS = 30
# A clean step is counted, after S has shrunk; an overflow is counted, and with
# the next one S shrinks; all is done.
SAVED = (13, 17, STEPS)
# Of these the targets are so far off that float16 overflows.
BAD = frozenset({2, 10, 11, 16, 17, 24})
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
  _, scaled_grads = ols.scaled_value_and_grad(loss_fn, opt_state)(params)
  updates, opt_state = TX.update(scaled_grads, opt_state, params)
  return {
    "params": optax.apply_updates(params, updates),
    "opt_state": opt_state,
    "key": ols.select_on_skip(
      opt_state, jax.random.key_data(next_key), state["key"]
    ),
    "step": state["step"] + 1,
  }


def train(state, saves=(), save=None):
  """Trains to the end; returns what it saw on each step, and the last state.

  Args:
    state: as of `init` or of a checkpoint.
    saves: the steps after which to save.
    save: a function of the state.
  """
  seen = {"loss_scale": [], "skipped": []}
  # As Orbax returns it, so that one compilation is for all.
  state = jax.device_put(state, jax.devices()[0])
  while state["step"] < STEPS:
    state = train_step(state, int(state["step"]) in BAD)
    metrics = ols.loss_scale_metrics(state["opt_state"])
    for name, values in seen.items():
      values.append(np.asarray(metrics[name]))
    if state["step"] in saves:
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


def die_in_file(path, event, arguments):
  """Kills the process when the new file is to take the place of the old one."""
  if event == "os.rename" and str(arguments[1]) == str(path):
    os.kill(os.getpid(), signal.SIGKILL)


def die_in_orbax(folder, event, arguments):
  """Kills the process when Orbax is about to write what its arrays are."""
  if event == "open" and "w" in str(arguments[1]):
    path = str(arguments[0])
    if path.startswith(str(folder)) and path.endswith("/_METADATA"):
      os.kill(os.getpid(), signal.SIGKILL)


def train_and_die(save, die):
  """Trains; dies in the second save."""

  def save_or_die(state):
    if state["step"] == SAVED[1]:
      sys.addaudithook(die)
    save(state)

  train(init(), SAVED[:2], save_or_die)


def write(path, seen, state):
  """Writes all bits of a run."""
  leaves = jax.tree.leaves_with_path(state)
  final = {jax.tree_util.keystr(key): np.asarray(leaf) for key, leaf in leaves}
  np.savez(path, **seen, **final)


def resume(name, folder, save, restore):
  """Goes on over what the killed run left, and from each save of its own."""
  for i, step in enumerate(SAVED):
    state = restore()
    assert state["step"] == step
    write(folder / f"{name}-{step}", *train(state, SAVED[i + 1 : i + 2], save))


def main(command, folder):
  jax.config.update("jax_disable_most_optimizations", True)
  folder = pathlib.Path(folder)
  file = folder / "state.msgpack"
  if command == "train-file":
    train_and_die(
      functools.partial(save_file, file), functools.partial(die_in_file, file)
    )
    return
  with ocp.CheckpointManager(folder / "orbax") as manager:
    save = functools.partial(save_orbax, manager)
    if command == "train-orbax":
      train_and_die(save, functools.partial(die_in_orbax, manager.directory))
    else:
      write(folder / "uninterrupted", *train(init()))
      save_and_restore = {
        "file": (
          functools.partial(save_file, file),
          functools.partial(restore_file, file),
        ),
        "orbax": (save, functools.partial(restore_orbax, manager)),
      }
      for name, functions in save_and_restore.items():
        resume(name, folder, *functions)


if __name__ == "__main__":
  main(*sys.argv[1:])
