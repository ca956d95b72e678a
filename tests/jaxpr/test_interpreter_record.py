"""A state closed over is fine where a function is evaluated at once."""

from flax import nnx
import jax
from jax import lax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_lossscale as ols
from optax_lossscale import hardware
from optax_lossscale._jaxpr import interpreter

X = jnp.array([1.0, 2.0], jnp.float16)

# What records a function. Both return its result, the second also a flag.
RECORDING = {
  "emulate_saturation": hardware.emulate_saturation,
  "float_status": lambda fun: (
    lambda *args: hardware.float_status(fun)(*args)[0]
  ),
  "autocast": ols.autocast,
}


def loss_fn(params):
  return jnp.sum(params * params)


def make_state():
  tx = ols.loss_scaling(optax.sgd(0.1), ols.FixedLossScale(4.0))
  return tx.init(X)


def closed_over(opt_state):
  """Returns a function that has closed over a state."""
  return lambda params: ols.scaled_value_and_grad(loss_fn, opt_state)(params)


@pytest.mark.parametrize("recording", RECORDING)
def test_a_state_closed_over_is_used_where_nothing_is_compiled(recording):
  loss, scaled_grads = RECORDING[recording](closed_over(make_state()))(X)
  assert loss == 5
  np.testing.assert_array_equal(scaled_grads, 4 * 2 * X)


@pytest.mark.parametrize("recording", RECORDING)
def test_each_call_uses_the_scale_of_its_own_state(recording):
  state = make_state()
  other = state._replace(
    loss_scale_state=state.loss_scale_state._replace(
      loss_scale=jnp.float32(16.0)
    )
  )
  for opt_state, scale in ((state, 4), (other, 16)):
    _, scaled_grads = RECORDING[recording](closed_over(opt_state))(X)
    np.testing.assert_array_equal(scaled_grads, scale * 2 * X)


# Each takes a recording and a function that has closed over a state.
FROZEN = {
  "a jitted function inside": lambda recording, fun: recording(jax.jit(fun)),
  "a jit around": lambda recording, fun: jax.jit(recording(fun)),
  "a jit around and inside": lambda recording, fun: jax.jit(
    recording(jax.jit(fun))
  ),
  "a scan inside": lambda recording, fun: recording(
    lambda x: lax.scan(lambda carry, _: (fun(x)[1], None), x, None, 2)[0]
  ),
  "a scan around": lambda recording, fun: (
    lambda x: lax.scan(
      lambda carry, _: (recording(fun)(carry)[1], None), x, None, 2
    )[0]
  ),
  "a remat around": lambda recording, fun: jax.checkpoint(recording(fun)),
}


@pytest.mark.parametrize("where", FROZEN)
@pytest.mark.parametrize("recording", RECORDING)
def test_what_is_compiled_still_refuses_a_frozen_scale(recording, where):
  fun = FROZEN[where](RECORDING[recording], closed_over(make_state()))
  with pytest.raises(ValueError, match="for ever"):
    fun(X)


@pytest.mark.slow
def test_a_state_that_is_an_argument_passes_everywhere():
  def fun(params, opt_state):
    return ols.scaled_value_and_grad(loss_fn, opt_state)(params)[1]

  for made in (
    jax.jit(hardware.emulate_saturation(fun)),
    hardware.emulate_saturation(jax.jit(fun)),
    jax.vmap(hardware.emulate_saturation(fun), in_axes=(0, None)),
  ):
    scaled_grads = made(jnp.stack([X]), make_state())
    np.testing.assert_array_equal(scaled_grads, 4 * 2 * X[None])


def test_nothing_is_recorded_before_and_after():
  seen = []

  def fun(x):
    seen.append(interpreter.is_recording())
    return jax.jit(lambda x: seen.append(interpreter.is_recording()) or x)(x)

  seen.append(interpreter.is_recording())
  hardware.emulate_saturation(fun)(X)
  seen.append(interpreter.is_recording())
  with pytest.raises(ZeroDivisionError):
    hardware.emulate_saturation(lambda: 1 / 0)()
  seen.append(interpreter.is_recording())
  assert seen == [False, True, False, False, False]


