"""Checks of a step's arguments, rule, states and trees."""

from collections.abc import Callable
from collections.abc import Collection
from collections.abc import Hashable
from collections.abc import Iterator
import contextlib
import inspect
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from optax_lossscale._base import arguments
from optax_lossscale._base import leaves
from optax_lossscale._base import switches
from optax_lossscale._base.arguments import shown
from optax_lossscale._rules import base
from optax_lossscale._rules import fixed
from optax_lossscale._step import checks
from optax_lossscale._step import states


def as_optimizer(
  name: str, inner: optax.GradientTransformation | optax.MultiSteps
) -> optax.GradientTransformationExtraArgs:
  """Returns `inner` as an optimizer that takes extra arguments, or raises."""
  if isinstance(inner, optax.MultiSteps):
    # `MultiSteps.gradient_transformation()` would drop extra arguments.
    # Its `update` takes no other state, which optax's types do not allow for.
    update: Callable[..., Any] = inner.update
    return optax.GradientTransformationExtraArgs(inner.init, update)
  if isinstance(inner, (type, base.LossScale)) or not (
    hasattr(inner, "init") and hasattr(inner, "update")
  ):
    remedy = ""
    if isinstance(inner, base.LossScale):
      remedy = (
        "; the optimizer comes first, then the rule: "
        "loss_scaling(optax.adam(1e-3), rule)"
      )
    elif callable(inner):
      remedy = "; call it: optax.adam(1e-3)"
    raise TypeError(
      f"`{name}` must be an optax gradient transformation, got "
      f"{getattr(inner, '__name__', shown(inner))}{remedy}."
    )
  return optax.with_extra_args_support(inner)


def check_rule(name: str, rule: object) -> None:
  """Raises if `rule` is not a LossScale."""
  if not isinstance(rule, base.LossScale):
    remedy = (
      f"call it: {rule.__name__}(...)"
      if callable(rule) and hasattr(rule, "__name__")
      else "for a fixed S pass FixedLossScale(1024.0), for one that adapts "
      "DynamicLossScale()"
    )
    raise TypeError(
      f"`{name}` must be a LossScale, got {shown(rule)}; {remedy}."
    )


def check_check(check: object) -> None:
  """Raises if `check` is not a Check."""
  if not isinstance(check, checks.Check):
    raise TypeError(
      "`check` must be made by nonfinite(), saturated(dtype) or "
      f"hardware.probe().check(dtype), got {shown(check)}."
    )


def check_params(params: object) -> None:
  """Raises if a leaf of the parameters is no array, such as a function."""
  for path, x in jax.tree.leaves_with_path(params):
    is_array = hasattr(x, "dtype") and hasattr(x, "shape")
    if not (is_array or isinstance(x, bool | int | float | complex)):
      classes = str(type(params).__mro__)
      remedy = "pass the arrays alone"
      if "'equinox." in classes:
        remedy = "pass eqx.filter(model, eqx.is_inexact_array)"
      if "'flax.linen." in classes:
        remedy = 'pass model.init(key, x)["params"]'
      raise TypeError(
        "`params` must be a tree of arrays, got "
        f"{arguments.kind_of(x)}{_at(path)}; {remedy}."
      )


def check_first_state(rule: base.LossScale) -> None:
  """Raises if the rule's first state does not hold a usable S."""
  # The first S is a known constant, even while `init` is being traced.
  with jax.ensure_compile_time_eval(), switches.lifted():
    state = rule.init()
    loss_scale = getattr(leaves.as_arrays(state), "loss_scale", None)
    if (
      not isinstance(loss_scale, jax.Array)
      or loss_scale.dtype != jnp.float32
      or loss_scale.shape != ()
    ):
      got = type(state).__name__ if loss_scale is None else loss_scale
      raise TypeError(
        "the state of `rule` must have an attribute `loss_scale`, float32[], "
        f"got {shown(got)}."
      )
    if not isinstance(loss_scale, jax.core.Tracer):
      arguments.check_scale("loss_scale of the rule's first state", loss_scale)


