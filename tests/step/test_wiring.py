"""Programs that run and yet do not train: the warnings, and where none is due.

The common mistakes are in `tests/test_silent_mistakes.py`, jitted and not. This
file has variants of them, right programs that look like them, and refusals.
"""

import pathlib
import warnings

from flax import nnx
import jax
import jax.numpy as jnp
import optax
import pytest

import optax_lossscale as ols
from optax_lossscale._step import provenance
from tests import support

PARAMS = {"a": jnp.ones(3), "b": jnp.ones((2, 2))}
RULE = support.Stub(8.0)
ADAM = optax.adam(0.1)


def scaling(inner=None, rule=RULE):
  return ols.loss_scaling(inner or optax.sgd(0.1), rule)


def loss_fn(params, batch=1.0):
  return sum(jnp.sum(x**2) for x in jax.tree.leaves(params)) * jnp.mean(batch)


def told(program, *args):
  """Returns what a program is told, text by text."""
  with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    program(*args)
  assert all(x.category is ols.WiringWarning for x in caught)
  assert all(pathlib.Path(x.filename).name == "test_wiring.py" for x in caught)
  return [str(x.message) for x in caught]


# The transformations around the wrapper.


def test_each_function_that_scales_sees_what_is_around():
  tx = optax.chain(optax.identity(), optax.apply_if_finite(scaling(), 3))
  state = tx.init(PARAMS)
  schedule = ols.PrecisionSchedule(jnp.float16, until_step=2)
  model = nnx.Linear(2, 1, rngs=nnx.Rngs(0))
  optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
  for construct in (
    lambda: ols.scaled_value_and_grad(loss_fn, state),
    lambda: ols.scale_loss(loss_fn(PARAMS), state),
    lambda: ols.nnx.scaled_value_and_grad(loss_fn, optimizer),
    lambda: schedule.value_and_grad(loss_fn, state, schedule.init()),
  ):
    (text,) = told(construct)
    assert "no optax.apply_if_finite around loss_scaling, got it at 1," in text


# The origin of gradients. Each program takes one step.

EIGHT = jnp.float32(8.0)


def scaled_by(scale, change=lambda scaled_grads: scaled_grads):
  """Returns a step that scales by something else than the state."""

  def step(tx, params, state):
    by = scale(state) if callable(scale) else scale
    _, scaled_grads = ols.scaled_value_and_grad(loss_fn, by)(params)
    return tx.update(change(scaled_grads), state, params)[1]

  return step


def unscaled(tx, params, state):
  _, scaled_grads = ols.scaled_value_and_grad(loss_fn, state)(params)
  return tx.update(ols.unscale(scaled_grads, state), state, params)[1]


def unscaled_by_the_next_state(tx, params, state):
  _, scaled_grads = ols.scaled_value_and_grad(loss_fn, state)(params)
  _, state = tx.update(scaled_grads, state, params)
  ols.unscale(scaled_grads, state)
  return state


def dropping(pass_on):
  """Returns a step that drops micro-batches and tells `update` of them."""

  def step(tx, params, state):
    value_and_grad = ols.scaled_value_and_grad(loss_fn, state)
    _, scaled_grads, overflow = ols.accumulate(
      value_and_grad, microbatches=2, drop=True
    )(params, jnp.ones(4))
    given = pass_on(overflow)
    return tx.update(scaled_grads, state, params, **given)[1]

  return step


def right(tx, params, state):
  _, scaled_grads = ols.scaled_value_and_grad(loss_fn, state)(params)
  ols.unscale(scaled_grads, state)
  return tx.update(scaled_grads, state, params)[1]


def in_halves(tx, params, state):
  halve = jax.jit(lambda p, s: ols.scaled_value_and_grad(loss_fn, s)(p))
  _, scaled_grads = halve(params, state)
  ols.unscale(scaled_grads, state)
  return jax.jit(tx.update)(scaled_grads, state, params)[1]


def in_a_scan(tx, params, state):
  return jax.lax.scan(
    lambda state, _: (right(tx, params, state), None), state, None, length=2
  )[0]


def twice(tx, params, state):
  return right(tx, params, right(tx, params, state))


def in_a_branch(tx, params, state):
  _, scaled_grads = ols.scaled_value_and_grad(loss_fn, state)(params)
  return jax.lax.cond(
    state.skipped,
    lambda: state,
    lambda: tx.update(scaled_grads, state, params)[1],
  )


