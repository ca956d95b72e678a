"""Programs that run and yet do not train: what is told, when, and when not.

Each mistake is a row: the text that a person sees, and whether it comes from a
constructor, while a step is traced, or on an eager step. The right programs
beside them say nothing, which the whole suite tests as well: there any warning
is an error.
"""

import copy
import dataclasses
import pathlib
import pickle
import re
import warnings

from flax import nnx
import jax
import jax.numpy as jnp
import optax
import pytest

import optax_lossscale as ols
from optax_lossscale._step import provenance

PARAMS = {"a": jnp.ones(3), "b": jnp.ones((2, 2))}
RULE = ols.DynamicLossScale(8.0, growth_interval=1)
LABELS = {"a": "x", "b": "y"}
MASK, REST = {"a": True, "b": False}, {"a": False, "b": True}


def scaling(inner=None, rule=RULE):
  return ols.loss_scaling(inner or optax.sgd(0.1), rule)


def loss_fn(params):
  return sum(jnp.sum(x**2) for x in jax.tree.leaves(params))


def batch_loss_fn(params, batch):
  return loss_fn(params) * jnp.mean(batch)


def told(program):
  """Returns what a program is told, text by text."""
  with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    program()
  assert all(x.category is ols.WiringWarning for x in caught)
  assert all(pathlib.Path(x.filename).name == "test_wiring.py" for x in caught)
  return [str(x.message) for x in caught]


# What is around the wrapper: `scaled_value_and_grad` sees the whole state.

ADAM = optax.adam(0.1)
MISPLACED = {
  "MultiSteps": (
    lambda: optax.MultiSteps(scaling(), 2),
    "`opt_state` must have optax.MultiSteps inside of loss_scaling, got it "
    "around, where it adds up scaled gradients, and an inf for ever. Write "
    "loss_scaling(optax.MultiSteps(inner, k), rule).",
  ),
  "apply_if_finite": (
    lambda: optax.chain(optax.identity(), optax.apply_if_finite(scaling(), 3)),
    "`opt_state` must have no optax.apply_if_finite around loss_scaling, got "
    "it at 1, where it takes a skipped step back and S with it, which then "
    "never shrinks. Leave it out: loss_scaling itself skips such a step.",
  ),
}


@pytest.mark.parametrize(("make", "text"), MISPLACED.values(), ids=MISPLACED)
def test_what_is_around_the_wrapper_is_told_at_construction(make, text):
  state = make().init(PARAMS)
  assert told(lambda: ols.scaled_value_and_grad(loss_fn, state)) == [text]
  # While it is traced, and once: the compiled step says nothing.
  step = jax.jit(lambda p, s: ols.scaled_value_and_grad(loss_fn, s)(p))
  assert told(lambda: (step(PARAMS, state), step(PARAMS, state))) == [text]


def test_each_function_that_scales_sees_what_is_around():
  tx = optax.apply_if_finite(scaling(), 3)
  state = tx.init(PARAMS)
  schedule = ols.PrecisionSchedule(jnp.float16, until_step=2)
  model = nnx.Linear(2, 1, rngs=nnx.Rngs(0))
  optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
  for construct in (
    lambda: ols.scaled_value_and_grad(loss_fn, state),
    lambda: ols.scale_loss(loss_fn(PARAMS), state),
    lambda: ols.nnx.scaled_value_and_grad(loss_fn, optimizer),
    lambda: ols.scale_loss(loss_fn(PARAMS), optimizer.opt_state),
    lambda: schedule.value_and_grad(loss_fn, state, schedule.init()),
  ):
    (text,) = told(construct)
    assert "no optax.apply_if_finite around" in text


# Only a step shows whether these are wrong: `check_step` runs one.
NOT_TOLD = {
  "both inside": scaling(optax.MultiSteps(optax.apply_if_finite(ADAM, 3), 2)),
  "beside": optax.chain(scaling(), optax.apply_if_finite(optax.trace(0.9), 3)),
  "a mask": optax.masked(scaling(), MASK),
  "masks as groups": optax.chain(
    optax.masked(scaling(), MASK), optax.masked(ADAM, REST)
  ),
  "a group": optax.multi_transform({"x": scaling(), "y": ADAM}, LABELS),
  "before and after": optax.chain(ADAM, scaling(), optax.ema(0.9)),
}


