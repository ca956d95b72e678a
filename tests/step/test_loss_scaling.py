"""The procedure of a step: unscale, update, skip, move S, report.

The rule is a stub that doubles S on a clean step and halves it on an overflow.
"""

import contextlib
import dataclasses
import re
from typing import NamedTuple

import jax
from jax.experimental import checkify
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_lossscale as ols
from tests import support
from tests.support import assert_same_bits
from tests.support import Stub

OTHER = "_overwrite_with_gradient"  # A collection that holds no gradients.
RULE = Stub(8.0)
INNER = optax.sgd(0.5, momentum=0.5)
NO, YES = jnp.array(False), jnp.array(True)


def wrapped(inner=INNER, rule=RULE, **options):
  return ols.loss_scaling(inner, rule, **options)


def assert_skipped(updates):
  """Asserts that every update is -0.0."""
  for update in jax.tree.leaves(updates):
    for part in (np.real(update), np.imag(update)):
      assert np.all(part == 0)
    assert np.all(np.signbit(np.real(update).astype(np.float32)))


# Unscaling.


@pytest.mark.parametrize("scale", [2.0**25, 3.0, 1e-3, 2.0**100])
def test_guarantee_2_gradients_are_unscaled_in_float32(scale):
  calls = []
  tx = wrapped(support.recording(calls), ols.FixedLossScale(scale))
  scaled_grads = {
    "half": jnp.array([1.0, 6e-8, -3.0], jnp.float16),
    "single": jnp.array([1.0, 1e-3, -3.0], jnp.float32),
  }
  updates, state = jax.jit(tx.update)(scaled_grads, tx.init(scaled_grads))
  inverse = np.float32(1) / np.float32(scale)
  for name, gradient in scaled_grads.items():
    assert calls[-1].updates[name].dtype == jnp.float32
    expected = np.asarray(gradient, np.float32) * inverse
    np.testing.assert_array_equal(updates[name], expected)
    assert np.all(updates[name] != 0)
  assert state.inv_scale == inverse


def test_guarantee_2_float64_and_complex_keep_their_dtype():
  with jax.enable_x64(True):
    tx = wrapped(optax.identity(), ols.FixedLossScale(1000.0))
    scaled_grads = {
      "double": jnp.array([np.pi * 1000], jnp.float64),
      "complex": jnp.array([1000.0 + 2000.0j], jnp.complex64),
      "wide": jnp.array([1000j * np.pi], jnp.complex128),
    }
    updates, _ = jax.jit(tx.update)(scaled_grads, tx.init(scaled_grads))
    for name, gradient in scaled_grads.items():
      assert updates[name].dtype == gradient.dtype
    # A float32 inverse would cost float64 its precision.
    np.testing.assert_allclose(updates["double"], np.pi, rtol=1e-15)
    np.testing.assert_allclose(updates["complex"], 1 + 2j, rtol=1e-6)
    np.testing.assert_allclose(updates["wide"], 1j * np.pi, rtol=1e-15)


@pytest.mark.parametrize("scale", [2.0**126, 2.0**127, 2.0**128 - 2.0**104])
def test_gradients_are_unscaled_where_the_inverse_is_subnormal(scale):
  for dtype in (jnp.float32, jnp.complex64):
    true = jnp.array([0.5, -0.75, 2.0**-60], dtype)
    unscaled = jax.jit(ols.unscale)(true * scale, jnp.float32(scale))
    np.testing.assert_allclose(unscaled, true, rtol=1e-6)


def test_a_complex_inf_stays_an_inf_when_it_is_unscaled():
  tx = wrapped(optax.identity(), ols.FixedLossScale(4.0, skip=False))
  gradient = jnp.array([complex(np.inf, 8.0)])
  updates, _ = tx.update(gradient, tx.init(gradient))
  assert updates[0] == complex(np.inf, 2.0)


def test_python_and_numpy_gradients_are_gradients():
  tx = wrapped(optax.identity())
  scaled_grads = {
    "python": 8.0,
    "numpy": np.full(2, 16.0),
    "scalar": np.float32(8),
  }
  updates, state = tx.update(scaled_grads, tx.init(scaled_grads))
  assert updates["python"] == updates["scalar"] == 1.0
  np.testing.assert_array_equal(updates["numpy"], [2.0, 2.0])
  assert state.amax == 16.0
  assert tx.update({**scaled_grads, "python": np.nan}, state)[1].skipped


# Situations in which a step runs.


def switched(transform, *switches):
  """Returns a transform of a function that also sets JAX's switches."""

  def switched_transform(function):
    def run(*operands):
      with contextlib.ExitStack() as stack:
        for switch in switches:
          stack.enter_context(switch())
        return jax.block_until_ready(transform(function)(*operands))

    return run

  return switched_transform


