"""The operations of `autocast`, by what low precision does to them.

Names are those of JAX's primitives, and a few more for what has none of its
own: "square" is also `x * x` and `integer_pow` by 2, "cube" is that by 3,
"reciprocal" that by -1 and a number divided by x, and "vecdot" a `dot_general`
of vectors, which is a sum of products rather than a matrix product. The groups
are those of PyTorch, Apex, MindSpore, TensorFlow and Paddle; where they differ
the majority decides, and the comment says so.
"""


def _names(text: str) -> frozenset[str]:
  return frozenset(text.split())


# Matrix products and convolutions. Hardware computes them many times faster in
# low precision, and accumulates in float32. Attention and the recurrent cells,
# which the other systems list as well, are made of these.
PRODUCTS = _names("""
  conv_general_dilated dot_general ragged_dot ragged_dot_general
""")

# They grow so fast that float16 overflows soon, exp at 12, or it is their slope
# near 0 or 1 that matters. TensorFlow lets log follow its input. Squares and
# cubes, which PyTorch has in float32 when they are written as powers, follow
# theirs: activations are made of them, which are in low precision in a layer
# with `dtype=`. In front of a sum they are in float32.
STEEP = _names("""
  cosh exp exp2 expm1 integer_pow log log1p log2 pow reciprocal rsqrt sinh tan
""")

# Steep at the ends of their range, where float16 has few values left.
INVERSES = _names("acos acosh asin asinh atanh erf_inv")

# Long sums lose the small summands: in float16 2048 + 1 is 2048. They are
# accumulated in float32 at every level; here are those whose result stays in
# float32 too. All of softmax, of a mean, of a norm goes on from there.
SUMS = _names("""
  cumlogsumexp cumprod cumsum psum psum_invariant reduce_prod reduce_scatter
  reduce_sum reduce_window_sum scatter-add scatter-mul vecdot
""")

# Series and continued fractions of many terms: nobody computes them in low
# precision, so no level does.
SPECIAL = _names("""
  bessel_i0e bessel_i1e digamma igamma igamma_grad_a igammac lgamma polygamma
  regularized_incomplete_beta zeta
""")

# What MindSpore's level "auto" runs in the widest dtype among its inputs, also
# where one of them is a parameter: BiasAdd, AddN and Concat.
PROMOTING = _names("add add_any concatenate")

# The scopes of what is kept in float32, as shell patterns for one part of a
# scope. Flax Linen calls them so unless the model's author names them.
NORM_SCOPES = ("*Norm*", "*norm*")
LOSS_SCOPES = ("*Loss*", "*loss*", "*cross_entropy*")
