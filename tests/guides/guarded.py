"""A small training with a `SpikeGuard`, for the pages that show one."""

import jax
import jax.numpy as jnp
import numpy as np
import optax

import optax_lossscale as ols
from tests import documents

PARAMS = {"w": jnp.full((4, 1), 0.5)}
CLEAN = [1.0] * 66  # The warm-up of a `SpikeGuard`, and two more.


def loss_fn(params, batch):
  return jnp.mean((batch @ params["w"]) ** 2)


def names_with_step(first, step):
  """Returns the names after some code of a page, and its step."""
  names = {"inner": optax.adam(0.125), "jax": jax, "jnp": jnp, "ols": ols}
  names |= {"loss_fn": loss_fn, "optax": optax, "params": PARAMS}
  names["rule"] = ols.DynamicLossScale()
  names = documents.run(f"```python\n{first}```", names)
  carry = "params", "opt_state", "guard_state"
  return names | {"train_step": documents.step(step, names, carry)}


def batch_of(size, seed=0):
  noise = np.random.default_rng(seed).uniform(0.9, 1.1, (2, 4))
  return jnp.float32(size * noise)


def trained(names, sizes):
  """Returns the parameters and states after steps on batches of these sizes."""
  carry = PARAMS, names["opt_state"], names["guard_state"]
  for seed, size in enumerate(sizes):
    *carry, _ = names["train_step"](*carry, batch_of(size, seed))
  return carry
