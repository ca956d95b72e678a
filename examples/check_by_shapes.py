"""Checks train steps of a transformer of 86 billion parameters, on a laptop.

`check_step` is given shapes in place of arrays, so it proves the laws from the
program alone: nothing is compiled, and no array is made. The second step has a
mistake, whose line the report names.

  python examples/check_by_shapes.py
"""

import math
import resource
import time

import jax
import jax.numpy as jnp
import optax

import optax_lossscale as ols

LAYERS, WIDTH, HIDDEN, SYMBOLS = 80, 8192, 32_768, 32_000
BATCH, LENGTH = 64, 4096


def make_params():
  """Returns shapes for the parameters."""
  shape_of = {
    **dict.fromkeys(("query", "key", "value", "mix"), (WIDTH, WIDTH)),
    **dict.fromkeys(("gate", "up"), (WIDTH, HIDDEN)),
    "down": (HIDDEN, WIDTH),
  }
  return {
    "embedding": jax.ShapeDtypeStruct((SYMBOLS, WIDTH), jnp.float32),
    "layers": {
      name: jax.ShapeDtypeStruct((LAYERS, *shape), jnp.float32)
      for name, shape in shape_of.items()
    },
  }


def normalize(x):
  """Divides by the root mean square."""
  return x * jax.lax.rsqrt(jnp.mean(x**2, axis=-1, keepdims=True) + 1e-6)


def layer(x, kernel):
  """Attention to what came before, and a gated layer."""
  y = normalize(x)
  query, key, value = (y @ kernel[name] for name in ("query", "key", "value"))
  scores = query @ key.swapaxes(1, 2) / math.sqrt(WIDTH)
  scores = jnp.where(jnp.tri(LENGTH, dtype=bool), scores, -jnp.inf)
  x = x + jax.nn.softmax(scores) @ value @ kernel["mix"]
  y = normalize(x)
  y = jax.nn.silu(y @ kernel["gate"]) * (y @ kernel["up"])
  return x + y @ kernel["down"], None


@ols.autocast
def loss_fn(params, symbols):
  """Returns the cross-entropy of each next symbol; written in float32."""
  x = params["embedding"][symbols]
  x, _ = jax.lax.scan(jax.checkpoint(layer), x, params["layers"])
  logits = normalize(x)[:, :-1] @ params["embedding"].T
  return jnp.mean(
    optax.softmax_cross_entropy_with_integer_labels(logits, symbols[:, 1:])
  )


inner = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-4))
tx = ols.loss_scaling(inner, ols.DynamicLossScale())


def right(params, opt_state, symbols):
  """A right train step."""
  value_and_grad = ols.scaled_value_and_grad(loss_fn, opt_state)
  loss, scaled_grads = value_and_grad(params, symbols)
  updates, opt_state = tx.update(scaled_grads, opt_state, params)
  return optax.apply_updates(params, updates), opt_state, loss


def wrong(params, opt_state, symbols):
  """A train step with weight decay on what is still scaled."""
  value_and_grad = ols.scaled_value_and_grad(loss_fn, opt_state)
  loss, scaled_grads = value_and_grad(params, symbols)
  decay = jax.tree.map(lambda w: 1e-4 * w, params)
  scaled_grads = jax.tree.map(jnp.add, scaled_grads, decay)
  updates, opt_state = tx.update(scaled_grads, opt_state, params)
  return optax.apply_updates(params, updates), opt_state, loss


def main():
  """Checks both steps, and says what that took."""
  params = make_params()
  opt_state = jax.eval_shape(tx.init, params)
  symbols = jax.ShapeDtypeStruct((BATCH, LENGTH), jnp.int32)
  count = sum(math.prod(x.shape) for x in jax.tree.leaves(params))
  print(f"{count / 1e9:.0f} billion parameters")
  for step in (right, wrong):
    began, before = time.perf_counter(), peak()
    report = ols.instruments.check_step(step, params, opt_state, symbols)
    seconds, grown = time.perf_counter() - began, peak() - before
    print(f"\n{step.__name__}: {seconds:.1f} s, {grown:.0f} MB\n{report}")
  print("\nNext: docs/guides/debugging.md")


def peak():
  """Returns the most memory that the process has had, in MB."""
  return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


if __name__ == "__main__":
  main()
