"""The optimizer that all of them run, and the loss scale they start from."""

import optax

LEARNING_RATE = 1e-3
B1 = 0.9
B2 = 0.999
# Large beside the gradients. With Adam's usual one the first step is the same
# whatever the gradients are divided by, and a wrong S would go unnoticed.
EPS = 1e-3
WEIGHT_DECAY = 1e-4

# In float16 the scaled gradients and their squares are then far from both ends
# of the range. It takes 2000 clean steps to grow, so it stays.
LOSS_SCALE = 2.0**10


def adamw() -> optax.GradientTransformation:
  """Returns optax's optimizer."""
  return optax.adamw(
    LEARNING_RATE, b1=B1, b2=B2, eps=EPS, weight_decay=WEIGHT_DECAY
  )