def check_inner_state(inner_state: object) -> None:
  """Raises if the optimizer's state already holds a loss scale."""
  if paths := states.find_states({"inner_state": inner_state}):
    place = leaves.path_name(next(iter(paths)))
    raise ValueError(
      f"`inner` must not contain loss_scaling, got it at {place}: gradients "
      "would be unscaled twice. Wrap the optimizer once, outermost."
    )


def check_beside(widened: optax.OptState, inner_state: optax.OptState) -> None:
  """Raises if a state is narrower than for float32, but one that must be."""
  nodes = jax.tree.leaves_with_path(widened, is_leaf=states.is_narrow_state)
  own = jax.tree.leaves(inner_state, is_leaf=states.is_narrow_state)
  for (path, wide), x in zip(nodes, own, strict=True):
    if leaves.is_real(x) and x.dtype != wide.dtype:
      raise ValueError(
        "`stochastic_rounding` and remainders must be around the whole "
        "optimizer, since `loss_scaling` shows it the parameters as they are; "
        f"got a state in {x.dtype} beside them at "
        f"{leaves.path_name(path)}. Wrap optax.chain(...) or "
        "optax.partition(...) itself, or each of its parts."
      )


def check_masters(params: object, inner_state: object) -> None:
  """Warns if float16 parameters accumulate their updates in float16."""
  found = jax.tree.leaves_with_path(params)
  paths = [path for path, _ in jax.tree.leaves_with_path(inner_state)]
  # If only some parameters have a state, the others may be frozen.
  ends = {path[i:] for path in paths for i in range(len(path) + 1)}
  moved = [x for x in found if x[0] in ends] or found
  narrow = [p for p, x in moved if getattr(x, "dtype", None) == jnp.float16]
  is_mask = lambda x: isinstance(x, optax.MaskedState)  # noqa: E731
  masks = filter(is_mask, jax.tree.leaves(inner_state, is_leaf=is_mask))
  # A mask whose state holds no arrays may freeze any parameter.
  may_freeze = any(not jax.tree.leaves(x) for x in masks)
  # Look for a field of this name: other optimizers have master weights too.
  keys = [str(getattr(key, "name", "")) for path in paths for key in path]
  keeps = states.keeps_narrow(inner_state) or any("master" in x for x in keys)
  if narrow and not may_freeze and not keeps:
    arguments.warn(
      "parameters in float16 should have master weights, got float16"
      f"{_at(narrow[0])} and no masters in the state of `inner`: small updates "
      "are rounded away. Write loss_scaling(master_weights(inner), rule), or "
      "keep the parameters in float32."
    )


def check_state(state: object, rule: base.LossScale | None) -> None:
  """Raises unless `state` is one that `init` makes with this rule."""
  if not isinstance(state, states.LossScalingState):
    remedy = ""
    if isinstance(state, dict) and "loss_scale_state" in state:
      remedy = f"; {states.RESTORE}"
    elif isinstance(state, tuple):
      remedy = (
        "; for the state of an optimizer that is wrapped only now, "
        "checkpoints.with_loss_scaling(state, tx.init(params))"
      )
    raise TypeError(
      "`state` must be the LossScalingState that init made, got "
      f"{arguments.kind_of(state)}{remedy}."
    )
  states.refuse_stack("state", state.skipped_steps)
  init = fixed.NoLossScaleState if rule is None else rule.init
  expected = jax.eval_shape(lambda: leaves.as_arrays(init()))
  got = state.loss_scale_state
  if found := _mismatch(got, expected):
    raise ValueError(
      f"`state` must hold the state of this `rule`, got {found}; "
      f"{_remedy(got, expected, rule)}."
    )


def _mismatch(got: object, expected: object) -> str | None:
  """Returns how a rule's state differs from the expected one, if it does."""
  structures: list[object] = [jax.tree.structure(x) for x in (got, expected)]
  fields = [_fields(x) for x in (got, expected)]
  # The names of all fields or, if the structures match, of those that differ.
  listed: list[list[str]] = [list(own) for own in fields]
  if structures[0] == structures[1]:
    same = fields[0].items() & fields[1].items()
    listed = [
      [" ".join(x) for x in own.items() if x not in same] for own in fields
    ]
    if not any(listed):
      return None
  in_words = (
    f"{type(x).__name__}({', '.join(own)})"
    for x, own in zip((got, expected), listed, strict=True)
  )
  return " where the rule has ".join(in_words)


