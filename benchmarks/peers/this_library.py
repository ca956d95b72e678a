"""This library, and its check with the optimizer under `lax.cond`."""

from collections.abc import Callable
from typing import Any

import optax

from benchmarks import phase
from benchmarks.peers import contender
from benchmarks.peers import settings
import optax_lossscale as ols

_RULE = ols.DynamicLossScale(settings.LOSS_SCALE)


def loss_scaling(
  inner: optax.GradientTransformation | None = None,
) -> contender.JaxContender:
  """Returns `loss_scaling` around an optimizer, as in the README.

  Args:
    inner: the optimizer; by default `optax.adamw`.
  """
  tx = ols.loss_scaling(inner or settings.adamw(), _RULE)
  return _make(tx, phase.make(tx))


def under_cond() -> contender.JaxContender:
  """Returns the check, and an optimizer that runs if it finds nothing."""
  check, tx = ols.loss_scaling(optax.identity(), _RULE), settings.adamw()
  return _make(optax.chain(check, tx), phase.make_conditional(check, tx))


def _make(
  tx: optax.GradientTransformation, update: Callable[[Any, Any], Any]
) -> contender.JaxContender:
  return contender.JaxContender(
    lambda params: contender.State(params, tx.init(params)),
    lambda state, scaled_grads: contender.State(
      *update(state[:2], scaled_grads)
    ),
  )
