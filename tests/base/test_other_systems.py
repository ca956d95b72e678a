"""Names of other systems lead to a line of docs/porting."""

import re

import equinox as eqx
from flax import linen
import jax
import jax.numpy as jnp
import optax
import pytest

import optax_lossscale as ols
from optax_lossscale._base import other_systems
from tests import documents

TX = ols.loss_scaling(optax.adam(1e-3), ols.DynamicLossScale())
PARAMS = {"w": jnp.ones(2)}


@pytest.mark.parametrize("name", other_systems._NAMES)
def test_a_name_of_another_system_leads_to_its_page(name):
  assert not hasattr(ols, name)
  with pytest.raises(AttributeError, match=f"no attribute '{name}'; ") as error:
    getattr(ols, name)
  (page,) = re.findall(r"see (docs/porting/\w+\.md)$", str(error.value))
  assert name.strip("_") in documents.read(page)
  code, _ = other_systems._NAMES[name]
  for path in re.findall(r"\b[a-z_]\w*(?:\.\w+)*(?=\()", code):
    parent, _, attribute = path.rpartition(".")
    roots = {"optax": optax, "presets": ols.presets, "": ols}
    assert hasattr(roots[parent], attribute), path


# What a newcomer types, and what the error says to type instead.
MISTAKES = {
  "a preset by its package": (
    lambda: ols.presets.pytorch,
    "'pytorch'; did you mean 'torch'?",
  ),
  "a name of another": (lambda: ols.GradScalar, "did you mean 'GradScaler'?"),
  "a submodule": (lambda: ols.check_step, "it is instruments.check_step$"),
  "a class of one": (lambda: ols.TrainState, "it is linen.TrainState$"),
  "a method": (
    lambda: ols.DynamicLossScale().unscale,
    r"write unscale\(scaled_grads, opt_state\)",
  ),
  "the wrong order": (
    lambda: ols.unscale(TX.init(PARAMS), PARAMS),
    "pass the arguments in their order",
  ),
  "a letter": (lambda: ols.presets.megatrom, "did you mean 'megatron'?"),
  "no name at all": (lambda: ols.presets.zzz, "no attribute 'zzz'$"),
  "enabled": (
    lambda: ols.DynamicLossScale(enabled=False),
    r"got 'enabled'; loss_scaling\(inner, None\) switches",
  ),
  "a misspelt argument": (
    lambda: ols.DynamicLossScale(backof_factor=0.5),
    "did you mean `backoff_factor`?",
  ),
  "a function's argument": (
    lambda: ols.loss_scaling(optax.sgd(1.0), loss_scale=None),
    "got 'loss_scale'; the argument is `rule`",
  ),
  "torch's switch": (
    lambda: ols.autocast(jnp.sin, enabled=False),
    "level O0 switches autocast off",
  ),
  "a short name": (
    lambda: ols.scaled_value_and_grad(jnp.sin, 1.0, aux=True),
    "did you mean `has_aux`?",
  ),
  "a block": (
    lambda: ols.autocast(dtype=jnp.float16),
    "got none; it is neither a block",
  ),
  "a device": (
    lambda: ols.autocast("cuda"),
    "got 'cuda'; it is neither a block",
  ),
  "a module of Flax": (
    lambda: ols.autocast(linen.Dense(3)),
    "pass model.apply",
  ),
  "its parameters": (
    lambda: TX.init(linen.Dense(3)),
    r'init\(key, x\)\["params',
  ),
  "a model of Equinox": (
    lambda: TX.init(eqx.nn.MLP(2, 2, 3, 1, key=jax.random.key(0))),
    r"got custom_jvp at activation; pass eqx.filter\(model, eqx.is_inexact",
  ),
  "a pair": (
    lambda: TX.update((jnp.float32(1.0), PARAMS), TX.init(PARAMS), PARAMS),
    "unpack it: loss, scaled_grads = value_and_grad",
  ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_first_mistake_is_answered_with_the_line_to_write(mistake):
  program, answer = MISTAKES[mistake]
  errors = AttributeError, TypeError, ValueError
  with pytest.raises(errors, match=answer):
    program()


def test_a_rule_of_the_users_own_may_take_any_argument():
  class Rule(ols.LossScale):
    def __init__(self, **options):
      object.__setattr__(self, "options", options)

    def init(self):
      return ols.FixedLossScale().init()

    def update(self, state, overflow, *, amax=None):
      return state

  assert Rule(enabled=True, period=3).options == {"enabled": True, "period": 3}


@pytest.mark.parametrize("compile", [jax.jit, lambda f: f])
def test_a_loss_that_is_scaled_twice_causes_a_warning(compile):
  def take_step(params, state):
    loss_fn = lambda x: ols.scale_loss(jnp.sum(x["w"]), state)  # noqa: E731
    return ols.scaled_value_and_grad(loss_fn, state)(params)

  with pytest.warns(ols.WiringWarning, match="`fun` must return the true loss"):
    compile(take_step)(PARAMS, TX.init(PARAMS))
