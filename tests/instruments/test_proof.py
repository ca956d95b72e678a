"""The proof of a step is sound: what it says of a value is true of the numbers.

Random programs are interpreted, and run at several S. S is a power of 16, so
that the fourth root of it scales a result exactly.
"""

import fractions
import functools
import pathlib
import re
import threading
from typing import Any
from typing import NamedTuple

import jax
from jax import lax
from jax.extend import core
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_lossscale as ols
from optax_lossscale import hardware
from optax_lossscale import rules
from optax_lossscale._base import leaves
from optax_lossscale._base import named_calls
from optax_lossscale._precision import precision_schedule
from optax_lossscale._step import backward
from optax_lossscale._step import checks
from optax_lossscale._step import findings
from optax_lossscale._step import loss_scaling
from optax_lossscale._step import states
from optax_lossscale.hardware import _emulate_saturation
from optax_lossscale.instruments import _degrees
from optax_lossscale.instruments import _interpret

SIZE = 4
# One S, and one for each member along the first axis.
SCALES = {
  "S": np.float32([2**-4, 1, 2**4]),
  "V": np.float32([[2**-4, 1, 2**4, 1], [1, 2**-4, 1, 2**4], [2**4, 1, 1, 1]]),
}

# ---- The operations that programs are made of.


def full(x):
  return jnp.broadcast_to(x, (SIZE, SIZE))


@jax.custom_vjp
def identity(x):
  return x * 1.5


identity.defvjp(lambda x: (x * 1.5, x), lambda x, c: (c * jnp.sign(x) * 2,))


@jax.custom_jvp
def doubled(x):
  return x + x


doubled.defjvp(lambda x, t: (x[0] + x[0], t[0] * 2))


def scanned(body, start, xs, length=SIZE):
  end, given = lax.scan(body, start, xs, length=length)
  return [end, given]


def window(x, how=lax.max, start=-np.inf):
  return lax.reduce_window(x, start, how, (2, 2), (1, 1), "SAME")


def lower(x):
  """Returns a triangular matrix with a diagonal that is not 0."""
  x = jnp.abs(full(x))
  return jnp.tril(x) + jnp.max(x) * jnp.eye(SIZE)


def turned(body):
  """Returns a loop that carries two values and swaps them."""

  def loop(x, y):
    return [*lax.fori_loop(0, 3, body, (full(x), full(y)))]

  return loop


def guarded(x):
  return jnp.where(x > 0, x, 1)


