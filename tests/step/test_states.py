"""The state of a step: its place in a tree, its metrics, select_on_skip."""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_lossscale as ols
from tests import support
from tests.support import SMALLEST
from tests.support import Stub


class Params(NamedTuple):
  loss_scale: jax.Array
  loss_scale_state: jax.Array
  inner_state: jax.Array


def scaling(scale=1024.0, inner=None):
  return ols.loss_scaling(inner or optax.adam(0.1), Stub(scale))


NESTS = {
  "alone": scaling,
  "chain in a chain": lambda: optax.chain(
    optax.chain(scaling(), optax.identity()), optax.identity()
  ),
  "inject_hyperparams": lambda: optax.inject_hyperparams(
    lambda rate: scaling(inner=optax.sgd(rate))
  )(rate=0.1),
  "named_chain": lambda: optax.named_chain(
    ("first", optax.identity()), ("scaling", scaling())
  ),
  "around MultiSteps": lambda: scaling(
    inner=optax.MultiSteps(optax.adam(0.1), 2)
  ),
}


@pytest.mark.parametrize("nest", NESTS)
def test_guarantee_14_the_scale_is_found_in_any_nest(nest):
  params = {"loss_scale": jnp.ones(2), "nested": Params(*jnp.ones((3, 2)))}
  state = NESTS[nest]().init(params)
  assert ols.get_loss_scale(state) == 1024.0
  assert ols.get_loss_scale({"opt_state": state, "step": 3}) == 1024.0
  assert ols.loss_scale_metrics(state)["loss_scale"] == 1024.0
  assert ols.get_loss_scale(state).dtype == jnp.float32


def test_guarantee_14_two_scales_without_a_path_list_the_paths():
  params = jnp.ones(2)
  both = {
    "generator": optax.chain(optax.identity(), scaling(8.0)).init(params),
    "critic": scaling(16.0).init(params),
  }
  with pytest.raises(ValueError, match=r"got 2; .*'critic', 'generator/1'"):
    ols.get_loss_scale(both)
  assert ols.get_loss_scale(both, path="critic") == 16.0
  assert ols.get_loss_scale(both, path="generator/1") == 8.0
  assert ols.get_loss_scale(both, path="generator") == 8.0
  with pytest.raises(ValueError, match=r"at `path`, got 'gen'; .*'critic'"):
    ols.get_loss_scale(both, path="gen")


def test_guarantee_14_every_reader_takes_the_path():
  params = jnp.ones(2)
  both = (scaling(8.0).init(params), scaling(16.0).init(params))
  value_and_grad = ols.scaled_value_and_grad(jnp.sum, both, path="1")
  loss, scaled_grads = value_and_grad(params)
  np.testing.assert_array_equal(scaled_grads, [16.0, 16.0])
  assert ols.scale_loss(loss, both, path="1") == 32.0
  np.testing.assert_array_equal(ols.unscale(scaled_grads, both, path="1"), 1)
  assert ols.loss_scale_metrics(both, path="0")["loss_scale"] == 8.0
  assert ols.select_on_skip(both, 2, 1, path="0") == 2
  for reader in (ols.loss_scale_metrics, ols.get_loss_scale):
    with pytest.raises(ValueError, match="choose one by its path"):
      reader(both)


# What would apply a member's flag or S to rows or columns of an array.
READERS = {
  "select": lambda state, x: ols.select_on_skip(state, x, x),
  "unscale": lambda state, x: ols.unscale(x, state),
  "scale": lambda state, x: ols.scale_loss(x, state),
  "gradient": lambda state, x: ols.scaled_value_and_grad(jnp.sum, state)(x)[1],
  "update": lambda state, x: scaling().update(x, state, x),
}
SHAPES = (3, 3), (3,), (3, 5), (3, 5, 3)


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("shape", support.slow_but(SHAPES[:1], SHAPES))
def test_a_state_that_vmap_made_is_read_inside_vmap(reader, shape):
  x = jnp.arange(float(np.prod(shape))).reshape(shape)
  stacked = jax.vmap(scaling().init)(x)
  read = READERS[reader]
  for state in (stacked, {"nested": stacked}):
    if reader == "update" and state is not stacked:
      continue
    with pytest.raises(
      ValueError, match=r"got a stack of shape \(3,\), as jax.v"
    ):
      read(state, x)
  one = jax.tree.map(lambda x: x[0], stacked)
  mapped = jax.vmap(read)(stacked, x)
  support.assert_same_bits(
    jax.tree.map(lambda y: y[0], mapped), read(one, x[0])
  )


