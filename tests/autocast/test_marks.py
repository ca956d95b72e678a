"""`cast_inputs`: under autocast a kernel that needs 16 bits runs in them."""

import collections
import functools

import equinox as eqx
from flax import nnx
import jax
from jax import flatten_util
from jax import lax
from jax.experimental.pallas.ops.tpu import flash_attention
from jax.experimental.pallas.ops.tpu.splash_attention import (
  splash_attention_kernel,
)
from jax.experimental.pallas.ops.tpu.splash_attention import (
  splash_attention_mask,
)
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from benchmarks import gpt2
import optax_lossscale as ols
from tests import documents
from tests import support
from tests.autocast import mixed
from tests.autocast.programs import dtypes_of
from tests.autocast.programs import kernel
from tests.autocast.programs import products

KEY = jax.random.key(0)
X = jnp.linspace(-1, 1, 32).reshape(8, 4)
W = jnp.linspace(-0.5, 0.5, 16).reshape(4, 4)
LOW = (jnp.float16, jnp.bfloat16)


def refusing(*dtypes):
  """Returns 2 * x @ w in a kernel that refuses other dtypes, as cuDNN does."""

  def check(*arrays):
    for x in arrays:
      if x.dtype not in dtypes:
        raise NotImplementedError(f"Q must be fp16/bf16, got {x.dtype}")

  @jax.custom_vjp
  def fused(x, w):
    check(x, w)
    return kernel(x @ w)

  def backward(kept, cotangent):
    x, w = kept
    check(x, w, cotangent)
    return 2 * cotangent @ w.T, 2 * x.T @ cotangent

  fused.defvjp(lambda x, w: (fused(x, w), (x, w)), backward)
  return fused


def with_own_rule(fused):
  """Returns a function whose derivative rule calls the marked one."""
  own = jax.custom_vjp(fused)
  own.defvjp(
    lambda x, w: (fused(x, w), (x, w)),
    lambda kept, y: jax.vjp(fused, *kept)[1](y),
  )
  return own


def on_devices(fused, x, w):
  mesh = support.make_mesh(data=2)
  return jax.shard_map(
    fused,
    mesh=mesh,
    in_specs=(support.SPREAD, None),
    out_specs=support.SPREAD,
    check_vma=False,
  )(x, w)


PROGRAMS = {
  "call": lambda fused, x, w: fused(jnp.tanh(x @ w), w) @ w,
  "jit": lambda fused, x, w: jax.jit(fused)(x, w),
  "scan": lambda fused, x, w: lax.scan(
    lambda x, _: (jnp.tanh(fused(x, w)), None), x, None, length=2
  )[0],
  "cond": lambda fused, x, w: lax.cond(x[0, 0] < 0, fused, jnp.matmul, x, w),
  "remat": lambda fused, x, w: jax.checkpoint(fused)(x @ w, w),
  "vmap": lambda fused, x, w: jax.vmap(fused, (0, None))(x[:, None], w),
  "shard_map": on_devices,
  "rule": lambda fused, x, w: with_own_rule(fused)(x, w),
  "grad": lambda fused, x, w: jax.grad(lambda x: jnp.sum(fused(x, w) ** 2))(x),
  "nested": lambda fused, x, w: ols.autocast(fused, dtype=jnp.float16)(x, w),
}


@pytest.mark.parametrize("low", LOW)
@pytest.mark.parametrize(
  "name", support.slow_but(PROGRAMS.keys() - {"shard_map"}, PROGRAMS)
)
def test_a_marked_kernel_gets_16_bits_and_its_gradient_is_that_of_float32(
  name, low
):
  # The inner autocast is in float16, and the outer one is not.
  low, outer = (jnp.float16, jnp.bfloat16) if name == "nested" else (low, low)
  marked, wide = ols.cast_inputs(refusing(low)), refusing(jnp.float32)
  program = functools.partial(PROGRAMS[name], marked)
  plain = functools.partial(PROGRAMS[name.replace("nested", "jit")], wide)
  mixed_program = ols.autocast(program, dtype=outer)
  expected = mixed.gradient(plain)(X, W)
  mixed.assert_close(mixed.gradient(mixed_program)(X, W), expected, 0.06)
  assert {*dtypes_of("pallas_call", mixed_program, X, W)} == {
    jnp.dtype(low).name
  }


