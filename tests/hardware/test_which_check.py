"""Which check sees which overflow: every kind, in every leaf, on every device.

docs/checks.md shows the table as the answer to "which check do I need?".
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

PAGE = pathlib.Path(__file__).parents[2] / "docs" / "checks.md"

DEVICES = 4
LEAVES = ("first", "second", "third")
SCALE = 2.0**8
# Too much for SCALE, and for a fourth of it, but not for an activation.
LARGE = 2000.0
# Too much for an activation.
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
  """A row of the table.

  Attributes:
    kind: what goes wrong.
    hardware: on which hardware.
    seen: "x" for a detector that sees it, "-" for one that does not.
    layer: takes an activation and a number, harmless where that is 1.
    number: that makes the layer go wrong.
    layer_scale: what stands between the layer and the parameter.
  """

  kind: str
  hardware: str
  seen: str
  layer: Any
  number: float
  layer_scale: float = 1.0


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


def emulate(hardware, fun):
  return (
    ols.hardware.emulate_saturation(fun) if hardware == "saturating" else fun
  )


def make_loss_fn(case):
  """Returns the loss of one device: an activation a leaf, through the layer."""

  def loss_fn(params, status, numbers, sign):
    loss = 0.0
    for number, leaf in zip(numbers, LEAVES, strict=True):
      activation = params[leaf].astype(jnp.float16) * jnp.float16(
        case.layer_scale
      )
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


def detect_on_each_device(case, params, numbers, signs):
  """Returns what sees the local gradients, as `axis_name` has them agree."""
  is_ieee = case.hardware == "IEEE"
  check = (ols.nonfinite if is_ieee else ols.saturated)(jnp.float16)
  loss_fn = make_loss_fn(case)

  @functools.partial(
    jax.shard_map,
    mesh=jax.make_mesh((DEVICES,), ("data",), (jax.sharding.AxisType.Auto,)),
    in_specs=(jax.P(), jax.P("data"), jax.P("data")),
    out_specs=jax.P(),
  )
  def detect(params, numbers, signs):
    params = ols.make_varying(params, "data")
    status = ols.make_varying(jnp.float32(0), "data")
    grad = emulate(
      case.hardware, ols.scaled_value_and_grad(loss_fn, SCALE, argnums=(0, 1))
    )
    (_, (scaled_grads, tapped)), register = ols.hardware.float_status(
      grad, check=check
    )(params, status, numbers[0], signs[0])
    find = functools.partial(overflows, axis_name="data")
    fine = jax.tree.map(jnp.zeros_like, scaled_grads)
    found = [
      find(scaled_grads, ols.nonfinite()),
      find(scaled_grads, ols.saturated(jnp.float16)),
      find(fine, ols.nonfinite(), flag=register),
      find(fine, ols.nonfinite(), flag=tapped),
    ]
    return jnp.stack(found)

  return detect(params, numbers, signs)


def detect_after_the_mean(case, params, numbers, signs):
  """Returns what sees the gradients that XLA has averaged under plain jit."""
  loss_fn = make_loss_fn(case)

  def mean_loss_fn(params, numbers, signs):
    losses = jax.vmap(loss_fn, (None, None, 0, 0))(
      params, jnp.float32(0), numbers, signs
    )
    return jnp.mean(losses)

  grad = emulate(case.hardware, ols.scaled_value_and_grad(mean_loss_fn, SCALE))
  _, scaled_grads = grad(params, numbers, signs)
  checks = (ols.nonfinite(), ols.saturated(jnp.float16))
  return jnp.stack([overflows(scaled_grads, check) for check in checks])


@pytest.mark.slow
@pytest.mark.parametrize(
  "case", CASES, ids=lambda case: f"{case.kind}, {case.hardware}"
)
def test_each_detector_sees_what_the_table_says(case):
  params = {leaf: jnp.full(3, 2.0) for leaf in LEAVES}
  # On every other device gradients have the other sign, so that what overflowed
  # is not the largest value any more when they have been added.
  alternating = np.array([1.0, -1.0] * (DEVICES // 2), np.float32)

  @jax.jit
  def detect(numbers, signs):
    local = detect_on_each_device(case, params, numbers, signs)
    mean = detect_after_the_mean(case, params, numbers, signs)
    return jnp.concatenate([local, mean])

  clean = np.ones((DEVICES, len(LEAVES)), np.float16)
  for signs in (alternating, -alternating):
    assert not np.any(detect(clean, signs))
    for device, leaf in np.ndindex(clean.shape):
      numbers = clean.copy()
      numbers[device, leaf] = case.number
      found = np.asarray(detect(numbers, signs))
      seen = "".join("x" if x else "-" for x in found)
      assert seen == case.seen, (device, LEAVES[leaf])


def test_the_page_shows_this_table():
  rows = [
    f"| {case.kind} | {case.hardware} | "
    + " | ".join("yes" if x == "x" else "" for x in case.seen)
    + " |"
    for case in CASES
  ]
  assert re.sub(" +", " ", "\n".join(rows)) in PAGE.read_text()
