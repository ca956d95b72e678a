"""The plan of a program, made before `autocast` evaluates it."""

import functools

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np
import pytest

from optax_lossscale._autocast import _plan
from optax_lossscale._autocast import levels
from optax_lossscale._jaxpr import operation_table

X = jnp.ones((2, 2))


def scan(function):
  return lambda x: lax.scan(lambda x, _: (function(x), x), x, None, 2)[0] + 1


def while_loop(function):
  return lambda x: lax.while_loop(lambda x: x[0, 0] < 9, function, x) + 1


def custom_jvp(function):
  with_rule = jax.custom_jvp(function)
  with_rule.defjvp(functools.partial(jax.jvp, function))
  return lambda x: jnp.exp(with_rule(x))


@pytest.mark.parametrize("nest", [scan, while_loop, jax.jit, custom_jvp])
def test_a_body_inside_of_bodies_is_planned_few_times(nest, monkeypatch):
  planned = []
  moves = operation_table.moves

  def counting(equation):
    planned.append(equation)
    return moves(equation)

  monkeypatch.setattr(operation_table, "moves", counting)
  recipe = levels.make_recipe("O1", np.float16, None, None)
  numbers = []
  for depth in (3, 6):
    function = lambda x: x @ x  # noqa: E731
    for _ in range(depth):
      function = nest(function)
    jaxpr = jax.make_jaxpr(lambda x, f=function: f(x) @ x)(X)
    planned.clear()
    _plan.make_plan(jaxpr, recipe, "", _plan.Use())
    numbers.append(len(planned))
  # For a loop or a call, in proportion to the depth. A function with a rule is
  # planned anew for each function around it.
  assert numbers[1] <= (4 if nest is custom_jvp else 2) * numbers[0]