@pytest.mark.parametrize("tx", NOT_TOLD.values(), ids=NOT_TOLD)
def test_what_may_be_right_is_not_told(tx):
  state = tx.init(PARAMS)
  assert told(lambda: ols.scaled_value_and_grad(loss_fn, state)) == []


# Where gradients come from.

S1 = "`update` takes the gradients scaled, got some that `unscale` has divided"
S7 = (
  "`update` takes the opt_state that the gradients were scaled with, got "
  "gradients scaled by the number 8.0. Call scaled_value_and_grad(loss_fn, "
  "opt_state) anew in each step, with the opt_state that goes to `update`."
)
S8 = S7.replace("the number 8.0", "another S")
S16 = (
  "`overflow` must be passed to `update` unchanged after accumulate"
  "(..., drop=True), got none: S would stay where it is while micro-batches "
  "are dropped. Write tx.update(scaled_grads, opt_state, params, "
  "overflow=overflow)."
)
S16_FLAG = S16.replace(
  "none: S would stay where it is while micro-batches are dropped",
  "a flag alone: it skips the step, so nothing would be dropped",
)
S17 = (
  "`unscale` takes the opt_state from before `update`, got gradients scaled by "
  "another S. Call `unscale` before `update`, or keep the old opt_state."
)


def unscaled_by_hand(tx, params, state):
  _, scaled_grads = ols.scaled_value_and_grad(loss_fn, state)(params)
  return tx.update(ols.unscale(scaled_grads, state), state, params)[1]


def scaled_by_a_number(tx, params, state):
  _, scaled_grads = ols.scaled_value_and_grad(loss_fn, 8.0)(params)
  return tx.update(scaled_grads, state, params)[1]


def scaled_by_an_array_read_once(tx, params, state):
  _, scaled_grads = ols.scaled_value_and_grad(loss_fn, EIGHT)(params)
  return tx.update(scaled_grads, state, params)[1]


EIGHT = jnp.float32(8.0)


def unscaled_by_the_next_state(tx, params, state):
  _, scaled_grads = ols.scaled_value_and_grad(loss_fn, state)(params)
  _, state = tx.update(scaled_grads, state, params)
  ols.unscale(scaled_grads, state)
  return state


def test_a_condition_around_an_eager_update_is_right():
  tx = scaling()
  state = tx.init(PARAMS)

  def train():
    _, scaled_grads = ols.scaled_value_and_grad(loss_fn, state)(PARAMS)
    jax.lax.cond(
      True,
      lambda state: tx.update(scaled_grads, state, PARAMS)[1],
      lambda state: state,
      state,
    )

  assert told(train) == []


def dropped_and_not_passed_on(tx, params, state):
  _, scaled_grads, _ = ols.accumulate(
    ols.scaled_value_and_grad(batch_loss_fn, state), microbatches=2, drop=True
  )(params, jnp.ones(4))
  return tx.update(scaled_grads, state, params)[1]


def dropped_and_passed_on_as_flags(tx, params, state):
  _, scaled_grads, overflow = ols.accumulate(
    ols.scaled_value_and_grad(batch_loss_fn, state), microbatches=2, drop=True
  )(params, jnp.ones(4))
  return tx.update(scaled_grads, state, params, overflow=overflow.flags)[1]


MISTAKEN = {
  "S1": (unscaled_by_hand, S1),
  "S7": (scaled_by_a_number, S7),
  "S7, an array": (scaled_by_an_array_read_once, S8),
  "S16": (dropped_and_not_passed_on, S16),
  "S16, a flag": (dropped_and_passed_on_as_flags, S16_FLAG),
  "S17": (unscaled_by_the_next_state, S17),
}


@pytest.mark.parametrize(("step", "text"), MISTAKEN.values(), ids=MISTAKEN)
def test_gradients_of_another_kind_are_told_once_a_trace(step, text):
  tx = scaling()
  compiled = jax.jit(lambda params, state: step(tx, params, state))

  def train():
    state = tx.init(PARAMS)
    for _ in range(3):
      state = compiled(PARAMS, state)

  (only,) = told(train)
  assert only.startswith(text)


