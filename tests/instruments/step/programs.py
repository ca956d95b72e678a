"""Random programs, with what an interpreter says of their values.

They are run at several S, to see whether it is true. S is a power of 16, so
that its fourth root scales a result exactly.
"""

import collections
import functools
import re
from typing import Any
from typing import NamedTuple

import jax
from jax import lax
from jax.extend import core
import jax.numpy as jnp
import numpy as np

from optax_lossscale.instruments.step import _degrees
from optax_lossscale.instruments.step import _interpret
from optax_lossscale.instruments.step import _values

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


def on_devices(function):
  mesh = jax.sharding.Mesh(np.array(jax.devices()[:2]), ("i",))
  spec = jax.sharding.PartitionSpec("i")
  sharded = jax.shard_map(
    function, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False
  )
  return lambda x: sharded(full(x).astype(jnp.float32))


def guarded(x):
  return jnp.where(x > 0, x, 1)


PERMUTATION = np.array([2, 0, 3, 1])
# The operands of an operation: f a float, s a float that is seldom free of S,
# i an integer, b a flag; k, S itself.
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
  "s relu": jax.nn.relu,
  "s plus 1": lambda x: x + 1,
  "s from 0": lambda x: 0 - x,
  "s to float16": lambda x: x.astype(jnp.float16),
  "s through float16": lambda x: x.astype(jnp.float16).astype(jnp.float32),
  "s to int at once": lambda x: x.astype(jnp.int32),
  "s to bool": lambda x: x.astype(bool),
  "s clip": lambda x: jnp.clip(x, -1, 1),
  "s at least 0": lambda x: jnp.maximum(x, 0),
  "s from -inf": lambda x: jnp.where(x >= -jnp.inf, x, 0.0),
  "s but -inf": lambda x: jnp.where(x <= -jnp.inf, 0.0, x),
  "s bits": lambda x: lax.bitcast_convert_type(
    lax.bitcast_convert_type(x.astype(jnp.float32), jnp.int32), jnp.float32
  ),
  "ss add": lambda x, y: x + y,
  "ss sub": lambda x, y: x - y,
  "ss mul": lambda x, y: x * y,
  "sf mul": lambda x, y: x * y,
  "ss div": lambda x, y: x / y,
  "fs div": lambda x, y: x / y,
  "ss max": jnp.maximum,
  "ss max of abs": lambda x, y: jnp.maximum(jnp.abs(x), y),
  "ss modulus": lambda x, y: jnp.abs(lax.complex(x + 0.0, y + 0.0)),
  "ss least": lambda x, y: full(x).at[0].min(full(y)[1]),
  "ss min": jnp.minimum,
  "ss atan2": jnp.arctan2,
  "sf atan2": jnp.arctan2,
  "ss rem": lax.rem,
  # Comparisons and choices.
  "ss gt": lambda x, y: x > y,
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
  "s roll": lambda x: jnp.roll(full(x), 1, 0),
  "s pad": lambda x: lax.pad(
    full(x), jnp.zeros((), x.dtype), ((1, -1, 0), (0, 0, 0))
  ),
  "s slice": lambda x: full(x)[:, 1:3].sum(1, keepdims=True),
  "ss concatenate": lambda x, y: jnp.concatenate([full(x)[:3], full(y)[:1]]),
  "s with ones": lambda x: jnp.concatenate(
    [full(x)[:3], jnp.ones((1, SIZE), x.dtype)]
  ),
  "ss stack": lambda x, y: jnp.stack([full(x), full(y)])[0],
  "s gather": lambda x: full(x)[PERMUTATION],
  "s gather columns": lambda x: full(x)[:, PERMUTATION],
  "s gather filled": lambda x: (
    full(x).at[np.array([0, 9, 1, 2])].get(mode="fill", fill_value=1)
  ),
  "si take": lambda x, i: full(x).take(i % SIZE).reshape(i.shape),
  "sf take by rank": lambda x, y: full(y)[jnp.argmax(full(x).sum(1))][None],
  "si dynamic_slice": lambda x, i: lax.dynamic_slice_in_dim(
    full(x), i.ravel()[0], 1
  ),
  "ss update_slice": lambda x, y: lax.dynamic_update_slice(
    full(x), full(y)[:1, :2].astype(x.dtype), (1, 1)
  ),
  "ss set": lambda x, y: full(x).at[2].set(full(y)[1].astype(x.dtype)),
  "s set to a number": lambda x: full(x).at[:, 2].set(1),
  "ss added": (
    lambda x, y: full(x).at[PERMUTATION[:2]].add(full(y)[:2].astype(x.dtype))
  ),
  "ss largest": lambda x, y: full(x).at[1].max(full(y)[0].astype(x.dtype)),
  "s sort": lambda x: jnp.sort(full(x), 0),
  "s sort columns": lambda x: jnp.sort(full(x), 1),
  "sf sort by": lambda x, y: [*lax.sort((full(x), full(y)), dimension=0)],
  "s argmax": lambda x: jnp.argmax(full(x), 0, keepdims=True),
  "s top_k": lambda x: lax.top_k(full(x), SIZE),
  # Sums and products.
  "s sum": lambda x: full(x).sum(),
  "s sum of rows": lambda x: full(x).sum(0, keepdims=True),
  "s largest": lambda x: full(x).max(1, keepdims=True),
  "s prod": lambda x: full(x).prod(1, keepdims=True),
  "s cumsum": lambda x: jnp.cumsum(full(x), 1),
  "s cumsum down": lambda x: jnp.cumsum(full(x), 0),
  "s cumprod": lambda x: jnp.cumprod(full(x), 1),
  "s cummax": lambda x: lax.cummax(full(x), 1),
  "s normalized": lambda x: full(x) / jnp.abs(full(x)).sum(),
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
  # XLA's transform takes no array whose axes it has laid out otherwise.
  "s fft": lambda x: jnp.abs(
    jnp.fft.fft(full(x).astype(jnp.float32).ravel())
  ).reshape(SIZE, SIZE),
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
  "sf gradient of choices": lambda x, y: jax.grad(
    lambda y: jnp.sum(full(x) * jnp.sort(full(y)) + doubled(full(x) * y).max())
  )(full(y)),
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
  "ks scan": lambda k, x: scanned(
    lambda c, r: (c + r[1], r[0] * r[1] - r[1].max()),
    full(x)[0] * 0,
    (k + jnp.zeros(SIZE), full(x)),
  ),
  "ks scan of parts": lambda k, x: scanned(
    lambda c, r: (r[0], c * r[1]), k.ravel()[0], (k * jnp.ones(SIZE), full(x))
  )[1],
  "kf scan of S": lambda k, y: (
    scanned(lambda c, r: (r[0], c / r[0] * r[1]), k[0], (k, full(y)))[1]
    if k.ndim
    else y
  ),
  "ks fori of S": lambda k, x: lax.fori_loop(
    0, 3, lambda i, c: (c[0] * 2, full(x) / column(c[0])), (k, full(x))
  )[1],
  "ks fori of products": lambda k, x: lax.fori_loop(
    0, 3, lambda i, c: (c[0], c[1] * column(c[0])), (k, full(x))
  )[1],
  # Results that may be an argument, or a number.
  "i plus 0": lambda i: i + 0,
  "i plus 1": lambda i: i + 1,
  "f plus 0": lambda x: x - 0.0,
  "f times 0": lambda x: x + 0 * x,
  "f times 1": lambda x: x * 1 / 1,
  "f times 3": lambda x: x * 3,
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
  "f barrier": lambda x: lax.optimization_barrier((x, x * 2))[0],
  "f zeros": lambda x: jnp.zeros_like(x) * x,
  "f inf": lambda x: jnp.full_like(x, np.inf),
  "f numbers": lambda x: jnp.maximum(jnp.float32(1), jnp.float32(np.nan)),
  "i numbers": lambda i: jnp.int32(2**31 - 1) + jnp.int32(1),
  "f number to int": lambda x: (
    jnp.full_like(x, 300).astype(jnp.uint8).astype(jnp.int32)
  ),
  "f inf to int": lambda x: jnp.full_like(x, np.inf).astype(jnp.int32),
}
# These compile to programs for several devices, which takes longer.
BETWEEN_DEVICES = {
  "s psum": on_devices(lambda x: lax.psum(x, "i") + x),
  "s pmax": on_devices(lambda x: lax.pmax(x, "i") * x),
  "s all_gather": on_devices(lambda x: lax.all_gather(x, "i").sum(0) + x),
  "s ppermute": on_devices(lambda x: lax.ppermute(x, "i", [(0, 1), (1, 0)])),
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
  "fs solve": lambda x, y: jnp.linalg.solve(lower(x), full(y)),
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
  number: int
  names: tuple[str, ...]
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
  return [[k, grown * column(k), *rest] for k in scales]


def compose(rng, names, made):
  """Returns a function that does operations on what was computed before."""

  def program(*inputs):
    values, grows = list(inputs), {0, 1}
    made[:] = [Made("input", ())] * len(values)

    def keep(name, sources, results):
      for x in jax.tree.leaves(results):
        if x.dtype not in (np.float32, np.float16, np.int32, bool):
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
    keep("k under", [0, 1], inputs[1] / column(inputs[0]))
    first = [1, *range(len(values) - 3, len(values))]

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
      operation = (OPERATIONS | BETWEEN_DEVICES | LAST)[name]
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


def traced(number, names):
  """Returns a program's jaxpr, what it makes, and its inputs at each S."""
  rng = np.random.default_rng(number)
  inputs = draw(rng, "SV"[number % 2])
  made: list[Made] = []
  with np.errstate(all="ignore"):
    jaxpr = jax.make_jaxpr(compose(rng, names, made))(*inputs[0])
  return jaxpr, made, inputs


def evaluate(jaxpr, inputs):
  """Returns a jaxpr's results; JAX compiles its operations one by one, once."""
  with np.errstate(all="ignore"):
    return [*map(np.asarray, core.jaxpr_as_fun(jaxpr)(*inputs))]


def program_of(number, names):
  jaxpr, made, inputs = traced(number, names)
  values = [evaluate(jaxpr, x) for x in inputs]
  return Program(number, tuple(names), jaxpr, made, inputs, values)


@functools.cache
def values_at_inf(number, names):
  """Returns the values of a program whose scaled data are all inf."""
  jaxpr, _, (inputs, *_) = traced(number, names)
  if "while[" in str(jaxpr):
    return []  # With an inf it may run for ever.
  return evaluate(
    jaxpr, [inputs[0], np.copysign(np.inf, inputs[1]), *inputs[2:]]
  )


@functools.cache
def programs(count, seed=0, start=0):
  """Returns programs that do every operation about equally often.

  Those before `start` are drawn and left out.
  """
  rng = np.random.default_rng(seed)
  found, names, last = [], [], []
  for number in range(count):
    if len(names) < 8:
      names += [str(x) for x in rng.permutation([*OPERATIONS])]
    last = last or [str(x) for x in rng.permutation([*LAST])]
    chosen, names = [*names[:8], last.pop()], names[8:]
    if number >= start:
      found.append(program_of(seed * 10**6 + number, chosen))
  return found


# ---- The facts found about the values of a program, and the truth.


def claims(number, jaxpr):
  """Returns what the interpreter says of each value of a program."""
  axes = tuple(range(jaxpr.in_avals[0].ndim))
  kind = "SV"[number % 2]
  degree = _degrees.of((_values.Symbol(kind, 0), axes))
  of_scale = frozenset([_values.Source("scale", "state")])
  inputs = [
    _values.Value(
      identity=_values.Identity(i), sources=frozenset([_values.DATA])
    )
    for i in range(len(jaxpr.in_avals))
  ]
  scale = _values.Scale("state", "old")
  inputs[0] = inputs[0].but(degree=degree, scale=scale, sources=of_scale)
  of_data = _values.Source("scale", "data")
  inputs[1] = inputs[1].but(degree=degree).sourced(*of_scale, of_data)
  return _interpret.Interpreter([]).run(jaxpr, inputs)


def is_power_known(number, name):
  """Returns whether the result of one operation is said to be a power of S."""
  jaxpr, made, _ = traced(number, [name])
  results = zip(made, claims(number, jaxpr), strict=True)
  degrees = [x.degree for operation, x in results if operation.name == name]
  return any(isinstance(x, tuple) and x for x in degrees)


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
  kinds = {x for x, _ in identity.forms} if identity else {None}
  if not kinds <= {"shape", "cast", "plus one"} or not identity.is_sure:
    return None
  more = sum(x == "plus one" for x, _ in identity.forms)
  return inputs[identity.argument] + more


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
    if said.degree == _values.ANY and not np.all(
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


def judge(program):
  """Returns the errors in what is said of a program, and counts of facts."""
  errors, counts = [], collections.Counter()
  tainted: set[int] = set()
  for i, said in enumerate(claims(program.number, program.jaxpr)):
    made = program.made[i]
    is_lost = any(is_extreme(x[i]) for x in program.values)
    if is_lost or tainted & {*made.sources}:
      tainted.add(i)
      continue
    counts["powers"] += isinstance(said.degree, tuple)
    counts["any"] += said.degree == _values.ANY
    counts["identities"] += said.identity is not None
    counts["constants"] += said.constant is not None
    wrong = error(program, i, said)
    if wrong:
      # Values that are made of it are wrong as well.
      tainted.add(i)
      errors.append(f"[{made.name}] value {i} {wrong}: {said}")
  return errors, counts


_PASSES_INF = ("div", "rem", "over what is 0", "fori of turns")
_PRODUCTS = ("mul", "times", "dot", "einsum", "conv")


def hidden(program):
  """Returns what is said to be inf or NaN if scaled data are, but is not."""
  # LAPACK, which may be last, takes no inf.
  values = values_at_inf(program.number, program.names[:-1])
  errors, tainted = [], set()
  saids = claims(program.number, program.jaxpr)
  for i, (said, x) in enumerate(zip(saids, values, strict=False)):
    made = program.made[i]
    is_known = not isinstance(said.degree, _values.Unknown)
    is_data = "data" in said.scales
    is_float = jnp.issubdtype(x.dtype, jnp.inexact)
    shows = not np.isfinite(x).all() if is_float else True
    # A mask of the data may leave anything out. A quotient is taken for that of
    # a value and its norm, a product for one that shows what a factor shows.
    kinds, _, name = made.name.partition(" ")
    is_exempt = "b" in kinds or name in _PASSES_INF
    is_exempt |= name in _PRODUCTS and any(saids[x].lost for x in made.sources)
    if is_exempt or tainted & {*made.sources}:
      tainted.add(i)
    elif is_known and is_data and not said.lost and not shows:
      tainted.add(i)
      errors.append(f"[{made.name}] value {i} is finite: {said}")
  return errors
