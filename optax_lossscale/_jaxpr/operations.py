"""A table of JAX's operations, with one line for each primitive.

All analyses read this table: `autocast` its own columns, `check_step` most of
the others, `where_overflow` and the emulation of saturation the first ones. A
column holds a word, which is a member of an enum, and each analysis has a rule
for the member. "-" claims nothing; a primitive without a line has it in every
column.
"""

from collections.abc import Sequence
import enum
from typing import NamedTuple

from jax.extend import core
from jax.extend.core import primitives
import numpy as np

from optax_lossscale._base import formats
from optax_lossscale._base import leaves


class Elements(enum.Enum):
  """The elements of the inputs that an element of the result depends on."""

  # On those at its position.
  EACH = "each"
  # On the same, and the result is their comparison.
  TESTS = "tests"
  # On all of the input along some axes.
  REDUCES = "reduces"
  # On those up to its position on an axis.
  RUNS = "runs"
  # It is one of them, and each of them is in the result once.
  PERMUTES = "permutes"
  # It is one of several inputs' of the same dtype.
  JOINS = "joins"
  UNKNOWN = "-"


class Size(enum.Enum):
  """How large the result may be, next to the inputs."""

  # Never larger: the operation moves, chooses or limits values. So it is with a
  # bitcast and a sign, whose results are never an overflow.
  MOVES = "moves"
  # A finite result fits in any dtype that holds the input. One that is not
  # finite has no value: log 0, rsqrt 0, sqrt(-1).
  BOUNDED = "bounded"
  # Bounded for real inputs; along the imaginary axis it grows.
  REAL = "real"
  # It may overflow, and at some inputs it has no value: 1 / 0.
  PARTIAL = "partial"
  # It may overflow.
  GROWS = "-"


class Growth(enum.Enum):
  """How the result grows with the inputs, if they are powers of S."""

  # As the first input.
  KEEPS = "keeps"
  # As the inputs, which must grow alike.
  ADDS = "adds"
  SUBTRACTS = "subtracts"
  COMPARES = "compares"
  REMAINDER = "remainder"
  # They must grow alike in one array, which may be taken apart again.
  PACKS = "packs"
  SCATTERS = "scatters"
  # They must grow alike in one array, from which the others are lost.
  MERGES = "merges"
  # Not at all, if the inputs grow alike: the result is a truth or an angle.
  TESTS = "tests"
  # Not at all, since S is positive.
  IGNORES = "ignores"
  ORDERS = "orders"
  # As a product, or as a quotient.
  MULTIPLIES = "multiplies"
  DIVIDES = "divides"
  SOLVES = "solves"
  # As a power.
  SQUARES = "squares"
  ROOTS = "roots"
  INVERTS = "inverts"
  CUBE_ROOTS = "cube_roots"
  POWER = "power"
  POWERS = "powers"
  PRODUCT = "product"
  # Of several results one grows as the input does.
  FIRST = "first"
  SECOND = "second"
  # By no power: the result does depend on S if an input does.
  DEPENDS = "depends"
  # It may.
  UNKNOWN = "-"


class Axes(enum.Enum):
  """The place of the inputs' axes in the result."""

  # In the same place, unless their length changes.
  SAME = "same"
  DOT = "dot"
  INDEXED = "indexed"
  PADDED = "padded"
  PERMUTED = "permuted"
  REDUCED = "reduced"
  RESHAPED = "reshaped"
  SPREAD = "spread"
  UNKNOWN = "-"


class Inf(enum.Enum):
  """The way in which a result shows that an input is inf or NaN."""

  # It is not finite then.
  SHOWS = "shows"
  # It is chosen by size: the largest, or another.
  LARGEST = "largest"
  ORDERED = "ordered"
  # An inf is hidden as the second input: 1 / inf is 0.
  DIVIDES = "divides"
  # It is hidden unless the exponent is positive.
  POWERS = "powers"
  # An inf among the positions is hidden.
  PICKS = "picks"
  # The result is the truth of a test.
  TESTS = "tests"
  # It may be finite: exp(-inf) is 0.
  HIDES = "-"