@pytest.mark.parametrize(("step", "text"), MISTAKEN.values(), ids=MISTAKEN)
def test_gradients_of_another_kind_are_told_eagerly(step, text):
  tx = scaling()
  state = tx.init(PARAMS)

  def train():
    nonlocal state
    state = step(tx, PARAMS, state)

  first = told(train)
  # A number is right for as long as S has not moved.
  assert len(first) == (0 if text in (S7, S8) else 1)
  (second,) = told(train)
  assert second.startswith(text)


def test_a_function_built_once_is_told_on_its_second_step():
  tx = scaling()
  state = tx.init(PARAMS)
  value_and_grad = ols.scaled_value_and_grad(loss_fn, state)

  def step():
    nonlocal state
    _, scaled_grads = value_and_grad(PARAMS)
    _, state = tx.update(scaled_grads, state, PARAMS)

  assert told(step) == []
  (text,) = told(step)
  assert text.startswith(S8)
  # Python's own filter shows a line once.
  with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("default")
    for _ in range(3):
      step()
  assert len(caught) == 1


def test_a_filter_silences_all_of_it():
  tx = scaling()
  with warnings.catch_warnings():
    warnings.filterwarnings("ignore", category=ols.WiringWarning)
    unscaled_by_hand(tx, PARAMS, tx.init(PARAMS))


def right(tx, params, state):
  _, scaled_grads = ols.scaled_value_and_grad(loss_fn, state)(params)
  ols.unscale(scaled_grads, state)
  return tx.update(scaled_grads, state, params)[1]


def by_the_scale_itself(tx, params, state):
  scale = ols.get_loss_scale(state)
  _, scaled_grads = ols.scaled_value_and_grad(loss_fn, scale)(params)
  return tx.update(scaled_grads, state, params)[1]


def with_a_rate_set_by_hand(tx, params, state):
  _, scaled_grads = ols.scaled_value_and_grad(loss_fn, state)(params)
  state = optax.tree.set(state, amax=jnp.float32(0))
  return tx.update(scaled_grads, state, params)[1]


def in_halves(tx, params, state):
  halve = jax.jit(lambda p, s: ols.scaled_value_and_grad(loss_fn, s)(p))
  _, scaled_grads = halve(params, state)
  ols.unscale(scaled_grads, state)
  return jax.jit(tx.update)(scaled_grads, state, params)[1]


def in_a_scan(tx, params, state):
  def body(state, _):
    return right(tx, params, state), None

  return jax.lax.scan(body, state, None, length=2)[0]


def twice_in_one_trace(tx, params, state):
  return right(tx, params, right(tx, params, state))


def in_a_branch(tx, params, state):
  _, scaled_grads = ols.scaled_value_and_grad(loss_fn, state)(params)
  return jax.lax.cond(
    state.skipped,
    lambda: state,
    lambda: tx.update(scaled_grads, state, params)[1],
  )


def summed_by_hand(tx, params, state):
  value_and_grad = ols.scaled_value_and_grad(loss_fn, state)
  scaled_grads = jax.tree.map(jnp.add, value_and_grad(params)[1], params)
  return tx.update(scaled_grads, state, params)[1]


def with_a_state_restored_from_a_checkpoint(tx, params, state):
  _, scaled_grads = ols.scaled_value_and_grad(loss_fn, state)(params)
  return tx.update(scaled_grads, jax.tree.map(jnp.copy, state), params)[1]


def two_optimizers(tx, params, state):
  other = scaling(ADAM, ols.DynamicLossScale(2.0))
  right(other, params, other.init(params))
  return right(tx, params, state)


def through_a_gradient_of_the_step(tx, params, state):
  def unrolled(params):
    return loss_fn(params), right(tx, params, right(tx, params, state))

  return jax.grad(unrolled, has_aux=True)(params)[1]


def dropped_and_passed_on(tx, params, state):
  _, scaled_grads, overflow = ols.accumulate(
    ols.scaled_value_and_grad(batch_loss_fn, state), microbatches=2, drop=True
  )(params, jnp.ones(4))
  return tx.update(scaled_grads, state, params, overflow=[False, overflow])[1]