def _remedy(got: object, expected: object, rule: base.LossScale | None) -> str:
  """Returns the remedy for the state of another rule than this one."""
  if hasattr(getattr(got, "loss_scale", None), "__jax_array__"):
    return states.AS_PURE
  if isinstance(got, dict):
    return states.RESTORE
  if rule is None:
    return (
      "take checkpoints.with_loss_scaling("
      "checkpoints.without_loss_scaling(opt_state), tx.init(params))"
    )
  remedy = (
    "to change the rule in mid-run, set its state: "
    "optax.tree.set(opt_state, loss_scale_state=rule.init())"
  )
  if hasattr(expected, "_replace") and jax.tree.leaves(got):
    remedy += (
      ", or rule.init()._replace(loss_scale=get_loss_scale(opt_state)) to "
      "keep S"
    )
  return remedy


def _fields(rule_state: object) -> dict[str, str]:
  """Returns each field of a rule's state with its dtype and shape, as text."""
  return {
    leaves.path_name(path): (
      f"{getattr(x, 'dtype', type(x).__name__)}{list(np.shape(x))}"
    )
    for path, x in jax.tree.leaves_with_path(rule_state)
  }


# The states that should not be around loss scaling, with their messages.
_AROUND = {
  optax.MultiStepsState: "optax.MultiSteps inside of loss_scaling, got it "
  "around{}, where it adds up scaled gradients, and an inf for ever. Write "
  "loss_scaling(optax.MultiSteps(inner, k), rule).",
  optax.ApplyIfFiniteState: "no optax.apply_if_finite around loss_scaling, got "
  "it{}, where it takes a skipped step back and S with it, which then never "
  "shrinks. Leave it out: loss_scaling itself skips such a step.",
}


def check_surroundings(opt_state: object) -> None:
  """Warns if a state around loss scaling is one that cannot work there."""
  # Other neighbours may be right. `check_step` sees what they do in a step.
  if message := _misplaced(opt_state, *_AROUND):
    arguments.warn(f"`opt_state` must have {message}")


def check_accumulation(opt_state: object) -> None:
  """Raises if `optax.MultiSteps` is around loss scaling."""
  if message := _misplaced(opt_state, optax.MultiStepsState):
    raise ValueError(f"`tx` must have {message}")


def _misplaced(opt_state: object, *kinds: type) -> str | None:
  """Returns a message on the first state of these around loss scaling."""

  def is_around(x: object) -> bool:
    return type(x) in kinds and bool(states.find_states(x))

  for path, x in jax.tree.leaves_with_path(opt_state, is_leaf=is_around):
    if is_around(x):
      return _AROUND[type(x)].format(_at(path))
  return None


def _at(path: tuple[Hashable, ...]) -> str:
  return f" at {leaves.path_name(path)}" if path else ""


# How to pass a flag to `update`, and the names that it is given by mistake.
_MISNAMED = {
  "overflow={}": "overflowed overflows overflow_flag is_overflow has_overflow "
  "found_inf found_infs found_nan has_inf has_nan is_nan noop_flag",
  "overflow=jnp.logical_not({})": "grads_finite is_finite all_finite",
  "skip={}": "skips skipped skip_step should_skip is_skip skip_update spike "
  "is_spike",
}


