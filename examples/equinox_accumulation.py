"""Trains an Equinox model in float16, with gradients of micro-batches.

The model tells two interleaved spirals apart. A batch of 2,048 points is too
large for one pass, let us say, so `ols.accumulate` computes its gradients in
eight passes, all with the same S, and sums them in float32. If the gradients of
one micro-batch overflow, the whole step is skipped.

This example also needs Equinox: pip install equinox

  python examples/equinox_accumulation.py
"""

import argparse

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax

import optax_lossscale as ols

BATCH, MICROBATCHES = 2048, 8
LINE = (
  "step {step}: loss {loss:.3f}, S 2^{log2_scale:.0f}, "
  "applied {applied_steps}, skipped {skipped_steps}"
)

tx = ols.loss_scaling(optax.adam(3e-3), ols.DynamicLossScale())


def draw(rng, count):
  """Returns points on two spirals, with some noise, and their spirals."""
  y = rng.integers(2, size=count)
  turns = 1.5 * np.sqrt(rng.uniform(0.05, 1, count))
  angle = 2 * np.pi * turns + np.pi * y
  x = turns * np.stack([np.cos(angle), np.sin(angle)])
  x = x.T + rng.normal(0, 0.1, (count, 2))
  return {"x": x.astype(np.float32), "y": y.astype(np.int32)}


def make_state(seed):
  """Returns the model, in float32, and the optimizer's state."""
  model = eqx.nn.MLP(2, 2, 64, depth=3, key=jax.random.key(seed))
  return model, tx.init(eqx.filter(model, eqx.is_inexact_array))


@ols.autocast  # The products of the layers are in float16.
def loss_fn(model, batch):
  """Returns the mean loss of a micro-batch."""
  logits = jax.vmap(model)(batch["x"])
  losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"])
  return jnp.mean(losses)


@eqx.filter_jit
def train_step(model, opt_state, batch):
  """Returns the next model, the optimizer's next state and the loss."""
  value_and_grad = ols.scaled_value_and_grad(
    loss_fn, opt_state, value_and_grad=eqx.filter_value_and_grad
  )
  loss, scaled_grads, overflow = ols.accumulate(
    value_and_grad, microbatches=MICROBATCHES
  )(model, batch)
  params = eqx.filter(model, eqx.is_inexact_array)
  updates, opt_state = tx.update(
    scaled_grads, opt_state, params, overflow=overflow
  )
  return eqx.apply_updates(model, updates), opt_state, loss


@eqx.filter_jit
def accuracy(model, batch):
  """Returns the share of points whose spiral the model recognizes."""
  return jnp.mean(jax.vmap(model)(batch["x"]).argmax(-1) == batch["y"])


def main(argv=None):
  """Trains the model and returns its accuracy and the last metrics."""
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
  model, opt_state = make_state(args.seed)
  print(f"{args.steps} steps; the first one compiles.", flush=True)
  for step in range(1, args.steps + 1):
    model, opt_state, loss = train_step(model, opt_state, draw(rng, BATCH))
    if step == 1 or step % 30 == 0:
      scalars = ols.loss_scale_metrics(opt_state)
      print(LINE.format(step=step, loss=loss, **scalars), flush=True)
  score = accuracy(model, held_out)
  print(f"Held-out accuracy: {score:.1%} (chance: 50.0%)")
  print("Next: docs/guides/accumulation.md")
  return {"accuracy": score, **ols.loss_scale_metrics(opt_state)}


if __name__ == "__main__":
  main()
