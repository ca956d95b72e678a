"""Guarantees that every device must keep, in a few compiled programs each.

NumPy's own float16 is the authority wherever numbers are compared: it rounds
after every operation, which a compiler may leave out.
"""

from typing import Any

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np
import optax

from benchmarks import nonfinite
from benchmarks import phase
from benchmarks import rounds as rounds_lib
import optax_lossscale as ols

_HALF = np.float16


def run(*, tiny: bool, until: float) -> dict[str, dict[str, str]]:
  """Returns what was `seen` of each guarantee, or why it does not hold.

  Args:
    tiny: whether only a few small arrays are searched for a NaN.
    until: of `time.monotonic`; after it that search ends.

  Returns:
    Rows for JSON by the guarantees' names; `left_out` is what does not hold.
  """
  sizes = nonfinite.SIZES[:3] if tiny else nonfinite.SIZES
  dtypes = nonfinite.DTYPES[:1] if tiny else nonfinite.DTYPES
  rows: dict[str, dict[str, str]] = {}
  with rounds_lib.attempt(rows, name := "every NaN and inf is seen"):
    tried, wrong = nonfinite.run(sizes=sizes, dtypes=dtypes, until=until)
    _expect(not wrong, f"{len(wrong)} wrong, such as {' and '.join(wrong[:3])}")
    rows[name] = {"seen": f"{tried:,} cases"}
  for check in CHECKS:
    with rounds_lib.attempt(rows, check.__doc__ or ""):
      rows[check.__doc__ or ""] = {"seen": check()}
  return rows


def _skip() -> str:
  """A skipped step keeps every bit."""
  params = {"a": _spread(np.float32, -9, 3, 0), "b": np.float32([-0.0, 3.0])}
  # A GPU updates a dozen small leaves of one shape in one kernel.
  shared = _spread(np.float32, -9, 3, 9)[: 13 * 300].reshape(13, 300)
  params |= {f"c{i}": x for i, x in enumerate(shared)}
  for inner in (optax.adamw(1e-2), optax.lamb(1e-2), optax.sgd(1e-2, 0.9)):
    tx = ols.loss_scaling(inner, ols.DynamicLossScale())
    update = jax.jit(phase.make(tx))
    scaled_grads = jax.tree.map(lambda x: x.astype(_HALF), params)
    before = update((params, tx.init(params)), scaled_grads)
    kept = [*map(np.asarray, jax.tree.leaves(_inner(before)))]
    for i, (name, x) in enumerate(scaled_grads.items()):
      # The first and the last place, and some between.
      place = (0, x.size - 1, 7777 % x.size, 37 * i % x.size)[i % 4]
      bad = x.copy()
      bad[place] = (np.inf, np.nan, -np.inf)[i % 3]
      after = update(before, scaled_grads | {name: bad})
      _expect(bool(after[1].skipped), f"{bad[place]} at {name}[{place}]")
      for old, new in zip(kept, jax.tree.leaves(_inner(after)), strict=True):
        _expect_same(new, old)
  return "AdamW, LAMB, SGD with momentum"


def _inner(state: Any) -> Any:
  params, opt_state = state
  return params, opt_state.inner_state


def _growth() -> str:
  """S grows on exactly the last step of the interval, in lax.scan."""
  rule = ols.DynamicLossScale(2.0**10, growth_interval=5)
  tx = ols.loss_scaling(optax.sgd(0.1), rule)

  def step(state: Any, scaled_grads: Any) -> Any:
    state = phase.make(tx)(state, scaled_grads)
    return state, ols.get_loss_scale(state[1])

  params = jnp.ones(3)
  _, scales = lax.scan(step, (params, tx.init(params)), jnp.ones((12, 3)))
  powers = np.log2(scales).tolist()
  _expect(powers == [10.0] * 4 + [11.0] * 5 + [12.0] * 3, f"log2 S: {powers}")
  return "12 steps, an interval of 5"