def test_two_states_at_paths_of_one_text_are_two_states():
  small, large = (scaling(x).init(jnp.ones(2)) for x in (8.0, 16.0))
  _, failed = scaling(8.0).update(jnp.full(2, jnp.nan), small)
  # Haiku's names of modules hold slashes.
  both = {"net": {"linear": failed}, "net/linear": large}
  long = ("['net']['linear']", "['net/linear']")
  for path in (None, "net/linear"):
    for reader in (
      ols.get_loss_scale,
      ols.loss_scale_metrics,
      lambda x, path: ols.scaled_value_and_grad(jnp.sum, x, path=path)(1.0),
      lambda x, path: ols.select_on_skip(x, 2, 1, path=path),
    ):
      with pytest.raises(ValueError, match="got 2; choose one") as error:
        reader(both, path=path)
      assert all(repr(x) in str(error.value) for x in long)
  for path, scale, kept in ((long[0], 4, 1), (long[1], 16, 2), ("net", 4, 1)):
    assert ols.get_loss_scale(both, path=path) == scale
    assert ols.select_on_skip(both, 2, 1, path=path) == kept
  _, again = scaling(8.0).update(jnp.full(2, jnp.nan), failed)
  both["net"]["linear"] = again
  with pytest.raises(
    FloatingPointError, match=r"'net'.*'linear'.*2 steps in a"
  ):
    ols.raise_if_failed(both, max_consecutive_skips=1)


def test_an_error_names_the_first_of_many_states():
  many = {f"member_{i}": scaling().init(jnp.ones(1)) for i in range(30)}
  for path in (None, "x"):
    with pytest.raises(ValueError, match="'member_0', .* and 10 more") as got:
      ols.get_loss_scale(many, path=path)
    assert len(str(got.value)) < 600
  with pytest.raises(ValueError) as got:
    ols.get_loss_scale(dict(list(many.items())[:20]))
  assert "'member_19'" in str(got.value) and "more" not in str(got.value)


BARE = optax.adam(0.1).init({"loss_scale": Params(*jnp.ones((3, 2)))})
WITHOUT = {
  "a rule's state": (Stub().init(), "a StubState without one; for the S of a"),
  "an optimizer": (scaling(), r"opt_state = tx\.init\(params"),
  "restored without a target": (
    {"opt_state": scaling().init(jnp.ones(1))._asdict()},
    "restored into the structure",
  ),
  "a bare state": (
    BARE,
    "got a tuple without one; pass .* or wrap the optimizer: .*with_",
  ),
  "parameters": (
    Params(*jnp.ones((3, 2))),
    "got a Params without one; pass .* or wrap",
  ),
}


@pytest.mark.parametrize(("tree", "message"), WITHOUT.values(), ids=WITHOUT)
def test_guarantee_14_what_holds_no_scale_is_refused_with_a_remedy(
  tree, message
):
  with pytest.raises(ValueError, match=f"`opt_state` must hold .*{message}"):
    ols.get_loss_scale(tree)


def test_a_scale_may_take_the_place_of_the_state():
  for scale in (8, 8.0, np.float32(8), np.array(8.0), jnp.float16(8)):
    got = ols.get_loss_scale(scale)
    assert got == 8 and got.dtype == jnp.float32 and not got.weak_type
  eight = jnp.float32(8)
  with jax.transfer_guard("disallow"):
    assert ols.get_loss_scale(eight) is not None
  assert jax.jit(ols.get_loss_scale)(eight) == 8


# Metrics.


