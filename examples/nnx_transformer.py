"""Trains a Flax NNX transformer with dropout and a moving average, in float16.

The transformer learns to sort digits. It is evaluated with an exponential
moving average (EMA) of its parameters. A step whose gradients overflow changes
neither the parameters nor their average nor the random keys of the dropout:
`ols.nnx.undo_on_skip` undoes such a step in all three, bit for bit.

  python examples/nnx_transformer.py
"""

import argparse

from flax import nnx
import jax.numpy as jnp
import numpy as np
import optax

import optax_lossscale as ols

DIGITS, LENGTH, WIDTH, BATCH = 10, 12, 64, 64
LINE = (
  "step {step}: loss {loss:.3f}, S 2^{log2_scale:.0f}, "
  "applied {applied_steps}, skipped {skipped_steps}"
)


def draw(rng, count):
  """Returns sequences of digits, and the same digits in order."""
  x = rng.integers(DIGITS, size=(count, LENGTH)).astype(np.int32)
  return {"x": x, "y": np.sort(x, axis=1)}


class Block(nnx.Module):
  """Attention and a hidden layer, each after a layer norm."""

  def __init__(self, rngs):
    half = {"dtype": jnp.float16, "rngs": rngs}  # Parameters are float32.
    self.norms = nnx.List([nnx.LayerNorm(WIDTH, **half) for _ in range(2)])
    # Without dropout Flax would call JAX's attention, which does not compile in
    # float16 for a CPU.
    self.attention = nnx.MultiHeadAttention(
      4, WIDTH, dropout_rate=0.1, decode=False, **half
    )
    self.hidden = nnx.Linear(WIDTH, 4 * WIDTH, **half)
    self.output = nnx.Linear(4 * WIDTH, WIDTH, **half)
    self.dropout = nnx.Dropout(0.1, rngs=rngs)

  def __call__(self, x):
    """Returns the activations after the block."""
    x = x + self.dropout(self.attention(self.norms[0](x)))
    hidden = nnx.gelu(self.hidden(self.norms[1](x)))
    return x + self.dropout(self.output(hidden))


class Transformer(nnx.Module):
  """Two blocks, without a causal mask."""

  def __init__(self, rngs):
    half = {"dtype": jnp.float16, "rngs": rngs}
    self.digits = nnx.Embed(DIGITS, WIDTH, **half)
    self.places = nnx.Embed(LENGTH, WIDTH, **half)
    self.blocks = nnx.List([Block(rngs) for _ in range(2)])
    self.norm = nnx.LayerNorm(WIDTH, **half)
    self.logits = nnx.Linear(WIDTH, DIGITS, **half)

  def __call__(self, x):
    """Returns the logits of the digit at each place, in float16."""
    x = self.digits(x) + self.places(jnp.arange(LENGTH))
    for block in self.blocks:
      x = block(x)
    return self.logits(self.norm(x))


def loss_fn(model, batch):
  """Returns the cross-entropy in float32."""
  logits = jnp.float32(model(batch["x"]))
  losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"])
  return jnp.mean(losses)


@nnx.jit
def train_step(model, optimizer, ema, batch):
  """Updates the model, the optimizer and the average; returns the loss."""
  with ols.nnx.undo_on_skip(optimizer, model, ema):
    value_and_grad = ols.nnx.scaled_value_and_grad(loss_fn, optimizer)
    loss, scaled_grads = value_and_grad(model, batch)
    optimizer.update(model, scaled_grads)
    params = nnx.state((model, ema), nnx.Param)
    nnx.update(ema, optax.incremental_update(params[0], params[1], 0.02))
  return loss


@nnx.jit
def accuracy(model, batch):
  """Returns the share of places that hold the right digit."""
  return jnp.mean(model(batch["x"]).argmax(-1) == batch["y"])


def make_state(seed):
  """Returns the model, its optimizer and its moving average."""
  tx = ols.loss_scaling(optax.adamw(2e-3), ols.DynamicLossScale())
  model = Transformer(nnx.Rngs(seed))
  model.train()  # With dropout.
  ema = nnx.clone(model)
  ema.eval()  # Without dropout.
  return model, nnx.Optimizer(model, tx, wrt=nnx.Param), ema


def main(argv=None):
  """Trains the model and returns its accuracy and the last metrics."""
  parser = argparse.ArgumentParser(
    description=__doc__.partition("\n")[0],
    usage=argparse.SUPPRESS,  # An error is one line.
  )
  parser.add_argument("--steps", type=int, default=240)
  parser.add_argument("--seed", type=int, default=0)
  args = parser.parse_args(argv)
  if args.steps < 1:
    parser.error(f"--steps must be at least 1, got {args.steps}")
  if not 0 <= args.seed < 2**32:
    parser.error(f"--seed must be from 0 to 2**32 - 1, got {args.seed}")
  rng = np.random.default_rng(args.seed)
  held_out = draw(rng, 1000)
  model, optimizer, ema = make_state(args.seed)
  print(f"{args.steps} steps; the first one compiles.", flush=True)
  for step in range(1, args.steps + 1):
    loss = train_step(model, optimizer, ema, draw(rng, BATCH))
    if step == 1 or step % 30 == 0:
      # Flax's own `optimizer.step` also counts the skipped steps.
      scalars = ols.loss_scale_metrics(optimizer.opt_state)
      print(LINE.format(step=step, loss=loss, **scalars), flush=True)
  score = accuracy(ema, held_out)
  print(f"Held-out digits that are in the right place: {score:.1%}")
  print("Next: docs/guides/nnx.md")
  return {"accuracy": score, **ols.loss_scale_metrics(optimizer.opt_state)}


if __name__ == "__main__":
  main()
