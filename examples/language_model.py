"""Trains a small language model in float32, float16 and bfloat16.

The model predicts a character from the eight before it. Its loss is the Brier
score: the mean of the squared errors of 128 probabilities for each of 16,384
characters. A mean over 2 million values has gradients so small that float16
rounds them to 0. Loss scaling keeps them.

  python examples/language_model.py
"""

import argparse
import pathlib
import time

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

import optax_lossscale as ols

CHARACTERS, CONTEXT, BATCH = 1_000_000, 8, 16_384
SYMBOLS = 128  # ASCII.

# The dtype of the computation, and the rule that moves S, the loss scale; None
# leaves loss scaling out. By default S grows every 2000 steps, too seldom for
# a short run.
RUNS = {
  "float32": (jnp.float32, None),
  "float16 alone": (jnp.float16, None),
  "float16 with loss scaling": (
    jnp.float16,
    ols.DynamicLossScale(growth_interval=9),
  ),
  "bfloat16": (jnp.bfloat16, None),
}


def make_text():
  """Returns a text of 5,000 made-up words, as the numbers of its characters."""
  rng = np.random.default_rng(0)
  letters = np.array(list("etaoinshrdlucmfwypvbgkjqxz"))
  shares, zipf = 1 / np.arange(2.0, 28), 1 / np.arange(1.0, 5001)
  words = [
    "".join(rng.choice(letters, size, p=shares / shares.sum()))
    for size in rng.integers(1, 9, len(zipf))
  ]
  text = " ".join(rng.choice(words, CHARACTERS // 2, p=zipf / zipf.sum()))
  return np.frombuffer(text[:CHARACTERS].encode(), np.uint8).astype(int)


def windows(text, starts):
  """Returns the context from each start, with the symbol that follows it."""
  return text[starts[:, None] + np.arange(CONTEXT + 1)]


class LanguageModel(nn.Module):
  """Embeddings, a hidden layer, logits (Bengio et al., 2003)."""

  dtype: jnp.dtype  # Of the computation. The parameters are float32.

  @nn.compact
  def __call__(self, context):
    """Returns the logits of the next symbol, in float32 for the loss."""
    x = nn.Embed(SYMBOLS, 24, dtype=self.dtype)(context)
    x = nn.Dense(128, dtype=self.dtype)(x.reshape(len(x), -1))
    logits = nn.Dense(SYMBOLS, dtype=self.dtype)(nn.tanh(x))
    return logits.astype(jnp.float32)


def train(name, text, held_out, arguments):
  """Returns the loss and S of each step, the last state, and the accuracy."""
  run = f"Run {[*RUNS].index(name) + 1} of {len(RUNS)}, {name}"
  dtype, rule = RUNS[name]
  model = LanguageModel(dtype)
  tx = ols.loss_scaling(optax.adam(5e-3), rule)

  def loss_fn(params, batch):
    probabilities = jax.nn.softmax(model.apply(params, batch[:, :-1]))
    truth = jax.nn.one_hot(batch[:, -1], SYMBOLS)
    return jnp.mean((probabilities - truth) ** 2)

  @jax.jit
  def train_step(params, opt_state, batch):
    value_and_grad = ols.scaled_value_and_grad(loss_fn, opt_state)
    loss, scaled_grads = value_and_grad(params, batch)
    updates, opt_state = tx.update(scaled_grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, loss

  params = model.init(jax.random.key(arguments.seed), held_out[:1, :-1])
  opt_state = tx.init(params)
  rng = np.random.default_rng(arguments.seed)
  losses, scales, told = [], [], -np.inf
  for step in range(1, arguments.steps + 1):
    if time.monotonic() - told > 5:
      told = time.monotonic()
      print(f"{run}: step {step} of {arguments.steps}", flush=True)
    batch = windows(text, rng.integers(len(text) - CONTEXT, size=BATCH))
    scales.append(float(ols.get_loss_scale(opt_state)))
    params, opt_state, loss = train_step(params, opt_state, batch)
    losses.append(float(loss))
  guesses = model.apply(params, held_out[:, :-1]).argmax(-1)
  accuracy = jnp.mean(guesses == held_out[:, -1])
  return losses, scales if rule else [], opt_state, accuracy


def draw(results, path):
  """Draws the loss and S of each run."""
  from matplotlib.figure import Figure

  figure = Figure(figsize=(8, 5), layout="constrained")
  upper, lower = figure.subplots(2, 1, sharex=True)
  # Three of the losses are equal to the eye, so each line is thinner.
  styles = [("#CCCCCC", 8), ("#D55E00", 3), ("#0072B2", 3), ("#000000", 1)]
  for (name, run), (color, width) in zip(results.items(), styles, strict=False):
    upper.plot(run[0], color=color, linewidth=width, label=name)
    lower.plot(run[1], color=color, linewidth=width, drawstyle="steps-post")
  upper.set(ylabel="training loss")
  lower.set(xlabel="step", ylabel="loss scale S")
  lower.set_yscale("log", base=2)
  lower.set_yticks([2.0**exponent for exponent in range(15, 31, 5)])
  if results:
    upper.legend(loc="center right")
  figure.savefig(path, format=path.suffix[1:], dpi=150)


def main(argv=None):
  """Trains all runs, and prints their figures."""
  parser = argparse.ArgumentParser(
    description=__doc__.partition("\n")[0],
    usage=argparse.SUPPRESS,  # An error is one line.
  )
  parser.add_argument("--steps", type=int, default=200, help="of each run")
  parser.add_argument("--seed", type=int, default=0)
  parser.add_argument(
    "--figure", type=pathlib.Path, metavar="FILE", help="needs matplotlib"
  )
  arguments = parser.parse_args(argv)
  if arguments.steps < 1:
    parser.error(f"--steps must be at least 1, got {arguments.steps}")
  if not 0 <= arguments.seed < 2**32:
    parser.error(f"--seed must be from 0 to 2**32 - 1, got {arguments.seed}")
  if arguments.figure:
    try:
      if arguments.figure.is_dir():
        raise IsADirectoryError(f"Is a directory: '{arguments.figure}'")
      # An old picture stays until there is a new one.
      beside = arguments.figure.with_name(f"new_{arguments.figure.name}")
      draw({}, beside)
    except (ImportError, OSError, RuntimeError, ValueError) as error:
      parser.error(f"--figure cannot be drawn: {error}")

  text = make_text()
  text, rest = np.split(text, [len(text) - len(text) // 10])
  starts = np.linspace(0, len(rest) - CONTEXT - 1, 20_000, dtype=int)
  held_out = windows(rest, starts)
  results = {name: train(name, text, held_out, arguments) for name in RUNS}

  print(f"\n{'':25}final loss  held-out accuracy  skipped steps  last S")
  for name, (losses, scales, state, accuracy) in results.items():
    print(
      f"{name:25}{losses[-1]:10.4f}{accuracy:19.2f}{state.skipped_steps:15}",
      *(f"   2^{np.log2(scale):.0f}" for scale in scales[-1:]),
    )
  if arguments.figure:
    draw(results, beside)
    beside.replace(arguments.figure)
    print(f"\nPicture: {arguments.figure}")
  print("\nNext: your own step, with docs/first_hour.md.")


if __name__ == "__main__":
  main()