PERMUTATION = np.array([2, 0, 3, 1])
# What an operation takes: f a float, s a float that is seldom free of S, i an
# integer, b a flag; k, S itself.
OPERATIONS = {
  # Elementwise.
  "s neg": lambda x: -x,
  "s abs": jnp.abs,
  "s sign": jnp.sign,
  "s square": jnp.square,
  "s sqrt": lambda x: jnp.sqrt(jnp.abs(x)),
  "s rsqrt": lambda x: lax.rsqrt(jnp.abs(x)),
  "s cubed": lambda x: x**3,
  "s reciprocal": lambda x: x**-1,
  "s to the 0": lambda x: x**0,
  "s exp": lambda x: jnp.exp(-jnp.abs(x) / 8),
  "s tanh": jnp.tanh,
  "s log": lambda x: jnp.log(jnp.abs(x)),
  "s floor": jnp.floor,
  "s round": lax.round,
  "s softplus": jax.nn.softplus,
  "s relu": jax.nn.relu,
  "s leaky": jax.nn.leaky_relu,
  "s plus 1": lambda x: x + 1,
  "s times": lambda x: x * 3,
  "s over": lambda x: 2 / x,
  "s to float16": lambda x: x.astype(jnp.float16),
  "s through float16": lambda x: x.astype(jnp.float16).astype(jnp.float32),
  "s to int": lambda x: jnp.clip(x, -99, 99).astype(jnp.int32),
  "s to int at once": lambda x: x.astype(jnp.int32),
  "s to bool": lambda x: x.astype(bool),
  "s nan_to_num": jnp.nan_to_num,
  "s clip": lambda x: jnp.clip(x, -1, 1),
  "s from 0": lambda x: jnp.maximum(x, 0),
  "s above tiny": lambda x: jnp.maximum(jnp.abs(x), 1e-8),
  "s bits": lambda x: lax.bitcast_convert_type(
    lax.bitcast_convert_type(x.astype(jnp.float32), jnp.int32), jnp.float32
  ),
  "s frexp": lambda x: jnp.frexp(x.astype(jnp.float32))[0],
  "ss add": lambda x, y: x + y,
  "ss sub": lambda x, y: x - y,
  "ss mul": lambda x, y: x * y,
  "sf mul": lambda x, y: x * y,
  "ss div": lambda x, y: x / y,
  "fs div": lambda x, y: x / y,
  "ss max": jnp.maximum,
  "ss min": jnp.minimum,
  "ss atan2": jnp.arctan2,
  "sf atan2": jnp.arctan2,
  "ss rem": lax.rem,
  "ss hypot": lambda x, y: jnp.sqrt(x * x + y * y),
  # Comparisons and choices.
  "ss gt": lambda x, y: x > y,
  "s ge a number": lambda x: x >= 1,
  "s gt 0": lambda x: x > 0,
  "ss eq": lambda x, y: x == y,
  "s finite": jnp.isfinite,
  "bss where": jnp.where,
  "bs where": lambda b, x: jnp.where(b, x, 0),
  "ss where": lambda x, y: jnp.where(x > 1, x, y),
  "s where": lambda x: jnp.where(jnp.isfinite(x), x, 0),
  "bb and": lambda a, b: a & ~b,
  "sss clamp": lambda x, y, z: jnp.clip(x, -abs(y), abs(z)),
  "sf clamp": lambda x, y: lax.clamp(
    full(y).astype(x.dtype) - 1, full(x), full(y).astype(x.dtype) + 1
  ),
  # Moves.
  "s transpose": lambda x: full(x).T,
  "s reshape": lambda x: full(x).reshape(2, -1),
  "s back": lambda x: full(x).reshape(2, 8).reshape(SIZE, SIZE),
  "s turned": lambda x: full(x).reshape(2, 8).T.reshape(SIZE, SIZE),
  "s rev": lambda x: lax.rev(full(x), (0,)),
  "s roll": lambda x: jnp.roll(full(x), 1, 0),
  "s tile": lambda x: jnp.tile(full(x), (2, 1))[1:5],
  "s pad": lambda x: lax.pad(
    full(x), jnp.zeros((), x.dtype), ((1, -1, 0), (0, 0, 0))
  ),
  "sf pad": lambda x, y: jnp.pad(full(x)[1:3], 1, constant_values=2)[:, :4],
  "s slice": lambda x: full(x)[:, 1:3].sum(1, keepdims=True),
  "ss concatenate": lambda x, y: jnp.concatenate([full(x)[:3], full(y)[:1]]),
  "sf concatenate": lambda x, y: jnp.concatenate([full(x)[:3], full(y)[:1]]),
  "ss stack": lambda x, y: jnp.stack([full(x), full(y)])[0],
  "s split": lambda x: jnp.concatenate(jnp.split(full(x), 2, 1)[::-1], 1),
  "s gather": lambda x: full(x)[PERMUTATION],
  "s gather columns": lambda x: full(x)[:, PERMUTATION],
  "s gather filled": lambda x: (
    full(x).at[np.array([0, 9, 1, 2])].get(mode="fill", fill_value=1)
  ),
  "si take": lambda x, i: full(x).take(i % SIZE).reshape(i.shape),
  "s take along": lambda x: jnp.take_along_axis(
    full(x), jnp.argsort(full(x), 1), 1
  ),
  "sf take by rank": lambda x, y: full(y)[jnp.argmax(full(x).sum(1))][None],
  "si dynamic_slice": lambda x, i: lax.dynamic_slice_in_dim(
    full(x), i.ravel()[0], 1
  ),
  "ss update_slice": lambda x, y: lax.dynamic_update_slice(
    full(x), full(y)[:1, :2].astype(x.dtype), (1, 1)
  ),
  "ss set": lambda x, y: full(x).at[2].set(full(y)[1]),
  "s set to a number": lambda x: full(x).at[:, 2].set(1),
  "ss added": lambda x, y: full(x).at[PERMUTATION[:2]].add(full(y)[:2]),
  "s multiplied": lambda x: full(x).at[1].multiply(full(x)[0]),
  "ss largest": lambda x, y: full(x).at[1].max(full(y)[0]),
  "s applied": lambda x: full(x).at[1].apply(lambda y: y * y),
  "s sort": lambda x: jnp.sort(full(x), 0),
  "s sort columns": lambda x: jnp.sort(full(x), 1),
  "sf sort by": lambda x, y: [*lax.sort((full(x), full(y)), dimension=0)],
  "s argsort": lambda x: jnp.argsort(full(x), 1),
  "s argmax": lambda x: jnp.argmax(full(x), 0, keepdims=True),
  "s argmin of all": lambda x: jnp.argmin(full(x)),
  "s top_k": lambda x: lax.top_k(full(x), SIZE),
  # Sums and products.
  "s sum": lambda x: full(x).sum(),
  "s mean": lambda x: full(x).mean(1, keepdims=True),
  "s sum of rows": lambda x: full(x).sum(0, keepdims=True),
  "s largest": lambda x: full(x).max(1, keepdims=True),
  "s prod": lambda x: full(x).prod(1, keepdims=True),
  "s norm": lambda x: jnp.sqrt(jnp.sum(full(x) ** 2)),
  "s cumsum": lambda x: jnp.cumsum(full(x), 1),
  "s cumsum down": lambda x: jnp.cumsum(full(x), 0),
  "s cumprod": lambda x: jnp.cumprod(full(x), 1),
  "s cummax": lambda x: lax.cummax(full(x), 1),
  "s logsumexp": lambda x: jax.nn.logsumexp(full(x), 1, keepdims=True),
  "s normalized": lambda x: full(x) / jnp.abs(full(x)).sum(),
  "s softmax": lambda x: jax.nn.softmax(full(x)),
  "s layer norm": lambda x: jax.nn.standardize(full(x)),
  "ss dot": lambda x, y: full(x) @ full(y),
  "sf dot": lambda x, y: full(x) @ full(y).T,
  "fs dot": lambda x, y: full(x) @ full(y),
  "sf einsum": lambda x, y: jnp.einsum("ij,ik->ij", full(x), full(y)),
  "sf conv": lambda x, y: lax.conv(
    full(x)[None, None],
    full(y)[None, None, :3, :3].astype(x.dtype),
    (1, 1),
    "SAME",
  )[0, 0],
  "s max pool": lambda x: window(full(x)),
  "s mean pool": lambda x: window(full(x), lax.add, 0.0),
  "s fft": lambda x: jnp.fft.fft(full(x).astype(jnp.float32)).real,
  "ss triangular": lambda x, y: lax.linalg.triangular_solve(
    lower(x).astype(jnp.float32),
    full(y).astype(jnp.float32),
    left_side=True,
    lower=True,
  ),
  "ss unit triangular": lambda x, y: lax.linalg.triangular_solve(
    lower(x).astype(jnp.float32),
    full(y).astype(jnp.float32),
    left_side=True,
    lower=True,
    unit_diagonal=True,
  ),
  # Calls, branches and loops.
  "ss jit": lambda x, y: jax.jit(lambda x, y: [x * y, x])(x, y),
  "s checkpoint": jax.checkpoint(lambda x: x * jnp.abs(x)),
  "s custom": lambda x: doubled(identity(x)),
  "sf gradient": lambda x, y: jax.grad(
    lambda y: jnp.sum(full(x) * jnp.tanh(full(y)))
  )(y),
  "s gradient of a loss": lambda x: jax.grad(
    lambda x: jnp.sum(identity(x) ** 2 * jax.nn.relu(x))
  )(full(x)),
  "sf gradient of choices": lambda x, y: jax.grad(
    lambda y: jnp.sum(full(x) * jnp.sort(full(y)) + doubled(full(x) * y).max())
  )(full(y)),
  "ss vmap": lambda x, y: jax.vmap(lambda a, b: a @ jnp.outer(b, b))(
    full(x), full(y)
  ),
  "s vmap of a sum": lambda x: jax.vmap(lambda a: a / a.sum())(full(x)),
  "bss cond": lambda b, x, y: lax.cond(
    b.any(), lambda: full(x).astype(jnp.float32), lambda: 2.0 * full(y)
  ),
  "ss cond by S": lambda x, y: lax.cond(
    full(x).sum() > 1, lambda: full(x) * 1.0, lambda: full(x) * 2.0
  ),
  "is switch": lambda i, x: lax.switch(
    i.ravel()[0] % 3, [lambda: x * 2, lambda: x * x, lambda: -x]
  ),
  "ss scan": lambda x, y: scanned(
    lambda c, r: (c + r, c * r), full(x)[0] * 1.0, full(y) * 1.0
  ),
  "s scan of 0": lambda x: scanned(
    lambda c, r: (r, c / r), jnp.zeros_like(full(x)[0]), full(x)
  ),
  "s scan of products": lambda x: scanned(
    lambda c, r: (c * r, c), jnp.ones_like(full(x)[0]), full(x)
  ),
  "ss scan of the last": lambda x, y: scanned(
    lambda c, r: ((r, c[0]), r * c[1]), (full(x)[0], full(x)[0]), full(x)
  )[1],
  "s fori of sums": lambda x: lax.fori_loop(
    0, 3, lambda i, c: c + c * i.astype(x.dtype), x
  ),
  "s fori of powers": lambda x: lax.fori_loop(0, 2, lambda i, c: c * x, x),
  "ss fori of turns": turned(lambda i, c: (c[1], c[0])),
  "ss fori of ratios": turned(lambda i, c: (c[0], c[0] / c[1])),
  "sf while": lambda x, y: lax.while_loop(
    lambda c: c[1] < jnp.sum(full(y) > 0),
    lambda c: (c[0] * 0.5, c[1] + 4),
    (x, jnp.int32(0)),
  )[0],
  "sf while or not": lambda x, y: lax.while_loop(
    lambda c: c[1] < (jnp.sum(full(y) > 0) > 8),
    lambda c: (full(y).astype(x.dtype), c[1] + 1),
    (full(x), jnp.int32(0)),
  )[0],
  "s while by S": lambda x: lax.while_loop(
    lambda c: (jnp.abs(c[0]).max() < 8) & (c[1] < 8),
    lambda c: (c[0] * 2, c[1] + 1),
    (x, jnp.int32(0)),
  )[0],
  "s over what is 0": lambda x: x / jnp.where(x == 0, 1, x),
  "ss over what is 0": lambda x, y: x / jnp.where(y == 0, 1, y),
  "s over what is positive": lambda x: x / jnp.where(x * x > 0, x * x, 1),
  "ss over a product": lambda x, y: 1 / guarded(x * y),
  # S itself.
  "k slice": lambda k: k[2] if k.ndim else k,
  "k strides": lambda k: (k[::2] / k[::3])[1] if k.ndim else k,
  "k permuted": lambda k: k[PERMUTATION][:, None] if k.ndim else k,
  "kk of members": lambda k, _: k[1] / k[0] if k.ndim else 1 / k,
  "ks times": lambda k, x: column(k) * x,
  "ks over": lambda k, x: x / column(k),
  "bk where": lambda b, k: column(jnp.where(b.any(), k, 2 * k)),
  "k broadcast": lambda k: jnp.broadcast_to(column(k), (SIZE, SIZE))[:, :1],
  # What may be an argument, or a number.
  "i plus 0": lambda i: i + 0,
  "i plus 1": lambda i: i + 1,
  "f plus 0": lambda x: x - 0.0,
  "f times 0": lambda x: x + 0 * x,
  "f times 1": lambda x: x * 1 / 1,
  "f up and down": lambda x: x.astype(jnp.float32).astype(x.dtype),
  "i widened": lambda i: i.astype(jnp.int8).astype(jnp.int32),
  "b to int": lambda b: b.astype(jnp.int32),
  "ii compare": lambda i, j: i < j,
  "i compare": lambda i: i + 1 > i,
  "i bounds": lambda i: jnp.minimum(i, 1) == jnp.minimum(i, 2),
  "ii where": lambda i, j: jnp.where(i == j, i, j),
  "bi where": lambda b, i: jnp.where(b | True, i, i + 1),
  "bf choice": lambda b, x: jnp.where(b & False, x + 1, x),
  "fb kept": lambda x, b: lax.cond(b.any(), lambda: x, lambda: x + 0),
  "f scanned": lambda x: scanned(lambda c, r: (c, (r, c)), full(x)[0], full(x))[
    1
  ][0],
  "f looped": lambda x: lax.fori_loop(0, 3, lambda i, c: c.T.T, full(x)),
  "f barrier": lambda x: lax.optimization_barrier((x, x * 2))[0],
  "f zeros": lambda x: jnp.zeros_like(x) * x,
  "f inf": lambda x: jnp.full_like(x, np.inf),
  "f ones": lambda x: jnp.full((SIZE, SIZE), 1.5, x.dtype).max(
    0, keepdims=True
  ),
  "f numbers": lambda x: jnp.maximum(jnp.float32(1), jnp.float32(np.nan)),
  "i numbers": lambda i: jnp.int32(2**31 - 1) + jnp.int32(1),
  "f number to int": lambda x: (
    jnp.full_like(x, 300).astype(jnp.uint8).astype(jnp.int32)
  ),
  "f inf to int": lambda x: jnp.full_like(x, np.inf).astype(jnp.int32),
  "i counted": lambda i: jnp.sum(jnp.full((SIZE, SIZE), 3)),
}
# Their rounding depends on the exponent, so that nothing may follow on them.
LAST = {
  "s cbrt": jnp.cbrt,
  "s pow 0.5": lambda x: jnp.abs(x) ** 0.5,
  "s pow -1.25": lambda x: jnp.abs(x) ** -1.25,
  "s pow 0.005": lambda x: jnp.abs(x) ** 0.005,
  "s cholesky": lambda x: jnp.linalg.cholesky(
    (lower(x) @ lower(x).T).astype(jnp.float32)
  ),
  "ss solve": lambda x, y: jnp.linalg.solve(lower(x), full(y)),
  "s svd": lambda x: jnp.linalg.svd(full(x).astype(jnp.float32))[1],
  "s eigh": lambda x: jnp.linalg.eigvalsh(lower(x).astype(jnp.float32)),
}