def with_a_state_restored_from_a_checkpoint(tx, params, state):
  _, scaled_grads = ols.scaled_value_and_grad(loss_fn, state)(params)
  return tx.update(scaled_grads, jax.tree.map(jnp.copy, state), params)[1]


def two_optimizers(tx, params, state):
  other = scaling(ADAM, support.Stub(2.0))
  right(other, params, other.init(params))
  return right(tx, params, state)


def through_a_gradient_of_the_step(tx, params, state):
  def unrolled(params):
    return loss_fn(params), twice(tx, params, state)

  return jax.grad(unrolled, has_aux=True)(params)[1]


def as_an_ensemble(tx, params, state):
  several = jax.tree.map(lambda x: jnp.stack([x, 2 * x]), params)
  jax.vmap(lambda p: right(tx, p, tx.init(p)))(several)
  return state


def warnings_in_the_second_step(tx, step, jit):
  """Returns the warnings of a step from a state that a first one has made."""

  def run(params, state):
    return step(tx, params, state)

  run = jax.jit(run) if jit else run
  return told(run, PARAMS, run(PARAMS, tx.init(PARAMS)))


both = pytest.mark.parametrize("jit", [False, True], ids=["eager", "jit"])


@both
@pytest.mark.parametrize(
  "step",
  [
    scaled_by(ols.get_loss_scale),
    scaled_by(lambda state: state, lambda x: jax.tree.map(jnp.add, x, PARAMS)),
    in_halves,
    in_a_scan,
    in_a_branch,
    twice,
    with_a_state_restored_from_a_checkpoint,
    two_optimizers,
    through_a_gradient_of_the_step,
    dropping(lambda overflow: {"overflow": [False, overflow]}),
    as_an_ensemble,
  ],
)
def test_a_right_step_gets_no_warning(step, jit):
  assert warnings_in_the_second_step(scaling(), step, jit) == []


PRESET = ols.presets.mindspore_fixed(loss_scale=8.0, drop_overflow_update=True)


@both
@pytest.mark.parametrize(
  ("rule", "step"),
  [
    (ols.FixedLossScale(8.0), scaled_by(8.0)),
    (ols.FixedLossScale(8.0), scaled_by(EIGHT)),
    (ols.FixedLossScale(8.0), unscaled_by_the_next_state),
    (PRESET, scaled_by(8.0)),
    (ols.FixedLossScale(1.0), unscaled),
    (None, unscaled),
    (None, unscaled_by_the_next_state),
    (None, dropping(lambda overflow: {})),
  ],
)
def test_what_makes_no_difference_gets_no_warning(rule, step, jit):
  assert warnings_in_the_second_step(scaling(rule=rule), step, jit) == []


@both
@pytest.mark.parametrize(
  ("rule", "step", "text"),
  [
    (RULE, scaled_by(EIGHT), "scaled by another S. Call scaled_value_and_grad"),
    (
      RULE,
      dropping(lambda overflow: {"overflow": overflow.flags}),
      "got a flag alone: it skips the step, so nothing would be dropped.",
    ),
    (None, scaled_by(8.0), "gradients scaled by the number 8.0. Call"),
    (ols.FixedLossScale(8.0), scaled_by(4.0), "scaled by the number 4.0. Call"),
    (None, scaled_by(EIGHT), "gradients scaled by another S. Call"),
  ],
  ids=[
    "an array",
    "a flag alone",
    "off, a number",
    "fixed, another number",
    "off, an array",
  ],
)
def test_gradients_of_another_kind_get_a_warning(rule, step, text, jit):
  tx = scaling(rule=rule)
  state = right(tx, PARAMS, tx.init(PARAMS))

  def run(params, state):
    return step(tx, params, state)

  run = jax.jit(run) if jit else run
  (only,) = told(run, PARAMS, state)
  assert text in only


def test_a_condition_around_an_eager_update_is_right():
  tx = scaling()
  state = tx.init(PARAMS)
  _, scaled_grads = ols.scaled_value_and_grad(loss_fn, state)(PARAMS)

  def update(state):
    return tx.update(scaled_grads, state, PARAMS)[1]

  assert told(jax.lax.cond, True, update, lambda state: state, state) == []