def alone_in_a_batch(transform):
  """Returns a transform that maps a function over a batch of one."""

  def mapped_transform(function):
    def run(*operands):
      batch = jax.tree.map(lambda x: x[None], operands)
      return jax.tree.map(lambda x: x[0], transform(function)(batch))

    return run

  return mapped_transform


def checkified(function):
  checked = jax.jit(checkify.checkify(function, errors=checkify.all_checks))
  return lambda *operands: checked(*operands)[1]


SITUATIONS = {
  "eager": lambda function: function,
  "jit": jax.jit,
  "scan": alone_in_a_batch(
    lambda f: lambda batch: jax.lax.map(lambda operands: f(*operands), batch)
  ),
  "vmap": alone_in_a_batch(lambda f: lambda batch: jax.vmap(f)(*batch)),
  "checkify": checkified,
  "disable_jit": switched(jax.jit, jax.disable_jit),
  "debug_nans": switched(jax.jit, lambda: jax.debug_nans(True)),
  "enable_checks and leaks": switched(
    jax.jit, lambda: jax.enable_checks(True), jax.checking_leaks
  ),
  "enable_x64": jax.jit,
  "strict promotion": switched(
    jax.jit,
    lambda: jax.numpy_dtype_promotion("strict"),
    lambda: jax.numpy_rank_promotion("raise"),
  ),
  "transfer_guard": switched(jax.jit, lambda: jax.transfer_guard("disallow")),
}


def make_params():
  """Returns leaves of several dtypes; the last is float64 if JAX has it."""
  return {
    "half": jnp.array([1.0, -0.0, 0.5], jnp.float16),
    "single": jnp.array([[-0.0, 4.0]], jnp.float32),
    "wide": jnp.asarray(np.array([0.25, 3.0])),
  }


def bare_update(rule, gradients, params):
  """Returns what the optimizer alone does, in float32 if there is a rule."""
  at_least = jnp.float16 if rule is None else jnp.float32
  gradients, wide_params = jax.tree.map(
    lambda x: x.astype(jnp.promote_types(x.dtype, at_least)),
    (gradients, params),
  )
  updates, inner_state = INNER.update(
    gradients, INNER.init(wide_params), wide_params
  )
  updates = jax.tree.map(lambda u, p: u.astype(p.dtype), updates, params)
  return updates, inner_state


@pytest.mark.parametrize("rule", [RULE, None], ids=["rule", "no rule"])
@pytest.mark.parametrize("situation", SITUATIONS)
def test_in_each_situation_a_step_is_applied_whole_or_changes_no_bit(
  situation, rule
):
  tx = wrapped(rule=rule)

  def update(scaled_grads, state, params, overflow, skip):
    return tx.update(scaled_grads, state, params, overflow=overflow, skip=skip)

  with jax.enable_x64(situation == "enable_x64"):
    run = SITUATIONS[situation](update)
    params = make_params()
    first = tx.init(params)
    gradients = jax.tree.map(lambda x: (x + 1) / 2, params)
    scaled_grads = jax.tree.map(
      lambda x: x * ols.get_loss_scale(first).astype(x.dtype), gradients
    )
    updates, state = run(scaled_grads, first, params, NO, NO)
    expected, inner_state = bare_update(rule, gradients, params)
    assert_same_bits((updates, state.inner_state), (expected, inner_state))
    assert state.applied_steps == 1 and not state.skipped
    assert support.describe(state) == support.describe(first)
    outer = jax.tree.leaves(state._replace(inner_state=()))
    assert {str(x.dtype) for x in outer} <= {"bool", "float32", "int32"}

    infinite = jax.tree.map(lambda x: x / 0, scaled_grads)
    skips = [(scaled_grads, NO, YES), (infinite, NO, YES)]
    if rule is not None:
      assert ols.get_loss_scale(state) == 16
      skips += [(scaled_grads, YES, NO), (infinite, NO, NO)]
    for bad, overflow, skip in skips:
      updates, after = run(bad, state, params, overflow, skip)
      assert after.skipped
      assert_skipped(updates)
      assert_same_bits(optax.apply_updates(params, updates), params)
      assert_same_bits(after.inner_state, state.inner_state)
      counts = (after.applied_steps, after.skipped_steps)
      assert counts == (1, 1)