class Form(enum.Enum):
  """The result for inputs that are known numbers, or known arguments."""

  # Each result is the input at its position.
  COPIES = "copies"
  CONVERTS = "converts"
  RESHAPES = "reshapes"
  TURNS = "turns"
  # The result is a part of the input; a slice may be all of it.
  SLICES = "slices"
  PARTS = "parts"
  SELECTS = "selects"
  # A random key is made of numbers, or the reverse.
  WRAPS = "wraps"
  UNWRAPS = "unwraps"
  # The result for known numbers is a known number.
  FOLDS = "folds"
  PLUS = "plus"
  MINUS = "minus"
  TIMES = "times"
  OVER = "over"
  FLIPS = "flips"
  ALL = "all"
  ANY = "any"
  TOTALS = "totals"
  # Of equal numbers the result is that number.
  EXTREME = "extreme"
  UNKNOWN = "-"


class Cast(enum.Enum):
  """The list of `autocast` that an operation is on; levels.py says why."""

  PRODUCT = "product"
  STEEP = "steep"
  SUM = "sum"
  SPECIAL = "special"
  PROMOTES = "promotes"
  NONE = "-"


class Flag(enum.Flag):
  """Other properties of an operation."""

  # It works between devices: it adds up their values, or moves or chooses them.
  SUMS = enum.auto()
  EXCHANGES = enum.auto()
  # The results of devices differ.
  DIFFERS = enum.auto()
  # The result is 0 where the input is.
  ZERO = enum.auto()
  # The result is seldom negative.
  POSITIVE = enum.auto()
  # JAX does not know what the operation does.
  OPAQUE = enum.auto()
  # For `autocast`: it saves nothing for the backward pass, so float32 costs no
  # memory. (`reduce_max` is one for softmax, which does not differentiate its
  # maximum, and cubes and squares for a sum, the only user of their results.)
  LINEAR = enum.auto()
  # It holds a jaxpr that combines two numbers, and counts as one operation.
  COMBINES = enum.auto()
  # The result depends on the bits of the dtype.
  BITS = enum.auto()
  # If an input holds a large number, so does the result.
  SPAN = enum.auto()
  # A parameter among its inputs follows the dtype of the others.
  PARAMETER = enum.auto()


class Row(NamedTuple):
  """A line of the table; `positions` are the inputs that are positions."""

  name: str
  elements: Elements = Elements.UNKNOWN
  size: Size = Size.GROWS
  growth: Growth = Growth.UNKNOWN
  axes: Axes = Axes.UNKNOWN
  inf: Inf = Inf.HIDES
  form: Form = Form.UNKNOWN
  cast: Cast = Cast.NONE
  flags: Flag = Flag(0)
  positions: slice = slice(0)


