"""The real digits, and a model small enough for many tests."""

import dataclasses

import flax.linen as nn

from optax_lossscale.demo import digits


class Linear(nn.Module):
  """A linear classifier of every fourth pixel in both directions."""

  dtype: object

  @nn.compact
  def __call__(self, images):
    flat = images[:, ::4, ::4].reshape(len(images), -1)
    return nn.Dense(10, dtype=self.dtype)(flat)


def make_task():
  """Returns the digits task with the linear classifier and four steps."""
  return dataclasses.replace(
    digits.make_task(), model=lambda dtype: Linear(dtype=dtype), steps=4
  )