def as_an_ensemble(tx, params, state):
  del state
  two = jax.tree.map(lambda x: jnp.stack([x, 2 * x]), params)
  return jax.vmap(lambda p: right(tx, p, tx.init(p)))(two)


def told_in_its_second_step(tx, step, jit):
  """Returns the warnings of a step from a state that a first one has made."""

  def run(params, state):
    return step(tx, params, state)

  run = jax.jit(run) if jit else run
  state = tx.init(PARAMS)
  if step is not as_an_ensemble:
    state = run(PARAMS, state)
  return told(lambda: run(PARAMS, state))


@pytest.mark.parametrize("jit", [False, True], ids=["eager", "jit"])
@pytest.mark.parametrize(
  "step",
  [
    right,
    by_the_scale_itself,
    with_a_rate_set_by_hand,
    in_halves,
    in_a_scan,
    in_a_branch,
    twice_in_one_trace,
    summed_by_hand,
    with_a_state_restored_from_a_checkpoint,
    two_optimizers,
    through_a_gradient_of_the_step,
    dropped_and_passed_on,
    as_an_ensemble,
  ],
)
def test_a_right_step_is_not_told_anything(step, jit):
  assert told_in_its_second_step(scaling(), step, jit) == []


@pytest.mark.parametrize("jit", [False, True], ids=["eager", "jit"])
@pytest.mark.parametrize(
  ("rule", "step"),
  [
    (ols.FixedLossScale(8.0), scaled_by_a_number),
    (ols.FixedLossScale(8.0), scaled_by_an_array_read_once),
    (ols.FixedLossScale(8.0), unscaled_by_the_next_state),
    (
      ols.presets.mindspore_fixed(loss_scale=8.0, drop_overflow_update=True),
      scaled_by_a_number,
    ),
    (ols.FixedLossScale(1.0), unscaled_by_hand),
    (None, right),
    (None, by_the_scale_itself),
    (None, unscaled_by_hand),
    (None, unscaled_by_the_next_state),
    (None, dropped_and_not_passed_on),
    (None, summed_by_hand),
    (None, in_a_branch),
    (None, as_an_ensemble),
  ],
)
def test_what_makes_no_difference_is_not_told(rule, step, jit):
  assert told_in_its_second_step(scaling(rule=rule), step, jit) == []


@pytest.mark.parametrize("jit", [False, True], ids=["eager", "jit"])
@pytest.mark.parametrize(
  ("step", "text"),
  [(scaled_by_a_number, S7), (scaled_by_an_array_read_once, S8)],
)
def test_scaled_gradients_are_told_where_scaling_is_switched_off(
  step, text, jit
):
  tx = scaling(rule=None)
  state = tx.init(PARAMS)

  def run(params, state):
    return step(tx, params, state)

  run = jax.jit(run) if jit else run
  assert told(lambda: run(PARAMS, state)) == [text]


def test_nnx_gradients_are_known_by_their_scale():
  model = nnx.Linear(2, 1, rngs=nnx.Rngs(0))
  optimizer = nnx.Optimizer(model, scaling(), wrt=nnx.Param)

  def loss(model, x):
    return jnp.sum(model(x))

  def step(model, optimizer, x, mistake):
    _, scaled = ols.nnx.scaled_value_and_grad(loss, optimizer)(model, x)
    grads = ols.unscale(scaled, optimizer.opt_state)
    optimizer.update(model, grads if mistake == S1 else scaled)
    if mistake == S17:
      ols.unscale(scaled, optimizer.opt_state)

  x = jnp.ones((1, 2))
  for run in step, nnx.jit(step, static_argnums=3):
    assert told(lambda run=run: run(model, optimizer, x, "")) == []
    for mistake in S1, S17:
      (text,) = told(lambda run=run: run(model, optimizer, x, mistake))  # noqa: B023
      assert text.startswith(mistake)


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


# What is refused.


# Wrong names of flags, each with the right way to pass it.
MISNAMED = {
  "overflowed": "overflow=overflowed",
  "is_overflow": "overflow=is_overflow",
  "found_inf": "overflow=found_inf",
  "found_nan": "overflow=found_nan",
  "has_overflow": "overflow=has_overflow",
  "grads_finite": "overflow=jnp.logical_not(grads_finite)",
  "is_finite": "overflow=jnp.logical_not(is_finite)",
  "skip_update": "skip=skip_update",
  "spike": "skip=spike",
}