# The last column lists flags, and as "@start:stop" which inputs are positions.
# Four lines are for forms that have names of their own (see `name_of`): "square"
# is also `x * x`.
_TABLE = """
primitive            elements size    growth     axes     inf     form     cast     more
abs                  each     moves   keeps      same     shows   folds    -        zero positive span
acos                 each     bounded depends    same     shows   -        steep
acosh                each     bounded depends    same     shows   -        steep
add                  each     -       adds       same     shows   plus     promotes linear span parameter
add_any              each     -       adds       same     shows   plus     promotes linear span parameter
all_gather           -        moves   keeps      -        shows   -        -        exchanges
all_gather_invariant -        moves   keeps      -        shows   -        -        exchanges
all_gather_reduced   -        moves   -          -        shows   -        -        exchanges
all_to_all           -        moves   keeps      -        shows   -        -        exchanges differs
and                  -        -       -          same     shows   all      -
approx_top_k         -        moves   first      -        ordered -        -
argmax               -        -       orders     reduced  -       -        -
argmin               -        -       orders     reduced  -       -        -
asin                 each     bounded depends    same     shows   -        steep
asinh                each     bounded depends    same     shows   -        steep
atan                 each     bounded depends    same     -       -        -
atan2                each     bounded tests      same     -       -        -
atanh                each     bounded depends    same     shows   -        steep
axis_index           -        -       -          -        -       -        -
bessel_i0e           each     bounded depends    same     -       -        special
bessel_i1e           each     bounded depends    same     -       -        special
bitcast_convert_type -        moves   -          -        shows   -        -        bits
broadcast_in_dim     -        moves   keeps      spread   shows   reshapes -
cbrt                 each     bounded cube_roots same     shows   -        -
ceil                 each     -       depends    same     shows   -        -
cholesky             -        -       roots      -        -       -        -
clamp                joins    moves   compares   same     -       -        -
complex              each     -       packs      same     shows   -        -
concatenate          joins    moves   packs      same     shows   -        promotes linear
conj                 each     moves   keeps      same     shows   -        -
conv_general_dilated -        -       multiplies -        shows   -        product
convert_element_type each     -       depends    same     shows   converts -
copy                 permutes moves   keeps      -        shows   copies   -
cos                  each     real    depends    same     shows   -        -
cosh                 each     -       depends    same     shows   -        steep
cube                 -        -       -          -        -       -        -        linear
cumlogsumexp         runs     -       depends    same     -       -        sum
cummax               -        moves   keeps      same     largest -        -
cummin               -        moves   keeps      same     ordered -        -
cumprod              runs     -       depends    same     shows   -        sum
cumsum               runs     -       keeps      same     shows   -        sum
device_put           -        moves   keeps      -        shows   copies   -
digamma              each     partial depends    same     -       -        special
div                  each     partial divides    same     divides over     -
dot_general          -        -       multiplies dot      shows   -        product
dynamic_slice        -        moves   keeps      same     picks   parts    -        @1:
dynamic_update_slice joins    moves   packs      same     shows   -        -        @2:
eig                  -        -       -          -        shows   -        -
eigh                 -        -       second     -        -       -        -
eq                   tests    -       tests      same     tests   folds    -
eq_to                tests    -       tests      same     tests   -        -
erf                  each     bounded depends    same     -       -        -
erf_inv              each     bounded depends    same     shows   -        steep
erfc                 each     bounded depends    same     -       -        -
exp                  each     -       depends    same     -       -        steep
exp2                 each     -       depends    same     -       -        steep
expm1                each     -       depends    same     -       -        steep
ffi_call             -        -       -          -        -       -        -        opaque
fft                  -        -       keeps      -        shows   -        -
floor                each     -       depends    same     shows   -        -
freeze               -        moves   keeps      -        shows   -        -
gather               -        moves   keeps      indexed  picks   parts    -        @1:
ge                   tests    -       tests      same     tests   folds    -
get                  -        moves   -          -        shows   -        -
gt                   tests    -       tests      same     tests   folds    -
igamma               each     bounded depends    same     -       -        special
igamma_grad_a        each     partial depends    same     -       -        special
igammac              each     bounded depends    same     -       -        special
imag                 each     moves   keeps      same     shows   -        -
integer_pow          each     partial powers     same     powers  -        steep
is_finite            -        -       ignores    same     tests   -        -
le                   tests    -       tests      same     tests   folds    -
le_to                tests    -       tests      same     tests   -        -
lgamma               each     partial depends    same     -       -        special
log                  each     bounded -          same     shows   -        steep
log1p                each     bounded -          same     shows   -        steep
log2                 each     bounded -          same     shows   -        steep
logistic             each     real    depends    same     -       -        -
lt                   tests    -       tests      same     tests   folds    -
lt_to                tests    -       tests      same     tests   -        -
lu                   -        -       -          -        shows   -        -
max                  joins    moves   compares   same     largest folds    -
min                  joins    moves   compares   same     ordered folds    -
mul                  each     -       multiplies same     shows   times    -        span parameter
name                 -        moves   keeps      -        shows   copies   -
ne                   tests    -       tests      same     tests   folds    -
neg                  each     moves   keeps      same     shows   folds    -        linear span
nextafter            each     -       -          same     -       -        -        bits
not                  -        -       -          same     shows   flips    -
one_minus_square     each     -       depends    same     -       -        -
optimization_barrier -        moves   keeps      -        shows   copies   -
or                   -        -       -          same     shows   any      -
pad                  joins    moves   packs      padded   shows   -        -        linear
pallas_call          -        -       -          -        -       -        -        opaque
pbroadcast           -        moves   keeps      -        shows   copies   -
pmax                 -        moves   keeps      same     largest extreme  -        exchanges
pmin                 -        moves   keeps      same     ordered extreme  -        exchanges
polygamma            each     partial depends    same     -       -        special
pow                  each     partial power      same     powers  -        steep
ppermute             -        moves   keeps      -        shows   -        -        exchanges differs
psum                 -        -       keeps      same     shows   -        sum      sums
psum_invariant       -        -       keeps      same     shows   -        sum      sums
pvary                -        moves   keeps      -        shows   copies   -
qr                   -        -       second     -        shows   -        -
ragged_all_to_all    joins    moves   -          -        shows   -        -        exchanges differs
ragged_dot_general   -        -       multiplies -        -       -        product
random_clone         -        -       -          -        -       copies   -
random_unwrap        -        -       -          -        -       unwraps  -
random_wrap          -        -       -          -        -       wraps    -
real                 each     moves   keeps      same     shows   -        -
reciprocal           -        -       -          -        -       -        steep
reduce               -        -       -          -        -       -        -        combines
reduce_and           -        -       keeps      reduced  shows   all      -
reduce_max           -        moves   keeps      reduced  largest extreme  -        zero positive linear
reduce_min           -        moves   keeps      reduced  ordered extreme  -
reduce_or            -        -       keeps      reduced  shows   any      -
reduce_precision     each     -       keeps      same     shows   -        -        bits
reduce_prod          reduces  -       product    reduced  shows   -        sum
reduce_scatter       -        -       keeps      -        shows   -        sum      sums differs
reduce_sum           reduces  -       keeps      reduced  shows   totals   sum      zero
reduce_window        -        -       -          -        -       -        -        combines
reduce_window_max    -        moves   keeps      -        largest -        -
reduce_window_min    -        moves   keeps      -        ordered -        -
reduce_window_sum    -        -       keeps      -        shows   -        sum
regularized_incomplete_beta each     bounded depends    same     -       -        special
rem                  each     bounded remainder  same     divides -        -
reshape              permutes moves   keeps      reshaped shows   reshapes -
reshard              -        moves   keeps      -        shows   copies   -
rev                  permutes moves   keeps      -        shows   -        -
round                each     -       depends    same     shows   -        -
rsqrt                each     bounded inverts    same     -       -        steep
scatter              joins    moves   packs      indexed  shows   -        -        combines @1:2
scatter-add          -        -       scatters   indexed  shows   -        sum      combines @1:2
scatter-max          joins    moves   merges     indexed  ordered -        -        combines @1:2
scatter-min          joins    moves   merges     indexed  ordered -        -        combines @1:2
scatter-mul          -        -       -          -        shows   -        sum      combines
scatter-sub          -        -       scatters   indexed  shows   -        sum      combines @1:2
select_and_gather_add joins    moves   keeps      -        shows   -        -        combines
select_and_scatter   -        -       -          -        -       -        -        combines
select_and_scatter_add -        -       keeps      -        shows   -        -
select_n             joins    moves   -          same     shows   selects  -        linear
sharding_constraint  -        moves   keeps      -        shows   copies   -
sign                 each     moves   ignores    same     -       -        -
sin                  each     real    depends    same     shows   -        -
sinh                 each     -       depends    same     shows   -        steep
slice                -        moves   keeps      same     shows   slices   -
sort                 -        moves   keeps      same     ordered -        -
split                -        moves   keeps      same     shows   -        -
sqrt                 each     bounded roots      same     shows   folds    -        zero positive span
square               each     -       squares    same     shows   folds    -        zero positive linear parameter
squeeze              permutes moves   keeps      reshaped shows   reshapes -
stack                joins    moves   packs      -        shows   -        -        linear
stop_gradient        permutes moves   keeps      -        shows   copies   -        linear
sub                  each     -       subtracts  same     shows   minus    -        linear span
svd                  -        -       first      -        shows   -        -
swap                 -        moves   -          -        shows   -        -
tan                  each     -       depends    same     shows   -        steep
tanh                 each     real    depends    same     -       -        -
tile                 -        moves   keeps      -        shows   -        -
top_k                -        moves   first      -        ordered -        -
tpu_custom_call      -        -       -          -        -       -        -        opaque
transpose            permutes moves   keeps      permuted shows   turns    -
triangular_solve     -        -       solves     -        -       -        -
tridiagonal_solve    -        -       -          -        -       -        -
unstack              -        moves   keeps      -        shows   -        -
vecdot               -        -       -          -        -       -        sum
zeta                 each     partial depends    same     -       -        special
"""