NOISE = optax.add_noise(0.5, 0.5, key=jax.random.key(0))
# A switch, its value, whether the step compiles, its optimizer, its gradient.
STOPS = [
  ("debug_infs", True, True, INNER, np.inf, "inf"),
  ("debug_infs", True, False, INNER, np.inf, "inf"),
  ("debug_nans", True, True, INNER, np.nan, "nan"),
  # The optimizer runs on inf, and only then is its result discarded.
  ("debug_nans", True, False, optax.adam(0.5), np.inf, "nan.* div"),
  # The state holds the old key or the new one, which JAX cannot follow.
  ("debug_key_reuse", True, True, NOISE, 1.0, "already consumed"),
  # Outside jit, each number in the code is a transfer.
  ("transfer_guard", "disallow", False, INNER, 1.0, "Disallowed host-to-dev"),
]


@pytest.mark.parametrize(
  ("switch", "value", "compiles", "inner", "gradient", "message"),
  STOPS,
  ids=lambda x: x if isinstance(x, str) else "",
)
def test_a_debugging_switch_stops_the_step_that_its_guide_says(
  switch, value, compiles, inner, gradient, message
):
  tx = wrapped(inner)
  update = jax.jit(tx.update) if compiles else tx.update
  scaled_grads, state = jnp.array([gradient, 1.0]), tx.init(jnp.ones(2))
  with pytest.raises(Exception, match=message), getattr(jax, switch)(value):
    jax.block_until_ready(update(scaled_grads, state))


def test_a_program_that_forbids_transfers_starts():
  tx = wrapped(optax.adam(1e-3))
  params = jnp.ones(2)
  with jax.transfer_guard("disallow"):
    jax.eval_shape(tx.init, params)
    state = jax.jit(tx.init)(params)
  assert ols.get_loss_scale(state) == 8


@pytest.mark.parametrize("rule", [RULE, None])
def test_effects_of_the_optimizer_happen_once_on_a_skipped_step(rule, capfd):
  def effects(updates, params):
    jax.debug.print("updates {}", updates)
    checkify.check(jnp.sum(updates) < 0, "the updates are positive")
    return updates

  tx = wrapped(optax.stateless(effects), rule)
  checked = jax.jit(checkify.checkify(tx.update))
  error, _ = checked(jnp.ones(2), tx.init(jnp.ones(2)), skip=YES)
  jax.effects_barrier()
  assert capfd.readouterr().out.count("updates") == 1
  assert "the updates are positive" in error.get()


def test_guarantee_9_python_numbers_never_enter_the_state():
  class WeakState(NamedTuple):
    loss_scale: float
    steps: int

  @dataclasses.dataclass(frozen=True)
  class Weak(ols.LossScale):
    def init(self):
      return WeakState(8.0, 0)

    def update(self, state, overflow, *, amax=None):
      return WeakState(jnp.where(overflow, 4.0, 8.0), state.steps + 1)

  inner = optax.GradientTransformation(
    lambda _: {"count": 0, "rate": 0.5},
    lambda u, s, p=None: (u, {"count": s["count"] + 1, "rate": s["rate"] * 1}),
  )
  tx = wrapped(inner, Weak())
  state = tx.init(jnp.zeros(2))
  assert not any(x.weak_type for x in jax.tree.leaves(state))
  _, after = jax.jit(tx.update)(jnp.ones(2), state)
  assert support.describe(after) == support.describe(state)


def test_guarantee_9_the_dtypes_of_the_inner_state_are_those_of_init():
  inner = optax.GradientTransformation(
    lambda _: {"trace": jnp.zeros(2, jnp.bfloat16), "count": jnp.int32(0)},
    lambda updates, state, params=None: (
      updates,
      {"trace": state["trace"] + updates, "count": state["count"] + 0.5},
    ),
  )
  tx = wrapped(inner)
  _, after = jax.jit(tx.update)(jnp.full(2, 8.0), tx.init(jnp.zeros(2)))
  assert after.inner_state["trace"].dtype == jnp.bfloat16
  assert after.inner_state["count"].dtype == jnp.int32
  np.testing.assert_array_equal(after.inner_state["trace"], [1.0, 1.0])


# The outcome of a step.