@pytest.mark.slow
@pytest.mark.parametrize("outer", RECORDING)
@pytest.mark.parametrize("inner", RECORDING)
def test_a_recording_within_a_recording_is_at_once_as_well(outer, inner):
  fun = RECORDING[outer](RECORDING[inner](closed_over(make_state())))
  np.testing.assert_array_equal(fun(X)[1], 4 * 2 * X)
  with pytest.raises(ValueError, match="for ever"):
    RECORDING[outer](jax.jit(fun))(X)


def test_what_a_function_returns_are_arrays():
  def fun(x):
    return x, 1.0, 2, True, None, np.ones(2, np.float16), (jax.random.key(0),)

  recording = interpreter.record(fun, (X,), {})
  result = recording.result(recording.evaluate(*recording.operands))
  expected = jax.jit(fun)(X)
  assert jax.tree.structure(result) == jax.tree.structure(expected)
  for got, want in zip(
    jax.tree.leaves(result), jax.tree.leaves(expected), strict=True
  ):
    assert isinstance(got, jax.Array)
    assert jax.typeof(got) == jax.typeof(want)


def test_what_a_function_closes_over_comes_before_its_arguments():
  weights = jnp.array([3.0, 4.0], jnp.float16)

  def fun(x, power, train=False):
    return (x * weights) ** power if train else x

  recording = interpreter.record(fun, (X, 2), {"train": True})
  consts, arguments = recording.consts_and_arguments(recording.operands)
  assert [x is X for x in arguments] == [True]
  assert len(consts) == 1
  np.testing.assert_array_equal(
    recording.evaluate(weights + 1, X)[0], (X * (weights + 1)) ** 2
  )


def test_a_flag_of_numpy_is_a_flag():
  def fun(x, train):
    return x * 2 if train else x

  for train in (True, np.True_, np.False_):
    assert hardware.emulate_saturation(fun)(jnp.float16(3), train) == (
      6 if train else 3
    )


@pytest.mark.parametrize("recording", RECORDING)
def test_an_object_that_is_changed_in_place_is_an_error(recording):
  module = nnx.BatchNorm(2, rngs=nnx.Rngs(0))
  recorded = RECORDING[recording](lambda module, x: module(x))
  with pytest.raises(ValueError) as caught:
    recorded(module, jnp.ones((3, 2)))
  assert "`fun` must not change its arguments in place" in str(caught.value)
  assert "mean" in str(caught.value)
  assert "nnx.split" in str(caught.value)
  assert "optax_lossscale.nnx.autocast" in str(caught.value)


@pytest.mark.parametrize("recording", RECORDING)
def test_an_object_that_is_closed_over_and_changed_is_an_error(recording):
  module = nnx.BatchNorm(2, rngs=nnx.Rngs(0))
  recorded = RECORDING[recording](lambda x: module(x))
  with pytest.raises(ValueError, match="must not change NNX .*nnx.autocast"):
    recorded(jnp.ones((3, 2)))


@pytest.mark.parametrize("recording", RECORDING)
def test_an_object_that_stays_as_it_is_may_be_an_argument(recording):
  module = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
  recorded = RECORDING[recording](lambda module, x: module(x))
  assert recorded(module, jnp.ones((3, 2))).shape == (3, 2)


@pytest.mark.parametrize("recording", RECORDING)
def test_a_dict_may_be_changed_in_place(recording):
  def fun(batch):
    batch["x"] = batch["x"] * 2
    return batch["x"]

  batch = {"x": X}
  np.testing.assert_array_equal(RECORDING[recording](fun)(batch), [2.0, 4.0])
  assert batch["x"] is X
