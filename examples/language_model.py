"""Trains a small language model in float32 and in float16, and compares them.

The model predicts a character of Python's own sources from the eight before it.
Its loss is the Brier score: the mean of the squared errors of 98 probabilities
for each of 16,384 characters. A mean over 1.6 million values has gradients so
small that float16 rounds them to 0. Loss scaling keeps them.

  python examples/language_model.py
"""

import argparse
import pathlib
import sysconfig
import time

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

import optax_lossscale as ols

CHARACTERS, CONTEXT, BATCH = 4_000_000, 8, 16_384
SYMBOLS = "\t\n" + "".join(map(chr, range(32, 127)))
UNKNOWN = len(SYMBOLS)  # One symbol for every other character.
SKIPPED = {"encodings", "idlelib", "lib2to3", "site-packages", "test", "tests"}

# The dtype of the computation, and the rule that moves S; None leaves loss
# scaling out. By default S grows every 2000 steps, too seldom for a short run.
RUNS = {
  "float32": (jnp.float32, None),
  "float16 alone": (jnp.float16, None),
  "float16, fixed": (jnp.float16, ols.FixedLossScale(1024)),
  "float16, dynamic": (jnp.float16, ols.DynamicLossScale(growth_interval=12)),
}


def read_symbols():
  """Returns the beginning of the standard library's sources, as numbers."""
  library = pathlib.Path(sysconfig.get_path("stdlib"))
  text = ""
  for path in sorted(library.rglob("*.py")):
    is_skipped = SKIPPED & set(path.relative_to(library).parts)
    if len(text) < CHARACTERS and not is_skipped:
      text += path.read_text(encoding="utf-8", errors="replace")
  numbers = {symbol: number for number, symbol in enumerate(SYMBOLS)}
  return np.array([numbers.get(x, UNKNOWN) for x in text[:CHARACTERS]])


def windows(symbols, starts):
  """Returns the context from each start, with the symbol that follows it."""
  return symbols[starts[:, None] + np.arange(CONTEXT + 1)]


class LanguageModel(nn.Module):
  """Embeddings, a hidden layer, logits (Bengio et al., 2003)."""

  dtype: jnp.dtype  # Of the computation. The parameters are float32.

  @nn.compact
  def __call__(self, context):
    """Returns the logits of the next symbol, in float32 for the loss."""
    x = nn.Embed(UNKNOWN + 1, 24, dtype=self.dtype)(context)
    x = nn.Dense(128, dtype=self.dtype)(x.reshape(len(x), -1))
    logits = nn.Dense(UNKNOWN + 1, dtype=self.dtype)(nn.tanh(x))
    return logits.astype(jnp.float32)


def train(name, symbols, held_out, arguments):
  """Returns the loss and S of each step, the last state, and the accuracy."""
  dtype, rule = RUNS[name]
  model = LanguageModel(dtype)
  tx = ols.loss_scaling(optax.adam(5e-3), rule)

  def loss_fn(params, batch):
    probabilities = jax.nn.softmax(model.apply(params, batch[:, :-1]))
    truth = jax.nn.one_hot(batch[:, -1], UNKNOWN + 1)
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
      print(f"{name}: step {step} of {arguments.steps}", flush=True)
    batch = windows(symbols, rng.integers(len(symbols) - CONTEXT, size=BATCH))
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
  # The losses of three runs lie on each other: each line is thinner.
  styles = [("#CCCCCC", 8), ("#D55E00", 3), ("#0072B2", 3), ("#000000", 1)]
  for (name, run), (color, width) in zip(results.items(), styles, strict=False):
    upper.plot(run[0], color=color, linewidth=width, label=name)
    lower.plot(run[1], color=color, linewidth=width, drawstyle="steps-post")
  upper.set(ylabel="training loss")
  lower.set(xlabel="step", ylabel="loss scale S")
  lower.set_yscale("log", base=2)
  lower.set_yticks([2.0**exponent for exponent in range(10, 31, 5)])
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

  symbols = read_symbols()
  symbols, rest = np.split(symbols, [len(symbols) - len(symbols) // 10])
  starts = np.linspace(0, len(rest) - CONTEXT - 1, 20_000, dtype=int)
  held_out = windows(rest, starts)
  results = {name: train(name, symbols, held_out, arguments) for name in RUNS}

  print(f"\n{'':18}final loss  held-out accuracy  applied  skipped  last S")
  for name, (losses, scales, state, accuracy) in results.items():
    print(
      f"{name:18}{losses[-1]:10.4f}{accuracy:19.4f}{state.applied_steps:9}"
      f"{state.skipped_steps:9}",
      *(f"   2^{np.log2(scale):.0f}" for scale in scales[-1:]),
    )
  if arguments.figure:
    draw(results, beside)
    beside.replace(arguments.figure)
  print("\nNext: wrap your own optimizer, as README.md shows under 'Use it'.")


if __name__ == "__main__":
  main()