def check_call(
  inner: optax.GradientTransformation,
  updates: object,
  params: object,
  names: Collection[str],
) -> None:
  """Raises if `update` gets no gradients, or a flag under the wrong name."""
  if isinstance(updates, tuple) and len(updates) == 2:
    like: list[object] = [jax.tree.structure(x) for x in (params, *updates)]
    if like[0] == like[2] != like[1] and np.shape(updates[0]) == ():
      raise TypeError(
        "`updates` must be the scaled gradients, got a pair of a loss and "
        "gradients; unpack it: loss, scaled_grads = value_and_grad(params, "
        "batch)."
      )
  if updates is None and jax.tree.leaves(params):
    raise TypeError(
      "`updates` must be the scaled gradients, got None; pass what "
      "scaled_value_and_grad returned."
    )
  taken = inspect.signature(inner.update).parameters
  if "skip" in taken:
    raise TypeError(
      "`inner` must not take a `skip` of its own, since the `skip` of `update` "
      "skips the whole step, got an optimizer that does; rename its argument."
    )
  for remedy, misnamed in _MISNAMED.items():
    for name in misnamed.split():
      if name in names and name not in taken:
        raise TypeError(
          "`update` takes the caller's flags as `overflow` and `skip`, got "
          f"`{name}`, which the optimizer would ignore; did you mean "
          f"{remedy.format(name)}?"
        )


def check_gradients(gradients: object, params: object) -> None:
  """Raises if gradients would be broadcast to the shapes of parameters."""
  if params is None:
    return
  fits = leaves.is_for_each_example
  if found := leaves.mismatched_shape(params, gradients, fits):
    raise ValueError(
      f"`updates` must have the shapes of the parameters, got {found}."
    )


def narrow_updates(
  updates: leaves.Tree, gradients: object, params: object, *, to_sums: bool
) -> leaves.Tree:
  """Returns an optimizer's updates in the dtypes of the parameters."""
  updates = leaves.as_arrays(updates)
  if params is None:
    return updates
  try:
    narrow = leaves.narrow_like(updates, params, to_sums=to_sums)
  except ValueError as error:
    found = leaves.difference(params, gradients)
    if found is None:
      raise
    raise ValueError(
      f"`updates` must be gradients that fit the parameters, got {found}."
    ) from error
  # Per-example gradients, which an optimizer may return, have other shapes.
  of_params = leaves.mismatched_shape(params, gradients) is None
  if of_params and (found := leaves.mismatched_shape(params, narrow)):
    raise ValueError(
      "the updates of `inner` must have the shapes of the parameters, got "
      f"{found}."
    )
  return narrow


@contextlib.contextmanager
def explained(
  inner: optax.GradientTransformation,
  gradients: object,
  inner_state: object,
  params: object,
) -> Iterator[None]:
  """Explains which argument does not fit if an optimizer raises an error."""
  try:
    yield
  except (AttributeError, TypeError, ValueError) as error:
    # Not before, since gradients need not have the structure of the parameters:
    # with `optax.lookahead` they do not.
    fits = leaves.is_for_each_example
    # A state that depends on the parameters' dtypes cannot be compared with
    # gradients. Of a state like lookahead's they fit a part of the parameters.
    parts = jax.tree.leaves(params, is_leaf=lambda x: x is not params)
    like: object = jax.tree.structure(gradients)
    is_of_part = like in map(jax.tree.structure, parts)
    is_narrow = states.keeps_narrow(inner_state)
    found = None
    if not is_narrow:
      of_gradients = _init_shapes(inner, gradients, inner_state)
      found = leaves.difference(inner_state, of_gradients, fits)
    rule = "`updates` must be gradients that fit the state"
    if params is not None:
      of_params = _init_shapes(inner, params, inner_state)
      # Gradients that fit the state need not have the parameters' structure.
      if found or (is_narrow and not is_of_part):
        found = leaves.difference(params, gradients, fits)
      rule = "`updates` must be gradients that fit the parameters"
      if other := leaves.difference(of_params, inner_state):
        rule = "`state` must be that of this optimizer for these parameters"
        found = other
    if found is None:
      raise
    raise ValueError(f"{rule}, got {found}.") from error


def _init_shapes(
  inner: optax.GradientTransformation, tree: object, default: object
) -> object:
  """Returns the shapes of the state for `tree`; `default` if `init` fails."""
  seen = tree if states.keeps_narrow(default) else leaves.widen(tree)
  try:
    return jax.eval_shape(inner.init, seen)
  except Exception:  # `init` may reject a tree for any reason.
    return default
