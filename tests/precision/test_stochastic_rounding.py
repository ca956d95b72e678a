"""16-bit parameters and states that learn, by remainders or by chance."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_lossscale as ols
from tests import support

RULE = ols.FixedLossScale(1024.0)
remainders = functools.partial(ols.master_weights, store="remainder")
WAYS = {
  "copy": ols.master_weights,
  "remainder": remainders,
  "stochastic": ols.stochastic_rounding,
}
POSITIONS = {
  "alone": lambda way, inner: way(inner),
  "inside": lambda way, inner: ols.loss_scaling(way(inner), RULE),
  "outside": lambda way, inner: way(ols.loss_scaling(inner, RULE)),
}
each_way = pytest.mark.parametrize("way", WAYS)
each_dtype = pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
each_position = pytest.mark.parametrize(
  "position", support.slow_but({"inside"}, POSITIONS)
)
SIZE = 4096


def make(way, position="alone", inner=None):
  return POSITIONS[position](WAYS[way], inner or optax.sgd(1.0))


def step(tx, params, state, gradients):
  """Takes a step on true gradients, which are scaled in float32."""
  scaled = jax.tree.map(lambda x: x * support.scale_of(state), gradients)
  updates, state = tx.update(scaled, state, params)
  same_dtypes = jax.tree.map(lambda x, y: x.dtype == y.dtype, updates, params)
  assert all(jax.tree.leaves(same_dtypes))
  return optax.apply_updates(params, updates), state


@functools.partial(jax.jit, static_argnums=0)
def run(tx, params, gradients, state=None):
  """Takes a step on each of several gradients, in a scan."""
  carry = params, tx.init(params) if state is None else state
  return jax.lax.scan(
    lambda carry, x: (step(tx, *carry, x), None), carry, gradients
  )[0]


def normal(*shape, seed=0, dtype=jnp.float32):
  return jnp.asarray(np.random.default_rng(seed).normal(size=shape), dtype)


@pytest.mark.parametrize("way", ["remainder", "stochastic"])
@each_position
def test_small_updates_add_up(way, position):
  params = {
    "half": jnp.ones((2, SIZE), "float16"),
    "brain": -jnp.ones(SIZE, "bfloat16"),
  }
  # A sixteenth of the distance to the next number.
  small = {name: float(jnp.finfo(x).eps) / 16 for name, x in params.items()}
  gradients = {
    name: jnp.full((64, *x.shape), small[name]) for name, x in params.items()
  }
  for name, x in params.items():
    assert np.array_equal(x - gradients[name][0].astype(x.dtype), x)
  after, _ = run(make(way, position), params, gradients)
  for name in params:
    moved = np.mean(np.float64(params[name]) - np.float64(after[name]))
    # A walk of 64 steps of eps and less, over thousands of parameters.
    assert abs(moved / (64 * small[name]) - 1) < 0.05, name


@each_position
def test_remainders_train_as_a_copy_does(position):
  params = {
    "float16": normal(SIZE, dtype="float16"),
    "bfloat16": normal(SIZE, dtype="bfloat16"),
    "b": normal(3),
  }
  gradients = jax.tree.map(lambda x: normal(30, *x.shape, seed=1), params)
  masters = {}
  for store in ("copy", "remainder"):
    tx = make(store, position, optax.adamw(1e-3))
    after, state = run(tx, params, gradients)
    (owner,) = support.owners_of_masters(state)
    masters[store] = owner.wide(after)
  for dtype in ("float16", "bfloat16"):
    copy, remainder = (np.asarray(x[dtype]) for x in masters.values())
    off = np.abs(copy - remainder)
    # A few are so small that a step is more than half of them.
    assert (off == 0).mean() > 0.99
    assert off.max() <= 2e-3 * float(jnp.finfo(dtype).eps)
    # What is seen is the number nearest to the master.
    assert np.array_equal(remainder.astype(after[dtype].dtype), after[dtype])


@each_dtype
def test_where_no_update_leads_to_the_parameter_its_neighbor_is_taken(dtype):
  # Updates of the size of the parameters and far beyond.
  params = normal(100_000, dtype=dtype)
  gradients = normal(1, 100_000, seed=1) * np.float32(np.abs(params)) * 3
  after, state = run(remainders(optax.sgd(1.0)), params, gradients)
  target = np.float32(params) - np.asarray(gradients[0])
  off = np.abs(state.wide(after) - target)
  step = np.spacing(np.abs(target) + np.abs(np.float32(params)))
  eps = float(jnp.finfo(dtype).eps)
  # Never farther than one distance of the larger of both.
  assert (off <= eps / np.finfo(np.float32).eps * step).all()
  share = np.mean(off > 2.0**-40)
  assert 0.05 < share < 0.3


@each_way
@pytest.mark.parametrize(
  "fault",
  [
    lambda: {}.nothing,
    lambda: bool(jax.jit(lambda: jnp.ones(2))()),
    lambda: jnp.ones(2) + jnp.ones(3),
    lambda: jnp.zeros(1, jnp.bfloat16) + jnp.zeros(1, jnp.float16),
  ],
  ids=["attribute", "bool", "shapes", "promotion"],
)
@pytest.mark.usefixtures("strict_promotion")
def test_an_error_of_the_inner_optimizer_is_its_own(way, fault):
  inner = optax.GradientTransformation(
    lambda params: optax.EmptyState(), lambda *args: fault()
  )
  tx = make(way, "inside", inner)
  params = jnp.ones(3, jnp.bfloat16)
  with pytest.raises(Exception) as expected:
    fault()
  with pytest.raises(expected.type) as error:
    tx.update(params, tx.init(params), params)
  assert str(error.value) == str(expected.value)


@each_way
def test_an_error_inside_of_lookahead_is_its_own(way):
  def fail(*_):
    raise ValueError("It is mine.")

  inner = optax.GradientTransformation(lambda _: optax.EmptyState(), fail)
  tx = ols.loss_scaling(optax.lookahead(WAYS[way](inner), 5, 0.5), RULE)
  gradients = {"w": jnp.ones(3, jnp.bfloat16)}
  params = optax.LookaheadParams.init_synced(gradients)
  with pytest.raises(ValueError, match="^It is mine.$"):
    tx.update(gradients, tx.init(params), params)


@each_way
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_an_infinite_parameter_stays_where_it_is(way, dtype):
  # A mask of attention, for example.
  params = jnp.array([-jnp.inf, jnp.inf, 1.0], dtype)
  for position in POSITIONS:
    after, _ = run(make(way, position), params, jnp.zeros((2, 3)))
    support.assert_same_bits(after, params)


@each_way
def test_a_state_that_vmap_made_is_refused_outside(way):
  params = jnp.ones((3, 3), jnp.bfloat16)
  tx = make(way)
  state = jax.vmap(tx.init)(params)
  jax.vmap(tx.update)(params, state, params)
  if way == "stochastic":
    with pytest.raises(ValueError, match="a stack of shape"):
      tx.update(params, state, params)


@each_way
def test_gradients_that_do_not_fit_are_named(way):
  tx = make(way, "inside", optax.adam(0.1))
  params = {"w": jnp.ones(3, jnp.bfloat16)}
  state = tx.init(params)
  for updates, given in (({"v": params["w"]}, params), (params, None)):
    with pytest.raises(ValueError, match="`(updates|params)` must be"):
      tx.update(updates, state, given)


@each_way
@pytest.mark.parametrize("position", ["inside", "outside"])
def test_a_skipped_step_changes_no_bit(way, position):
  params = {
    "half": jnp.array([0.0, -0.0, 1.0, 6e-8, jnp.inf, jnp.nan], jnp.float16),
    "brain": jnp.array([-0.0, 1e-40, 3.0], jnp.bfloat16),
    "single": jnp.array([-0.0, 1e-40]),
  }
  tx = make(way, position, optax.sgd(1e-3, momentum=0.5))
  gradients = jax.tree.map(jnp.ones_like, params)
  take = jax.jit(functools.partial(step, tx))
  moved, state = take(params, jax.jit(tx.init)(params), gradients)
  gradients["half"] = gradients["half"].at[0].set(jnp.nan)
  # A parameter that something else has moved stays where it is.
  moved["half"] = moved["half"].at[2].set(3.0)
  after, new = take(moved, state, gradients)
  assert ols.loss_scale_metrics(new)["skipped"]
  support.assert_same_bits(after, moved)
  for name in ("remainder", "trace", "rounding_count"):
    found = [optax.tree.get(x, name) for x in (state, new)]
    support.assert_same_bits(*found)


@pytest.mark.parametrize(
  ("wrap", "dtype"),
  [(ols.stochastic_rounding, "bfloat16"), (ols.low_precision_state, "float32")],
)
def test_another_seed_rounds_otherwise(wrap, dtype):
  params, gradients = normal(SIZE, dtype=dtype), normal(2, SIZE, seed=1)
  start = wrap(optax.sgd(1.0)).init(params)
  assert (start[1], start[1].dtype) == (0, jnp.int32)  # Steps so far.
  first, again, other = (
    run(wrap(optax.sgd(1e-3, 0.5), seed=seed), params, gradients)[0]
    for seed in (0, 0, 1)
  )
  support.assert_same_bits(first, again)
  assert not support.same_bits(first, other)


@pytest.mark.parametrize("way", ["remainder", "stochastic"])
def test_wide_parameters_are_the_inner_optimizers_alone(way):
  params = {"w": normal(9), "c": normal(4) + 1j, "x": None}
  inner = optax.adam(0.1)
  tx = WAYS[way](inner)
  expected, _ = inner.update(params, inner.init(params), params)
  got, _ = tx.update(params, tx.init(params), params)
  assert got["x"] is None
  support.assert_same_bits([got["w"], got["c"]], [expected["w"], expected["c"]])


def nearest(number, digits, largest, *, ties_away=False):
  """Returns an integer rounded to some binary digits, as far as the largest."""
  unit = 1 << max(abs(number).bit_length() - digits, 0)
  low, rest = divmod(abs(number), unit)
  is_up = 2 * rest > unit or (2 * rest == unit and (ties_away or low % 2))
  return int(np.sign(number)) * min((low + is_up) * unit, largest)


# The numbers of each dtype, far from 0, are integers times a unit: the unit,
# their binary digits, the largest one, and the largest update in float32.
ENDS = {
  "float16": (1.0, 11, 2047 << 5, 10**6),
  "bfloat16": (2.0**104, 8, 255 << 16, (1 << 24) - 1),
}
# A parameter and an update. The sums of the last three are halfway beyond the
# largest number, if the updates are rounded to the nearest.
FAR = [(42112, -84202), (-100, 10**6), (48, 65456), (-48, -65456), (144, 65360)]


def far_pairs(dtype):
  """Returns parameters and updates beyond the largest number, as integers."""
  _, digits, largest, longest = ENDS[dtype]
  rng = np.random.default_rng(0)
  starts = rng.integers(-largest, largest, 3000)
  updates = rng.integers(largest, longest, 3000) * rng.choice([-1, 1], 3000)
  pairs = [
    (nearest(int(x), digits, largest), int(y))
    for x, y in zip(starts, updates, strict=True)
  ]
  return pairs + (FAR if dtype == "float16" else [])


def whole(numbers, unit):
  """Returns numbers as integers times a unit."""
  return [int(x / unit) for x in np.float64(numbers)]


@each_way
@each_position
def test_a_way_beyond_the_largest_number_takes_two_steps(way, position):
  pairs = {dtype: far_pairs(dtype) for dtype in ENDS}
  params, gradients = (
    {
      dtype: np.array(pairs[dtype])[:, i] * (ENDS[dtype][0] * factor)
      for dtype in ENDS
    }
    for i, factor in ((0, 1.0), (1, -(2.0**-20)))
  )
  params = {dtype: jnp.array(x, dtype) for dtype, x in params.items()}
  # S times these gradients is finite in float32.
  tx = make(way, position, optax.sgd(2.0**20))
  gradients = {
    x: jnp.array([y, 0 * y], "float32") for x, y in gradients.items()
  }
  halves = [
    jax.tree.map(lambda x, i=i: x[i : i + 1], gradients) for i in (0, 1)
  ]
  once, state = run(tx, params, halves[0])
  twice, _ = run(tx, once, halves[1], state)
  for dtype, (unit, digits, largest, longest) in ENDS.items():
    firsts = whole(once[dtype], unit)
    assert max(map(abs, firsts)) <= largest
    # float32 rounds some of these targets first.
    targets = [nearest(x + y, 24, longest) for x, y in pairs[dtype]]
    ties_away = way == "remainder"
    goals = [nearest(x, digits, largest, ties_away=ties_away) for x in targets]
    for (start, _), goal, first in zip(
      pairs[dtype], goals, firsts, strict=True
    ):
      # Stochastic rounding also draws numbers that are nearer.
      if abs(goal - start) > largest and way != "stochastic":
        end = start + (largest if goal > start else -largest)
        assert first == nearest(end, digits, largest)
    if way == "copy":
      assert whole(twice[dtype], unit) == goals
    if way == "remainder":
      shown = (state.inner_state if position == "inside" else state).wide(once)
      # Masters have 16 binary digits more.
      masters = whole(np.float64(shown[dtype]) * 2**16, unit)
      ends = [
        nearest(x, digits, largest << 16, ties_away=True) for x in masters
      ]
      assert [x >> 16 for x in ends] == firsts


@pytest.mark.parametrize("way", ["remainder", "stochastic"])
def test_masters_beyond_the_largest_parameter_stop_there(way):
  largest = {"float16": 65504.0, "bfloat16": 3.3895314e38}
  params = {x: jnp.array([y, -y, 1.0, jnp.inf], x) for x, y in largest.items()}
  up = {
    x: np.float32([[-y / 512, y / 512, np.nan, 0.0]])
    for x, y in largest.items()
  }
  after, state = run(make(way), params, up)
  back, _ = run(make(way), after, jax.tree.map(np.negative, up), state)
  for dtype, x in after.items():
    assert np.array_equal(x[:2], params[dtype][:2])
    assert jnp.isnan(x[2]) and not jnp.isfinite(x[3])
    # They come back.
    assert (np.abs(np.float32(back[dtype][:2])) <= largest[dtype]).all()


SGD, ADAM, BFLOAT16 = optax.sgd(1.0), optax.adam(1.0), jnp.bfloat16
LOW, BY_CHANCE = ols.low_precision_state, ols.stochastic_rounding
ONE = jnp.ones(1, BFLOAT16)


def crossed(tx, other):
  """Gives the state of an optimizer to another one."""
  return lambda: tx.update(ONE, other.init(ONE), ONE)


def first(tx, params=ONE):
  return lambda: tx.init(params)


# What raises an error, and the error's words.
REFUSED = {
  "8 bits": (
    first(BY_CHANCE(SGD), jnp.ones(3, jnp.float8_e4m3fn)),
    r"of `stochastic_rounding` must be in float16, .*, got float8",
  ),
  "8 bits and a remainder": (
    first(remainders(SGD), jnp.ones(3, jnp.float8_e5m2)),
    r"store=\"remainder\".* must be in float16, .*, got float8",
  ),
  "store": (
    lambda: ols.master_weights(SGD, store="half"),
    "`store` must be 'copy' or 'remainder', got 'half'",
  ),
  "float64": (
    lambda: remainders(SGD, jnp.float64),
    "`dtype` must be float32 with store=",
  ),
  "seed": (
    lambda: BY_CHANCE(SGD, seed=0.5),
    "`seed` must be an integer, got 0.5",
  ),
  "float16 moments": (
    lambda: LOW(ADAM, jnp.float16),
    "`dtype` must be bfloat16, got float16: the squares",
  ),
  "float32 moments": (
    lambda: LOW(ADAM, jnp.float32),
    r"`dtype` must be bfloat16, got float32\.",
  ),
  "no parameters": (
    lambda: BY_CHANCE(SGD).update(ONE, BY_CHANCE(SGD).init(ONE)),
    "`params` must be passed to update",
  ),
  "another state": (
    lambda: LOW(ADAM).update(ONE, optax.EmptyState()),
    "`state` must be the LowPrecisionState",
  ),
  "a remainder for a copy": (
    crossed(ols.master_weights(SGD), remainders(SGD)),
    "`state` must be the MasterWeightsState .*'copy' has it, got Remainder",
  ),
  "a copy for a remainder": (
    crossed(remainders(SGD), ols.master_weights(SGD)),
    "`state` must be the RemainderState .*'remainder' has it, got Master",
  ),
  "parameters cast after init": (
    lambda: remainders(SGD).update(ONE, remainders(SGD).init(jnp.ones(1)), ONE),
    "`tx.init` must be given .* got one in bfloat16 that was wider then",
  ),
  "masters of other parameters": (
    lambda: remainders(SGD).init(ONE).wide(ONE.astype("float32")),
    "`params` must be the 16-bit parameters .* got one in float32",
  ),
  "two ways": (
    first(remainders(ols.loss_scaling(BY_CHANCE(SGD), RULE))),
    "`inner` of `master_weights.* must not contain .* one way",
  ),
  "masters in bfloat16": (
    first(LOW(ols.master_weights(ADAM))),
    "`low_precision_state` must not contain .* put it inside",
  ),
  "moments beside": (
    first(
      ols.loss_scaling(optax.chain(optax.trace(0.9), BY_CHANCE(SGD)), RULE)
    ),
    "around the whole optimizer.* got a state in bfloat16 .* at 0/trace",
  ),
  "a mask of numbers": (
    first(LOW(ADAM, mask=1)),
    "`mask` must be of bools, got 1",
  ),
  "a mask that returns nothing": (
    first(LOW(ADAM, mask=lambda state: None)),
    "`mask` must be of bools, got None",
  ),
  "a mask like the parameters": (
    first(LOW(ADAM, mask={"w": True}), {"w": ONE}),
    "`mask` must be like the state of `inner`, or a prefix of it",
  ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_is_refused_with_a_sentence(case):
  call, match = REFUSED[case]
  errors = TypeError, ValueError
  with jax.enable_x64(True), pytest.raises(errors, match=match):
    call()


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.float8_e4m3fn])
@pytest.mark.parametrize("is_bare", [True, False])
def test_moments_of_narrow_parameters_are_computed_in_float32(dtype, is_bare):
  inner = optax.adam(1e-3)
  tx = LOW(inner if is_bare else ols.loss_scaling(inner, None))
  params = jnp.ones((2, SIZE), dtype)
  update = jax.jit(tx.update)
  updates, state = update(
    jnp.full_like(params, 2.0**-9), tx.init(params), params
  )
  assert updates.dtype == dtype
  squares = optax.tree.get(state, "nu")
  assert squares.dtype == jnp.bfloat16
  assert np.mean(np.float32(squares)) == pytest.approx(
    2.0**-18 / 1000, rel=0.01
  )


def moments(tx, steps=1000):
  """Returns the squares that Adam keeps, of gradients that are all 1."""
  params = {"large": jnp.zeros(SIZE), "small": jnp.zeros(SIZE - 1)}
  gradients = jax.tree.map(jnp.ones_like, params)

  @jax.jit
  def scan(state):
    update = lambda state, _: (tx.update(gradients, state)[1], None)  # noqa: E731
    return jax.lax.scan(update, state, length=steps)[0]

  state = scan(tx.init(params))
  return optax.tree.get(state, "nu"), state


def test_an_average_in_bfloat16_moves():
  adam = optax.adam(1e-3)
  true, _ = moments(adam)
  found, state = moments(ols.low_precision_state(adam))
  assert found["large"].dtype == jnp.bfloat16
  assert found["small"].dtype == jnp.float32
  assert optax.tree.get(state, "count").dtype == jnp.int32
  assert abs(np.mean(np.float32(found["large"])) / true["large"][0] - 1) < 0.01
  support.assert_same_bits(found["small"], true["small"])
  # Rounded to the nearest, it stops where a step is half of the distance.
  nearest = jnp.bfloat16(0)
  for _ in range(1000):
    nearest = (nearest * jnp.float32(0.999) + 0.001).astype(jnp.bfloat16)
  assert nearest < 0.5 * true["large"][0]


MASKS = {
  "none": (None, {"mu": "bfloat16", "nu": "bfloat16"}),
  "all": (True, {"mu": "bfloat16", "nu": "bfloat16"}),
  "nothing": (False, {"mu": "float32", "nu": "float32"}),
  "by path": (
    lambda state: jax.tree.map_with_path(
      lambda path, _: "nu" not in jax.tree_util.keystr(path), state
    ),
    {"mu": "bfloat16", "nu": "float32"},
  ),
  "a prefix": (
    (optax.ScaleByAdamState(True, False, True), False),
    {"mu": "float32", "nu": "bfloat16"},
  ),
}


@pytest.mark.parametrize("case", MASKS)
def test_a_mask_leaves_out_what_must_stay_wide(case):
  mask, dtypes = MASKS[case]
  tx = ols.low_precision_state(optax.adam(1e-3), mask=mask)
  _, state = run(tx, jnp.zeros(SIZE), jnp.ones((2, SIZE)))
  for name, dtype in dtypes.items():
    assert optax.tree.get(state, name).dtype == dtype, name


def test_what_an_optimizer_keeps_in_bfloat16_itself_stays_so():
  tx = ols.low_precision_state(optax.adam(1e-3, mu_dtype=jnp.bfloat16))
  _, state = run(tx, jnp.zeros(SIZE), jnp.ones((2, SIZE)))
  assert optax.tree.get(state, "mu").dtype == jnp.bfloat16


def both(inner):
  return ols.stochastic_rounding(ols.low_precision_state(inner))


PROGRAMS = {
  "groups": lambda: optax.partition(
    {"a": both(optax.adam(1e-2)), "b": remainders(optax.adam(1e-2))},
    {"w": "a", "b": "b"},
  ),
  "momentum of shampoo's kind": lambda: both(optax.adafactor(1e-2)),
}


@pytest.mark.parametrize("program", PROGRAMS)
def test_programs_train_anywhere(program):
  tx = PROGRAMS[program]()
  params = {
    "w": normal(64, 64, dtype="bfloat16"),
    "b": normal(64, seed=1, dtype="bfloat16"),
  }

  def loss_fn(params):
    wide = jax.tree.map(lambda x: x.astype(jnp.float32), params)
    return jnp.mean(
      (wide["w"] @ normal(64, 8, seed=2) + wide["b"][:, None]) ** 2
    )

  @jax.jit
  def train(params):
    def body(carry, _):
      return step(tx, *carry, jax.grad(loss_fn)(carry[0])), None

    # The state keeps its structure and its dtypes, or a scan would not take it.
    (after, _), _ = jax.lax.scan(body, (params, tx.init(params)), length=100)
    return loss_fn(params), loss_fn(after)

  before, after = train(params)
  assert after < 0.8 * before


@each_way
def test_loss_scaling_does_not_ask_for_a_copy(way):
  # A WiringWarning would be an error here. Shapes are enough.
  shape = jax.ShapeDtypeStruct((3,), jnp.float16)
  states = [
    make(way, "inside").init(x) for x in (shape, jnp.ones(3, jnp.float16))
  ]
  assert support.describe(states[0]) == support.describe(states[1])
  low = ols.loss_scaling(ols.low_precision_state(optax.sgd(1.0)), RULE)
  with pytest.warns(ols.WiringWarning, match="should have master weights"):
    low.init(jnp.ones(3, jnp.float16))
