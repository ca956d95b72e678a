"""Trains a GAN in float16, with a loss scale for each of its two networks.

The generator learns to make points like the data, which lie around eight
centers on a circle. Each network has its own loss, optimizer and S. If the
gradients of one network overflow, only that network's step is skipped, and only
its S shrinks.

  python examples/gan.py
"""

import argparse

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

import optax_lossscale as ols

BATCH, LATENT, MODES, SPREAD = 256, 2, 8, 0.1
ANGLES = 2 * np.pi * np.arange(MODES) / MODES
CENTERS = 2 * np.stack([np.cos(ANGLES), np.sin(ANGLES)], axis=1)
LINE = (
  "  {name}: S 2^{log2_scale:.0f}, "
  "applied {applied_steps}, skipped {skipped_steps}"
)

rule = ols.DynamicLossScale()
optimizers = {
  "discriminator": ols.loss_scaling(optax.adam(1e-3, b1=0.5), rule),
  "generator": ols.loss_scaling(optax.adam(3e-4, b1=0.5), rule),
}


def draw(rng, count):
  """Returns real points, and noise for the generator."""
  real = CENTERS[rng.integers(MODES, size=count)]
  real = real + rng.normal(0, SPREAD, real.shape)
  noise = rng.normal(size=(count, LATENT))
  return {"real": np.float32(real), "noise": np.float32(noise)}


class Network(nn.Module):
  """A network with two hidden layers."""

  features: int

  @nn.compact
  def __call__(self, x):
    """Returns `features` numbers for each row of x."""
    for _ in range(2):
      x = nn.leaky_relu(nn.Dense(128)(x), 0.2)
    return nn.Dense(self.features)(x)


networks = {"discriminator": Network(1), "generator": Network(2)}


@ols.autocast  # The products of both networks are in float16.
def discriminator_loss(own, params, batch):
  """Returns the loss of distinguishing real points from made ones."""
  made = networks["generator"].apply(params["generator"], batch["noise"])
  real_logits = networks["discriminator"].apply(own, batch["real"])
  made_logits = networks["discriminator"].apply(own, made)
  return jnp.mean(jax.nn.softplus(-real_logits) + jax.nn.softplus(made_logits))


@ols.autocast
def generator_loss(own, params, batch):
  """Returns the loss of being distinguished from real points."""
  made = networks["generator"].apply(own, batch["noise"])
  logits = networks["discriminator"].apply(params["discriminator"], made)
  return jnp.mean(jax.nn.softplus(-logits))


losses = {"discriminator": discriminator_loss, "generator": generator_loss}


@jax.jit
def train_step(params, opt_state, batch):
  """Returns the next parameters and states, of both networks."""
  for name, tx in optimizers.items():
    value_and_grad = ols.scaled_value_and_grad(losses[name], opt_state[name])
    _, scaled_grads = value_and_grad(params[name], params, batch)
    updates, state = tx.update(scaled_grads, opt_state[name], params[name])
    params = params | {name: optax.apply_updates(params[name], updates)}
    opt_state = opt_state | {name: state}
  return params, opt_state


def make_state(seed):
  """Returns the first parameters and states of both networks."""
  keys = jax.random.split(jax.random.key(seed))
  params = {
    "discriminator": networks["discriminator"].init(keys[0], jnp.zeros(2)),
    "generator": networks["generator"].init(keys[1], jnp.zeros(LATENT)),
  }
  return params, {
    name: tx.init(params[name]) for name, tx in optimizers.items()
  }


def report(step, params, opt_state, batch):
  """Prints and returns how good the made points are, and the metrics."""
  made = networks["generator"].apply(params["generator"], batch["noise"])
  distances = np.linalg.norm(np.asarray(made)[:, None] - CENTERS, axis=-1)
  near = distances < 4 * SPREAD
  share, found = near.any(axis=1).mean(), (near.mean(axis=0) > 0.02).sum()
  print(f"step {step}: {share:.1%} near a center, {found} of {MODES} found")
  metrics = {
    name: ols.loss_scale_metrics(opt_state, path=name) for name in optimizers
  }
  for name, scalars in metrics.items():
    print(LINE.format(name=name, **scalars), flush=True)
  return {"share": share, "found": found, **metrics}


def main(argv=None):
  """Trains both networks and returns the last report."""
  parser = argparse.ArgumentParser(
    description=__doc__.partition("\n")[0],
    usage=argparse.SUPPRESS,  # An error is one line.
  )
  parser.add_argument("--steps", type=int, default=2500)
  parser.add_argument("--seed", type=int, default=0)
  args = parser.parse_args(argv)
  if args.steps < 1:
    parser.error(f"--steps must be at least 1, got {args.steps}")
  if not 0 <= args.seed < 2**32:
    parser.error(f"--seed must be from 0 to 2**32 - 1, got {args.seed}")
  rng = np.random.default_rng(args.seed)
  held_out = draw(rng, 2000)
  params, opt_state = make_state(args.seed)
  result = report(0, params, opt_state, held_out)
  for step in range(1, args.steps + 1):
    params, opt_state = train_step(params, opt_state, draw(rng, BATCH))
    if step % 250 == 0 or step == args.steps:
      result = report(step, params, opt_state, held_out)
  print("Next: docs/guides/several_losses.md")
  return result


if __name__ == "__main__":
  main()
