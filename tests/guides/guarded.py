"""A small training with a `SpikeGuard`, for the pages that show one."""

import jax.numpy as jnp
import numpy as np

PARAMS = {"w": jnp.full((4, 1), 0.5)}
CLEAN = [1.0] * 66  # The warm-up of a `SpikeGuard`, and two more.


def loss_fn(params, batch):
  return jnp.mean((batch @ params["w"]) ** 2)


def batch_of(size, seed=0):
  noise = np.random.default_rng(seed).uniform(0.9, 1.1, (2, 4))
  return jnp.float32(size * noise)


def trained(names, sizes):
  """Returns the parameters and states after steps on batches of these sizes."""
  carry = PARAMS, names["opt_state"], names["guard_state"]
  for seed, size in enumerate(sizes):
    *carry, _ = names["train_step"](*carry, batch_of(size, seed))
  return carry