def test_metrics_are_scalar_arrays_inside_jit():
  tx = scaling()
  _, state = tx.update(jnp.array([jnp.nan, 1.0]), tx.init(jnp.ones(2)))
  metrics = jax.jit(ols.loss_scale_metrics)(state)
  dtypes = {
    "float32": "loss_scale log2_scale inv_scale amax headroom skip_rate",
    "bool": "overflow nan inf skipped stalled",
    "int32": "applied_steps skipped_steps requested_skips consecutive_skips",
  }
  assert {name: str(x.dtype) for name, x in metrics.items()} == {
    name: dtype for dtype, names in dtypes.items() for name in names.split()
  }
  assert all(value.shape == () for value in metrics.values())
  assert (metrics["loss_scale"], metrics["log2_scale"]) == (512, 9)
  assert metrics["inv_scale"] == 2.0**-9
  assert metrics["nan"] and metrics["skipped"] and metrics["overflow"]
  counts = [metrics[name] for name in dtypes["int32"].split()]
  assert counts == [0, 1, 0, 1] and metrics["skip_rate"] == 1


def test_the_logarithm_of_a_power_of_two_is_exact():
  scales = jnp.asarray(2.0 ** np.arange(-126.0, 128), jnp.float32)
  state = scaling().init(jnp.ones(1))

  @jax.jit
  @jax.vmap
  def log2(scale):
    rule_state = state.loss_scale_state._replace(loss_scale=scale)
    return ols.loss_scale_metrics(state._replace(loss_scale_state=rule_state))

  np.testing.assert_array_equal(log2(scales)["log2_scale"], range(-126, 128))


# amax and the share of the range, and then what the metrics say of it.
HEADROOM = {
  "before the first step": (0.0, 0.0, np.nan, False),
  "no gradient": (0.0, SMALLEST, np.nan, False),
  "a share": (48.0, 3 / 64, -math.log2(3 / 64), False),
  "the limit": (65504.0, 1.0, 0.0, False),
  "beyond an unknown limit": (8 * 65504.0, 8.0, -3.0, False),
  "a subnormal amax": (2.0**-149, SMALLEST, 126.0, False),
  "inf": (np.inf, np.inf, -np.inf, True),
  "NaN": (np.nan, np.nan, np.nan, False),
}


@pytest.mark.parametrize(
  ("amax", "used", "headroom", "is_inf"), HEADROOM.values(), ids=HEADROOM
)
def test_headroom_is_how_often_s_could_still_have_doubled(
  amax, used, headroom, is_inf
):
  state = scaling().init(jnp.ones(1))
  last_step = state.last_step._replace(
    amax=jnp.float32(amax), range_used=jnp.float32(used)
  )
  metrics = ols.loss_scale_metrics(state._replace(last_step=last_step))
  np.testing.assert_allclose(metrics["headroom"], headroom, rtol=1e-6)
  assert not np.signbit(metrics["headroom"]) or headroom < 0
  assert metrics["inf"] == is_inf


# Values that a step changes outside the optimizer.


def test_select_on_skip_moves_everything_or_nothing():
  tx = scaling()
  new, old = (
    {
      "mean": mean,
      "key": jax.random.key(step),
      "step": jnp.array(step),
      "rate": 1 / step,
      "none": None,
    }
    for step, mean in (
      (4, jnp.full(2, jnp.nan)),
      (2, jnp.ones(2, jnp.float16)),
    )
  )

  @jax.jit
  def step(scaled_grads, opt_state):
    _, opt_state = tx.update(scaled_grads, opt_state)
    return ols.select_on_skip(opt_state, new, old)

  kept = step(jnp.full(2, jnp.inf), tx.init(jnp.ones(2)))
  np.testing.assert_array_equal(kept["mean"], [1.0, 1.0])
  assert kept["mean"].dtype == jnp.float16
  assert (kept["step"], kept["rate"], kept["key"]) == (2, 0.5, old["key"])
  moved = step(jnp.ones(2), tx.init(jnp.ones(2)))
  assert np.all(np.isnan(moved["mean"]))
  assert moved["mean"].dtype == jnp.float16
  assert (moved["step"], moved["rate"], moved["key"]) == (4, 0.25, new["key"])


def test_select_on_skip_refuses_trees_that_differ():
  state = scaling().init(jnp.ones(2))
  with pytest.raises(ValueError, match="`new` and `old` must have the same"):
    ols.select_on_skip(state, {"a": 1}, {"b": 1})
