"""Tables of JAX's operations: which can overflow, and from which inputs."""

from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any

import jax
from jax.extend import core
from jax.extend.core import primitives
import jax.numpy as jnp
import numpy as np

from optax_lossscale._base import formats
from optax_lossscale._base import leaves
from optax_lossscale._jaxpr import collectives


def names(text: str) -> frozenset[str]:
  """Returns the words of a text as a set."""
  return frozenset(text.split())


# Comparisons of two elements.
COMPARISONS = names("eq eq_to ge gt le le_to lt lt_to ne")

# Moves with several inputs of the same dtype.
JOINS = names("""
  clamp concatenate dynamic_update_slice max min pad ragged_all_to_all scatter
  scatter-max scatter-min select_and_gather_add select_n stack
""")

# Moves that rearrange elements without repeating or dropping any.
REARRANGES = names("copy reshape rev squeeze stop_gradient transpose")

# These operations move, choose or limit values, so the results never exceed the
# inputs in magnitude. A bitcast is listed too: its result is never an overflow.
MOVES = names("""
  approx_top_k bitcast_convert_type broadcast_in_dim device_put dynamic_slice
  freeze gather get name optimization_barrier pbroadcast pvary reshard
  sharding_constraint slice sort split swap tile top_k unstack
  cummax cummin reduce_max reduce_min reduce_window_max reduce_window_min
  abs conj imag neg real sign
""").union(collectives.EXCHANGES, JOINS, REARRANGES)

# A finite result of these fits in any dtype that holds the input. A non-finite
# result means that the operation is undefined: log 0, rsqrt 0, sqrt(-1).
BOUNDED = names("""
  acos acosh asin asinh atan atan2 atanh bessel_i0e bessel_i1e cbrt cos erf
  erf_inv erfc igamma igammac log log1p log2 logistic
  regularized_incomplete_beta rem rsqrt sin sqrt tanh
""")

# Each element of the result depends on the same element of each input.
ELEMENTWISE = BOUNDED | names("""
  abs add add_any ceil complex convert_element_type cosh digamma div exp exp2
  expm1 floor igamma_grad_a integer_pow lgamma mul nextafter one_minus_square
  polygamma pow reduce_precision round sinh square sub tan zeta
""")

# Each element of the result depends on all inputs along some axes.
REDUCTIONS = names("reduce_prod reduce_sum")

# Each element of the result depends on the input up to its position on an axis.
CUMULATIVE = names("cumlogsumexp cumprod cumsum")

# Functions bounded for real inputs, which grow along the imaginary axis.
_REAL_BOUNDED = names("cos logistic sin tanh")

# Returns where an operation outside of `BOUNDED` has no finite value.
_Undefined = Callable[[Sequence[jax.Array], Mapping[str, Any]], jax.Array]


def moves(equation: core.JaxprEqn) -> bool:
  """Returns whether the results never exceed the inputs in magnitude."""
  name, parameters = equation.primitive.name, equation.params
  if name == "abs":
    return not _is_complex(equation.invars[0].aval)
  if name == "scatter":
    # This parameter holds the `function` of `x.at[...].apply(function)`.
    return parameters.get("update_jaxpr") is None
  return name in MOVES


# Kernels and calls whose operations JAX does not know, and how others begin.
OPAQUE = names("ffi_call pallas_call tpu_custom_call")
_OPAQUE_STARTS = ("cudnn_", "dot_product_attention_", "scaled_matmul")

# The names that `name_of` returns for the primitives that JAX exports.
NAMES = frozenset(
  getattr(primitives, attribute).name
  for attribute in dir(primitives)
  if attribute.endswith("_p")
) | names("cube reciprocal square vecdot")

_POWERS = {-1: "reciprocal", 2: "square", 3: "cube"}


def is_opaque(equation: core.JaxprEqn) -> bool:
  """Returns whether an equation is a kernel that nothing can look into."""
  name = equation.primitive.name
  return name in OPAQUE or name.startswith(_OPAQUE_STARTS)


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


def undefined(
  equation: core.JaxprEqn, inputs: Sequence[jax.Array]
) -> jax.Array | np.ndarray:
  """Returns where an operation with a non-finite result has no finite one."""
  name = equation.primitive.name
  if name in BOUNDED:
    is_bounded = name not in _REAL_BOUNDED or not _is_complex(inputs[0])
    return np.array(is_bounded)
  if name in UNDEFINED:
    return UNDEFINED[name](inputs, equation.params)
  return np.array(False)


def _is_complex(x: object) -> bool:
  return leaves.is_gradient(x) and not leaves.is_real(x)


def _is_pole(x: jax.Array) -> jax.Array:
  """Returns where the gamma function is undefined: 0, -1, -2 ..."""
  return (x <= 0) & _is_whole(x)


def _is_whole(x: jax.Array) -> jax.Array:
  return x == jnp.round(x)


def _pow(base: jax.Array, exponent: jax.Array) -> jax.Array:
  if _is_complex(base) or _is_complex(exponent):
    return (base == 0) & (jnp.real(exponent) <= 0)
  is_root = (base < 0) & ~_is_whole(exponent)
  return ((base == 0) & (exponent < 0)) | is_root


UNDEFINED: Mapping[str, _Undefined] = {
  "digamma": lambda inputs, _: _is_pole(inputs[0]),
  "div": lambda inputs, _: inputs[1] == 0,
  "igamma_grad_a": lambda inputs, _: (inputs[0] <= 0) | (inputs[1] < 0),
  "integer_pow": lambda inputs, parameters: (
    (inputs[0] == 0) & (parameters["y"] < 0)
  ),
  "lgamma": lambda inputs, _: _is_pole(inputs[0]),
  "polygamma": lambda inputs, _: (
    (inputs[0] < 0) | ~_is_whole(inputs[0]) | _is_pole(inputs[1])
  ),
  "pow": lambda inputs, _: _pow(*inputs),
  "zeta": lambda x, _: (
    (x[0] <= 1) | ((x[1] <= 0) & (_is_whole(x[1]) | ~_is_whole(x[0])))
  ),
}