def _float16_loss() -> str:
  """A float16 loss with S above 65504 is an overflow."""
  tx = ols.loss_scaling(optax.sgd(0.1), ols.DynamicLossScale(2.0**17))

  @jax.jit
  def step(params: Any, state: Any) -> Any:
    value_and_grad = ols.scaled_value_and_grad(
      lambda x: jnp.sum(jnp.square(x.astype(_HALF))), state
    )
    loss, scaled_grads = value_and_grad(params)
    return loss, tx.update(scaled_grads, state, params)[1]

  params = jnp.full(4, 2.0**-10)
  loss, state = step(params, tx.init(params))
  _expect(loss.dtype == _HALF and float(loss) == 2.0**-18, f"loss {loss}")
  _expect(bool(state.overflow and state.skipped), "no overflow")
  return f"S went from 2^17 to 2^{np.log2(ols.get_loss_scale(state)):.0f}"


def _saturated() -> str:
  """saturated(float16) sees 65504."""
  answers = []
  for check in (ols.saturated(jnp.float16), ols.nonfinite()):
    tx = ols.loss_scaling(optax.identity(), ols.FixedLossScale(), check=check)
    update = jax.jit(lambda g, tx=tx: tx.update(g, tx.init(()))[1].overflow)
    scaled_grads = np.zeros(1000, _HALF)
    for scaled_grads[777] in (65504, 65472):
      answers.append(bool(update(scaled_grads)))
  _expect(answers == [True, False, False, False], f"answers {answers}")
  return "and neither 65472, nor 65504 with nonfinite()"


def _narrowed() -> str:
  """A gradient that overflows where the update casts it is seen."""
  answers = []
  for check in (ols.nonfinite(), ols.saturated(jnp.float16)):
    tx = ols.loss_scaling(optax.identity(), ols.FixedLossScale(), check=check)
    state = tx.init(())
    # A compiler may leave out the rounding that makes inf of 65520.
    update = jax.jit(
      lambda x, tx=tx, state=state: tx.update(x.astype(_HALF), state)[1]
    )
    for value in (65487, 65519, 65520, 70000):
      scaled_grads = np.full(1000, value, np.float32)
      answers.append(bool(update(scaled_grads).overflow))
  expected = [False, False, True, True, False, True, True, True]
  _expect(answers == expected, f"answers {answers}")
  return "65520 with nonfinite(), 65519 (that is, 65504) with saturated()"


def _saturating() -> str:
  """Saturating rounds as NumPy does."""

  def clipped(x: Any) -> Any:
    return np.nan_to_num(x, nan=0.0, posinf=65504.0, neginf=-65504.0)

  x, y = (_spread(np.float32, -8, 17, seed) for seed in (1, 2))

  @jax.jit
  @ols.hardware.emulate_saturation
  def function(x: Any, y: Any) -> Any:
    x, y = x.astype(_HALF), y.astype(_HALF)
    return ((x * y - x) * y + x * x).astype(jnp.float32)

  with np.errstate(over="ignore"):
    a, b = clipped(x.astype(_HALF)), clipped(y.astype(_HALF))
    product = clipped(clipped(clipped(a * b) - a) * b)
    expected = clipped(product + clipped(a * a)).astype(np.float32)
  _expect_same(function(x, y), expected)
  return f"{x.size:,} results of five operations in float16"


def _status() -> str:
  """float_status sees a cast that overflows."""
  function = jax.jit(ols.hardware.float_status(lambda x: x.astype(_HALF) + 1))
  values = (65519.0, 65520.0, 1e5, np.inf)
  answers = [bool(function(np.float32(x))[1]) for x in values]
  _expect(answers == [False, True, True, False], f"answers {answers}")
  return "65520 and 100000, neither 65519 nor inf"


def _swallowed() -> str:
  """swallowed_share counts as NumPy does."""
  params, updates = _spread(np.float32, -3, 3, 4), _spread(_HALF, -14, -3, 5)
  share = jax.jit(
    lambda x, y: ols.instruments.swallowed_share(x.astype(_HALF), y)
  )(params, updates)
  narrow = params.astype(_HALF)
  expected = np.mean(narrow + updates == narrow)
  _expect(abs(share - expected) < 1e-6, f"{share}, not {expected}")
  return f"{expected:.4f} of {params.size:,} in float16"