# The first of two micro-batches overflows, and is part of the sum or left out.
WINDOW, DROPPED = (
  ols.WindowOverflow(jnp.array([True, False]), jnp.array([jnp.inf, 1.0]), drop)
  for drop in (False, True)
)
STATUS, UNDEFINED = (
  ols.hardware.FloatStatus(2, 0),
  ols.hardware.FloatStatus(0, 3),
)
BOTH = {"skip": YES, "overflow": DROPPED}
# The rule's `skip`, the gradient and the arguments of `update`. Then whether
# the step is skipped, overflows and is a requested skip; and the next S.
OUTCOMES = {
  "clean": (True, 1.0, {}, (0, 0, 0), 16),
  "inf": (True, np.inf, {}, (1, 1, 0), 4),
  "NaN": (True, np.nan, {}, (1, 1, 0), 4),
  "inf, applied": (False, np.inf, {}, (0, 1, 0), 4),
  "the caller's overflow": (True, 1.0, {"overflow": True}, (1, 1, 0), 4),
  "the caller's flag, not set": (True, 1.0, {"overflow": NO}, (0, 0, 0), 16),
  "one of two flags": (True, 1.0, {"overflow": [NO, YES]}, (1, 1, 0), 4),
  "a status": (True, 1.0, {"overflow": STATUS}, (1, 1, 0), 4),
  "only undefined": (True, 1.0, {"overflow": UNDEFINED}, (0, 0, 0), 16),
  "amax": (True, 1.0, {"amax": np.inf}, (1, 1, 0), 4),
  "a window": (True, 1.0, {"overflow": WINDOW}, (1, 1, 0), 4),
  "a dropped micro-batch": (True, 1.0, {"overflow": DROPPED}, (0, 1, 0), 4),
  "skip": (True, 1.0, {"skip": True}, (1, 0, 1), 8),
  "skip, not set": (True, 1.0, {"skip": NO}, (0, 0, 0), 16),
  "skip, with a rule that applies": (False, 1.0, {"skip": YES}, (1, 0, 1), 8),
  # Either alone skips the step.
  "skip and inf": (True, np.inf, {"skip": YES}, (1, 1, 0), 4),
  # The overflow alone does not.
  "skip and inf, applied": (False, np.inf, {"skip": YES}, (1, 1, 1), 4),
  "skip and a dropped micro-batch": (True, 1.0, BOTH, (1, 1, 1), 4),
}


@pytest.mark.parametrize(
  ("rule_skips", "value", "options", "expected", "loss_scale"),
  OUTCOMES.values(),
  ids=OUTCOMES,
)
def test_the_findings_decide_the_step_and_the_next_s(
  rule_skips, value, options, expected, loss_scale
):
  tx = wrapped(rule=Stub(8.0, skip=rule_skips))
  gradient = jnp.array([value, 8.0])
  state = tx.init(gradient)
  updates, after = tx.update(gradient, state, **options)
  found = (after.skipped, after.overflow, after.requested_skips)
  assert tuple(map(int, found)) == expected
  assert ols.get_loss_scale(after) == loss_scale
  assert not after.stalled
  if after.skipped:
    assert_skipped(updates)
    assert_same_bits(after.inner_state, state.inner_state)
  else:
    np.testing.assert_array_equal(updates, gradient / -16)
    np.testing.assert_array_equal(after.inner_state[0].trace, gradient / 8)
  counts = (after.applied_steps, after.skipped_steps, after.consecutive_skips)
  assert counts == ((0, 1, 1) if after.skipped else (1, 0, 0))
  if options.keys() <= {"skip"}:
    np.testing.assert_equal(float(after.amax), np.maximum(value, 8.0))


@pytest.mark.parametrize(
  ("flag", "expected"),
  [
    (np.bool_(True), True),
    (0, False),
    (2**32, True),
    (10**400, True),
    (np.int64(2**32), True),
    (0.0, False),
    (0.25, True),
    (jnp.nan, True),
    (jnp.array([0, 0, 3]), True),
    (jnp.zeros((2, 2)), False),
    (jnp.array([], jnp.float32), False),
    ([], False),
    ((0, jnp.zeros(2)), False),
    ([False, jnp.array([0.0, 1.0])], True),
  ],
)
def test_a_flag_is_set_if_anything_in_it_is_not_zero(flag, expected):
  tx = wrapped()
  state = tx.init(jnp.zeros(2))
  for name in ("overflow", "skip"):
    _, after = tx.update(jnp.ones(2), state, **{name: flag})
    assert after.skipped == expected
    assert after.overflow == (expected and name == "overflow")
    assert not after.nan


def test_without_a_flag_the_count_of_requested_skips_passes_through():
  tx = wrapped()
  state = tx.init(jnp.ones(2))

  def counts(**options):
    update = lambda state: tx.update(jnp.ones(2), state, **options)[1]  # noqa: E731
    jaxpr = jax.make_jaxpr(update)(state).jaxpr
    structure = jax.tree.structure(state)
    taken, given = (
      jax.tree.unflatten(structure, x).requested_skips
      for x in (jaxpr.invars, jaxpr.outvars)
    )
    return taken, given

  for options, is_same in (({}, True), ({"skip": NO}, False)):
    taken, given = counts(**options)
    assert (given is taken) == is_same


@dataclasses.dataclass(frozen=True)
class Floored(Stub):
  """A stub that stalls where an overflow meets S at 2."""

  def update(self, state, overflow, *, amax=None):
    moved = super().update(state, overflow).loss_scale
    return support.StubState(jnp.maximum(moved, 2))

  def stalled(self, state, overflow):
    return overflow & (state.loss_scale <= 2)


