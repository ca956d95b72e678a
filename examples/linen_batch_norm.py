"""Trains a Flax Linen network with batch norm in float16.

The network tells the direction of stripes in noisy images, which the program
draws itself. Its layers compute in float16, and its parameters and batch
statistics are float32. A step whose gradients overflow changes neither:
`ols.linen.TrainState` keeps both, bit for bit.

  python examples/linen_batch_norm.py
"""

import argparse
import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

import optax_lossscale as ols

SIZE, DIRECTIONS, BATCH = 16, 8, 64
LINE = (
  "step {step}: loss {loss:.3f}, S 2^{log2_scale:.0f}, "
  "applied {applied_steps}, skipped {skipped_steps}"
)


def draw(rng, count):
  """Returns noisy images of stripes, and the direction of each."""
  y = rng.integers(DIRECTIONS, size=count)
  angle = np.pi * y[:, None, None] / DIRECTIONS
  width, phase = rng.uniform(1, 4, (2, count, 1, 1))
  rows, columns = np.mgrid[:SIZE, :SIZE]
  across = np.cos(angle) * rows + np.sin(angle) * columns
  images = np.sin(across / width + 2 * np.pi * phase)
  images = images + rng.normal(0, 0.7, images.shape)
  return {"x": np.float32(images)[..., None], "y": y.astype(np.int32)}


class Network(nn.Module):
  """Three convolutions, each with batch norm."""

  @nn.compact
  def __call__(self, x, train):
    """Returns a logit for each direction, in float16."""
    for channels in (16, 32, 32):
      x = nn.Conv(channels, (3, 3), strides=2, dtype=jnp.float16)(x)
      # Flax sums the statistics in float32, so float16 inputs are safe.
      x = nn.BatchNorm(not train, momentum=0.9, dtype=jnp.float16)(x)
      x = nn.relu(x)
    return nn.Dense(DIRECTIONS, dtype=jnp.float16)(x.mean(axis=(1, 2)))


class TrainState(ols.linen.TrainState):
  """The train state of a network with batch norm."""

  batch_stats: Any


def make_state(seed):
  """Returns the state before the first step."""
  network = Network()
  variables = network.init(
    jax.random.key(seed), jnp.zeros((1, SIZE, SIZE, 1)), train=False
  )
  return TrainState.create(
    apply_fn=network.apply,
    params=variables["params"],
    batch_stats=variables["batch_stats"],
    tx=ols.loss_scaling(optax.adam(3e-3), ols.DynamicLossScale()),
  )


def loss_fn(params, state, batch):
  """Returns the cross-entropy in float32, and the new batch statistics."""
  logits, new = state.apply_fn(
    {"params": params, "batch_stats": state.batch_stats},
    batch["x"],
    train=True,
    mutable=["batch_stats"],
  )
  losses = optax.softmax_cross_entropy_with_integer_labels(
    jnp.float32(logits), batch["y"]
  )
  return jnp.mean(losses), new["batch_stats"]


@functools.partial(jax.jit, donate_argnums=0)
def train_step(state, batch):
  """Returns the next state and the loss."""
  (loss, batch_stats), scaled_grads = ols.scaled_value_and_grad(
    loss_fn, state.opt_state, has_aux=True
  )(state.params, state, batch)
  # The statistics go through here, so that a skipped step keeps the old ones.
  state = state.apply_gradients(grads=scaled_grads, batch_stats=batch_stats)
  return state, loss


@jax.jit
def accuracy(state, batch):
  """Returns the share of images whose direction the network recognizes."""
  variables = {"params": state.params, "batch_stats": state.batch_stats}
  logits = state.apply_fn(variables, batch["x"], train=False)
  return jnp.mean(logits.argmax(-1) == batch["y"])


def main(argv=None):
  """Trains the network and returns its accuracy and the last metrics."""
  parser = argparse.ArgumentParser(
    description=__doc__.partition("\n")[0],
    usage=argparse.SUPPRESS,  # An error is one line.
  )
  parser.add_argument("--steps", type=int, default=300)
  parser.add_argument("--seed", type=int, default=0)
  args = parser.parse_args(argv)
  if args.steps < 1:
    parser.error(f"--steps must be at least 1, got {args.steps}")
  if not 0 <= args.seed < 2**32:
    parser.error(f"--seed must be from 0 to 2**32 - 1, got {args.seed}")
  rng = np.random.default_rng(args.seed)
  held_out = draw(rng, 1000)
  state = make_state(args.seed)
  print(f"{args.steps} steps; the first one compiles.", flush=True)
  for step in range(1, args.steps + 1):
    state, loss = train_step(state, draw(rng, BATCH))
    if step == 1 or step % 30 == 0:
      scalars = ols.loss_scale_metrics(state.opt_state)
      print(LINE.format(step=step, loss=loss, **scalars), flush=True)
  score = accuracy(state, held_out)
  print(f"Held-out accuracy: {score:.1%} (chance: 12.5%)")
  print("Next: docs/guides/linen.md")
  return {"accuracy": score, **ols.loss_scale_metrics(state.opt_state)}


if __name__ == "__main__":
  main()