@pytest.mark.parametrize(("name", "remedy"), MISNAMED.items(), ids=MISNAMED)
def test_a_flag_under_another_name_is_refused(name, remedy):
  tx = scaling(ADAM)
  with pytest.raises(TypeError, match=f"`{name}`.*mean {re.escape(remedy)}[?]"):
    tx.update(PARAMS, tx.init(PARAMS), PARAMS, **{name: True})


# The methods of torch's GradScaler, each with the remedy.
OF_A_SCALER = {
  "scale": "scaled_value_and_grad(loss_fn, opt_state)",
  "get_scale": "get_loss_scale(opt_state)",
  "unscale_": "unscale(scaled_grads, opt_state)",
  "step": "tx.update(scaled_grads, opt_state, params)",
  "state_dict": "save opt_state",
  "load_state_dict": "restore opt_state",
}


@pytest.mark.parametrize(("name", "remedy"), OF_A_SCALER.items())
def test_a_rule_has_no_method_of_torchs_scaler(name, remedy):
  assert not hasattr(RULE, name)
  text = f"DynamicLossScale has no `{name}`.*write .*{re.escape(remedy)}"
  with pytest.raises(AttributeError, match=text):
    getattr(RULE, name)
  with pytest.raises(AttributeError, match="has no attribute 'scales'"):
    _ = RULE.scales


def test_a_users_rule_keeps_the_attributes_of_these_names():
  @dataclasses.dataclass(frozen=True)
  class Rule(ols.FixedLossScale):
    step: int = 3

    @property
    def state_dict(self):
      return {"scale": self.scale}

    @property
    def broken(self):
      return self.step.missing

  rule = Rule(8.0)
  assert (rule.step, rule.state_dict) == (3, {"scale": 8.0})
  assert pickle.loads(pickle.dumps(RULE)) == copy.deepcopy(RULE) == RULE
  # The error of a property is its own.
  with pytest.raises(AttributeError, match="'int' object has no .*'missing'"):
    _ = rule.broken


def test_a_rule_in_a_chain_says_where_it_goes():
  class Rule(ols.FixedLossScale):
    @staticmethod
    def init():
      return RULE.init()

  assert Rule().init() == RULE.init()
  for rule in (RULE, ols.presets.torch(), ols.FixedLossScale()):
    tx = optax.chain(rule, ADAM)
    with pytest.raises(
      TypeError, match=r"write loss_scaling\(optax.adam\(.*le"
    ):
      tx.init(PARAMS)


@pytest.mark.parametrize(
  "tx",
  [scaling(), RULE, optax.MultiSteps(ADAM, 2)],
  ids=["tx", "rule", "multi"],
)
def test_an_optimizer_in_the_place_of_its_state_is_refused(tx):
  with pytest.raises(ValueError, match=r"init made: .*tx\.init\(params"):
    ols.scaled_value_and_grad(lambda x: x, tx)


def test_an_optimizer_may_take_such_a_name():
  seen = []

  def update(updates, state, params=None, *, overflowed):
    seen.append(overflowed)
    return updates, state

  inner = optax.GradientTransformationExtraArgs(optax.identity().init, update)
  tx = scaling(inner)
  tx.update(PARAMS, tx.init(PARAMS), PARAMS, overflowed=3)
  assert seen == [3]


def test_none_for_gradients_is_refused_where_there_are_parameters():
  tx = scaling()
  with pytest.raises(TypeError, match=r"`updates` must be .*, got None"):
    tx.update(None, tx.init(PARAMS), PARAMS)
  tx.update(None, tx.init(None), None)


def test_a_rule_in_the_place_of_the_optimizer_is_named():
  with pytest.raises(
    TypeError, match=r"`inner` .*the rule: loss_scaling\(optax.adam\(1e-3\), r"
  ):
    ols.loss_scaling(RULE, ADAM)


# What a rule starts with, and what parameters are made of.

