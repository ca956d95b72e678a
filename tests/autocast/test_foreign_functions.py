"""`autocast` on the functions of `jax.nn`, and on custom derivatives."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import optax_lossscale as ols
from tests import support
from tests.autocast import foreign

pytestmark = pytest.mark.slow

# --- Functions of jax.nn, between two products as in a network.

IN = foreign.normal(4, 6)
BEFORE = foreign.normal(6, 8, seed=1, scale=0.5)
BEHIND = foreign.normal(8, 3, seed=2, scale=0.5)
WHERE = foreign.normal(4, 8, seed=3) > -0.5

FUNCTIONS = {
  name: getattr(jax.nn, name)
  for name in (
    "celu",
    "elu",
    "gelu",
    "hard_sigmoid",
    "hard_silu",
    "hard_tanh",
    "identity",
    "leaky_relu",
    "log_sigmoid",
    "log_softmax",
    "mish",
    "relu",
    "relu6",
    "selu",
    "sigmoid",
    "silu",
    "soft_sign",
    "softmax",
    "softplus",
    "sparse_plus",
    "sparse_sigmoid",
    "squareplus",
    "standardize",
    "tanh",
  )
} | {
  "gelu, exact": functools.partial(jax.nn.gelu, approximate=False),
  "glu": lambda x: jnp.tile(jax.nn.glu(x), 2),
  "log1mexp": lambda x: jax.nn.log1mexp(1 + jnp.abs(x)),
  "logsumexp": functools.partial(jax.nn.logsumexp, axis=0),
  "logmeanexp": functools.partial(jax.nn.logmeanexp, axis=0),
  "softmax, masked": functools.partial(jax.nn.softmax, where=WHERE),
  "log_softmax, masked": lambda x: jnp.where(
    WHERE, jax.nn.log_softmax(x, where=WHERE), 0
  ),
  "standardize, masked": functools.partial(jax.nn.standardize, where=WHERE),
}


def between(function):
  """Returns a function with a matrix product before it and one behind."""
  return foreign.Case(
    lambda x, before, behind: function(x @ before) @ behind,
    (IN, BEFORE, BEHIND),
  )


def attention(**options):
  query, key, value = (
    foreign.normal(2, 5, 2, 4, seed=seed) for seed in range(3)
  )
  return foreign.Case(
    functools.partial(jax.nn.dot_product_attention, **options),
    (query, key, value),
  )


ATTENTION = {
  "attention": attention,
  "attention, causal": functools.partial(attention, is_causal=True),
  "attention, masked": functools.partial(
    attention, mask=foreign.normal(1, 2, 5, 5, seed=4) > -1
  ),
  "attention, biased": functools.partial(
    attention, bias=foreign.normal(1, 2, 5, 5, seed=4)
  ),
  "attention, windowed": functools.partial(attention, local_window_size=2),
  "attention, padded": functools.partial(
    attention, key_value_seq_lengths=np.array([3, 5], np.int32)
  ),
}
CASES = foreign.Cases(
  {name: functools.partial(between, f) for name, f in FUNCTIONS.items()}
  | ATTENTION
)
of_every_function = pytest.mark.parametrize("name", CASES.names)


@pytest.mark.long
@of_every_function
def test_functions_return_what_they_return_without_autocast(name):
  CASES.assert_same_shapes(name)


@of_every_function
def test_functions_compute_what_they_compute_without_autocast(name):
  CASES.assert_same_values(name)


@of_every_function
def test_no_product_around_a_function_stays_in_float32(name):
  CASES.assert_low_products(name)


# --- Derivatives that are not those of the function.


@jax.custom_gradient
def with_gradient(x):
  return jnp.sin(x), lambda g: 3 * g


def straight_through(x):
  return 3 * x + jax.lax.stop_gradient(jnp.sin(x) - 3 * x)


RULES = {
  "with_jvp": support.with_jvp(jnp.sin, lambda dx: 3 * dx),
  "with_vjp": support.with_vjp(jnp.sin, lambda dy: 3 * dy),
  "with_gradient": with_gradient,
  "straight_through": straight_through,
}


@pytest.mark.parametrize("name", RULES)
def test_a_derivative_that_its_author_chose_stays(name):
  case = between(RULES[name])
  want = BEFORE * 0 + IN.T @ (3 * foreign.weights((4, 3)) @ BEHIND.T)
  for level in foreign.LEVELS:
    run = foreign.differentiated(ols.autocast(case.function, level), case.args)
    _, (_, before, _) = jax.jit(run)(*case.args)
    foreign.assert_near(before, want, 4 * foreign.ROUNDING)


@pytest.mark.parametrize("level", foreign.LEVELS)
def test_relu_has_no_slope_at_zero(level):
  case = between(jax.nn.relu)
  run = foreign.differentiated(ols.autocast(case.function, level), case.args)
  _, (x, before, _) = run(IN, 0 * BEFORE, BEHIND)
  assert not x.any()
  assert not before.any()