def test_guarantee_17_an_overflow_at_the_floor_is_reported_as_stalled():
  tx = wrapped(rule=Floored(8.0))
  state = tx.init(jnp.zeros(1))
  seen = []
  for bad in (True, True, True, False, True):
    _, state = tx.update(jnp.where(bad, jnp.inf, jnp.ones(1)), state)
    seen.append((float(ols.get_loss_scale(state)), bool(state.stalled)))
  assert seen == [(4, False), (2, False), (2, True), (4, False), (2, False)]
  tx = wrapped(rule=ols.FixedLossScale(1.0))
  _, state = tx.update(jnp.full(1, jnp.inf), tx.init(jnp.zeros(1)))
  assert state.skipped and state.stalled


def test_guarantee_17_no_step_is_applied_because_too_many_were_skipped():
  tx = wrapped()
  params = jnp.ones(2)

  def step(state, _):
    updates, state = tx.update(jnp.full(2, jnp.nan), state, params)
    return state, jnp.all(updates == 0) & jnp.all(jnp.signbit(updates))

  state, untouched = jax.lax.scan(step, tx.init(params), length=5_000)
  assert jnp.all(untouched)
  assert (state.applied_steps, state.skipped_steps) == (0, 5_000)
  assert state.stalled and state.nan


def test_guarantee_18_schedules_inside_count_applied_steps():
  schedule = optax.piecewise_constant_schedule(1.0, {1: 0.5, 2: 0.5})
  tx = wrapped(optax.sgd(schedule), ols.FixedLossScale(1.0))
  state = tx.init(jnp.zeros(1))
  steps = []
  for bad in (False, True, True, False, True, False):
    updates, state = tx.update(jnp.where(bad, jnp.inf, jnp.ones(1)), state)
    steps.append(float(updates[0]))
  assert steps == [-1.0, 0.0, 0.0, -0.5, 0.0, -0.25]
  assert optax.tree.get(state, "count") == state.applied_steps == 3


# Skips.


def test_guarantee_6_complex_and_narrow_leaves_are_kept_on_a_skip():
  kept = {"complex": jnp.array([1.0 + 2.0j]), "half": jnp.ones(1, jnp.bfloat16)}

  def move(updates, state, params=None):
    return jnp.array([1j]), jax.tree.map(lambda x: x * jnp.nan, state)

  tx = wrapped(optax.GradientTransformation(lambda _: kept, move))
  scaled_grads = jnp.array([complex(np.nan, 0.0)])
  state = tx.init(jnp.zeros(1, jnp.complex64))
  updates, after = jax.jit(tx.update)(scaled_grads, state)
  assert np.signbit(updates.imag).all()
  assert_skipped(updates)
  assert_same_bits(after.inner_state, kept)


def test_guarantee_6_python_numbers_in_a_skipped_state_and_updates():
  inner = optax.GradientTransformation(
    lambda _: {"count": 3},
    lambda updates, state, params=None: (0.5, {"count": state["count"] + 1}),
  )
  tx = wrapped(inner)
  state = tx.init(0.0)._replace(inner_state={"count": 3})
  updates, state = tx.update(jnp.nan, state)
  assert state.skipped
  assert updates == 0
  assert state.inner_state["count"] == 3


# Leaves that are not gradients, and other arguments.


def test_guarantee_12_leaves_that_are_no_gradients_pass_through():
  tree = {
    "none": None,
    "masked": optax.MaskedNode(),
    "integer": jnp.array([2**30, 7]),
    "float0": np.zeros(2, jax.dtypes.float0),
    "key": jax.random.key(0),
    "empty": jnp.zeros((0,)),
    "weight": jnp.array([8.0]),
  }
  tx = wrapped(optax.identity())
  updates, state = tx.update(tree, tx.init(tree), tree)
  assert not state.overflow
  assert updates["float0"].dtype == jax.dtypes.float0
  expected = {**tree, "weight": jnp.array([1.0])}
  del updates["float0"], expected["float0"]
  assert_same_bits(updates, expected)


@pytest.mark.parametrize("tree", [{}, (), None, []])
def test_guarantee_12_empty_trees_pass_through(tree):
  tx = wrapped(optax.adam(1.0))
  updates, state = tx.update(tree, tx.init(tree), tree)
  assert updates == tree
  assert not state.overflow
  assert state.applied_steps == 1


