"""The table of operations, against true values and against JAX."""

import itertools

import jax
from jax import lax
from jax.extend import core
from jax.extend.core import primitives
import jax.numpy as jnp
import numpy as np
import pytest

from optax_lossscale._jaxpr import calls
from optax_lossscale._jaxpr import operations as table
from optax_lossscale._jaxpr.operations import Elements
from optax_lossscale._jaxpr.operations import Inf
from optax_lossscale._jaxpr.operations import Size
from optax_lossscale.hardware import operation_overflow
from tests import support
from tests.jaxpr import operations
from tests.support import equation_of


@pytest.mark.parametrize("name", operations.ELEMENTWISE)
def test_an_operation_is_undefined_where_it_has_no_true_value(name):
  call = operations.ELEMENTWISE[name].call
  situations = operations.situations(name)
  for situation in (operations.OVERFLOW, operations.UNDEFINED):
    if columns := situations.get(situation):
      equation = equation_of(call, *columns)
      assert equation.primitive.name == name
      found = operation_overflow.undefined_at(equation, columns)
      assert np.all(found == (situation == operations.UNDEFINED)), situation
  # The row says that the result shows an inf of any input.
  one = [np.float32(2)] * operations.ELEMENTWISE[name].arity
  for place, bad in itertools.product(
    range(len(one)), (np.inf, -np.inf, np.nan)
  ):
    given = [*one[:place], np.float32(bad), *one[place + 1 :]]
    is_shown = not np.all(np.isfinite(call(*given)))
    assert is_shown or table.ROWS[name].inf is not Inf.SHOWS, bad


@pytest.mark.parametrize(
  ("function", "inputs", "has_no_value"),
  [
    (lax.pow, ([-2, -2, 0, 0], [0.5, 3, -1, 2]), [True, False, True, False]),
    # Functions that are bounded for real inputs may overflow for complex ones.
    (lax.log, (np.complex64(0),), True),
    (lax.sin, (np.complex64(1 + 200j),), False),
    (lax.sin, (np.inf,), True),
    # JAX's own values are far off here, so no result can show this.
    (lax.zeta, ([2, 1.5, 2], [-0.5, -0.5, -1]), [False, True, True]),
  ],
)
def test_an_operation_has_no_value_at_points(function, inputs, has_no_value):
  inputs = [x if np.iscomplexobj(x) else np.float32(x) for x in inputs]
  equation = equation_of(function, *inputs)
  found = operation_overflow.undefined_at(equation, [*map(jnp.array, inputs)])
  assert found.tolist() == has_no_value


def test_the_elementwise_operations_are_those_with_a_true_value():
  # Tests of `float_status` and of casts cover the first two.
  others = {"complex", "convert_element_type", "log2", "one_minus_square"}
  known = operations.ELEMENTWISE.keys() | others
  each, partial = map(table.names, (Elements.EACH, Size.PARTIAL))
  others = each - table.names(Size.MOVES) - known
  assert not others, "tests/jaxpr/operations.py needs their true values"
  assert partial == operation_overflow.PARTIAL.keys()
  assert partial | table.names(Size.BOUNDED, Size.REAL) <= each


MOVES = {
  "clamp": lambda x: lax.clamp(jnp.float16(-3), x, jnp.float16(5)),
  "max": lambda x: lax.max(x, np.ones(9, np.float16)),
  "min": lambda x: lax.min(x, np.ones(9, np.float16)),
  "neg": lax.neg,
  "select_n": lambda x: lax.select_n(np.arange(9) > 3, x, x),
  "sort": lambda x: lax.sort(x),
  "top_k": lambda x: lax.top_k(x, 3)[0],
}


@pytest.mark.parametrize("name", MOVES)
def test_a_move_makes_no_value_larger(name):
  x = np.random.default_rng(0).normal(size=9).astype(np.float16) * 4
  assert table.moves(equation_of(MOVES[name], x))
  assert np.max(np.abs(MOVES[name](x))) <= np.max(np.abs(x))
  for bad in (np.inf, -np.inf, np.nan):
    x[4] = bad
    hides = np.all(np.isfinite(MOVES[name](x)))
    assert not (hides and table.ROWS[name].inf is Inf.SHOWS), bad


def test_only_some_scatters_and_absolute_values_are_moves():
  x, z = jnp.ones(3), jnp.ones(3, jnp.complex64)

  def scatter_of(function):
    found = support.equations(jax.make_jaxpr(function)(x))
    return next(y for y in found if y.primitive.name.startswith("scatter"))

  assert table.moves(scatter_of(lambda x: x.at[0].set(2.0)))
  apply = scatter_of(lambda x: x.at[0].apply(lambda y: y * y))
  assert not table.moves(apply)
  assert not table.moves(scatter_of(lambda x: x.at[0].add(2.0)))
  assert not table.moves(equation_of(lax.abs, z))


# Primitives that jax.extend.core.primitives and jax.lax do not list, each with
# what JAX records as one, mapped over devices.
WITHOUT_A_HANDLE = {
  "all_gather_invariant": lambda x: lax.all_gather(x, "data", to="invarying"),
  "pbroadcast": lambda x: lax.pbroadcast(x, ("data",), 0),
  "psum_invariant": lambda x: lax.psum(x, "data"),
  "pvary": lambda x: lax.pcast(lax.psum(x, "data"), "data", to="varying"),
  "reduce_scatter": lambda x: lax.psum_scatter(x, "data", tiled=True),
}
UNTRIED = """
  all_gather_reduced ffi_call freeze pallas_call ragged_dot_general random_clone
  random_unwrap random_wrap reshard tpu_custom_call
"""
# Only newer versions of JAX have these, and no version these.
NEWER = {"log2", "one_minus_square"}
FORMS = {"cube", "reciprocal", "vecdot"}
# The primitives of JAX without a row, which are unknown everywhere: by reason.
WITHOUT_A_ROW = """
  whole numbers and bits, which S does not reach: clz population_count xor
  reduce_xor shift_left shift_right_arithmetic shift_right_logical;
  random numbers, tokens and positions: after_all create_token empty2 iota
  random_bits random_fold_in random_gamma random_seed random_split
  rng_bit_generator rng_uniform threefry2x32;
  not seen in a train step: custom_lin hessenberg householder_product polynomial
  schur tridiagonal
"""


def test_the_table_has_a_row_for_each_primitive_but_for_a_reason():
  values = [*vars(primitives).values(), *vars(lax).values()]
  listed = {x.name for x in values if isinstance(x, core.Primitive)}
  unlisted = {*WITHOUT_A_HANDLE, *UNTRIED.split()}
  assert table.ROWS.keys() - listed - NEWER - FORMS == unlisted
  exported = table.NAMES - calls.TABLE.keys() - table.ROWS.keys()
  by_reason = (x.partition(":")[2] for x in WITHOUT_A_ROW.split(";"))
  without = {x for names in by_reason for x in names.split()} & table.NAMES
  assert exported == without, "keep WITHOUT_A_ROW up to date"
  lines = [x.split()[0] for x in table._TABLE.strip().splitlines()[1:]]
  assert lines == sorted({*lines}), "each once, in alphabetical order"


@pytest.mark.parametrize("name", WITHOUT_A_HANDLE)
def test_jax_records_an_operation_without_a_handle_under_its_name(name):
  out_specs = jax.P() if "invariant" in name else support.SPREAD
  call = support.on_each_device(WITHOUT_A_HANDLE[name], out_specs)
  assert f" {name}[" in str(jax.make_jaxpr(call)(jnp.ones(64)))
