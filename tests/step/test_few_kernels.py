"""The programs that GPUs and TPUs get, executed on a CPU.

How many kernels they are is tested in tests/compiled/test_targets.py.
"""

import functools

import jax
import jax.export
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest

import optax_lossscale as ols
from optax_lossscale._base import bits
from optax_lossscale._step import findings
from tests import support

# A GPU alone and one of several, whose arrays may be sharded, and a TPU.
PROGRAMS = {"gpu": ("cuda", 1), "gpus": ("rocm", 8), "tpu": ("tpu", 1)}
# Around a power of two, 512 rows, 2**14 elements and a large leaf.
SIZES = (0, 1, 3, 512, 512, 4095, 4096, 4097, 16_384, 24_576, 65_536, 70_001)
FLOAT8 = ml_dtypes.float8_e4m3fn


def ones(dtype, sizes=SIZES):
  return [np.ones(size, dtype) for size in sizes]


TREES = {
  "none": [],
  "empty": [np.ones((0, 3), np.float16), np.ones(0, np.float16)],
  "zeros": [np.zeros(n, np.float16) for n in (7, 5000)],
  "odd": ones(np.float16, (3, (), 512, 0)),
  "sizes": ones(np.float16),
  "matrices": [np.ones((64, 8 * n), np.float32) for n in (1, 33, 64, 64)],
  "different": ones(np.float16, range(1, 150, 2)),
  "many": ones(np.float32, [700] * 70 + [5000] * 70),
  "dtypes": ones(np.float16, (9, 5000)) + ones(np.float32, (9, 40_000)),
  "bfloat16": ones(ml_dtypes.bfloat16, (5000, 70_001)),
  "float0": [*ones(np.float16, (7,)), np.zeros(5, jax.dtypes.float0)],
  "float8": ones(FLOAT8, (7, 5000)),
  "complex": ones(np.complex64, (7, 5000)),
  "float64": ones(np.float64, (7, 5000)),
}
QUICK = {"none", "empty", "zeros", "odd", "float0", "complex", "matrices"}
# The largest number, the smallest one, inf and NaN, also with other payloads.
WORDS = {
  2: ("7bff", "0001", "fc00", "7e00", "ffff", "7c01"),
  4: ("7f7fffff", "80000001", "ff800000", "7fc00000", "ff800001"),
  8: ("ffefffffffffffff", "7ff0000000000000", "fff0000000000001"),
}