def test_guarantee_12_fp8_collections_go_around_the_wrapper():
  calls = []
  params = {"kernel": jnp.array([1.0, 2.0]), OTHER: {"scale": jnp.ones(1)}}
  tx = wrapped(support.recording(calls))
  # The next scale of an FP8 layer may be anything, also inf.
  scaled_grads = {
    "kernel": jnp.array([8.0, 16.0]),
    OTHER: {"scale": jnp.array([jnp.inf])},
  }
  updates, state = jax.jit(tx.update)(scaled_grads, tx.init(params), params)
  assert not state.overflow
  assert state.amax == 16.0
  np.testing.assert_array_equal(updates["kernel"], [1.0, 2.0])
  np.testing.assert_array_equal(updates[OTHER]["scale"], [jnp.inf])
  for call in calls:
    assert len(jax.tree.leaves(call.params)) == 1


@pytest.mark.parametrize(
  ("rule", "value", "options", "expected"),
  [
    (RULE, 1.0, {}, 5),
    (RULE, np.inf, {}, 3),
    (RULE, 1.0, {"skip": YES}, 3),
    (Stub(8.0, skip=False), np.inf, {}, 5),
    (Stub(8.0, skip=False), 1.0, {"skip": NO}, 5),
    (Stub(8.0, skip=False), 1.0, {"skip": YES}, 3),
    (None, np.inf, {}, 5),
    (None, 1.0, {"skip": NO}, 5),
    (None, 1.0, {"skip": YES}, 3),
  ],
)
def test_guarantee_12_a_skip_keeps_the_old_value_of_an_fp8_collection(
  rule, value, options, expected
):
  tx = wrapped(rule=rule)
  params = {"w": jnp.ones(2), OTHER: jnp.float32(3.0)}
  scaled_grads = {"w": jnp.full(2, value), OTHER: jnp.float32(5.0)}
  state = tx.init(params)
  updates, _ = tx.update(scaled_grads, state, params, **options)
  assert updates[OTHER] == expected
  may_skip = options or (rule is not None and rule.skip)
  if not may_skip:
    tx.update(scaled_grads, state)
    return
  with pytest.raises(ValueError, match="`params` must be passed to update"):
    tx.update(scaled_grads, state, **options)


@pytest.mark.parametrize("rule", [RULE, None])
def test_guarantee_13_extra_arguments_reach_the_inner_transformation(rule):
  calls = []
  tx = wrapped(support.recording(calls), rule)
  value, grad = object(), {"not": "touched"}
  state = tx.init(jnp.zeros(2))
  options = {"overflow": False, "amax": 1.0, "skip": False}
  tx.update(jnp.ones(2), state, None, **options, value=value, grad=grad)
  assert calls[-1].extra_args == {"value": value, "grad": grad}
  # Optimizers without such arguments accept them too.
  tx = wrapped(rule=rule)
  tx.update(jnp.ones(2), tx.init(jnp.ones(2)), value=value)


def test_parameters_may_be_two_trees():
  tx = wrapped(optax.lookahead(optax.sgd(1.0), 2, 0.5))
  params = optax.LookaheadParams.init_synced(jnp.array([1.0, 2.0]))
  updates, state = tx.update(jnp.array([8.0, 16.0]), tx.init(params), params)
  np.testing.assert_array_equal(updates.fast, [-1.0, -2.0])
  updates, _ = tx.update(jnp.array([jnp.inf, 1.0]), state, params)
  assert_skipped(updates)


def test_parameters_without_a_gradient_need_not_be_arrays():
  params = {"w": jnp.ones(2), "activation": jax.nn.relu}
  tx = wrapped(optax.sgd(1.0))
  scaled_grads = {"w": jnp.array([8.0, 16.0]), "activation": None}
  updates, _ = tx.update(scaled_grads, tx.init(scaled_grads), params)
  np.testing.assert_array_equal(updates["w"], [-1.0, -2.0])
  assert updates["activation"] is None


# The rule, and an S that is not usable.


@dataclasses.dataclass(frozen=True)
class Reckless(Stub):
  """A rule that multiplies S by anything, without bounds, in any dtype."""

  factor: float = 1.0
  dtype: str = "float32"

  def update(self, state, overflow, *, amax=None):
    moved = state.loss_scale * jnp.float32(self.factor)
    return support.StubState(moved.astype(self.dtype))


@pytest.mark.parametrize(
  ("factor", "dtype"),
  [
    *((x, "float32") for x in (2.0, 0.5, 0.0, np.inf, np.nan, -1.0)),
    (2.0, "float16"),
    (0.5, "float16"),
    (0.5, "int32"),
  ],
)
def test_guarantee_4_a_reckless_rule_is_held(factor, dtype):
  tx = wrapped(rule=Reckless(factor=factor, dtype=dtype))

  def step(state, _):
    _, state = tx.update(jnp.ones(1), state)
    return state, (ols.get_loss_scale(state), state.inv_scale)

  state, (scales, inverses) = jax.lax.scan(
    step, tx.init(jnp.zeros(1)), length=150
  )
  assert state.loss_scale_state.loss_scale.dtype == jnp.float32
  assert jnp.all(jnp.isfinite(scales) & (scales >= support.SMALLEST))
  # Above 2**126 the inverse is subnormal, which a backend may flush.
  assert jnp.all((inverses >= support.SMALLEST) | (scales > 2.0**126))
  assert state.stalled and state.applied_steps == 150
  # The rule does not see a step that is skipped by request.
  assert not tx.update(jnp.ones(1), state, skip=True)[1].stalled