FIRST_SCALES = {
  "fixed": (
    lambda: ols.FixedLossScale(1000),
    "`scale` should be a power of two, so that scaling rounds nothing, got "
    "1000: take 1024.0.",
  ),
  "dynamic": (
    lambda: ols.DynamicLossScale(2000),
    "`init_scale` should be a power of two, so that scaling rounds nothing, "
    "got 2000: take 2048.0; if the interval was meant: growth_interval=2000.",
  ),
  "dynamic, a fraction": (
    lambda: ols.DynamicLossScale(0.3),
    "`init_scale` should be a power of two, so that scaling rounds nothing, "
    "got 0.3: take 0.25.",
  ),
  "preset": (
    lambda: ols.presets.torch(init_scale=1000.0),
    "`init_scale` should be a power of two",
  ),
  "fixed preset": (
    lambda: ols.presets.mindspore_fixed(loss_scale=1000.0),
    "`scale` should be a power of two",
  ),
  "headroom": (
    lambda: ols.rules.HeadroomLossScale(init_scale=5.0),
    "`init_scale` should be a power of two",
  ),
  "warm start": (
    lambda: ols.rules.WarmStart(RULE, probe_scale=3.0),
    "`probe_scale` should be a power of two",
  ),
}


@pytest.mark.parametrize(
  ("make", "text"), FIRST_SCALES.values(), ids=FIRST_SCALES
)
def test_a_first_scale_that_rounds_is_told_at_construction(make, text):
  (only,) = told(make)
  assert only.startswith(text)


@pytest.mark.parametrize("scale", [2.0**-126, 0.5, 1, 1024, 2.0**127])
def test_a_power_of_two_is_not_told(scale):
  def make():
    ols.FixedLossScale(scale)
    ols.DynamicLossScale(
      8.0, growth_factor=1.5, backoff_factor=0.3, min_scale=0.1, max_scale=9.0
    )

  assert told(make) == []


def test_float16_parameters_without_a_master_are_told_by_init():
  params = {"w": jnp.ones(2), "v": jnp.ones(2, jnp.float16)}
  text = (
    "parameters in float16 should have master weights, got float16 at v and no "
    "masters in the state of `inner`: small updates are rounded away. Write "
    "loss_scaling(master_weights(inner), rule), or keep the parameters in "
    "float32."
  )
  assert told(lambda: scaling(ADAM).init(params)) == [text]
  assert told(lambda: jax.jit(scaling().init)(params)) == [text]


LORA = {"base": jnp.ones(3, jnp.float16), "adapter": jnp.ones(2)}
FROZEN = {"base": True, "adapter": False}
SGD_OR_FROZEN = {True: optax.set_to_zero(), False: optax.sgd(0.1)}


def test_what_other_parameters_have_a_state_for_is_not_frozen():
  (text,) = told(lambda: scaling(ADAM).init(LORA))
  assert "float16 at base" in text


FP8 = {
  "params": jnp.ones(2),
  "_overwrite_with_gradient": jnp.ones(2, "float16"),
}


@pytest.mark.parametrize(
  ("tx", "params"),
  [
    (scaling(ols.master_weights(ADAM)), jnp.ones(2, jnp.float16)),
    (
      scaling(optax.chain(optax.clip(1.0), ols.master_weights(ADAM))),
      jnp.ones(2, jnp.float16),
    ),
    (ols.master_weights(scaling(ADAM)), jnp.ones(2, jnp.float16)),
    (scaling(ADAM), jnp.ones(2, jnp.bfloat16)),
    (scaling(ADAM), jnp.ones(2, jnp.float8_e4m3fn)),
    (scaling(ADAM), FP8),
    (scaling(optax.selective_transform(ADAM, freeze_mask=FROZEN)), LORA),
    (scaling(optax.chain(ADAM, optax.freeze(FROZEN))), LORA),
    (scaling(optax.partition(SGD_OR_FROZEN, FROZEN)), LORA),
  ],
  ids=[
    "inside",
    "chain",
    "outside",
    "bfloat16",
    "float8",
    "FP8",
    "frozen",
    "freeze",
    "a frozen group",
  ],
)
def test_parameters_that_have_a_master_or_need_none_are_not_told(tx, params):
  assert told(lambda: tx.init(params)) == []