def _parsed(line: str) -> Row:
  """Returns a line of the table as a row."""
  name, elements, size, growth, axes, inf, form, cast, *more = line.split()
  flags, positions = Flag(0), slice(0)
  for word in more:
    if word.startswith("@"):
      start, stop = word[1:].split(":")
      positions = slice(int(start), int(stop) if stop else None)
    else:
      flags |= Flag[word.upper()]
  members = Elements(elements), Size(size), Growth(growth), Axes(axes)
  return Row(name, *members, Inf(inf), Form(form), Cast(cast), flags, positions)


ROWS = {row.name: row for row in map(_parsed, _TABLE.strip().splitlines()[1:])}
UNKNOWN = Row("")

# Kernels have many names, which begin like this.
_OPAQUE_STARTS = ("cudnn_", "dot_product_attention_", "scaled_matmul")

# The names that `name_of` returns for the primitives that JAX exports.
NAMES = frozenset(
  getattr(primitives, attribute).name
  for attribute in dir(primitives)
  if attribute.endswith("_p")
) | {"cube", "reciprocal", "square", "vecdot"}

_POWERS = {-1: "reciprocal", 2: "square", 3: "cube"}


def of(equation: core.JaxprEqn) -> Row:
  """Returns the row of an operation as JAX wrote it."""
  return ROWS.get(equation.primitive.name, UNKNOWN)