def column(k):
  return k[:, None] if k.ndim else k


# ---- Programs.


class Made(NamedTuple):
  """A value of a program: the operation, and the values that it takes."""

  name: str
  sources: tuple[int, ...]


class Program(NamedTuple):
  kind: str
  jaxpr: Any
  made: list[Made]
  # The inputs and the values at each S.
  inputs: list[list[np.ndarray]]
  values: list[list[np.ndarray]]


def draw(rng, kind):
  """Returns a program's inputs at each S: S, what grows as S, and the rest."""
  grown, signed, positive = rng.normal(size=(3, SIZE, SIZE)).astype(np.float32)
  grown[rng.random(grown.shape) < 0.1] = 0
  signed[rng.random(signed.shape) < 0.1] = 0
  rest = [
    signed,
    np.abs(positive) + np.float32(0.1),
    positive[:, :1],
    rng.integers(-3, 4, (SIZE, SIZE)).astype(np.int32),
    np.int32(rng.integers(0, 9)),
    np.bool_(rng.random() < 0.5),
  ]
  scales = SCALES[kind]
  return [[k, grown * (k[:, None] if k.ndim else k), *rest] for k in scales]


def compose(rng, names, made):
  """Returns a function that does operations on what was computed before."""

  def program(*inputs):
    values, grows = list(inputs), {0, 1}
    made[:] = [Made("input", ())] * len(values)

    def keep(name, sources, results):
      for x in jax.tree.leaves(results):
        if jnp.result_type(x) not in (
          jnp.float32,
          jnp.float16,
          jnp.int32,
          bool,
        ):
          continue
        if x.ndim and x.shape not in ((SIZE, SIZE), (SIZE, 1), (1, SIZE)):
          # All of these can be broadcast to one shape.
          continue
        made.append(Made(name, tuple(sources)))
        values.append(x)
        if grows & {*sources}:
          grows.add(len(values) - 1)

    for i in (2, 3):
      keep("k times", [0, i], column(inputs[0]) * inputs[i])
    first = [1, len(values) - 2, len(values) - 1]

    def choose(kind):
      if kind == "k":
        return 0
      of = {"i": jnp.int32, "b": jnp.bool_}.get(kind)
      fits = [
        i
        for i, x in enumerate(values)
        if i and (x.dtype == of if of else x.dtype in (np.float32, np.float16))
      ]
      if kind == "s" and rng.random() < 0.5:
        return int(rng.choice(first))
      if kind == "s" and rng.random() < 0.8:
        fits = [i for i in fits if i in grows]
      return int(rng.choice(fits))

    for name in names:
      sources = [choose(x) for x in name.partition(" ")[0]]
      operation = OPERATIONS.get(name) or LAST[name]
      taken = [values[i] for i in sources]
      try:
        results = operation(*taken)
      except (TypeError, ValueError):
        # It needs floats of one dtype.
        results = operation(
          *(x.astype(np.float32) if x.dtype == np.float16 else x for x in taken)
        )
      if name in LAST:
        made.append(Made(name, tuple(sources)))
        values.append(results)
        break
      keep(name, sources, results)
    return values

  return program


