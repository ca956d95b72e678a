"""The table of overflows and the checks that see them.

docs/checks.md shows this table.
"""

import functools
import pathlib
import re
from typing import Any
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_lossscale as ols
from tests import support

PAGE = pathlib.Path(__file__).parents[2] / "docs" / "checks.md"

DEVICES = 8
LEAVES = ("first", "second", "third")
SCALE = 2.0**8
# A gradient times SCALE, or an eighth of it, overflows; an activation does not.
LARGE = 4000.0
# An activation overflows.
HUGE = 60000.0


def multiply(x, number):
  return x * number


def cancel(x, number):
  # Backward: inf - inf.
  return x * number - x * (number - 1)


def clip(x, number):
  # Forward: an activation that is too large, and no gradient through it.
  return jnp.minimum(x * number, 8)


def divide_unused(x, number):
  return jnp.where(number == 0, x, x / number)


def exp_unused(x, number):
  return jnp.where(number == 1, jnp.exp(x * number), x)


class Case(NamedTuple):
  """A row of the table: what goes wrong, and who sees it."""

  kind: str
  hardware: str
  seen: str  # "x" for a detector that sees it, "-" for one that does not.
  # Takes an activation and a number, and goes wrong for this one but not 1.
  layer: Any
  number: float
  layer_scale: float = 1.0  # Between the layer and the parameter.


CASES = (
  Case("±inf", "IEEE", "xxxxxx", multiply, LARGE),
  Case("NaN", "IEEE", "xxxxxx", cancel, LARGE),
  Case("±65504", "saturating", "-xxx--", multiply, LARGE),
  Case("NaN, which becomes 0", "saturating", "--x---", cancel, LARGE),
  Case("behind a layer scale", "IEEE", "xxxxxx", multiply, LARGE, 0.02),
  Case("behind a layer scale", "saturating", "--xx--", multiply, LARGE, 0.02),
  Case("in the forward pass only", "IEEE", "--x---", clip, HUGE),
  Case("in the forward pass only", "saturating", "--x---", clip, HUGE),
  Case("1/0 not taken by a `where`", "IEEE", "xx-xxx", divide_unused, 0.0),
  Case(
    "1/0 not taken by a `where`", "saturating", "------", divide_unused, 0.0
  ),
  Case("overflow not taken by a `where`", "IEEE", "xxxxxx", exp_unused, 30.0),
  Case(
    "overflow not taken by a `where`", "saturating", "--x---", exp_unused, 30.0
  ),
)


def make_loss_fn(case):
  """Returns the loss of one device: an activation a leaf, through the layer."""

  def loss_fn(params, status, numbers, sign):
    loss = 0.0
    for number, leaf in zip(numbers, LEAVES, strict=True):
      activation = params[leaf].astype(jnp.float16)
      activation *= jnp.float16(case.layer_scale)
      activation = ols.hardware.status_tap(activation, status)
      activation = case.layer(activation, number)
      loss += sign * jnp.sum(activation.astype(jnp.float32))
    return loss

  return loss_fn


def overflows(scaled_grads, check, axis_name=None, flag=False):
  """Returns what the wrapper says of these scaled gradients."""
  rule = ols.FixedLossScale(SCALE)
  tx = ols.loss_scaling(
    optax.identity(), rule, check=check, axis_name=axis_name
  )
  _, state = tx.update(scaled_grads, tx.init(scaled_grads), overflow=flag)
  return state.overflow


def make_detect(case):
  """Returns a function of numbers and signs for what each detector says."""
  is_ieee = case.hardware == "IEEE"
  emulate = (lambda f: f) if is_ieee else ols.hardware.emulate_saturation
  check = (ols.nonfinite if is_ieee else ols.saturated)(jnp.float16)
  checks = ols.nonfinite(), ols.saturated(jnp.float16)
  loss_fn = make_loss_fn(case)
  params = {leaf: jnp.full(3, 2.0) for leaf in LEAVES}

  def on_device(numbers, signs):
    """Looks at the local gradients, and agrees with the other devices."""
    varying, status = ols.make_varying((params, jnp.float32(0)), "data")
    grad = ols.scaled_value_and_grad(loss_fn, SCALE, argnums=(0, 1))
    (_, (scaled_grads, tapped)), register = ols.hardware.float_status(
      emulate(grad), check=check
    )(varying, status, numbers[0], signs[0])
    find = functools.partial(overflows, axis_name="data")
    fine = jax.tree.map(jnp.zeros_like, scaled_grads)
    return jnp.stack(
      [find(scaled_grads, x) for x in checks]
      + [find(fine, checks[0], flag=x) for x in (register, tapped)]
    )

  def mean_loss_fn(params, numbers, signs):
    losses = jax.vmap(loss_fn, (None, None, 0, 0))
    return jnp.mean(losses(params, jnp.float32(0), numbers, signs))

  @jax.jit
  def detect(numbers, signs):
    local = support.on_each_device(
      on_device, jax.P(), in_specs=(support.SPREAD, support.SPREAD)
    )(numbers, signs)
    # Under plain jit, XLA averages the gradients before anybody looks.
    grad = ols.scaled_value_and_grad(mean_loss_fn, SCALE)
    _, scaled_grads = emulate(grad)(params, numbers, signs)
    mean = jnp.stack([overflows(scaled_grads, x) for x in checks])
    return jnp.concatenate([local, mean])

  return detect


@pytest.mark.parametrize(
  "case",
  support.slow_but([CASES[5]], CASES),
  ids=lambda case: f"{case.kind}, {case.hardware}",
)
def test_each_detector_sees_what_the_table_says(case):
  detect = make_detect(case)
  # On every other device gradients have the other sign, so what overflowed is
  # not the largest value after the sum.
  alternating = np.array([1.0, -1.0] * (DEVICES // 2), np.float32)
  clean = np.ones((DEVICES, len(LEAVES)), np.float16)
  for signs in (alternating, -alternating):
    assert not np.any(detect(clean, signs))
    for place in ((0, 0), (3, 1), (DEVICES - 1, 2)):
      numbers = clean.copy()
      numbers[place] = case.number
      found = np.asarray(detect(numbers, signs))
      assert "".join("x" if x else "-" for x in found) == case.seen, place


def test_the_page_shows_this_table():
  rows = [
    f"| {case.kind} | {case.hardware} | "
    + " | ".join("yes" if x == "x" else "" for x in case.seen)
    + " |"
    for case in CASES
  ]
  assert re.sub(" +", " ", "\n".join(rows)) in PAGE.read_text()