def test_nnx_and_what_follows_are_in_16_bits():
  fused = ols.cast_inputs(refusing(jnp.float16))

  def loss_fn(layer, x):
    return jnp.sum(layer(fused(x, W) * 2))

  graph, state = nnx.split(nnx.Linear(4, 4, rngs=nnx.Rngs(0)))
  # The product that follows takes the kernel's result as it is.
  run = ols.nnx.autocast(loss_fn)

  def merged(state, x):
    return run(nnx.merge(graph, state), x)

  assert products(merged, state, X) == ["float16"] * 4
  assert {*dtypes_of("mul", merged, state, X)} == {"float16"}


def test_what_leads_to_a_kernel_is_in_16_bits():
  fused = ols.cast_inputs(kernel)  # No product follows.
  low = ols.autocast(lambda x: fused(jnp.tanh(x @ W)))
  assert dtypes_of("tanh", low, X) == ["float16"]


@pytest.mark.slow
def test_each_library_reaches_the_kernel_in_16_bits():
  # A CPU has no cuDNN.
  swap = {'"cudnn"': '"xla"'}
  with documents.reading("docs/guides/fused_attention.md") as page:
    page.run(swap=swap)
    x, linen, keys = page["x"], page["linen_layer"], jax.random.split(KEY)
    variables = linen.init(KEY, x)
    of_equinox = page["Attention"](
      eqx.nn.Linear(64, 192, key=keys[0]), eqx.nn.Linear(64, 64, key=keys[1])
    )
    layers = page["nnx_layer"], functools.partial(linen.apply, variables)
    for layer in (*layers, jax.vmap(of_equinox)):
      low = ols.autocast(layer, dtype=jnp.bfloat16)
      # Four products, or six where one makes queries, keys and values each.
      assert {*products(low, x)} == {"bfloat16"}
      expected = mixed.gradient(layer, (0,))(x)
      mixed.assert_close(mixed.gradient(low, (0,))(x), expected, 0.03)


def test_plain_attention_keeps_what_layers_with_dtype_keep():
  size = gpt2.SIZES["tiny"]
  params = jax.eval_shape(lambda: gpt2.init(size, 0))
  tokens = jax.ShapeDtypeStruct((2, 64), jnp.int32)

  def kept(model):
    loss_fn = gpt2.make_loss_fn(model)
    backward = jax.eval_shape(
      lambda *args: jax.vjp(lambda x: loss_fn(x, args[1:]), args[0])[1],
      *(params, tokens, tokens),
    )
    shapes = jax.tree.leaves(backward)
    return collections.Counter(
      x.dtype.name for x in shapes if x.shape == (2, size.heads, 64, 64)
    )

  found = kept(gpt2.Autocast(gpt2.GPT2(size, jnp.float32), "O1"))
  assert found == {"bool": 1, "float32": 2, "float16": 1}
  assert found == kept(gpt2.GPT2(size, jnp.float16))


def test_the_kernels_for_tpus_are_reached_in_bfloat16():
  mask = splash_attention_mask.CausalMask((256, 256))
  splash = splash_attention_kernel.make_splash_mha(
    mask=splash_attention_mask.MultiHeadMask([mask, mask]),
    head_shards=1,
    q_seq_shards=1,
  )
  x = jax.ShapeDtypeStruct((1, 2, 256, 128), jnp.float32)
  for fused in (
    ols.cast_inputs(flash_attention.flash_attention),
    jax.vmap(ols.cast_inputs(splash)),
  ):

    def loss_fn(x, fused=fused):
      return jnp.sum(fused(x, x, x))

    low = ols.autocast(loss_fn, dtype=jnp.bfloat16)
    counts = ols.instruments.precision_report(jax.grad(low), x).counts
    found = [x for names in counts.values() for x in names if "pallas" in x]
    # The backward pass also takes statistics in float32.
    assert len(found) == 3 and all("(bfloat16" in x for x in found)


@pytest.mark.slow
@pytest.mark.parametrize("low", LOW)
def test_the_gradient_of_gpt2_is_as_near_as_that_of_layers_with_dtype(
  low, monkeypatch
):
  attend = ols.cast_inputs(gpt2._attend, argnums=(0, 1, 2))
  monkeypatch.setattr(gpt2, "_attend", attend)
  size = gpt2.SIZES["tiny"]
  (batch,) = gpt2.make_batches(size, batch=2, length=32, count=1)
  params = gpt2.init(size, 0)

  def gradient(dtype, lower=lambda loss_fn: loss_fn):
    loss_fn = gpt2.make_loss_fn(gpt2.GPT2(size, dtype))
    grads = jax.jit(jax.grad(lower(loss_fn)))(params, batch)
    return flatten_util.ravel_pytree(grads)[0]

  true = gradient(jnp.float32)
  by_dtype = support.relative_error(gradient(low), true)
  lower = functools.partial(ols.autocast, dtype=low)
  marked = support.relative_error(gradient(jnp.float32, lower), true)
  assert 0 < marked < 1.2 * by_dtype < 0.05