def program_of(number, names):
  rng = np.random.default_rng(number)
  kind = "SV"[number % 2]
  inputs = draw(rng, kind)
  made: list[Made] = []
  with np.errstate(all="ignore"):
    jaxpr = jax.make_jaxpr(compose(rng, names, made))(*inputs[0])
    run = jax.jit(core.jaxpr_as_fun(jaxpr))
    values = [[*map(np.asarray, run(*x))] for x in inputs]
  return Program(kind, jaxpr, made, inputs, values)


@functools.cache
def programs(count, seed=0):
  """Returns programs that do every operation about equally often."""
  rng = np.random.default_rng(seed)
  found, names, last = [], [], []
  for number in range(count):
    if len(names) < 8:
      names += [str(x) for x in rng.permutation([*OPERATIONS])]
    last = last or [str(x) for x in rng.permutation([*LAST])]
    chosen, names = [*names[:8], last.pop()], names[8:]
    found.append(program_of(seed * 10**6 + number, chosen))
  return found


# ---- What is said of the values of a program, and what is true.


def claims(program):
  """Returns what the interpreter says of each value of a program."""
  machine = _interpret.Interpreter([])
  avals = program.jaxpr.in_avals
  inputs = [_interpret.Value(identity=("in", i)) for i in range(len(avals))]
  inputs[0] = machine.argument(0, avals[0], "state", program.kind)
  axes = tuple(range(avals[0].ndim))
  ((symbol, _), _) = inputs[0].degree[0]
  unit = ((symbol, axes), fractions.Fraction(1))
  inputs[1] = inputs[1].but(degree=(unit,), scales=inputs[0].scales)
  return machine.run(program.jaxpr, inputs)


def factor_of(degree, ratio, ndim):
  """Returns how a value of a degree grows, or None if its S is unknown."""
  factor = np.float64(1)
  for (symbol, axes), exponent in degree:
    grown = ratio
    if part := re.fullmatch(r"([SV])\[(\d+)\]", symbol.words):
      # A slice of S, or of one that was broadcast.
      grown = ratio[int(part[2])] if ratio.ndim and not axes else ratio
    elif symbol.words not in SCALES:
      return None
    if grown.ndim != len(axes) or any(x not in range(ndim) for x in axes):
      return np.float64(np.nan)  # Which member's?
    shape = np.ones(ndim, int)
    for axis in axes:
      shape[axis] = SIZE
    factor = factor * grown.reshape(shape) ** float(exponent)
  return factor


def same(a, b, *, is_exact=True):
  """Returns whether arrays are equal, but for the sign of 0."""
  if is_exact:
    return bool(np.array_equal(a, b, equal_nan=a.dtype.kind in "fc"))
  size = np.max(np.abs(b), where=np.isfinite(b), initial=0)
  return bool(np.allclose(a, b, 1e-3, 1e-3 * size, equal_nan=True))


def expected(identity, inputs):
  """Returns the array that an identity stands for, or None."""
  if not isinstance(identity, tuple):
    return None
  kind, of = identity[:2]
  if kind == "in":
    return inputs[of]
  array = expected(of, inputs)
  if array is None or kind not in ("shape", "cast", "plus one"):
    return None
  return array + 1 if kind == "plus one" else array


def is_extreme(x):
  """Returns whether products of an array's numbers may not be exact."""
  if x.dtype.kind != "f":
    return False
  bound = 2.0**11 if x.dtype == np.float16 else 2.0**40
  sizes = np.abs(x[np.isfinite(x) & (x != 0)].astype(np.float64))
  is_lost = x.dtype == np.float16 and not np.isfinite(x).all()
  return is_lost or bool(np.any((sizes > bound) | (sizes < 1 / bound)))


