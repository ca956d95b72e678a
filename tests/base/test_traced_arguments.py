"""Errors about traced values: they have no names from inside JAX."""

import inspect
import re
import traceback
import warnings

import jax
import jax.numpy as jnp
import optax
import pytest

import optax_lossscale as ols
from optax_lossscale import checkpoints
from optax_lossscale import experimental
from optax_lossscale import hardware
from optax_lossscale import instruments
from optax_lossscale import nnx
from optax_lossscale import plot
from optax_lossscale import presets
from optax_lossscale import rules
from optax_lossscale._base import arguments
from tests.support import slow_but

TRANSFORMATIONS = {
  "jit": lambda fun, x: jax.jit(fun)(x),
  "grad": lambda fun, x: jax.grad(fun)(x),
  "vmap": lambda fun, x: jax.vmap(fun)(jnp.stack([x, x])),
  "linearize": jax.linearize,
  "jvp": lambda fun, x: jax.jvp(fun, (x,), (x,)),
  "jit of grad": lambda fun, x: jax.jit(jax.grad(fun))(x),
}


@pytest.fixture(params=slow_but(["jit of grad"], TRANSFORMATIONS))
def trace(request):
  """Calls a function with a traced float32[]."""

  def call(function):
    def as_loss(x):
      function(x)
      return x

    TRANSFORMATIONS[request.param](as_loss, jnp.float32(1.5))

  return call


def test_a_traced_value_is_shown_by_its_shape_and_dtype(trace):
  def check(x):
    assert arguments.shown(x) == "a traced float32[]"
    assert arguments.shown(jnp.stack([x, x])) == "a traced float32[2]"
    assert arguments.kind_of(x) == "jax.Array"
    text = arguments.shown({"a": (x, 1), "b": [x]}, 1000)
    assert text.count("Traced(") >= 2 and "Tracer" not in text
    with pytest.raises(TypeError) as error:
      ols.DynamicLossScale(growth_interval=x)
    assert str(error.value) == (
      "`growth_interval` must be an integer number of steps, got a traced "
      "float32[] of type jax.Array."
    )

  trace(check)


def test_an_array_is_shown_by_the_name_that_jax_gives_it():
  assert arguments.kind_of(jnp.ones(1)) == "jax.Array"
  assert arguments.kind_of([1]) == "list"


def test_a_traced_value_on_an_explicit_mesh_is_shown():
  # JAX cannot tell the text of some of these.
  mesh = jax.make_mesh(
    (1,), ("d",), axis_types=(jax.sharding.AxisType.Explicit,)
  )

  def check(x):
    assert "float32" in arguments.shown(x) or "f32" in arguments.shown(x)
    return x

  with jax.set_mesh(mesh):
    x = jax.device_put(jnp.ones(3), jax.P("d"))
    jax.grad(lambda x: jnp.sum(check(x)))(x)


LOSS = lambda params, batch=1.0: jnp.sum(params["w"]) * batch  # noqa: E731
PARAMS = {"w": jnp.ones(3)}
TX = ols.loss_scaling(optax.adam(1e-3), ols.DynamicLossScale())
STATE = TX.init(PARAMS)
# What is right for an argument that is not the one in question.
RIGHT = {
  "inner": optax.sgd(0.1),
  "rule": ols.DynamicLossScale(),
  "fun": LOSS,
  "step": LOSS,
  "opt_state": STATE,
  "bare_state": STATE,
  "tx": TX,
  "text": "fast|step|0.5",
  **dict.fromkeys(
    ["params", "updates", "tree", "new", "old", "scaled_grads"], PARAMS
  ),
}
MODULES = (
  ols,
  checkpoints,
  experimental,
  hardware,
  instruments,
  nnx,
  plot,
  presets,
  rules,
)
FUNCTIONS = {
  f"{module.__name__}.{name}": getattr(module, name)
  for module in MODULES
  for name in getattr(module, "__all__", vars(module))
  if getattr(getattr(module, name), "__module__", "").startswith("optax_loss")
  if name[0] != "_" and callable(getattr(module, name))
  if name != "WiringWarning"
}


def error_of(function, *args, **kwargs):
  """Returns what a function returns, and the text of our error if it raises."""
  try:
    with warnings.catch_warnings():
      warnings.simplefilter("ignore")
      return function(*args, **kwargs), ""
  except Exception as error:
    last = traceback.extract_tb(error.__traceback__)[-1]
    return None, str(error) if "optax_lossscale" in last.filename else ""


def errors_with(x):
  """Yields what public functions say to a traced value, by their names."""
  for name, function in FUNCTIONS.items():
    parameters = [
      each
      for each in inspect.signature(function).parameters.values()
      if each.kind not in (each.VAR_KEYWORD, each.VAR_POSITIONAL)
    ]
    for wrong in parameters:
      for value in (x, {"w": x}, (x, x)):
        kwargs = {
          each.name: RIGHT.get(each.name, 1)
          for each in parameters
          if each.default is each.empty
        } | {wrong.name: value}
        args = [
          kwargs.pop(each.name)
          for each in parameters
          if each.kind is each.POSITIONAL_ONLY
        ]
        made, text = error_of(function, *args, **kwargs)
        yield f"{name}({wrong.name}=)", text
        if inspect.isfunction(made):
          for args in ((x,), (PARAMS,), (PARAMS, x)):
            yield f"{name}({wrong.name}=)()", error_of(made, *args)[1]
  for i in range(3):
    args = [PARAMS, STATE, PARAMS]
    args[i] = x
    yield f"update, {i}", error_of(TX.update, *args)[1]
  for value in ((x, x), {"w": x}, [x], jnp.stack([x, x]), x.astype(int)):
    for has_aux in (False, True):
      function = ols.scaled_value_and_grad(
        lambda _, value=value: value, STATE, has_aux=has_aux
      )
      yield "loss", error_of(function, PARAMS)[1]


def test_no_error_has_a_name_from_inside_jax(trace):
  found = []

  def check(x):
    found.extend(errors_with(x))

  trace(check)
  assert sum(text != "" for _, text in found) > 100
  wrong = [x for x in found if re.search(r"Tracer|ArrayImpl", x[1])]
  assert wrong == []