def with_word(tree, rng, step):
  """Returns a tree with a special value at the end of a leaf, or inside."""
  tree = [x.copy() for x in tree]
  filled = [x for x in tree if x.size and x.dtype != jax.dtypes.float0]
  if filled:
    leaf = filled[step % len(filled)]
    if leaf.dtype.itemsize == 1:
      leaf[-1] = np.nan
    else:
      own = leaf.reshape(-1).view(leaf.real.dtype)
      words = WORDS[own.dtype.itemsize]
      place = rng.choice([0, own.size // 2, own.size - 1])
      word = int(words[step % len(words)], 16)
      own.view(f"uint{8 * own.dtype.itemsize}")[place] = word
  return tree


@pytest.mark.usefixtures("full_compilation")
@pytest.mark.parametrize("name", support.slow_but(QUICK, TREES))
def test_guarantee_5_every_program_finds_the_same_bits(name, monkeypatch):
  def examine(tree, loss_scale):
    checks = ols.nonfinite(), ols.saturated()
    found = [findings.examine(x, tree, loss_scale=loss_scale) for x in checks]
    return [x._replace(skip=jnp.zeros(())) for x in found]

  functions = {}
  with jax.enable_x64(name == "float64"), monkeypatch.context() as patched:
    scale = jnp.float32(2 - 2**-23)  # Nearly all of its bits are set.
    for program, (platform, devices) in PROGRAMS.items():
      support.take_for(platform, patched, devices)
      functions[program] = jax.jit(functools.partial(examine))
      functions[program](TREES[name], scale)
    only = {"default": bits._largest_by_leaf}
    patched.setattr(bits, "_ways", lambda *_: only)
    by_leaf = jax.jit(functools.partial(examine))
    rng = np.random.default_rng(0)
    for step in range(2 * len(TREES[name]) if len(TREES[name]) < 20 else 12):
      tree = with_word(TREES[name], rng, step)
      expected = by_leaf(tree, scale)
      for function in functions.values():
        support.assert_same_bits(function(tree, scale), expected)


def params():
  """Returns leaves that share a flag, and two that do not."""
  rng = np.random.default_rng(0)
  shapes = [(3,), (40, 7), (40, 7), (256, 256), (256, 256)]
  return [rng.normal(size=shape).astype(np.float32) for shape in shapes]


INNERS = {
  # With powers of two nothing is rounded, however it is compiled.
  "momentum": lambda: optax.sgd(0.5, momentum=0.5),
  "adamw": lambda: optax.adamw(0.1),
  "lamb": lambda: optax.lamb(0.1),
}


def trainer(tx):
  """Returns a scan over steps; in each one element may be replaced."""

  def train(params, state, leaf, place, values):
    def step(carry, x):
      params, state = carry
      leaf, place, value = x
      grads = [8 * x.astype(jnp.float16) for x in params]
      grads = [
        x.reshape(-1)
        .at[place % x.size]
        .set(jnp.where(leaf == i, value, x.reshape(-1)[place % x.size]))
        .reshape(x.shape)
        for i, x in enumerate(grads)
      ]
      updates, state = tx.update(grads, state, params, skip=value == 3)
      params = optax.apply_updates(params, updates)
      return (params, state), (params, state)

    steps = leaf, place, values
    return jax.lax.scan(step, (params, state), steps)[1]

  return jax.jit(train)


@pytest.mark.usefixtures("full_compilation")
@pytest.mark.parametrize("inner", support.slow_but({"momentum"}, INNERS))
def test_guarantee_6_a_shared_flag_skips_every_leaf_bit_for_bit(
  inner, monkeypatch
):
  tx = ols.loss_scaling(INNERS[inner](), ols.DynamicLossScale(8.0))
  start = params()
  state = tx.init(start)
  rng = np.random.default_rng(1)
  values = np.float16([1, np.nan, 2, -np.inf, 3, np.inf, np.nan, 3, 1, np.inf])
  leaf = np.arange(10) % 5
  place = rng.integers(2**20, size=10)
  expected = trainer(tx)(start, state, leaf, place, values)
  for platform, devices in PROGRAMS.values():
    support.take_for(platform, monkeypatch, devices)
    # Also guarantee 9: one trace, and a scan.
    after, states = found = trainer(tx)(start, state, leaf, place, values)
    support.assert_same_bits(found, expected)
  skipped = ~np.isfinite(values) | (values == 3)
  assert states.skipped.tolist() == skipped.tolist()
  kept = [*after, *jax.tree.leaves(states.inner_state)]
  for step in np.flatnonzero(skipped):
    for x in kept:
      assert x[step].tobytes() == x[step - 1].tobytes()


def test_an_update_under_vmap_and_exported_for_many_platforms(monkeypatch):
  tx = ols.loss_scaling(INNERS["momentum"](), ols.DynamicLossScale(8.0))
  grads = [jnp.stack([jnp.float16(x), jnp.float16(x)]) for x in params()]
  grads[1] = grads[1].at[1, 39, 6].set(jnp.nan)
  state = jax.vmap(tx.init)(grads)
  exported = jax.export.export(
    jax.jit(jax.vmap(tx.update)), platforms=("cpu", "cuda", "tpu", "rocm")
  )(grads, state)
  expected = jax.jit(jax.vmap(tx.update))(grads, state)
  support.assert_same_bits(exported.call(grads, state), expected)
  for platform, devices in PROGRAMS.values():
    with monkeypatch.context() as patched:
      support.take_for(platform, patched, devices)
      found = jax.jit(jax.vmap(lambda *x: tx.update(*x)))(grads, state)
    support.assert_same_bits(found, expected)
  assert found[1].skipped.tolist() == [False, True]

  # Sizes may be symbols.
  tx = ols.loss_scaling(optax.sgd(1.0), ols.DynamicLossScale(8.0))
  (rows,) = jax.export.symbolic_shape("rows")
  grads = jax.ShapeDtypeStruct((rows, 8), jnp.float16)
  state = tx.init(jnp.ones((3, 8)))
  exported = jax.export.export(
    jax.jit(tx.update), platforms=("cpu", "cuda", "tpu")
  )(grads, jax.eval_shape(lambda: state))
  for value in (16.0, np.nan):
    values = np.full((3, 8), value, np.float16)
    found = exported.call(values, state)
    support.assert_same_bits(found, jax.jit(tx.update)(values, state))


def test_a_flag_and_an_s_may_vary_along_other_axes():
  """Each device has its own model, and all of them skip on request."""
  tx = ols.loss_scaling(optax.sgd(1.0), ols.DynamicLossScale(8.0), axis_name=())
  state = jax.vmap(tx.init)(jnp.ones((8, 3)))

  def update(grads, state, skip):
    state = jax.tree.map(lambda x: x[0], state)
    return tx.update(grads[0], state, skip=skip)[0][None]

  update = support.on_each_device(
    update, support.SPREAD, True, (support.SPREAD, support.SPREAD, jax.P())
  )
  grads = jnp.full((8, 3), 8.0)
  for skip, expected in ((False, -1.0), (True, -0.0)):
    found = jax.jit(update)(grads, state, jnp.array(skip))
    support.assert_same_bits(found, jnp.full((8, 3), expected))