def meant(equation: core.JaxprEqn) -> Row:
  """Returns the row of an operation, in whichever of its forms it is."""
  return ROWS.get(name_of(equation), UNKNOWN)


def names(*members: enum.Enum) -> frozenset[str]:
  """Returns the names of the rows that have any of some words."""
  return frozenset(
    name
    for name, row in ROWS.items()
    for member in members
    if member in row or (isinstance(member, Flag) and member in row.flags)
  )


def moves(equation: core.JaxprEqn) -> bool:
  """Returns whether the results never exceed the inputs in magnitude."""
  name = equation.primitive.name
  if name == "abs":
    return not is_complex(equation.invars[0].aval)
  if name == "scatter":
    # This parameter holds the `function` of `x.at[...].apply(function)`.
    return equation.params.get("update_jaxpr") is None
  return of(equation).size is Size.MOVES


def is_opaque(equation: core.JaxprEqn) -> bool:
  """Returns whether an equation is a kernel that nothing can look into."""
  is_kernel = equation.primitive.name.startswith(_OPAQUE_STARTS)
  return is_kernel or Flag.OPAQUE in of(equation).flags


def name_of(equation: core.JaxprEqn) -> str:
  """Returns a name that equivalent ways to write an operation share."""
  name, inputs = equation.primitive.name, equation.invars
  if name == "integer_pow":
    return _POWERS.get(equation.params["y"], name)
  if name == "mul" and inputs[0] is inputs[1]:
    return "square"
  if name == "div" and isinstance(inputs[0], core.Literal):
    return "reciprocal"
  if name == "dot_general" and all(
    len(contracting) + len(batch) == len(atom.aval.shape)
    for contracting, batch, atom in zip(
      *equation.params["dimension_numbers"], inputs, strict=True
    )
  ):
    return "vecdot"
  return name


def dtype_of(equation: core.JaxprEqn) -> np.dtype | None:
  """Returns the dtype that an operation runs in, or None without floats."""

  def widest(atoms: Sequence[core.Var | core.Literal]) -> np.dtype | None:
    floats = [x.aval.dtype for x in atoms if leaves.is_gradient(x.aval)]
    return max(floats, key=lambda x: x.itemsize, default=None)

  # The sum of numbers in low precision may have a wider dtype than they do.
  taken, given = widest(equation.invars), widest(equation.outvars)
  return taken if given is not None and formats.is_low(taken) else given


def is_complex(x: object) -> bool:
  """Returns whether an array, or its form, is of complex numbers."""
  return leaves.is_gradient(x) and not leaves.is_real(x)
