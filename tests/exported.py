"""Every transformation that optax exports, found by looking, so none is missed.

Whatever optax adds is found and tried with its default arguments, or with a
`learning_rate` alone. What needs more is listed here with what it needs.
"""

import functools
import inspect

import jax
import jax.numpy as jnp
import optax

LEARNING_RATE = 2.0**-6

_ADAM = optax.adam(LEARNING_RATE)

ARGUMENTS = {
  "contrib.mechanize": [_ADAM],
  "contrib.schedule_free": [_ADAM, LEARNING_RATE],
  "contrib.split_real_and_imaginary": [_ADAM],
  "optax.adaptive_grad_clip": [0.5],
  "optax.add_noise": [0.5, 0.5, 0],
  "optax.apply_if_finite": [_ADAM, 3],
  "optax.chain": [optax.clip_by_global_norm(0.5), _ADAM],
  "optax.clip": [0.5],
  "optax.clip_by_block_rms": [0.5],
  "optax.clip_by_global_norm": [0.5],
  "optax.conditionally_mask": [_ADAM, lambda step: step % 2 == 0],
  "optax.conditionally_transform": [_ADAM, lambda step: step % 2 == 0],
  "optax.ema": [0.5],
  "optax.flatten": [_ADAM],
  "optax.freeze": [True],
  "optax.masked": [_ADAM, True],
  "optax.multi_transform": [{"all": _ADAM}, "all"],
  "optax.partition": [{"all": _ADAM}, "all"],
  "optax.scale": [0.5],
  "optax.scale_by_backtracking_linesearch": [4],
  "optax.scale_by_schedule": [optax.linear_schedule(1.0, 0.0, 8)],
  "optax.scale_by_zoom_linesearch": [4],
  "optax.selective_transform": {"optimizer": _ADAM, "freeze_mask": True},
  "optax.snapshot": ["sum", lambda updates: optax.tree.sum(updates)],
  "optax.stateless": [lambda updates, params: updates],
  "optax.stateless_with_tree_map": [lambda update, param: update],
  "optax.trace": [0.5],
  "optax.with_extra_args_support": [_ADAM],
}

LEFT_OUT = {
  "contrib.differentially_private_aggregate": "one gradient per example",
  "contrib.dpsgd": "it takes one gradient per example",
  "contrib.hutchinson_estimator_diag_hessian": "no gradients: it replaces them",
  "contrib.sam": "it calls the loss itself, at other parameters",
  "contrib.scale_by_muon": "it fails in optax itself; muon is here",
  "optax._deprecated_differentially_private_aggregate": "optax deprecated it",
  "optax._deprecated_dpsgd": "optax calls it private and deprecated",
  "optax.inject_hyperparams": "it makes a factory; tests/optimizers.py has it",
  "optax.inject_stateful_hyperparams": "it makes a factory of that kind",
  "optax.measure_with_ema": "it returns a measure, no updates",
  "optax.lookahead": "its parameters are a pair of parameters",
}


def make_inner(name):
  """Returns the transformation of this name."""
  place, _, attribute = name.partition(".")
  function = getattr(optax if place == "optax" else optax.contrib, attribute)
  if name in ARGUMENTS:
    arguments = ARGUMENTS[name]
    is_named = isinstance(arguments, dict)
    return function(**arguments) if is_named else function(*arguments)
  if "learning_rate" in inspect.signature(function).parameters:
    return function(learning_rate=LEARNING_RATE)
  return function()


def extra_args(name, loss_fn, loss, grads):
  """Returns what the transformation may ask for beside the gradients."""
  arguments = {"value": loss, "grad": grads, "value_fn": loss_fn}
  if name == "contrib.sophia":  # It estimates the Hessian of this.
    arguments["obj_fn"] = loss_fn
  return arguments


def _is_function(x):
  return inspect.isfunction(x) or isinstance(x, functools.partial)


def _find():
  found = []
  for place, module in (("optax", optax), ("contrib", optax.contrib)):
    for attribute, function in inspect.getmembers(module, _is_function):
      name = f"{place}.{attribute}"
      signature = inspect.signature(function)
      makes_one = "GradientTransformation" in str(signature.return_annotation)
      if not makes_one and signature.return_annotation is signature.empty:
        try:
          makes_one = isinstance(make_inner(name), optax.GradientTransformation)
        except TypeError:
          continue  # It needs arguments, as no transformation here does.
      if makes_one and name not in LEFT_OUT:
        found.append(name)
  return found


NAMES = _find()
OPTIMIZERS = [
  name
  for name in NAMES
  if "learning_rate"
  in inspect.signature(
    getattr(
      optax if name.startswith("optax.") else optax.contrib,
      name.partition(".")[2],
    )
  ).parameters
]


def make_params(size):
  """Returns parameters of two matrices."""
  return {
    f"layer_{i}": jnp.full((size, size), 0.125 * (i + 1)) for i in range(2)
  }


def loss_fn(params):
  """Returns a loss of such parameters with gradients of about 2**-10."""
  sums = [jnp.sum(jnp.sin(leaf) ** 2) for leaf in jax.tree.leaves(params)]
  return sum(sums) / 1024