UNUSABLE = [jnp.nan, 0.0, 2.0**-127, 2.0**-149, jnp.inf, -8.0, -jnp.inf]


def with_scale(state, loss_scale):
  """Returns the state of a wrapper with another S."""
  return state._replace(
    loss_scale_state=support.StubState(jnp.float32(loss_scale))
  )


@pytest.mark.parametrize("skip", [False, True])
@pytest.mark.parametrize("scale", UNUSABLE)
def test_guarantee_4_a_damaged_scale_is_skipped_and_starts_over(scale, skip):
  tx = wrapped()
  _, used = tx.update(jnp.ones(2), tx.init(jnp.ones(2)))
  updates, after = tx.update(jnp.ones(2), with_scale(used, scale), skip=skip)
  assert after.skipped and after.overflow and after.stalled
  assert after.requested_skips == 0
  assert_skipped(updates)
  assert_same_bits(after.inner_state, used.inner_state)
  assert_same_bits(after.loss_scale_state, RULE.init())


def test_guarantee_4_without_skip_a_damaged_scale_is_reported():
  tx = wrapped(optax.sgd(1.0), Stub(8.0, skip=False))
  state = with_scale(tx.init(jnp.zeros(1)), 0.0)
  updates, state = tx.update(jnp.ones(1), state)
  assert updates[0] == -jnp.inf
  assert state.overflow and state.stalled and not state.skipped
  assert ols.get_loss_scale(state) == 8.0


def test_guarantee_4_devices_skip_a_damaged_scale_together():
  tx = wrapped(axis_name="d")
  state = tx.init(jnp.zeros(()))
  stacked = jax.vmap(lambda s: with_scale(state, s))(jnp.array([8.0, jnp.nan]))
  updates, after = jax.vmap(tx.update, axis_name="d")(jnp.ones(2), stacked)
  np.testing.assert_array_equal(after.skipped, [True, True])
  assert_skipped(updates)


# Many devices; test_devices has the rest.


@pytest.mark.parametrize("rule", [RULE, None])
def test_one_devices_flag_skips_the_step_on_all_along_a_named_axis(rule):
  tx = wrapped(rule=rule, axis_name="data")
  state = tx.init(jnp.ones(2))

  def step(flag, gradient):
    _, after = tx.update(jnp.full(2, gradient[0]), state, skip=flag)
    mine = (after.skipped, after.overflow, after.requested_skips)
    return jnp.stack([jnp.asarray(x, jnp.int32) for x in mine])[None]

  mapped = support.on_each_device(
    step, support.SPREAD, in_specs=(support.SPREAD, support.SPREAD)
  )
  step = jax.jit(mapped).lower(jnp.zeros(8, bool), jnp.ones(8)).compile()
  assert len(support.between_devices(step)) == 1
  one, third, fifth = (
    np.ones(8, np.float32),
    np.arange(8) == 3,
    np.arange(8) == 5,
  )
  assert np.asarray(step(third, one)).tolist() == [[1, 0, 1]] * 8
  assert np.asarray(step(third & fifth, one)).tolist() == [[0, 0, 0]] * 8
  if rule is not None:
    # One device overflows and another asks to skip.
    infinite = np.where(fifth, np.inf, one)
    assert np.asarray(step(third, infinite)).tolist() == [[1, 1, 0]] * 8


@pytest.mark.parametrize("rule", [RULE, None])
def test_a_flag_that_varies_along_an_unnamed_axis_is_refused(rule):
  tx = wrapped(rule=rule)
  state = tx.init(jnp.ones(2))
  step = support.on_each_device(
    lambda flag: tx.update(jnp.ones(2), state, skip=flag)[1].skipped[None],
    support.SPREAD,
  )
  with pytest.raises(ValueError, match="must skip together.*axis_name='data'"):
    jax.jit(step)(jnp.zeros(8, bool))


# Without a rule, the same program trains like the bare optimizer.

PARAMS = {"w": jnp.linspace(-1.0, 1.0, 6).reshape(3, 2), "b": jnp.ones(2)}
X = np.linspace(-1, 1, 12, dtype=np.float32).reshape(4, 3)
BARE = optax.adamw(0.1)
OFF = ols.loss_scaling(BARE, None)