def _leaf_stats() -> str:
  """leaf_stats counts as NumPy does."""
  x, lines = _spread(np.float32, -24, 15, 6), []
  for dtype in (jnp.float16, jnp.bfloat16, jnp.float8_e5m2):
    stats = jax.jit(
      lambda x, dtype=dtype: ols.instruments.leaf_stats(x.astype(dtype))
    )(np.append(x, np.float32([0, -0.0, np.inf])))
    narrow = np.abs(x.astype(dtype).astype(np.float32))
    zeros = int(np.sum(narrow == 0))
    narrow = narrow[narrow != 0]
    _, exponents = np.frexp(narrow)
    counts = np.bincount(exponents - 1 + 149, minlength=277)
    _expect_same(stats.counts[0], counts.astype(np.uint32))
    smallest = float(jnp.finfo(dtype).smallest_normal)
    subnormals = int(np.sum(narrow < smallest))
    others = [
      int(x[0]) for x in (stats.zeros, stats.subnormals, stats.nonfinite)
    ]
    expected = [zeros + 2, subnormals, 1]
    _expect(others == expected, f"{others}, not {expected}")
    _expect(np.isinf(stats.amax[0]), f"amax {stats.amax}")
    lines.append(f"{subnormals:,} in {jnp.dtype(dtype)}")
  share = jax.jit(ols.instruments.leaf_stats)(x).share_lost(_HALF, 2.0**-5)
  expected = np.mean((x * np.float32(2.0**-5)).astype(_HALF) == 0)
  _expect(abs(share - expected) < 1e-6, f"{share}, not {expected}")
  return f"of {x.size:,} numbers, subnormal are {', '.join(lines)}"


def _master_weights() -> str:
  """Parameters follow their master to within a rounding."""
  # A power of two, so that a fused multiply-add rounds like NumPy.
  tx = ols.master_weights(optax.sgd(0.25))
  params, gradients = _spread(_HALF, -3, 3, 7), _spread(_HALF, -14, 3, 8)
  update = jax.jit(phase.make(tx))
  state = params, tx.init(params)
  master = params.astype(np.float32)
  for _ in range(5):
    # An update may be rounded twice or once, so a parameter has no exact value.
    before, state = state, update(state, gradients)
    master = master - np.float32(0.25) * gradients.astype(np.float32)
    ulp = np.spacing(np.maximum(*(np.abs(x[0]) for x in (before, state))))
    error = np.abs(np.asarray(state[0], np.float32) - master)
    _expect(bool(np.all(error <= 1.5 * ulp)), f"{np.max(error / ulp)} ulp")
  _expect_same(state[1].master, master)
  return f"5 steps of {params.size:,} parameters in float16"


CHECKS = (
  *(_skip, _growth, _float16_loss, _saturated, _narrowed, _saturating),
  *(_status, _swallowed, _leaf_stats, _master_weights),
)


def _spread(dtype: Any, low: int, high: int, seed: int) -> Any:
  """Returns 10,000 numbers of both signs, alike at every power of two."""
  rng = np.random.default_rng(seed)
  signs = rng.choice([-1.0, 1.0], 10_000)
  return (signs * np.exp2(rng.uniform(low, high, 10_000))).astype(dtype)


def _expect(holds: bool, line: str) -> None:
  if not holds:
    raise AssertionError(line)


def _expect_same(actual: Any, expected: Any) -> None:
  """Compares bits, so that -0.0 is not 0.0."""
  unsigned = f"uint{8 * expected.dtype.itemsize}"
  _expect(actual.dtype == expected.dtype, f"got {actual.dtype}")
  wrong = np.sum(np.asarray(actual).view(unsigned) != expected.view(unsigned))
  _expect(not wrong, f"{wrong} of {expected.size} differ")
