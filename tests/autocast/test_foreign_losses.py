"""`autocast` on optax's losses."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from optax import losses
import pytest

import optax_lossscale as ols
from tests.autocast import foreign

pytestmark = pytest.mark.long

LOGITS = foreign.normal(6, 5, scale=2)
SIGNS = np.sign(foreign.normal(6, 5, seed=1))
IDS = np.array([0, 4, 2, 2, 1, 3])
ONE_HOT = np.eye(5, dtype=np.float32)[IDS]
SOFT = np.asarray(jax.nn.softmax(foreign.normal(6, 5, seed=2)))
TARGETS = foreign.normal(6, 5, seed=3)
# Of the sequences of ctc_loss: batch, time, classes; labels, with padding.
SEQUENCES = foreign.normal(2, 8, 5)
PADDINGS = np.array([[0] * 8, [0] * 2 + [1] * 6], np.float32)
LABELS = np.array([[1, 2, 2], [3, 0, 0]])
LABEL_PADDINGS = np.array([[0, 0, 0], [0, 1, 1]], np.float32)


def log_probabilities(loss):
  """Returns a loss of logits for one of logarithms of probabilities."""
  return lambda x, *rest: loss(jax.nn.log_softmax(x), *rest)


# What they are called with after the predictions.
LOSSES = {
  "squared_error": (losses.squared_error, TARGETS),
  "l2_loss": (losses.l2_loss, TARGETS),
  "huber_loss": (losses.huber_loss, TARGETS),
  "log_cosh": (losses.log_cosh, TARGETS),
  "cosine_distance": (losses.cosine_distance, TARGETS),
  "hinge_loss": (losses.hinge_loss, SIGNS),
  "perceptron_loss": (losses.perceptron_loss, SIGNS),
  "sparsemax_loss": (losses.sparsemax_loss, (SIGNS > 0).astype(np.int32)),
  "sigmoid_binary_cross_entropy": (
    losses.sigmoid_binary_cross_entropy,
    SOFT,
  ),
  "sigmoid_focal_loss": (
    functools.partial(losses.sigmoid_focal_loss, alpha=0.25),
    ONE_HOT,
  ),
  "binary_dice_loss": (losses.binary_dice_loss, ONE_HOT),
  "dice_loss": (losses.dice_loss, ONE_HOT),
  "multiclass_generalized_dice_loss": (
    losses.multiclass_generalized_dice_loss,
    ONE_HOT,
  ),
  "multiclass_hinge_loss": (
    jax.vmap(losses.multiclass_hinge_loss),
    IDS,
  ),
  "multiclass_perceptron_loss": (
    jax.vmap(losses.multiclass_perceptron_loss),
    IDS,
  ),
  "multiclass_sparsemax_loss": (
    losses.multiclass_sparsemax_loss,
    IDS,
  ),
  "softmax_cross_entropy": (losses.softmax_cross_entropy, SOFT),
  "softmax_cross_entropy_with_integer_labels": (
    losses.softmax_cross_entropy_with_integer_labels,
    IDS,
  ),
  "safe_softmax_cross_entropy": (losses.safe_softmax_cross_entropy, ONE_HOT),
  "poly_loss_cross_entropy": (losses.poly_loss_cross_entropy, ONE_HOT),
  "ranking_softmax_loss": (losses.ranking_softmax_loss, SOFT),
  "kl_divergence": (log_probabilities(losses.kl_divergence), SOFT),
  "kl_divergence_with_log_targets": (
    log_probabilities(losses.kl_divergence_with_log_targets),
    np.log(SOFT),
  ),
  "generalized_kl_divergence": (
    log_probabilities(losses.generalized_kl_divergence),
    SOFT,
  ),
  "triplet_margin_loss": (
    losses.triplet_margin_loss,
    TARGETS,
    SOFT,
  ),
  "ctc_loss": (
    lambda x: losses.ctc_loss(
      SEQUENCES + x[0], PADDINGS, LABELS, LABEL_PADDINGS
    ),
  ),
  "make_fenchel_young_loss": (
    losses.make_fenchel_young_loss(jax.nn.logsumexp),
    SOFT,
  ),
  "ntxent": (losses.ntxent, IDS),
}


def loss_case(name):
  function, *rest = LOSSES[name]
  return foreign.Case(
    lambda x: function(x, *rest), (LOGITS,), levels=foreign.LEVELS
  )


CASES = foreign.Cases(
  {name: functools.partial(loss_case, name) for name in LOSSES}
)
of_every_loss = pytest.mark.parametrize("name", CASES.names)

# A matrix product is a part of these, with numbers that say which class it is.
# It is in float16 as any other.
WITH_PRODUCTS = {
  "ctc_loss",
  "make_fenchel_young_loss",
  "multiclass_hinge_loss",
  "multiclass_perceptron_loss",
  "multiclass_sparsemax_loss",
}
of_losses_without_products = pytest.mark.parametrize(
  "name", [name for name in LOSSES if name not in WITH_PRODUCTS]
)


@of_every_loss
def test_losses_return_what_they_return_without_autocast(name):
  CASES.assert_same_shapes(name)


@of_losses_without_products
def test_losses_are_computed_in_float32(name):
  values = CASES.values(name)
  for level in foreign.LEVELS:
    foreign.assert_near(values[level], values["O0"], 4 * 2.0**-24)


@of_losses_without_products
def test_losses_of_float16_predictions_are_rounded_once(name):
  loss = CASES.case(name).function
  half = LOGITS.astype(np.float16)
  written = jax.eval_shape(loss, half)
  want = CASES.values(name)["O0"][0]
  for level in foreign.LEVELS:
    got = ols.autocast(loss, level)(half)
    assert (got.shape, got.dtype) == (written.shape, written.dtype)
    foreign.assert_near(got, want, foreign.ROUNDING)


@of_losses_without_products
def test_losses_are_the_same_inside_and_outside_of_autocast(name):
  loss = CASES.case(name).function
  x, kernel = foreign.normal(6, 8), foreign.normal(8, 5, seed=1)

  def model(kernel, bias):
    return jnp.tanh(x @ kernel) @ kernel.T @ kernel + bias

  def both(*params):
    return {
      level: (
        loss(ols.autocast(model, level)(*params)),
        ols.autocast(lambda *params: loss(model(*params)), level)(*params),
      )
      for level in foreign.LEVELS
    }

  for outside, inside in jax.jit(both)(kernel, LOGITS[0]).values():
    foreign.assert_near(inside, outside, 2.0**-18)


@pytest.mark.parametrize("name", sorted(WITH_PRODUCTS))
def test_a_scope_keeps_a_loss_with_products_in_float32(name):
  case = CASES.case(name)

  def in_scope(x):
    with jax.named_scope("objective"):
      return case.function(x)

  def run(x):
    return {
      level: foreign.differentiated(
        ols.autocast(in_scope, level, overrides={"objective": jnp.float32}),
        (x,),
      )(x)
      for level in foreign.LEVELS
    }

  want = jax.jit(foreign.differentiated(case.function, case.args))(*case.args)
  for got in jax.jit(run)(*case.args).values():
    foreign.assert_near(got, want, 4 * 2.0**-24)