SEEN = {
  "without autocast": (lambda f: f, "float32"),
  "O0": (lambda f: ols.autocast(f, "O0"), "float32"),
  "O0, an override elsewhere": (
    lambda f: ols.autocast(f, "O0", overrides={"head": jnp.float16}),
    "float32",
  ),
  "O0, an override": (
    lambda f: ols.autocast(f, "O0", overrides={"body": jnp.float16}),
    "float16",
  ),
  "O1": (ols.autocast, "float16"),
  "O2": (lambda f: ols.autocast(f, "O2"), "float16"),
  "O3": (lambda f: ols.autocast(f, "O3", dtype=jnp.bfloat16), "bfloat16"),
  "OD": (lambda f: ols.autocast(f, "OD"), "float16"),
  "an override in float32": (
    lambda f: ols.autocast(f, overrides={"body": jnp.float32}),
    "float32",
  ),
  "no override": (
    lambda f: ols.autocast(f, "O1", overrides={"body": None}),
    "float16",
  ),
  "float8": (lambda f: ols.autocast(f, dot_dtype=jnp.float8_e4m3fn), "float16"),
  "an override in float8": (
    lambda f: ols.autocast(f, overrides={"body": jnp.float8_e4m3fn}),
    "float16",
  ),
}


@pytest.mark.parametrize("name", SEEN)
def test_levels_and_overrides_decide_for_a_marked_function(name):
  lowered, expected = SEEN[name]
  fused = ols.cast_inputs(kernel)

  def program(x):
    with jax.named_scope("head"):
      y = x @ W
    with jax.named_scope("body"):
      return fused(y) @ W

  assert dtypes_of("pallas_call", lowered(program), X) == [expected]


@pytest.mark.parametrize(
  ("argnums", "bias"), [(None, "float16"), (0, "float32"), ([0, -5], "float16")]
)
@pytest.mark.parametrize("names", [(), ("query", "bias")])
def test_only_chosen_floats_are_converted(argnums, bias, names):
  found = []

  def fused(query, bias, *, mask, seed, lengths, scale=1.0):
    found.extend([query.dtype.name, bias.dtype.name])
    assert (mask.dtype, lengths.dtype, scale) == (bool, jnp.int32, 2.0)
    assert jnp.issubdtype(seed.dtype, jax.dtypes.prng_key)
    return {"sum": query.sum(), "scale": scale}

  given = {"mask": X > 0, "seed": jax.random.key(0), "lengths": jnp.arange(3)}
  marked = ols.cast_inputs(fused, argnums=argnums)
  run = functools.partial(marked, **given, scale=2.0)
  arrays = (X, X)
  outputs = jax.eval_shape(
    ols.autocast(
      lambda *xs: run(*xs[len(names) :], **dict(zip(names, xs, strict=False)))
    ),
    *arrays,
  )
  assert found == ["float16", bias] and outputs["sum"].dtype == jnp.float32


def test_a_kernel_that_refuses_is_named():
  fused = ols.cast_inputs(refusing(jnp.float32))
  with pytest.raises(NotImplementedError, match="got float16") as error:
    ols.autocast(fused)(X, W)
  note = "`cast_inputs` marks `fused`, which got float16 under autocast."
  assert note in error.value.__notes__
  with (
    jax.enable_x64(True),
    pytest.raises(TypeError, match="must be float32, got float64"),
  ):
    ols.autocast(fused)(X, np.float64(W))
  assert fused(X, W).dtype == jnp.float32
  with pytest.raises(NotImplementedError, match="got float32") as error:
    ols.autocast(refusing(jnp.float16))(X, W)
  assert "ols.cast_inputs(jax.nn.dot" in "".join(error.value.__notes__)


def test_reports_know_the_dtypes_of_a_kernel():
  tx = ols.loss_scaling(optax.sgd(0.1), ols.DynamicLossScale())

  def step(params, opt_state, x):
    # All that works below float32 is in the kernel.
    loss_fn = ols.autocast(lambda w, x: jnp.sum(fused(x, w)), "OD")
    grads = ols.scaled_value_and_grad(loss_fn, opt_state)(params, x)[1]
    updates, opt_state = tx.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state

  def fused(x, w):
    return doubled(x[:, :, None] * w).sum(1)

  doubled = ols.cast_inputs(support.with_vjp(kernel))
  args = W, tx.init(W), X
  counts = ols.instruments.precision_report(step, *args).counts
  assert [
    (scope, dtype, name)
    for (scope, dtype, _), names in counts.items()
    for name in names
    if "pallas" in name
  ] == [("", "float16", "pallas_call(float16)")]
  law = ols.instruments.check_step(step, *jax.eval_shape(lambda: args)).laws[-1]
  assert law.text == "It computes in float16."