def loss_fn(params, x):
  return jnp.mean((x @ params["w"] + params["b"]) ** 2)


def off_step(params, opt_state, x):
  loss, scaled_grads = ols.scaled_value_and_grad(loss_fn, opt_state)(params, x)
  updates, opt_state = OFF.update(
    scaled_grads, opt_state, params, overflow=True, amax=jnp.inf
  )
  return optax.apply_updates(params, updates), opt_state, loss


def bare_step(params, opt_state, x):
  loss, grads = jax.value_and_grad(loss_fn)(params, x)
  updates, opt_state = BARE.update(grads, opt_state, params)
  return optax.apply_updates(params, updates), opt_state, loss


def operations(step, *operands):
  """Returns how often each operation occurs in what XLA makes of a step."""
  text = support.compile_donated(step, *operands).as_text()
  # A flag that is written into its donated buffer.
  text = text.replace(" pred[] copy(", " ")
  names = re.findall(r"= [^=]*?\]\S* ([a-z][a-z-]*)\(", text)
  left_out = ("parameter", "tuple", "constant", "get-tuple-element")
  return {x: names.count(x) for x in names if x not in left_out}


def test_without_a_rule_the_state_has_the_fields_that_it_has_with_one():
  off, on = OFF.init(PARAMS), wrapped(BARE).init(PARAMS)
  assert type(off) is ols.LossScalingState
  assert jax.tree.leaves(off.loss_scale_state) == []
  assert_same_bits(off, on._replace(loss_scale_state=off.loss_scale_state))


def test_without_a_rule_training_is_that_of_the_bare_optimizer_bit_for_bit():
  ours, theirs = (PARAMS, OFF.init(PARAMS)), (PARAMS, BARE.init(PARAMS))
  for x in (X, X + 1, X * np.nan):
    *ours, loss = jax.jit(off_step)(*ours, x)
    *theirs, expected = jax.jit(bare_step)(*theirs, x)
    assert_same_bits((ours[0], loss), (theirs[0], expected))
    assert_same_bits(ours[1].inner_state, theirs[1])
  assert ours[1].applied_steps == 3
  metrics = ols.loss_scale_metrics(ours[1])
  assert not metrics["overflow"] | metrics["skipped"] | metrics["stalled"]


def test_without_a_rule_xla_compiles_the_bare_optimizer_and_one_count():
  ours = operations(off_step, PARAMS, OFF.init(PARAMS), X)
  theirs = operations(bare_step, PARAMS, BARE.init(PARAMS), X)
  more = {
    name: count - theirs.get(name, 0)
    for name, count in ours.items()
    if count > theirs.get(name, 0)
  }
  # The count of applied steps, as Adam's own: one of each, in one kernel. And a
  # 0 that is copied: no step was skipped last.
  counting = ("compare", "add", "select", "fusion", "copy")
  assert more == dict.fromkeys(counting, 1)


def test_without_a_rule_s_is_one_everywhere_even_in_a_state_closed_over():
  state = OFF.init(PARAMS)
  assert_same_bits(ols.get_loss_scale(state), jnp.float32(1))
  assert ols.scale_loss(jnp.float32(3.0), state) == 3
  assert_same_bits(ols.unscale(PARAMS, state), PARAMS)
  assert ols.select_on_skip(state, new=8, old=7) == 8
  value_and_grad = jax.jit(ols.scaled_value_and_grad(loss_fn, state))
  expected = jax.jit(jax.value_and_grad(loss_fn))(PARAMS, X)
  assert_same_bits(value_and_grad(PARAMS, X), expected)


def test_without_a_rule_an_applied_step_ends_a_row_of_skips():
  state = OFF.init(PARAMS)
  rows = []
  for skip in (True, YES, False, YES, NO):
    _, state = OFF.update(PARAMS, state, PARAMS, skip=skip)
    rows.append((int(state.consecutive_skips), bool(state.skipped)))
  assert rows == [(1, True), (2, True), (0, False), (1, True), (0, False)]
  assert (state.requested_skips, state.applied_steps) == (3, 2)


def test_without_a_rule_gradients_are_still_averaged_over_devices():
  tx = ols.loss_scaling(optax.sgd(1.0), None, average_scaled="data")

  def update(gradient):
    return tx.update(gradient, tx.init(gradient))[0]

  averaged = jax.vmap(update, axis_name="data")(jnp.array([1.0, 3.0]))
  assert averaged.tolist() == [-2.0, -2.0]
  # NaN stays NaN, since nothing skips the step.
  averaged = jax.vmap(update, axis_name="data")(jnp.array([1.0, jnp.nan]))
  assert np.isnan(averaged).all()