def error(program, i, said):
  """Returns what is false of what is said of a value, or None."""
  values = [x[i] for x in program.values]
  is_exact = program.made[i].name not in LAST
  for inputs, value in zip(program.inputs, values, strict=True):
    array = expected(said.identity, inputs)
    if array is not None:
      array = np.asarray(array).astype(value.dtype)
      if array.size != value.size or not same(
        value, array.reshape(value.shape)
      ):
        return f"is not {said.identity}"
    if said.constant is not None:
      with np.errstate(all="ignore"):
        number = np.full(value.shape, said.constant)
      if not same(value.astype(number.dtype), number):
        return f"is not {said.constant}"
    if said.degree == _degrees.ANY and not np.all(
      (value == 0) | ~np.isfinite(value)
    ):
      return "is not 0, inf or NaN"
  if not isinstance(said.degree, tuple):
    return None
  for inputs, value in zip(program.inputs[1:], values[1:], strict=True):
    ratio = inputs[0].astype(np.float64) / program.inputs[0][0]
    factor = factor_of(said.degree, ratio, value.ndim)
    if factor is None:
      return None
    quarters = [float(x) * 4 for _, x in said.degree]
    exact = is_exact and all(x.is_integer() for x in quarters)
    if value.dtype.kind in "fc" or said.degree:
      grown = values[0].astype(np.float64) * factor
    else:
      grown = values[0]
    if not same(value.astype(grown.dtype), grown, is_exact=exact):
      return f"does not grow as S to the {said.degree}"
  return None


class Tally(NamedTuple):
  """What became of the values of programs."""

  errors: list[str]
  powers: int
  any: int
  identities: int
  constants: int
  # Of degrees that are surely unknown: all, and those that are powers of S.
  unknown: int
  unchanged: int


def judge(program):
  """Returns the errors in what is said of a program, and counts."""
  errors, counts = [], dict.fromkeys(Tally._fields[1:], 0)
  tainted: set[int] = set()
  for i, said in enumerate(claims(program)):
    made = program.made[i]
    if (
      tainted & {*made.sources}
      or any(is_extreme(x[i]) for x in program.values)
      or made.name in (*UNSOUND, *LIMITS)
    ):
      tainted.add(i)
      continue
    counts["powers"] += isinstance(said.degree, tuple)
    counts["any"] += said.degree == _degrees.ANY
    counts["identities"] += said.identity is not None
    counts["constants"] += said.constant is not None
    if isinstance(said.degree, _degrees.Unknown) and said.degree.is_sure:
      counts["unknown"] += 1
      counts["unchanged"] += is_power(program, i)
    wrong = error(program, i, said)
    if wrong:
      # What is made of it is wrong as well.
      tainted.add(i)
      errors.append(f"[{made.name}] value {i} {wrong}: {said}")
  return Tally(errors, **counts)


def is_power(program, i):
  """Returns whether a value was a power of S at these S."""
  first, *others = (x[i].astype(np.float64) for x in program.values)
  for quarters in range(-16, 17):
    ratios = [x[0] / program.inputs[0][0] for x in program.inputs[1:]]
    factors = [column(x) ** (quarters / 4) for x in ratios]
    if all(same(x, first * y) for x, y in zip(others, factors, strict=True)):
      return True
  return False


# ---- What is said is true, and a wrong rule would be seen.

COUNT = 150
LIMITS = {
  # What stands in for 0 is taken to divide what is 0 there, too.
  "ss over what is 0",
}
# Operations of which false things are said. Their programs go on without them.
UNSOUND: dict[str, str] = {
  "s applied": "`scatter` with a function",
  "s gather filled": "`gather` with another number",
  "s pow 0.005": "an exponent is rounded to 0",
  "ss unit triangular": "a diagonal that is taken for 1",
  "ss over a product": "a number stands in for what is negative",
  "i bounds": "equal, as both may be one argument",
  "f number to int": "NumPy and XLA differ",
  "f inf to int": "NumPy and XLA differ",
  # Members of an ensemble are mixed.
  "s pad": "`pad` shifts members",
  "s svd": "several outputs",
  "s eigh": "several outputs",
  "s top_k": "several outputs",
  "sf sort by": "several outputs",
  "s argsort": "several outputs",
  "s take along": "several outputs",
  "ss solve": "`custom_linear_solve`",
  "s argmax": "members are compared",
  "s argmin of all": "members are compared",
  "sf take by rank": "members are compared",
  "k permuted": "`gather` of S",
  "k strides": "a part of S",
  "s scan of 0": "S of one round in the next",
}


def errors_of(found):
  """Returns what is false, with the jaxprs of the programs, and the counts."""
  tallies = [judge(x) for x in found]
  errors = [
    f"{error}\nin {program.jaxpr}"
    for program, tally in zip(found, tallies, strict=True)
    for error in tally.errors
  ]
  sums = [sum(x) for x in zip(*(x[1:] for x in tallies), strict=True)]
  return errors, Tally([], *sums)


def test_what_is_said_of_random_programs_is_true():
  errors, said = errors_of(programs(COUNT))
  assert not errors, "\n\n".join(errors[:3])
  assert said.powers > 10 * COUNT and said.identities > 7 * COUNT
  assert said.any > 4 and said.constants > 10
  # What is sure to depend on S otherwise does so in most of these programs.
  assert said.unchanged < 0.4 * said.unknown


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, 9))
def test_what_is_said_of_more_programs_is_true(seed):
  errors, _ = errors_of(programs(5 * COUNT, seed))
  programs.cache_clear()
  assert not errors, "\n\n".join(errors[:3])


def keeps(*names):
  """Returns the mistake that operations keep the degree of the first input."""

  def plant(patch):
    patch.setattr(_degrees, "_KEEPS", _degrees._KEEPS | {*names})
    patch.setattr(_degrees, "_SAME_AXES", _degrees._SAME_AXES | {*names})

  return plant


def joins_first(reason):
  """Returns the mistake that the first of several values is all of them."""
  join = _interpret.Interpreter._join

  def wrong(self, values, place, why, **options):
    if why == reason:
      return values[0]
    return join(self, values, place, why, **options)

  return lambda patch: patch.setattr(_interpret.Interpreter, "_join", wrong)


def ignores(method, position=0):
  """Returns the mistake that a choice does not depend on what chooses."""
  original = getattr(_interpret.Interpreter, method)

  def wrong(self, equation, inputs, *rest):
    inputs = [*inputs]
    inputs[position] = inputs[position].but(degree=_degrees.FREE)
    return original(self, equation, inputs, *rest)

  return lambda patch: patch.setattr(_interpret.Interpreter, method, wrong)


def believes(*names):
  """Returns the mistake that operands of different degrees have the first's."""
  joined = _degrees._joined

  def wrong(name, equation, degrees, numbers, mismatch):
    if name in names:
      return next((x for x in degrees if x != _degrees.ANY), _degrees.ANY)
    return joined(name, equation, degrees, numbers, mismatch)

  return lambda patch: patch.setattr(_degrees, "_joined", wrong)


def replaced(owner, name, change):
  """Returns a mistake in place of a function, made of the right one."""
  wrong = change(getattr(owner, name))
  return lambda patch: patch.setattr(owner, name, wrong)