def test_notes_end_with_the_gradients_and_keep_no_tracer():
  before = len(provenance._ORIGINS)
  tx = scaling()
  with jax.checking_leaks():
    state = jax.jit(lambda p, s: right(tx, p, s))(PARAMS, tx.init(PARAMS))
  for _ in range(5):
    state = right(tx, PARAMS, state)
  assert len(provenance._ORIGINS) <= before + 1  # That of the last S.
  del state
  assert len(provenance._ORIGINS) <= before


def test_a_note_that_outlives_a_trace_keeps_none_of_its_tracers():
  kept = jnp.ones(3)

  @jax.jit
  def trace(scale):
    provenance.note(kept, "scaled", scale)
    return scale

  with jax.checking_leaks():
    trace(jnp.float32(8.0))


def test_notes_leave_the_compiled_program_as_it_is(monkeypatch):
  tx = scaling()

  def make_jaxpr():
    step = lambda p, s: right(tx, p, s)  # noqa: E731 - traced anew each time.
    return str(jax.make_jaxpr(step)(PARAMS, tx.init(PARAMS)))

  noted = make_jaxpr()
  for name in ("note", "check_update", "check_unscale"):
    monkeypatch.setattr(provenance, name, lambda *_: None)
  assert make_jaxpr() == noted


# Refused arguments.


def test_an_optimizer_may_take_such_a_name():
  seen = []

  def update(updates, state, params=None, *, overflowed):
    seen.append(overflowed)
    return updates, state

  inner = optax.GradientTransformationExtraArgs(optax.identity().init, update)
  tx = scaling(inner)
  tx.update(PARAMS, tx.init(PARAMS), PARAMS, overflowed=3)
  assert seen == [3]


# The first S, and parameters in float16.

FIRST_SCALES = {
  "`scale` should be a power of two, so that scaling rounds nothing, got 1000: "
  "take 1024.0.": lambda: ols.FixedLossScale(1000),
  "`init_scale` should be a power of two, so that scaling rounds nothing, got "
  "2000: take 2048.0; if the interval was meant: growth_interval=2000.": (
    lambda: ols.DynamicLossScale(2000)
  ),
  "`init_scale` should be a power of two, so that scaling rounds nothing, got "
  "0.3: take 0.25.": lambda: ols.DynamicLossScale(0.3),
  "`init_scale` should": lambda: ols.presets.torch(init_scale=1000.0),
  "`scale` should": lambda: ols.presets.mindspore_fixed(loss_scale=1000.0),
  "`probe_scale`": lambda: ols.rules.WarmStart(RULE, probe_scale=3.0),
}


@pytest.mark.parametrize("text", FIRST_SCALES)
def test_a_first_scale_that_rounds_gets_a_warning_at_construction(text):
  (only,) = told(FIRST_SCALES[text])
  assert only.startswith(text) and "a power of two" in only


HALF = jnp.ones(2, jnp.float16)
LORA = {"base": HALF, "adapter": jnp.ones(2)}
FROZEN = {"base": True, "adapter": False}
SGD_OR_FROZEN = {True: optax.set_to_zero(), False: optax.sgd(0.1)}


@pytest.mark.parametrize("compile", [jax.jit, lambda init: init])
def test_float16_parameters_without_a_master_get_a_warning_from_init(compile):
  text = (
    "parameters in float16 should have master weights, got float16 at base and "
    "no masters in the state of `inner`: small updates are rounded away. Write "
    "loss_scaling(master_weights(inner), rule), or keep the parameters in "
    "float32."
  )
  for inner in (ADAM, None):
    assert told(compile(scaling(inner).init), LORA) == [text]


HAVE_MASTERS = {
  "inside": (
    scaling(optax.chain(optax.clip(1.0), ols.master_weights(ADAM))),
    HALF,
  ),
  "outside": (ols.master_weights(scaling(ADAM)), HALF),
  "bfloat16": (scaling(ADAM), jnp.ones(2, jnp.bfloat16)),
  "float8": (scaling(ADAM), jnp.ones(2, jnp.float8_e4m3fn)),
  "FP8": (scaling(ADAM), {"_overwrite_with_gradient": HALF}),
  "freeze": (scaling(optax.chain(ADAM, optax.freeze(FROZEN))), LORA),
  "a frozen group": (scaling(optax.partition(SGD_OR_FROZEN, FROZEN)), LORA),
}


@pytest.mark.parametrize(
  ("tx", "params"), HAVE_MASTERS.values(), ids=HAVE_MASTERS
)
def test_parameters_that_have_a_master_or_need_none_get_no_warning(tx, params):
  assert told(tx.init, params) == []
