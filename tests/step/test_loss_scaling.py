"""The wrapper: what the optimizer sees, what the state says, its errors."""

import dataclasses
import inspect
from typing import NamedTuple

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_lossscale as ols
from optax_lossscale._step import states
from optax_lossscale.presets import declaration
from tests import support


class Recorded(NamedTuple):
  updates: object
  params: object
  extra_args: object


def recording(calls):
  """Returns a transformation that notes what reaches it and passes it on."""

  def init(params):
    calls.append(Recorded(None, params, None))
    return optax.EmptyState()

  def update(updates, state, params=None, **extra_args):
    calls.append(Recorded(updates, params, extra_args))
    return updates, state

  return optax.GradientTransformationExtraArgs(init, update)


@pytest.mark.parametrize("scale", [1024.0, 3.0, 1e-3, 2.0**100])
def test_guarantee_2_gradients_are_unscaled_in_float32(scale):
  calls = []
  tx = ols.loss_scaling(recording(calls), ols.FixedLossScale(scale))
  scaled_grads = {
    "half": jnp.array([1.0, 6e-8, -3.0], jnp.float16),
    "single": jnp.array([1.0, 1e-3, -3.0], jnp.float32),
  }
  jax.jit(tx.update)(scaled_grads, tx.init(scaled_grads))
  # The number that unscaling multiplies by, and the product, in float32.
  inverse = np.float32(1) / np.float32(scale)
  for name, unscaled in calls[-1].updates.items():
    assert unscaled.dtype == jnp.float32, name
  updates, state = jax.jit(tx.update)(scaled_grads, tx.init(scaled_grads))
  for name, gradient in scaled_grads.items():
    expected = np.asarray(gradient, np.float32) * inverse
    np.testing.assert_array_equal(updates[name], expected)
  assert state.inv_scale == inverse
  assert state.loss_scale_state.inv_scale == inverse


def test_guarantee_2_float16_gradients_at_a_large_scale_do_not_become_zero():
  tx = ols.loss_scaling(optax.sgd(1.0), ols.FixedLossScale(2.0**25))
  scaled_grads = jnp.array([2.0**-14, 1.0], jnp.float16)
  updates, _ = tx.update(scaled_grads, tx.init(scaled_grads))
  np.testing.assert_array_equal(updates, [-(2.0**-39), -(2.0**-25)])


def test_guarantee_2_float64_and_complex_keep_their_dtype():
  with jax.enable_x64(True):
    tx = ols.loss_scaling(optax.identity(), ols.FixedLossScale(1000.0))
    scaled_grads = {
      "double": jnp.array([np.pi * 1000], jnp.float64),
      "complex": jnp.array([1000.0 + 2000.0j], jnp.complex64),
      "wide": jnp.array([1000j * np.pi], jnp.complex128),
    }
    updates, _ = jax.jit(tx.update)(scaled_grads, tx.init(scaled_grads))
    assert updates["double"].dtype == jnp.float64
    assert updates["complex"].dtype == jnp.complex64
    assert updates["wide"].dtype == jnp.complex128
    # Nothing of float64's precision is lost to a float32 inverse.
    np.testing.assert_allclose(updates["double"], np.pi, rtol=1e-15)
    np.testing.assert_allclose(updates["complex"], 1 + 2j, rtol=1e-6)
    np.testing.assert_allclose(updates["wide"], 1j * np.pi, rtol=1e-15)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.complex64])
@pytest.mark.parametrize("scale", [2.0**126, 2.0**127, 2.0**128 - 2.0**104])
def test_gradients_are_unscaled_where_the_inverse_is_subnormal(scale, dtype):
  true = jnp.array([0.5, -0.75, 2.0**-60], dtype)
  unscaled = jax.jit(ols.unscale)(true * scale, jnp.float32(scale))
  np.testing.assert_allclose(unscaled, true, rtol=1e-6)


def test_a_complex_inf_stays_an_inf_when_it_is_unscaled():
  rule = ols.FixedLossScale(4.0, skip=False)
  tx = ols.loss_scaling(optax.identity(), rule)
  gradient = jnp.array([complex(np.inf, 8.0)])
  updates, _ = tx.update(gradient, tx.init(gradient))
  assert updates[0] == complex(np.inf, 2.0)


