"""autocast beside models with each conversion written by hand."""

import functools
from typing import Any
from typing import NamedTuple

import jax
import jax.numpy as jnp
import pytest

from benchmarks import autocast_counts as counts
from benchmarks import autocast_models as models
import optax_lossscale as ols

pytestmark = pytest.mark.slow

MAKERS = models.makers(tiny=True)
# The conversions of each model's gradient at O1. More would be a defect.
CONVERSIONS = dict(zip(MAKERS, (21, 35, 21, 56), strict=True))
CASES = [(name, level) for name in MAKERS for level in ("O1", "O2")]
# Its sums of norms stay in float32, and by hand they are in float16.
SUMS_IN_FLOAT32 = ("ResNet, two blocks", "O1")


class Contenders(NamedTuple):
  """The same for autocast and by hand."""

  autocast: Any
  by_hand: Any


@functools.cache
def contenders(name, level):
  """Returns the two loss functions, their gradients' jaxprs, and the model."""
  model = MAKERS[name]()
  written = model.make_loss_fn(jnp.float32)
  functions = Contenders(
    ols.autocast(written, level), model.make_loss_fn(jnp.float16)
  )
  jaxprs = Contenders(
    *(
      jax.make_jaxpr(jax.value_and_grad(f))(model.params, model.batch)
      for f in functions
    )
  )
  return functions, jaxprs, model


@pytest.mark.parametrize(("name", "level"), CASES)
def test_nothing_costs_more_than_by_hand(name, level):
  functions, jaxprs, model = contenders(name, level)
  ours, by_hand = (counts.products(x, jnp.float16) for x in jaxprs)
  assert ours.lowered == ours.all == by_hand.lowered == by_hand.all
  assert jaxprs.by_hand.out_avals[0].dtype == jnp.float32
  ours, by_hand = map(counts.float_conversions, jaxprs)
  assert ours <= by_hand
  if level == "O1":
    assert ours == CONVERSIONS[name]
  if (name, level) != SUMS_IN_FLOAT32:
    ours, by_hand = (
      counts.bytes_kept(lambda x, f=f: f(x, model.batch), model.params)
      for f in functions
    )
    assert ours <= by_hand