def in_scope(name, function):
  return jax.named_scope(name)(function)


def matmul(x):
  return x @ W


def test_one_traced_function_in_two_scopes_has_the_dtype_of_each():
  square = jax.jit(ols.cast_inputs(lambda x: x @ x))
  inner = ols.autocast(ols.cast_inputs(lambda x: x @ x), dtype=jnp.bfloat16)
  overrides = {"a": jnp.float32}
  for first, low in ((square, "float32"), (inner, "bfloat16")):

    def program(x, first=first):
      return in_scope("b", square)(in_scope("a", first)(x))

    found = products(ols.autocast(program, overrides=overrides), W)
    assert found == [low] * 2 + ["float16"] * 2


def test_an_outer_autocast_leaves_what_the_inner_one_chose():
  marked = in_scope("in", ols.cast_inputs(lambda x: jnp.exp(x @ x)))
  overrides = {"in": jnp.float16}
  inner = ols.autocast(marked, dtype=jnp.bfloat16, overrides=overrides)
  assert dtypes_of("exp", ols.autocast(inner), W) == ["float16"]


def test_outputs_of_16_bit_arguments_keep_their_dtype():
  low = ols.autocast(ols.cast_inputs(jnp.sin), dtype=jnp.bfloat16)
  assert low(X.astype(jnp.bfloat16)).dtype == jnp.bfloat16


def test_a_rule_has_the_dtype_of_its_scope():
  def program(x):
    return jnp.sum(in_scope("body", with_own_rule(marked))(x, W))

  marked = ols.cast_inputs(jnp.matmul)
  low = ols.autocast(program, overrides={"body": jnp.float32})
  assert {*products(jax.grad(low), X)} == {"float32"}


def test_overrides_keep_the_caches_of_jit():
  traced = []

  @jax.jit
  def inner(x):
    traced.append(x)
    return jnp.tanh(x)

  low = ols.autocast(
    lambda x: in_scope("body", inner)(x) @ W, overrides={"body": jnp.float32}
  )
  for _ in range(3):
    low(X)
  assert len(traced) == 1


def test_an_override_may_not_choose_a_dtype_that_the_kernel_refuses():
  fused = ols.cast_inputs(refusing(jnp.float16))
  with pytest.raises(ValueError, match="in float16, .* got float32 .* 'body'"):
    ols.autocast(in_scope("body", fused), overrides={"body": jnp.float32})(X, W)


def test_objects_of_nnx_keep_their_changes():
  dropout = nnx.Dropout(0.5, rngs=nnx.Rngs(0))
  marked = ols.cast_inputs(lambda layer, x: layer(x))

  def difference(layer, x):
    return marked(layer, x) - marked(layer, x)

  assert jnp.any(ols.nnx.autocast(difference)(dropout, jnp.ones((8, 8))))


def test_what_is_no_array_of_float32_is_passed_unchanged():
  given = np.float64(2), 1.0, jnp.ones(2, jnp.bfloat16), None, {"a": "b"}
  found = []
  marked = ols.cast_inputs(lambda x, *others: found.append(others) or x)
  assert ols.autocast(lambda x: marked(x, *given))(X).dtype == jnp.float32
  assert found[0][:2] == given[:2] and found[0][2].dtype == jnp.bfloat16
  assert found[0][3:] == given[3:]


@pytest.mark.parametrize(
  ("call", "error", "text"),
  [
    (lambda: ols.cast_inputs(max), TypeError, "must say its arguments"),
    (lambda: ols.cast_inputs(matmul, argnums=1), ValueError, "for 1 of them"),
    (lambda: ols.cast_inputs(3), TypeError, "`fun` must be a function"),
  ],
)
def test_what_cannot_be_marked_is_refused(call, error, text):
  with pytest.raises(error, match=text):
    call()


def test_a_partial_has_the_name_of_its_function():
  fused = ols.cast_inputs(functools.partial(refusing(jnp.float32), X))
  with pytest.raises(NotImplementedError) as error:
    ols.autocast(fused)(W)
  assert "`fused`" in "".join(error.value.__notes__)