@pytest.mark.parametrize("growth_interval", [1, 2])
def test_guarantee_1_the_step_on_which_s_grows_uses_the_old_s(growth_interval):
  rule = ols.DynamicLossScale(4.0, growth_interval=growth_interval)
  tx = ols.loss_scaling(optax.identity(), rule)
  params = jnp.array([1.0, -2.0])
  state = tx.init(params)

  @jax.jit
  def step(params, state):
    _, scaled_grads = ols.scaled_value_and_grad(lambda p: jnp.sum(p**2), state)(
      params
    )
    return tx.update(scaled_grads, state, params)

  scales = []
  for _ in range(4):
    updates, state = step(params, state)
    np.testing.assert_array_equal(updates, 2 * params)
    scales.append(float(ols.get_loss_scale(state)))
  assert scales == [4.0 * 2 ** (n // growth_interval) for n in range(1, 5)]


def test_guarantee_6_nan_is_never_multiplied_by_a_mask():
  def poisoned(updates, state, params=None):
    del params
    return jax.tree.map(lambda x: x * jnp.nan, updates), state * jnp.nan

  inner = optax.GradientTransformation(lambda _: jnp.ones(3), poisoned)
  tx = ols.loss_scaling(inner, ols.FixedLossScale())
  state = tx.init(jnp.zeros(2))
  updates, state = jax.jit(tx.update)(jnp.full(2, jnp.inf), state)
  assert np.all(np.signbit(updates)) and np.all(updates == 0)
  np.testing.assert_array_equal(state.inner_state, jnp.ones(3))


def test_guarantee_6_minus_zero_keeps_the_sign_of_a_zero_parameter():
  params = jnp.array([0.0, -0.0])
  tx = ols.loss_scaling(optax.sgd(1.0), ols.FixedLossScale())
  updates, _ = tx.update(jnp.full(2, jnp.nan), tx.init(params), params)
  after = optax.apply_updates(params, updates)
  assert np.signbit(after).tolist() == [False, True]


def test_guarantee_6_every_kind_of_leaf_is_kept_on_a_skip():
  kept = {
    "integer": jnp.array([1, 2]),
    "flag": jnp.array(True),
    "key": jax.random.key(0),
    "complex": jnp.array([1.0 + 2.0j]),
    "nothing": None,
    "half": jnp.array([1.0], jnp.bfloat16),
  }

  def move(updates, state, params=None):
    del params
    moved = {
      "integer": state["integer"] + 1,
      "flag": ~state["flag"],
      "key": jax.random.split(state["key"])[0],
      "complex": state["complex"] * jnp.nan,
      "nothing": None,
      "half": state["half"] * 2,
    }
    return {**updates, "complex": jnp.array([1j])}, moved

  inner = optax.GradientTransformation(lambda _: kept, move)
  tx = ols.loss_scaling(inner, ols.FixedLossScale())
  state = tx.init({"complex": jnp.zeros(1, jnp.complex64)})
  scaled_grads = {"complex": jnp.array([complex(np.nan, 0.0)])}
  updates, after = jax.jit(tx.update)(scaled_grads, state)
  parts = np.array([updates["complex"].real, updates["complex"].imag])
  assert np.all(np.signbit(parts)) and np.all(parts == 0)
  after = after.inner_state
  assert jnp.all(after["key"] == kept["key"])
  for name in ("integer", "flag", "complex", "half"):
    np.testing.assert_array_equal(after[name], kept[name])


def test_guarantee_8_the_inner_transformation_sees_float32_copies():
  calls = []
  tx = ols.loss_scaling(recording(calls), ols.FixedLossScale())
  params = {
    "half": jnp.ones(2, jnp.float16),
    "brain": jnp.ones(2, jnp.bfloat16),
    "integer": jnp.ones(2, jnp.int32),
  }
  scaled_grads = {**params, "integer": jnp.zeros(2, jnp.int32)}
  state = tx.init(params)
  updates, _ = tx.update(scaled_grads, state, params)
  for seen in (calls[0].params, calls[1].params, calls[1].updates):
    assert seen["half"].dtype == seen["brain"].dtype == jnp.float32
    assert seen["integer"].dtype == jnp.int32
  assert updates["half"].dtype == jnp.float16
  assert updates["brain"].dtype == jnp.bfloat16


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
  tx = ols.loss_scaling(inner, Weak())
  state = tx.init(jnp.zeros(2))

  @jax.jit
  @chex.assert_max_traces(n=1)
  def update(updates, state):
    return tx.update(updates, state)

  for _ in range(3):
    before = jax.tree.map(lambda x: (x.dtype, x.weak_type), state)
    _, state = update(jnp.ones(2), state)
    assert jax.tree.map(lambda x: (x.dtype, x.weak_type), state) == before
  assert not any(jax.tree.leaves(jax.tree.map(lambda x: x.weak_type, state)))
  assert state.loss_scale_state.loss_scale.dtype == jnp.float32


def test_guarantee_9_the_dtypes_of_the_inner_state_are_those_of_init():
  inner = optax.GradientTransformation(
    lambda _: {"trace": jnp.zeros(2, jnp.bfloat16), "count": jnp.int32(0)},
    lambda updates, state, params=None: (
      updates,
      {"trace": state["trace"] + updates, "count": state["count"] + 0.5},
    ),
  )
  tx = ols.loss_scaling(inner, ols.FixedLossScale())
  state = tx.init(jnp.zeros(2))
  _, after = jax.jit(tx.update)(jnp.full(2, 1024.0), state)
  assert after.inner_state["trace"].dtype == jnp.bfloat16
  assert after.inner_state["count"].dtype == jnp.int32
  np.testing.assert_array_equal(after.inner_state["trace"], [1.0, 1.0])


def test_guarantee_12_leaves_that_are_no_gradients_pass_through():
  key = jax.random.key(0)
  tree = {
    "none": None,
    "masked": optax.MaskedNode(),
    "integer": jnp.array([2**30, 7]),
    "float0": np.zeros(2, jax.dtypes.float0),
    "key": key,
    "empty": jnp.zeros((0,)),
    "weight": jnp.array([8.0]),
  }
  tx = ols.loss_scaling(optax.identity(), ols.FixedLossScale(8.0))
  state = tx.init(tree)
  updates, state = tx.update(tree, state, tree)
  assert not state.overflow
  assert updates["none"] is None
  assert isinstance(updates["masked"], optax.MaskedNode)
  np.testing.assert_array_equal(updates["integer"], [2**30, 7])
  assert updates["float0"].dtype == jax.dtypes.float0
  assert updates["key"] == key
  assert updates["empty"].shape == (0,)
  np.testing.assert_array_equal(updates["weight"], [1.0])


@pytest.mark.parametrize("tree", [{}, (), None, []])
def test_guarantee_12_empty_trees_pass_through(tree):
  tx = ols.loss_scaling(optax.adam(1.0), ols.DynamicLossScale())
  updates, state = tx.update(tree, tx.init(tree), tree)
  assert updates == tree
  assert not state.overflow
  assert state.applied_steps == 1


def variables_with_fp8():
  params = {"params": {"kernel": jnp.array([1.0, 2.0])}}
  params["_overwrite_with_gradient"] = {"scale": jnp.array([3.0])}
  return params


def test_guarantee_12_fp8_collections_go_around_the_wrapper():
  calls = []
  params = variables_with_fp8()
  tx = ols.loss_scaling(recording(calls), ols.FixedLossScale(8.0))
  state = tx.init(params)
  # The next scale of an FP8 layer may be anything, also inf.
  scaled_grads = {
    "params": {"kernel": jnp.array([8.0, 16.0])},
    "_overwrite_with_gradient": {"scale": jnp.array([jnp.inf])},
  }
  updates, state = jax.jit(tx.update)(scaled_grads, state, params)
  assert not state.overflow
  assert state.amax == 16.0
  np.testing.assert_array_equal(updates["params"]["kernel"], [1.0, 2.0])
  next_scale = updates["_overwrite_with_gradient"]["scale"]
  np.testing.assert_array_equal(next_scale, [jnp.inf])
  for call in calls:
    seen = jax.tree.leaves(call.params)
    assert len(seen) == 1


def test_guarantee_12_a_skip_keeps_the_old_value_of_an_fp8_collection():
  params = variables_with_fp8()
  tx = ols.loss_scaling(optax.sgd(1.0), ols.FixedLossScale(8.0))
  scaled_grads = jax.tree.map(lambda x: x * jnp.inf, params)
  updates, state = jax.jit(tx.update)(scaled_grads, tx.init(params), params)
  assert state.skipped
  assert np.all(np.signbit(updates["params"]["kernel"]))
  np.testing.assert_array_equal(
    updates["_overwrite_with_gradient"]["scale"], [3.0]
  )
  with pytest.raises(ValueError, match="`params` must be passed to update"):
    tx.update(scaled_grads, tx.init(params))


def test_guarantee_13_extra_arguments_reach_the_inner_transformation():
  calls = []
  tx = ols.loss_scaling(recording(calls), ols.FixedLossScale(8.0))
  value, grad = object(), {"not": "touched"}
  state = tx.init(jnp.zeros(2))
  tx.update(jnp.ones(2), state, None, overflow=True, value=value, grad=grad)
  assert calls[-1].extra_args == {"value": value, "grad": grad}
  assert calls[-1].extra_args["value"] is value


def test_guarantee_13_extra_arguments_are_fine_where_nobody_wants_them():
  tx = ols.loss_scaling(optax.sgd(1.0), ols.FixedLossScale(8.0))
  tx.update(jnp.ones(2), tx.init(jnp.zeros(2)), value=1.0)


@pytest.mark.parametrize(
  ("flag", "expected"),
  [
    (True, True),
    (False, False),
    (np.bool_(True), True),
    (0, False),
    (2, True),
    (0.0, False),
    (0.25, True),
    (jnp.nan, True),
    (jnp.array([0, 0, 3]), True),
    (jnp.zeros((2, 2)), False),
    (jnp.array([], jnp.float32), False),
  ],
)
def test_the_callers_flag_is_any_non_zero(flag, expected):
  tx = ols.loss_scaling(optax.sgd(1.0), ols.DynamicLossScale(8.0))
  state = tx.init(jnp.zeros(2))
  _, state = tx.update(jnp.ones(2), state, overflow=flag)
  assert state.overflow == state.skipped == expected
  assert not state.nan
  assert ols.get_loss_scale(state) == (4.0 if expected else 8.0)


def test_a_threshold_on_the_gradient_norm_is_one_line():
  tx = ols.loss_scaling(optax.sgd(1.0), ols.FixedLossScale(8.0))
  state = tx.init(jnp.zeros(2))

  @jax.jit
  def step(scaled_grads, state):
    norm = optax.tree.norm(ols.unscale(scaled_grads, state))
    return tx.update(scaled_grads, state, overflow=norm > 10.0)[1].skipped

  assert not step(jnp.array([48.0, 64.0]), state)
  assert step(jnp.array([48.0, 65.0]), state)


@pytest.mark.parametrize(
  "rule",
  [
    ols.DynamicLossScale(8.0, min_scale=2.0, skip=False),
    ols.FixedLossScale(8.0, skip=False),
  ],
)
def test_without_skip_an_overflow_is_only_reported(rule):
  tx = ols.loss_scaling(optax.sgd(1.0), rule)
  state = tx.init(jnp.zeros(2))
  update = jax.jit(tx.update)
  updates, state = update(jnp.array([8.0, jnp.inf]), state)
  np.testing.assert_array_equal(updates, [-1.0, -jnp.inf])
  assert state.overflow
  assert not state.skipped
  assert (state.applied_steps, state.skipped_steps) == (1, 0)
  moved = isinstance(rule, ols.DynamicLossScale)
  assert ols.get_loss_scale(state) == (4.0 if moved else 8.0)


def test_nan_is_told_apart_from_inf():
  tx = ols.loss_scaling(optax.sgd(1.0), ols.FixedLossScale(8.0))
  state = tx.init(jnp.zeros(3))
  for value, nan in ((jnp.inf, False), (jnp.nan, True), (-jnp.inf, False)):
    _, after = tx.update(jnp.array([1.0, value, -value]), state)
    assert after.overflow
    assert after.nan == nan
    assert jnp.isnan(after.amax) == nan


def test_guarantee_17_an_overflow_at_the_floor_is_reported_as_stalled():
  rule = ols.DynamicLossScale(8.0, min_scale=2.0, growth_interval=1)
  tx = ols.loss_scaling(optax.sgd(1.0), rule)
  state = tx.init(jnp.zeros(1))
  told = []
  for bad in (True, True, True, True, False, True):
    _, state = tx.update(jnp.where(bad, jnp.inf, jnp.ones(1)), state)
    told.append((float(ols.get_loss_scale(state)), bool(state.stalled)))
  assert told == [
    (4.0, False),
    (2.0, False),
    (2.0, True),
    (2.0, True),
    (4.0, False),
    (2.0, False),
  ]


def test_guarantee_17_a_fixed_scale_is_stalled_by_every_overflow():
  tx = ols.loss_scaling(optax.sgd(1.0), ols.FixedLossScale(1.0))
  state = tx.init(jnp.zeros(1))
  for _ in range(3):
    _, state = tx.update(jnp.full(1, jnp.inf), state)
    assert state.skipped
    assert state.stalled


def test_guarantee_17_nothing_is_applied_because_it_failed_too_often():
  tx = ols.loss_scaling(optax.sgd(1.0), ols.DynamicLossScale())
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
  tx = ols.loss_scaling(
    optax.sgd(schedule), ols.DynamicLossScale(1.0, min_scale=1.0)
  )
  state = tx.init(jnp.zeros(1))
  steps = []
  for bad in (False, True, True, False, True, False):
    updates, state = tx.update(jnp.where(bad, jnp.inf, jnp.ones(1)), state)
    steps.append(float(updates[0]))
  assert steps == [-1.0, 0.0, 0.0, -0.5, 0.0, -0.25]
  assert optax.tree.get(state, "count") == state.applied_steps == 3


class AnyState(NamedTuple):
  loss_scale: jax.Array


@dataclasses.dataclass(frozen=True)
class Reckless(ols.LossScale):
  """A rule that multiplies S by anything, with no bound."""

  factor: float = 1.0

  def init(self):
    return AnyState(jnp.float32(1.0))

  def update(self, state, overflow, *, amax=None):
    return AnyState(state.loss_scale * self.factor)


@pytest.mark.parametrize("factor", [2.0, 0.5, 0.0, jnp.inf, jnp.nan, -1.0])
def test_guarantee_4_a_reckless_rule_is_held(factor):
  tx = ols.loss_scaling(optax.sgd(1.0), Reckless(factor))
  state = tx.init(jnp.zeros(1))

  def step(state, _):
    _, state = tx.update(jnp.full(1, jnp.nan), state)
    return state, (ols.get_loss_scale(state), state.inv_scale)

  state, (scales, inverses) = jax.lax.scan(step, state, length=300)
  tiny = jnp.finfo(jnp.float32).smallest_normal
  assert jnp.all(jnp.isfinite(scales)) and jnp.all(scales >= tiny)
  # Above 2**126 the inverse is subnormal, which a backend may flush.
  assert jnp.all((inverses >= tiny) | (scales > 2.0**126))
  assert state.stalled


def make_preset(name):
  """Returns a preset, with an 8 for each argument that must be given."""
  parameters = inspect.signature(getattr(ols.presets, name)).parameters
  needed = [k for k, x in parameters.items() if x.default is x.empty]
  return getattr(ols.presets, name)(**dict.fromkeys(needed, 8))


EVERY_RULE = {
  "dynamic": ols.DynamicLossScale(),
  "fixed": ols.FixedLossScale(),
  "headroom": ols.rules.HeadroomLossScale(window=3),
  "log_max": ols.rules.LogMaxLossScale(),
  "warm_start": ols.rules.WarmStart(ols.presets.deepspeed()),
  "warm_log_max": ols.rules.WarmStart(ols.rules.LogMaxLossScale()),
  **{name: make_preset(name) for name in declaration.PRESETS},
}
each_rule = pytest.mark.parametrize(
  "name", support.slow_but(["dynamic", "fixed"], EVERY_RULE)
)

UNUSABLE = [jnp.nan, 0.0, 2.0**-127, 2.0**-149, jnp.inf, -8.0, -jnp.inf]


def with_scale(opt_state, loss_scale):
  """Returns the state of a wrapper with another S."""
  rule_state = states.replace_scale(
    opt_state.loss_scale_state, jnp.asarray(loss_scale, jnp.float32)
  )
  return opt_state._replace(loss_scale_state=rule_state)


@each_rule
def test_guarantee_4_a_damaged_scale_is_skipped_and_starts_over(name):
  """The last of the states side by side is sound."""
  rule = EVERY_RULE[name]
  tx = ols.loss_scaling(optax.adam(0.5), rule)
  params = jnp.ones(2)
  _, used = tx.update(jnp.ones(2), tx.init(params), params)
  scales = [*UNUSABLE, 8.0]
  stacked = jax.tree.map(
    lambda *x: jnp.stack(x), *(with_scale(used, s) for s in scales)
  )
  update = jax.jit(jax.vmap(tx.update, in_axes=(None, 0, None)))
  updates, after = update(jnp.ones(2), stacked, params)
  np.testing.assert_array_equal(updates[-1] != 0, True)
  assert not (after.skipped | after.overflow | after.stalled)[-1]
  for i, scale in enumerate(UNUSABLE):
    one = jax.tree.map(lambda x, i=i: x[i], after)
    assert one.skipped and one.overflow and one.stalled, scale
    assert np.all(np.signbit(updates[i]) & (updates[i] == 0)), scale
    support.assert_same_bits(one.inner_state, used.inner_state)
    support.assert_same_bits(one.loss_scale_state, rule.init())


def test_guarantee_4_without_skip_a_damaged_scale_is_reported():
  tx = ols.loss_scaling(optax.sgd(1.0), ols.FixedLossScale(8.0, skip=False))
  state = with_scale(tx.init(jnp.zeros(1)), 0.0)
  updates, state = tx.update(jnp.ones(1), state)
  assert updates[0] == -jnp.inf
  assert state.overflow and state.stalled and not state.skipped
  assert ols.get_loss_scale(state) == 8.0


@pytest.mark.parametrize("scale", UNUSABLE)
def test_guarantee_4_a_damaged_scale_skips_a_whole_step(scale):
  """Also eagerly, and where micro-batches that overflow are dropped."""
  tx = ols.loss_scaling(optax.adam(0.5), ols.DynamicLossScale())
  params, batch = jnp.ones(2), jnp.ones((4, 2))
  opt_state = with_scale(tx.init(params), scale)

  def loss_fn(params, batch):
    return jnp.mean((batch @ params) ** 2)

  loss, scaled_grads = ols.scaled_value_and_grad(loss_fn, opt_state)(
    params, batch
  )
  assert loss == 4.0
  updates, after = tx.update(scaled_grads, opt_state, params)
  assert after.skipped and np.all(updates == 0)
  value_and_grad = ols.accumulate(
    ols.scaled_value_and_grad(loss_fn, opt_state), microbatches=2, drop=True
  )
  _, scaled_grads, overflow = value_and_grad(params, batch)
  assert jnp.all(overflow.flags)
  updates, after = tx.update(scaled_grads, opt_state, params, overflow=overflow)
  assert after.skipped and np.all(updates == 0)
  assert ols.get_loss_scale(after) == 2.0**15


def test_guarantee_4_devices_skip_a_damaged_scale_together():
  tx = ols.loss_scaling(optax.sgd(1.0), ols.FixedLossScale(8.0), axis_name="d")
  state = tx.init(jnp.zeros(()))
  stacked = jax.vmap(lambda s: with_scale(state, s))(jnp.array([8.0, jnp.nan]))
  update = jax.vmap(tx.update, axis_name="d")
  updates, after = update(jnp.ones(2), stacked)
  np.testing.assert_array_equal(after.skipped, [True, True])
  np.testing.assert_array_equal(updates, [0, 0])


def test_a_gradient_that_float32_cannot_hold_unscaled_never_reaches_adam():
  """d/dw (1e20 w)**2 is 2e40 w, 59 times the largest float32."""
  tx = ols.loss_scaling(optax.adam(1e-3), ols.DynamicLossScale())
  params = jnp.float32(1.0)

  def step(carry, _):
    params, state = carry
    loss_fn = lambda w: (1e20 * w) ** 2  # noqa: E731
    _, scaled_grads = ols.scaled_value_and_grad(loss_fn, state)(params)
    updates, state = tx.update(scaled_grads, state, params)
    return (optax.apply_updates(params, updates), state), scaled_grads

  end, scaled_grads = jax.lax.scan(step, (params, tx.init(params)), length=60)
  assert jnp.isfinite(scaled_grads[-1])
  support.assert_same_bits(end[0], params)
  support.assert_same_bits(end[1].inner_state, tx.init(params).inner_state)
  assert end[1].skipped and end[1].stalled and end[1].applied_steps == 0


FLOAT32_MAX = float(np.finfo(np.float32).max)


@pytest.mark.parametrize(
  ("largest", "scale", "fits"),
  [
    (jnp.float32(FLOAT32_MAX / 8), 0.125, True),
    (jnp.nextafter(jnp.float32(FLOAT32_MAX / 8), jnp.inf), 0.125, False),
    (jnp.float32(FLOAT32_MAX), 1.0, True),
    (jnp.float16(65504), 2.0**-112, True),
    (jnp.float16(65504), 2.0**-113, False),
    (jnp.complex64(complex(1, -FLOAT32_MAX / 8)), 0.125, True),
    (jnp.complex64(complex(1, -FLOAT32_MAX / 4)), 0.125, False),
    (np.float64(1e300), 0.125, True),
    (np.float64(1e308), 0.125, False),
    (np.complex128(complex(1e300, 1)), 0.125, True),
  ],
  ids=str,
)
def test_a_quotient_beyond_the_range_of_its_dtype_is_an_overflow(
  largest, scale, fits
):
  with jax.enable_x64(largest.dtype in ("float64", "complex128")):
    tx = ols.loss_scaling(optax.identity(), ols.FixedLossScale(scale))
    scaled_grads = {"a": jnp.ones(3, largest.dtype).at[1].set(largest)}
    updates, state = jax.jit(tx.update)(scaled_grads, tx.init(scaled_grads))
    assert state.skipped == (not fits)
    assert jnp.all(jnp.isfinite(updates["a"]))
    assert (updates["a"][1] != 0) == fits


def test_a_micro_batch_that_does_not_fit_unscaled_is_dropped():
  tx = ols.loss_scaling(optax.sgd(1.0), ols.FixedLossScale(0.125))
  state = tx.init(jnp.zeros(()))
  value_and_grad = ols.accumulate(
    ols.scaled_value_and_grad(lambda w, x: jnp.mean(w * x) * 1e20, state),
    microbatches=2,
    drop=True,
  )
  _, scaled_grads, overflow = value_and_grad(
    jnp.zeros(()), jnp.array([1e19, 8.0])
  )
  np.testing.assert_array_equal(overflow.flags, [True, False])
  assert jnp.isfinite(overflow.amax[0]) and scaled_grads == jnp.float32(1e20)


@pytest.mark.parametrize("transform", [lambda init: init, jax.jit])
def test_guarantee_4_a_rule_that_starts_unusable_is_refused(transform):
  @dataclasses.dataclass(frozen=True)
  class Zero(Reckless):
    def init(self):
      return AnyState(jnp.float32(0.0))

  tx = ols.loss_scaling(optax.sgd(1.0), Zero())
  with pytest.raises(ValueError, match="first state` must be positive, got"):
    transform(tx.init)(jnp.zeros(1))


def test_a_rule_whose_state_has_no_loss_scale_is_refused():
  @dataclasses.dataclass(frozen=True)
  class Nameless(Reckless):
    def init(self):
      return (jnp.float32(1.0),)

  tx = ols.loss_scaling(optax.sgd(1.0), Nameless())
  with pytest.raises(
    TypeError, match="attribute `loss_scale`, float32.*got .tuple"
  ):
    tx.init(jnp.zeros(1))


def test_the_rule_is_given_amax():
  @dataclasses.dataclass(frozen=True)
  class Follower(Reckless):
    def update(self, state, overflow, *, amax=None):
      return AnyState(amax * 2)

  tx = ols.loss_scaling(optax.sgd(1.0), Follower())
  state = tx.init(jnp.zeros(2))
  _, state = tx.update(jnp.array([-24.0, 3.0]), state)
  assert ols.get_loss_scale(state) == 48.0
  assert state.amax == 24.0


@dataclasses.dataclass(frozen=True)
class Odd(ols.LossScale):
  """A rule that computes S in another dtype than it keeps it in."""

  dtype: str = "int32"

  def init(self):
    return AnyState(jnp.float32(4.0))

  def update(self, state, overflow, *, amax=None):
    halved = jnp.where(overflow, state.loss_scale / 2, state.loss_scale * 2)
    return AnyState(halved.astype(self.dtype))


@pytest.mark.parametrize("dtype", ["int32", "float16"])
@pytest.mark.parametrize("bad", [True, False])
def test_guarantee_4_a_rule_that_computes_in_another_dtype_is_held(dtype, bad):
  tx = ols.loss_scaling(optax.sgd(1.0), Odd(dtype))

  def step(state, _):
    _, state = tx.update(jnp.where(bad, jnp.nan, jnp.ones(1)), state)
    return state, ols.get_loss_scale(state)

  _, scales = jax.lax.scan(step, tx.init(jnp.zeros(1)), length=100)
  assert scales.dtype == jnp.float32
  assert jnp.all(jnp.isfinite(scales)) and jnp.all(scales > 0)


def test_a_rule_that_changes_its_state_is_refused():
  @dataclasses.dataclass(frozen=True)
  class Forgetful(Reckless):
    def update(self, state, overflow, *, amax=None):
      return None

  tx = ols.loss_scaling(optax.sgd(1.0), Forgetful())
  with pytest.raises(ValueError, match="`rule` must keep the structure"):
    tx.update(jnp.ones(1), tx.init(jnp.ones(1)))


def test_python_and_numpy_gradients_are_gradients():
  tx = ols.loss_scaling(optax.identity(), ols.FixedLossScale(8.0))
  scaled_grads = {
    "python": 8.0,
    "numpy": np.full(2, 16.0),
    "scalar": np.float32(8),
  }
  updates, state = tx.update(scaled_grads, tx.init(scaled_grads))
  assert updates["python"] == updates["scalar"] == 1.0
  np.testing.assert_array_equal(updates["numpy"], [2.0, 2.0])
  assert state.amax == 16.0
  updates, state = tx.update({**scaled_grads, "python": np.nan}, state)
  assert state.skipped


def test_guarantee_6_python_numbers_in_a_skipped_state_and_updates():
  inner = optax.GradientTransformation(
    lambda _: {"count": 3},
    lambda updates, state, params=None: (0.5, {"count": state["count"] + 1}),
  )
  tx = ols.loss_scaling(inner, ols.FixedLossScale())
  state = tx.init(0.0)
  updates, state = tx.update(jnp.nan, state._replace(inner_state={"count": 3}))
  assert state.skipped
  assert updates == 0
  assert state.inner_state["count"] == 3


def test_an_inner_state_that_changes_a_shape_is_refused():
  inner = optax.GradientTransformation(
    lambda _: {"trace": jnp.zeros(1)},
    lambda updates, state, params=None: (updates, {"trace": jnp.zeros(2)}),
  )
  tx = ols.loss_scaling(inner, ols.FixedLossScale())
  with pytest.raises(ValueError, match=r"shape \(2,\) at 'trace' and not \(1,"):
    tx.update(jnp.ones(1), tx.init(jnp.ones(1)))


@each_rule
def test_a_state_can_be_donated_from_the_first_on(name):
  rule = EVERY_RULE[name]
  tx = ols.loss_scaling(optax.sgd(1.0), rule)
  state = tx.init(jnp.ones(2))

  def step(state):
    metrics = ols.loss_scale_metrics(state)
    return tx.update(jnp.ones(2), state)[1], metrics

  step = jax.jit(step, donate_argnums=0)
  for _ in range(3):
    state, _ = step(state)
  assert state.applied_steps + state.skipped_steps == 3


@pytest.mark.usefixtures("strict_promotion")
def test_the_wrapper_promotes_nothing_implicitly():
  params = {"half": jnp.ones(2, jnp.float16), "single": jnp.ones(2)}
  inner = optax.identity()
  tx = ols.loss_scaling(inner, ols.DynamicLossScale(2.0, growth_interval=2))

  def loss_fn(params):
    return jnp.sum(params["half"]) * jnp.float16(2.0)

  @jax.jit
  def step(params, state):
    _, scaled_grads = ols.scaled_value_and_grad(loss_fn, state)(params)
    return tx.update(scaled_grads, state, params, overflow=False)

  updates, _ = step(params, tx.init(params))
  np.testing.assert_array_equal(updates["half"], [2.0, 2.0])


@pytest.mark.parametrize(
  ("arguments", "error", "message"),
  [
    (
      (ols.FixedLossScale(), optax.sgd(1.0)),
      TypeError,
      "`inner` must be an optax .* got FixedLossScale.* optimizer comes first",
    ),
    (
      (optax.adam, ols.FixedLossScale()),
      TypeError,
      "`inner` must be .* got adam; call it",
    ),
    (
      (optax.MultiSteps, ols.FixedLossScale()),
      TypeError,
      "`inner` must be .* got MultiSteps; call it",
    ),
    (
      (optax.sgd(1.0), optax.sgd(1.0)),
      TypeError,
      "`rule` must be a LossScale, got Gradient",
    ),
    ((optax.sgd(1.0), 1024.0), TypeError, "`rule` must be .* got 1024.0; for"),
    (
      (optax.sgd(1.0), ols.DynamicLossScale),
      TypeError,
      "`rule` must be a LossScale, got <class",
    ),
    (
      ("adam", ols.FixedLossScale()),
      TypeError,
      "`inner` must be an optax gradient transformation, got .adam",
    ),
  ],
)
def test_swapped_or_wrong_arguments_are_refused(arguments, error, message):
  with pytest.raises(error, match=message):
    ols.loss_scaling(*arguments)


def test_a_check_must_be_a_check():
  with pytest.raises(TypeError, match="`check` must be made by nonfinite"):
    ols.loss_scaling(optax.sgd(1.0), ols.FixedLossScale(), check=ols.nonfinite)


def test_guarantee_16_what_people_swap_is_keyword_only():
  with pytest.raises(TypeError, match="positional"):
    ols.loss_scaling(optax.sgd(1.0), ols.FixedLossScale(), ols.saturated())
  tx = ols.loss_scaling(optax.sgd(1.0), ols.FixedLossScale())
  state = tx.init(jnp.zeros(1))
  with pytest.raises(TypeError, match="positional"):
    tx.update(jnp.ones(1), state, None, True)


@pytest.mark.parametrize("overflow", [None, "yes", {"a": 1}, jnp.isnan])
def test_an_overflow_that_is_no_flag_is_refused(overflow):
  tx = ols.loss_scaling(optax.sgd(1.0), ols.FixedLossScale())
  with pytest.raises(TypeError, match="`overflow` must be a bool, a number"):
    tx.update(jnp.ones(1), tx.init(jnp.ones(1)), overflow=overflow)


def test_update_refuses_the_state_of_another_rule():
  state = ols.loss_scaling(optax.sgd(1.0), ols.FixedLossScale()).init(0.0)
  tx = ols.loss_scaling(optax.sgd(1.0), ols.DynamicLossScale())
  with pytest.raises(ValueError, match="the state of this `rule`, got .*Fixed"):
    tx.update(1.0, state)


def test_update_refuses_a_state_of_something_else():
  tx = ols.loss_scaling(optax.sgd(1.0), ols.FixedLossScale())
  with pytest.raises(TypeError, match="`state` must be the LossScalingState"):
    tx.update(jnp.ones(1), optax.sgd(1.0).init(jnp.ones(1)))


def test_an_inner_state_that_changes_its_structure_is_refused():
  inner = optax.GradientTransformation(
    lambda _: {}, lambda updates, state, params=None: (updates, {"new": 1.0})
  )
  tx = ols.loss_scaling(inner, ols.FixedLossScale())
  with pytest.raises(ValueError, match="`inner` must keep the structure"):
    tx.update(jnp.ones(1), tx.init(jnp.ones(1)))


def test_guarantee_12_real_fp8_layers_train_and_skip():
  class Model(nn.Module):
    @nn.compact
    def __call__(self, x):
      return nn.Dense(16, dot_general_cls=nn.Fp8DirectDotGeneralOp)(x)

  model, batch = Model(), jnp.linspace(-1.0, 1.0, 256).reshape(16, 16)
  params = model.init(jax.random.key(0), batch)
  collection = "_overwrite_with_gradient"
  tx = ols.loss_scaling(optax.adam(0.1), ols.DynamicLossScale(1024.0))
  state = tx.init(params)

  @jax.jit
  def step(params, state, factor):
    def loss_fn(params):
      return jnp.mean(model.apply(params, batch) ** 2) * factor

    _, scaled_grads = ols.scaled_value_and_grad(loss_fn, state)(params)
    updates, state = tx.update(scaled_grads, state, params)
    moved = optax.apply_updates(params["params"], updates["params"])
    return {"params": moved, collection: updates[collection]}, state

  first, state = step(params, state, 1.0)
  assert state.applied_steps == 1
  scales = jax.tree.leaves(first[collection])
  assert jax.tree.structure(first) == jax.tree.structure(params)
  assert not any(np.any(scale < 0) for scale in scales)
  # Nothing of the collection is in the optimizer's state.
  moments = optax.tree.get(state, "mu")
  assert len(jax.tree.leaves(moments)) == len(jax.tree.leaves(params["params"]))
  after, state = step(first, state, jnp.nan)
  assert state.skipped
  for old, new in zip(
    jax.tree.leaves(first), jax.tree.leaves(after), strict=True
  ):
    np.testing.assert_array_equal(old, new)


@pytest.mark.parametrize("axis_name", [("data", "model"), ["data", "model"]])
def test_devices_agree_where_gradients_vary_over_one_axis_of_two(axis_name):
  tx = ols.loss_scaling(
    optax.sgd(1.0), ols.DynamicLossScale(8.0), axis_name=axis_name
  )
  state = tx.init(jnp.zeros(3))
  auto = (jax.sharding.AxisType.Auto,) * 2
  mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=auto)

  @jax.jit
  @jax.shard_map(
    mesh=mesh,
    in_specs=(jax.P("data"), jax.P()),
    out_specs=(jax.P("data"), jax.P()),
  )
  def update(scaled_grads, state):
    return tx.update(scaled_grads, state)

  updates, state = update(jnp.ones((4, 3)).at[3, 1].set(jnp.inf), state)
  assert np.all(updates == 0)
  assert state.skipped


@pytest.mark.slow
@pytest.mark.parametrize("check_vma", [True, False])
def test_devices_skip_together_over_a_named_axis(check_vma):
  tx = ols.loss_scaling(
    optax.sgd(1.0), ols.DynamicLossScale(8.0), axis_name="data"
  )
  state = tx.init(jnp.zeros(3))
  mesh = jax.make_mesh(
    (8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,)
  )

  @jax.jit
  @jax.shard_map(
    mesh=mesh,
    in_specs=(jax.P("data"), jax.P()),
    out_specs=(jax.P("data"), jax.P()),
    check_vma=check_vma,
  )
  def update(scaled_grads, state):
    return tx.update(scaled_grads, state)

  scaled_grads = jnp.ones((8, 3)).at[5, 2].set(jnp.nan)
  updates, state = update(scaled_grads, state)
  assert np.all(updates == 0)
  assert state.skipped and state.nan
  assert ols.get_loss_scale(state) == 4.0


@pytest.mark.slow
@pytest.mark.parametrize("check_vma", [True, False])
def test_both_ways_to_average_over_devices_give_the_true_gradient(check_vma):
  def mean(updates, state, params=None):
    del params
    return jax.lax.pmean(updates, "data"), state

  pmean = optax.GradientTransformation(lambda _: optax.EmptyState(), mean)
  inner = optax.identity() if check_vma else pmean
  tx = ols.loss_scaling(inner, ols.FixedLossScale(8.0), axis_name="data")
  auto = (jax.sharding.AxisType.Auto,)
  mesh = jax.make_mesh((8,), ("data",), axis_types=auto)

  def loss_fn(params, batch):
    return jnp.mean((batch @ params) ** 2)

  def local_loss_fn(params, batch):
    loss = loss_fn(params, batch)
    # By default JAX sums the gradients of replicated parameters over devices.
    return jax.lax.pmean(loss, "data") if check_vma else loss

  @jax.jit
  @jax.shard_map(
    mesh=mesh,
    in_specs=(jax.P(), jax.P(), jax.P("data")),
    out_specs=jax.P(),
    check_vma=check_vma,
  )
  def update(params, state, batch):
    _, scaled_grads = ols.scaled_value_and_grad(local_loss_fn, state)(
      params, batch
    )
    return tx.update(scaled_grads, state, params)[0]

  params = jnp.array([1.0, -2.0, 3.0])
  batch = jnp.arange(48.0).reshape(16, 3) / 16
  np.testing.assert_allclose(
    update(params, tx.init(params), batch),
    jax.grad(loss_fn)(params, batch),
    rtol=1e-6,
  )


def test_an_overflow_of_one_device_leaves_amax_the_same_on_all():
  mesh = jax.make_mesh(
    (8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,)
  )
  tx = ols.loss_scaling(optax.sgd(0.5), ols.FixedLossScale(1.0))
  scaled_grads = jnp.array([1.0, -3.0])

  def step(overflow):
    # One model a device, so that each may decide for itself.
    state = ols.make_varying(tx.init(scaled_grads), "data")
    _, state = tx.update(scaled_grads, state, overflow=overflow)
    return state.amax, state.skipped[None]

  amax, skipped = jax.jit(
    jax.shard_map(
      step,
      mesh=mesh,
      in_specs=jax.P("data"),
      out_specs=(jax.P(), jax.P("data")),
    )
  )(jnp.arange(8) == 3)
  assert amax == 3.0
  assert skipped.tolist() == [i == 3 for i in range(8)]
