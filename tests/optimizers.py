"""The inner optimizers, parameters and loss of the batteries of tests."""

import jax.numpy as jnp
import optax

OPTIMIZERS = {
  "adafactor": lambda: optax.adafactor(1e-2),
  "adam": lambda: optax.adam(1e-2),
  "adamw": lambda: optax.adamw(1e-2),
  "adan": lambda: optax.adan(1e-2),
  "apply_if_finite": lambda: optax.apply_if_finite(optax.adam(1e-2), 5),
  "backtracking": lambda: optax.chain(
    optax.sgd(1.0), optax.scale_by_backtracking_linesearch(10)
  ),
  "clipped": lambda: optax.chain(
    optax.clip_by_global_norm(0.5), optax.adam(optax.linear_schedule(1, 0, 9))
  ),
  "cocob": lambda: optax.contrib.cocob(),
  "inject_hyperparams": lambda: optax.inject_hyperparams(optax.adam)(1e-2),
  "lbfgs": lambda: optax.lbfgs(),
  "lion": lambda: optax.lion(1e-2),
  "masked": lambda: optax.chain(
    optax.masked(optax.adam(1e-2), {"bias": False, "kernel": True}),
    optax.sgd(0.1),
  ),
  "mechanize": lambda: optax.contrib.mechanize(optax.adam(1e-2)),
  "multi_steps": lambda: optax.MultiSteps(optax.adam(1e-2), 2),
  "multi_transform": lambda: optax.multi_transform(
    {"fast": optax.sgd(0.1), "slow": optax.adam(1e-3)},
    {"bias": "fast", "kernel": "slow"},
  ),
  "muon": lambda: optax.contrib.muon(1e-2),
  "noisy_sgd": lambda: optax.noisy_sgd(1e-2, key=0),
  "plateau": lambda: optax.chain(
    optax.adam(1e-2), optax.contrib.reduce_on_plateau()
  ),
  "polyak_sgd": lambda: optax.polyak_sgd(1.0),
  "prodigy": lambda: optax.contrib.prodigy(),
  "schedule_free": lambda: optax.contrib.schedule_free_adamw(1e-2),
  "sgd": lambda: optax.sgd(1e-2, momentum=0.9),
}


def bare(inner):
  """Returns the optimizer as it is used without loss scaling."""
  if isinstance(inner, optax.MultiSteps):
    inner = inner.gradient_transformation()
  return optax.with_extra_args_support(inner)


def make_params(dtype=jnp.float32):
  """Returns parameters with a leaf of two dimensions and one of one."""
  return {
    "bias": jnp.array([0.5, -0.25, 1.0], dtype),
    "kernel": (
      jnp.arange(12, dtype=jnp.float32).reshape(4, 3) / 8 - 0.5
    ).astype(dtype),
  }


def loss_fn(params):
  """Returns a loss whose gradients are neither tiny nor huge."""
  params = {name: jnp.float32(leaf) for name, leaf in params.items()}
  return jnp.sum(jnp.sin(params["bias"])) + jnp.sum(params["kernel"] ** 2)