def compares_freely(patch):
  names = _interpret.operation_table.COMPARISONS
  patch.setattr(_degrees, "_ORDERS", _degrees._ORDERS | names)


def casts_keep(convert):
  def wrong(self, equation, value, made):
    degree = value.degree
    result = convert(self, equation, value, made)
    is_known = isinstance(degree, tuple) and degree
    return result.but(degree=degree) if is_known else result

  return wrong


def forgets_members(moved):
  def wrong(equation, index, degree):
    axes = _degrees._output_axes(equation, index)
    return _degrees.renamed(
      degree, lambda x: (x[0], tuple(axes[i] for i in x[1] if i in axes))
    )

  return wrong


MISTAKES = {
  "a square keeps the degree": lambda patch: patch.setitem(
    _degrees._POWERS, "square", 1
  ),
  "rsqrt is sqrt": lambda patch: patch.setitem(_degrees._POWERS, "rsqrt", 0.5),
  "a power keeps the degree": replaced(
    _degrees, "power", lambda _: lambda degree, exponent: degree
  ),
  "a quotient is a product": replaced(
    _degrees, "times", lambda times: lambda a, b, sign=1: times(a, b)
  ),
  "a product has the first degree": keeps("dot_general"),
  "exp is a move": keeps("exp"),
  "tanh is a move": keeps("tanh"),
  "rounding is a move": keeps("floor", "round"),
  "cumprod keeps the degree": keeps("cumprod"),
  "reduce_prod keeps the degree": keeps("reduce_prod"),
  "concatenate takes the first": keeps("concatenate"),
  "clamp takes the bounds for free": keeps("clamp"),
  "scatter takes the array": keeps("scatter"),
  "sums are believed": believes("add", "sub"),
  "bounds are believed": believes("max", "min"),
  "angles are free": lambda patch: patch.setattr(
    _degrees, "_ORDERS", _degrees._ORDERS | {"atan2"}
  ),
  "comparisons are free": compares_freely,
  "select_n ignores its condition": ignores("_select"),
  "a branch ignores its index": ignores("_cond"),
  "the first choice is all": joins_first("are chosen between"),
  "the first round is all": joins_first("are carried by a loop"),
  "a loop is sure to run": replaced(
    _interpret.Interpreter,
    "_loop",
    lambda loop: lambda *args, runs=False: loop(*args, runs=True),
  ),
  "an integer keeps the degree": replaced(
    _interpret.Interpreter, "_convert", casts_keep
  ),
  "members may mix": replaced(_degrees, "_moved", forgets_members),
  "a transpose keeps the order": lambda patch: patch.setattr(
    _interpret, "_RESHAPES", _interpret._RESHAPES | {"transpose"}
  ),
  "a cast and back is nothing": replaced(
    _interpret,
    "_cast",
    lambda _: lambda identity, before, after: identity,
  ),
  "3 is 1": replaced(_interpret, "_is_one", lambda _: lambda x: x in (1, 3)),
  "n + 1 is n": replaced(
    _interpret,
    "_apart",
    lambda apart: lambda *ids: None if apart(*ids) is None else 0,
  ),
  "a sum is a difference": lambda patch: patch.setitem(
    _interpret._FOLDED, "add", lambda a, b: a - b
  ),
  "all numbers are 0": replaced(
    _interpret.Interpreter,
    "number",
    lambda number: lambda self, x: number(self, x).but(degree=_degrees.ANY),
  ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_wrong_rule_is_seen(mistake, monkeypatch):
  MISTAKES[mistake](monkeypatch)
  assert any(judge(x).errors for x in programs(COUNT))


# ---- A proof leaves other traces alone.

RULE = ols.DynamicLossScale()
TX = ols.loss_scaling(optax.adam(1e-2), RULE)
PARAMS = {"w": jnp.asarray([[0.5, -1], [2, 0.25], [-0.75, 1]])}
BATCH = jnp.asarray([[1, -1, 0.5], [0.25, 2, 1], [-1, 0.5, 1], [1, 1, -0.5]])


def loss_fn(params, batch):
  return jnp.mean(jnp.tanh(batch @ params["w"]) ** 2)


def make_step(tx=TX, loss_fn=loss_fn, change=lambda new, old, opt_state: new):
  """Returns a right step, but for a change to the next parameters."""

  def step(params, opt_state, batch):
    loss, scaled_grads = ols.scaled_value_and_grad(loss_fn, opt_state)(
      params, batch
    )
    updates, opt_state = tx.update(scaled_grads, opt_state, params)
    new = optax.apply_updates(params, updates)
    return change(new, params, opt_state), opt_state, loss

  return step


def update(scaled_grads, opt_state, params):
  return TX.update(scaled_grads, opt_state, params)


def text(function, args):
  return re.sub("0x[0-9a-f]+", "", str(jax.make_jaxpr(function)(*args)))


def in_thread(function):
  results = []
  thread = threading.Thread(target=lambda: results.append(function()))
  thread.start()
  thread.join()
  (result,) = results
  return result


@pytest.mark.parametrize("is_warm", [True, False])
@pytest.mark.parametrize("compile", [jax.jit, lambda function: function])
@pytest.mark.parametrize("make", [make_step, lambda: update])
def test_a_trace_is_the_same_before_during_and_after_a_proof(
  make, compile, is_warm
):
  args = (PARAMS, TX.init(PARAMS), BATCH if make is make_step else PARAMS)
  plain = text(compile(make()), args)
  function = compile(make())
  if is_warm:
    jax.block_until_ready(function(*args))
  with named_calls.proving():
    assert "named_call" in text(function, args)
    assert in_thread(lambda: text(function, args)) == plain
    assert "named_call" in text(function, args)
  assert "named_call" not in plain
  assert text(function, args) == plain


def test_a_step_runs_after_a_proof_as_before_it():
  args = (PARAMS, TX.init(PARAMS), BATCH)
  step, other = jax.jit(make_step()), jax.jit(make_step())
  before = step(*args)
  count = step._cache_size()
  for function in (step, other):
    assert ols.instruments.check_step(function, *args).ok
    after = function(*args)
    jax.tree.map(np.testing.assert_array_equal, after, before)
    assert "named_call" not in text(function, args)
  assert step._cache_size() == count


# ---- What a proof assumes of the library is true.

GRADIENTS = {
  "a": jnp.asarray([0, 1.5, -3, 2.0**20]),
  "b": jnp.asarray([0.5, -7, 2.0**-9], jnp.float16),
  "c": jnp.asarray([1 + 2j, -3j, 0.25]),
  "d": jnp.arange(3),
}
FLOATS = {x: y for x, y in GRADIENTS.items() if x in "ab"}


def over_devices(x):
  return jax.vmap(
    lambda x: findings._largest([x, 9 - x], ("i",)), axis_name="i"
  )(x)


# The functions in whose place a proof reads another, with arguments for both.
ASSUMED = {
  "leaves.unscale": [
    (leaves.unscale, GRADIENTS, jnp.float32(2.0**x)) for x in (-9, 0, 15, 126)
  ],
  "leaves.without_inf": [(leaves.without_inf, x) for x in FLOATS.values()],
  "states._count_if": [
    (states._count_if, jnp.asarray(x), jnp.int32(7)) for x in (True, False)
  ],
  "findings._largest": [(over_devices, jnp.arange(5, dtype=jnp.uint32))],
  "backward._inf_where_unusable": [
    (
      lambda *args: backward._inf_where_unusable(args[0], jnp.float16, args[1]),
      jnp.float32(2.0**x),
      GRADIENTS,
    )
    for x in (-9, 0, 15)
  ],
  "_emulate_saturation._saturate": [
    (_emulate_saturation._saturate, GRADIENTS[x]) for x in "abc"
  ],
  "_emulate_saturation._clip": [
    (lambda x: _emulate_saturation._clip(x, jnp.float16), x)
    for x in (GRADIENTS["a"][:3], GRADIENTS["b"])
  ],
}


@pytest.mark.parametrize("name", ASSUMED)
def test_what_a_proof_reads_in_place_of_a_function_does_the_same(name):
  for function, *args in ASSUMED[name]:
    real = function(*args)
    with named_calls.proving() as trace:
      assumed = function(*args)
    assert name in trace.trusted
    jax.tree.map(np.testing.assert_array_equal, real, assumed)


def test_all_that_a_proof_assumes_is_tested_here():
  folder = pathlib.Path(ols.__file__).parent
  found = []
  for path in folder.rglob("*.py"):
    source = path.read_text()
    functions = r"@named_calls\.assumed\([^\n]*\)\ndef (\w+)"
    found += [f"{path.stem}.{x}" for x in re.findall(functions, source)]
    found += re.findall(r'named_calls\.\w+\(\s*"(\w+)"', source)
  named = ["arguments", "dropped", "examine", "move", "schedule", "skip"]
  assert sorted(found) == sorted([*ASSUMED, *named])


def test_an_overflow_is_found_exactly_where_a_gradient_is_not_finite():
  rng = np.random.default_rng(0)
  for number in [0, 1, 2.0**15, np.inf, -np.inf, np.nan] * 3:
    dtype = rng.choice([np.float32, np.float16])
    grads = {x: rng.normal(size=9).astype(dtype) for x in "abc"}
    grads[rng.choice([*grads])][rng.integers(9)] = number
    scaled = {x: jnp.asarray(y) for x, y in grads.items()}
    finding = findings.examine(
      checks.nonfinite(), scaled, loss_scale=jnp.float32(8)
    )
    every = np.concatenate([*grads.values()])
    assert finding.overflow == (not np.isfinite(every).all())
    assert not finding.dropped
    np.testing.assert_array_equal(finding.amax, np.max(np.abs(every)))


def test_a_skip_that_nobody_asks_for_is_none():
  for flags in ([False], [jnp.asarray(False), jnp.zeros(3)]):
    assert not findings.requested(flags)
    assert findings.requested([*flags, jnp.asarray(True)])


@pytest.mark.parametrize(
  "rule",
  [
    RULE,
    ols.DynamicLossScale(2.0**4, growth_interval=1),
    rules.HeadroomLossScale(),
  ],
)
def test_the_next_scale_depends_on_what_is_found_alone(rule):
  tx = ols.loss_scaling(optax.adam(1e-2), rule)
  state = tx.init(PARAMS)
  grads = PARAMS["w"] * 2
  # The largest gradient is 4 in both.
  after = [
    tx.update({"w": x}, state, PARAMS)[1].loss_scale_state
    for x in (grads, jnp.minimum(grads, 0.5).at[0].set(-4))
  ]
  jax.tree.map(np.testing.assert_array_equal, *after)
  assert after[0].loss_scale > 0 and np.isfinite(after[0].loss_scale)


def test_a_schedule_that_is_told_the_same_count_stays():
  schedule = ols.PrecisionSchedule(jnp.float16, until_step=4)
  for steps in range(7):
    state = schedule.update(schedule.init(), step=jnp.int32(steps))
    again = schedule.update(state, step=jnp.int32(steps))
    jax.tree.map(np.testing.assert_array_equal, again, state)


@pytest.mark.parametrize("bad", [None, 1, (0, 3)])
def test_what_leaves_out_micro_batches_tells(bad):
  batch = BATCH if bad is None else BATCH.at[np.asarray(bad)].set(np.inf)
  value_and_grad = ols.accumulate(
    ols.scaled_value_and_grad(
      lambda w, x: jnp.mean(x @ w) * 1.0, TX.init(PARAMS)
    ),
    microbatches=4,
    drop=True,
  )
  _, scaled_grads, overflow = value_and_grad(PARAMS["w"], batch)
  expected = ~np.isfinite(batch).all(1)
  np.testing.assert_array_equal(overflow.flags, expected)
  assert np.isfinite(scaled_grads).all()


# ---- What is assumed, but not true, is seen by runs.


def stands_in(real, wrong):
  """Returns a function that a proof takes for the real one."""
  return named_calls.assumed(lambda *args: real(*args))(wrong)


def break_examine(real, **changes):
  def wrong(*args, **options):
    finding = real(*args, **options)
    return finding._replace(
      **{x: jnp.full_like(getattr(finding, x), y) for x, y in changes.items()}
    )

  return wrong


def break_move(move):
  return lambda rule, state, *args: (state, move(rule, state, *args)[1])


def accumulated(params, opt_state, batch):
  _, scaled_grads, overflow = ols.accumulate(
    ols.scaled_value_and_grad(loss_fn, opt_state), microbatches=2
  )(params, batch)
  updates, opt_state = TX.update(
    scaled_grads, opt_state, params, overflow=overflow
  )
  return optax.apply_updates(params, updates), opt_state


def half_loss_fn(params, batch):
  product = batch.astype(jnp.float16) @ params["w"].astype(jnp.float16)
  return jnp.mean(jnp.tanh(product).astype(jnp.float32) ** 2)


SCHEDULE = ols.PrecisionSchedule(jnp.float16, until_step=4)


def scheduled():
  step = SCHEDULE.make_train_step(loss_fn, TX)
  return step, PARAMS, TX.init(PARAMS), SCHEDULE.init(), BATCH


ARGS = PARAMS, TX.init(PARAMS), BATCH
# The module, its function, what breaks it, a step, and the law that is broken.
BROKEN = {
  "unscale": (
    leaves,
    "unscale",
    lambda real: stands_in(real, lambda x, k: real(x, jnp.sqrt(k))),
    lambda: (make_step(), *ARGS),
    "invariance",
  ),
  "unusable": (
    backward,
    "_inf_where_unusable",
    lambda real: stands_in(
      real, lambda k, dtype, x: jax.tree.map(lambda x: x + 1, x)
    ),
    lambda: (make_step(), *ARGS),
    "scale",
  ),
  "mean": (
    leaves,
    "without_inf",
    lambda real: stands_in(real, lambda x: jnp.full_like(x, 9)),
    lambda: (accumulated, *ARGS),
    "scale",
  ),
  "saturation": (
    _emulate_saturation,
    "_saturate",
    lambda real: stands_in(real, lambda x: jnp.clip(x, -1, 1)),
    lambda: (
      make_step(loss_fn=hardware.emulate_saturation(half_loss_fn)),
      *ARGS,
    ),
    "scale",
  ),
  "schedule": (
    precision_schedule,
    "_compare",
    lambda real: lambda *args: (real(*args)[0], real(*args)[1] + 1),
    scheduled,
    "skip",
  ),
  "amax": (
    findings,
    "_examine",
    functools.partial(break_examine, amax=1),
    lambda: (make_step(), *ARGS),
    "scale",
  ),
}
# No run asks whether a step at an S of inf was skipped and S then fell.
UNSEEN = {
  "overflow": (
    findings,
    "_examine",
    functools.partial(break_examine, overflow=False),
    lambda: (make_step(), *ARGS),
    "skip",
  ),
  "move": (
    loss_scaling,
    "_move",
    break_move,
    lambda: (make_step(), *ARGS),
    "invariance",
  ),
}


@pytest.mark.parametrize(
  "name",
  [
    *BROKEN,
    *(pytest.param(x, marks=pytest.mark.xfail(strict=True)) for x in UNSEEN),
  ],
)
def test_what_is_assumed_but_not_true_is_seen_by_runs(name, monkeypatch):
  owner, attribute, breaks, make, law = (BROKEN | UNSEEN)[name]
  monkeypatch.setattr(owner, attribute, breaks(getattr(owner, attribute)))
  step, *args = make()
  shapes = jax.eval_shape(lambda: args)
  alone = ols.instruments.check_step(step, *shapes)
  assert {x.verdict for x in alone.laws[:-1]} == {"proved"}, alone
  report = ols.instruments.check_step(step, *args)
  found = {x.name: x for x in report.laws}[law]
  assert found.verdict == "wrong", report
  assert "please report" in found.text


# ---- What no proof can know.


def scale_of(change, loss_fn=loss_fn):
  """Returns the scale law of a proof in which gradients are changed."""

  def step(params, opt_state, batch):
    _, scaled_grads = ols.scaled_value_and_grad(loss_fn, opt_state)(
      params, batch
    )
    scaled_grads = jax.tree.map(change, scaled_grads)
    updates, opt_state = TX.update(scaled_grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state

  report = ols.instruments.check_step(step, *jax.eval_shape(lambda: ARGS))
  return report.laws[0].verdict, report.laws[0].text


def on_host(x):
  shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
  return jax.pure_callback(np.asarray, shape, x, vmap_method="sequential")


def test_a_factor_is_not_seen():
  assert scale_of(lambda x: 3 * x)[0] == "proved"


def test_what_a_kernel_does_with_scaled_values_is_not_known():
  verdict, said = scale_of(on_host)
  assert verdict == "inconclusive" and "pure_callback" in said


@pytest.mark.parametrize(
  ("limit", "verdict"), [(448, "proved"), (57344, "proved"), (440, "wrong")]
)
def test_a_clip_at_the_largest_number_of_a_float8_is_a_cast(limit, verdict):
  limit = float(limit)
  assert scale_of(lambda x: jnp.clip(x, -limit, limit))[0] == verdict


def test_what_stands_in_for_0_divides_0():
  # Where x is 0 and 1 is not, the quotient grows with S.
  assert scale_of(lambda x: x * x / jnp.where(x == 0, 1, x))[0] == "proved"


@pytest.mark.parametrize(
  "keep",
  [
    lambda new, old, skipped: jnp.where(skipped, old * 1, new),
    lambda new, old, skipped: jnp.where(skipped, old + 0 * new, new),
    lambda new, old, skipped: jnp.where(skipped, old * 1.5 / 1.5, new),
    lambda new, old, skipped: jnp.where(skipped, 0 - (0 - old), new),
    lambda new, old, skipped: jnp.where(skipped, old.T.T, new),
    lambda new, old, skipped: jnp.where(skipped, old + (new - new), new),
    lambda new, old, skipped: old + jnp.where(skipped, 0, new - old),
    lambda new, old, skipped: (
      jnp.where(skipped, 1, 0) * old + jnp.where(skipped, 0, new)
    ),
  ],
)
def test_equal_values_that_are_written_otherwise_are_not_called_wrong(keep):
  def step(params, opt_state, batch, average):
    params, opt_state, loss = make_step()(params, opt_state, batch)
    skipped = opt_state.skipped
    new = 0.5 * average + 0.5 * params["w"]
    return params, opt_state, loss, keep(new, average, skipped)

  args = *ARGS, jnp.zeros_like(PARAMS["w"]) + 3
  report = ols.instruments.check_step(step, *args)
  assert "wrong" not in {x.verdict for x in report.laws}, report


def test_what_the_host_draws_is_seen_by_runs_alone():
  rng = np.random.default_rng(0)

  def drawn(params, batch):
    noise = jax.pure_callback(
      lambda: rng.normal(size=BATCH.shape).astype(np.float32),
      jax.ShapeDtypeStruct(BATCH.shape, jnp.float32),
    )
    return loss_fn(params, batch + noise)

  report = ols.instruments.check_step(make_step(loss_fn=drawn), *ARGS)
  assert not report.deterministic
  invariance = {x.name: x for x in report.laws}["invariance"]
  assert "reads random numbers" in invariance.text or (
    invariance.verdict != "wrong"
  ), report
