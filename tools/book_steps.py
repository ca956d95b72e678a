"""The steps and the models of the book."""

import functools

from flax import nnx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

import optax_lossscale as ols
from tests import support
from tests.examples import test_frameworks
from tests.instruments.step import steps

ADAM, TX = steps.ADAM, steps.TX
P = jax.P


def of(
  tx=TX, loss_fn=steps.loss_fn, params=steps.PARAMS, change=None, **update
):
  """Returns a step, not jitted, and its arguments."""

  def train_step(params, opt_state, batch):
    loss, grads = ols.scaled_value_and_grad(loss_fn, opt_state)(params, batch)
    if change:
      grads = change(grads, opt_state, params)
    updates, opt_state = tx.update(grads, opt_state, params, **update)
    return optax.apply_updates(params, updates), opt_state, loss

  return train_step, params, tx.init(params), steps.BATCH


def preset(rule, **options):
  return lambda: of(ols.loss_scaling(ADAM, rule, **options))


def accumulated():
  def train_step(params, opt_state, batch):
    value_and_grad = ols.scaled_value_and_grad(steps.loss_fn, opt_state)
    loss, grads, overflow = ols.accumulate(
      value_and_grad, microbatches=4, drop=True
    )(params, batch)
    updates, opt_state = TX.update(grads, opt_state, params, overflow=overflow)
    return optax.apply_updates(params, updates), opt_state, loss

  return train_step, steps.PARAMS, TX.init(steps.PARAMS), steps.BATCH


def on_devices():
  tx = ols.loss_scaling(
    optax.chain(ols.pmean_gradients("data"), ADAM),
    steps.RULE,
    axis_name="data",
  )
  step, params, state, batch = of(tx)
  mesh = support.make_mesh(data=4)
  mapped = jax.shard_map(
    step,
    mesh=mesh,
    in_specs=(P(), P(), P("data")),
    out_specs=(P(), P(), P()),
    check_vma=False,
  )
  return mapped, params, state, batch


def schedule():
  schedule = ols.PrecisionSchedule("float16", until_step=9)
  step = schedule.make_train_step(steps.loss_fn, TX)
  params = steps.PARAMS
  return step, params, TX.init(params), schedule.init(), steps.BATCH


def example(name):
  def make():
    module = test_frameworks.load(name)
    state = module.make_state(0)
    args = state if isinstance(state, tuple) else (state,)
    batch = module.draw(np.random.default_rng(0), module.BATCH)
    step = module.train_step
    if any(isinstance(x, nnx.Module) for x in args):
      definition, arrays = nnx.split(args)

      def pure(arrays, batch):
        args = nnx.merge(definition, arrays)
        loss = step(*args, batch)
        return loss, nnx.state(args)

      return pure, arrays, batch
    if name == "equinox_accumulation":
      import equinox as eqx

      parts, static = eqx.partition(args, eqx.is_array)

      def arrays_of(parts, batch):
        return eqx.filter(
          step(*eqx.combine(parts, static), batch), eqx.is_array
        )

      return arrays_of, parts, batch
    return step, *args, batch

  return make


def narrow(wrap):
  params = jax.tree.map(lambda x: x.astype(jnp.bfloat16), steps.PARAMS)
  return lambda: of(ols.loss_scaling(wrap(ADAM), steps.RULE), params=params)


def nnx_accumulated():
  module = test_frameworks.load("nnx_transformer")
  model, optimizer, _ = module.make_state(0)
  batch = module.draw(np.random.default_rng(0), 8)
  definition, arrays = nnx.split((model, optimizer))

  def pure(arrays, batch):
    model, optimizer = nnx.merge(definition, arrays)
    value_and_grad = ols.nnx.scaled_value_and_grad(module.loss_fn, optimizer)
    loss, grads, overflow = ols.accumulate(value_and_grad, microbatches=2)(
      model, batch
    )
    optimizer.update(model, grads, overflow=overflow)
    return loss, nnx.state((model, optimizer))

  return pure, arrays, batch


def members():
  step, params, state, batch = of()
  several = jax.tree.map(lambda x: jnp.stack([x] * 3), (params, state))
  return jax.vmap(step, (0, 0, None)), *several, batch


def scanned():
  step, params, state, batch = of()

  def run(params, state, batches):
    def body(carry, batch):
      *carry, loss = step(*carry, batch)
      return tuple(carry), loss

    return jax.lax.scan(body, (params, state), batches)

  return run, params, state, jax.tree.map(lambda x: x[None], batch)


GUARD = ols.loss_scaling(ADAM, steps.RULE)
STEPS = {
  "plain": of,
  "dynamic": lambda: of(ols.loss_scaling(ADAM, ols.DynamicLossScale())),
  "no rule": lambda: of(ols.loss_scaling(ADAM, None)),
  "clip": lambda: of(
    ols.loss_scaling(
      optax.chain(optax.clip_by_global_norm(1.0), ADAM), steps.RULE
    )
  ),
  "saturated": lambda: of(
    ols.loss_scaling(ADAM, steps.RULE, check=ols.saturated())
  ),
  "accumulated": accumulated,
  "shard_map": on_devices,
  "schedule": schedule,
  "megatron": preset(ols.presets.megatron()),
  "npu": preset(
    ols.presets.npu_exponential(init_loss_scale=2.0**16, incr_every_n_steps=100)
  ),
  "mindspore_fixed": preset(
    ols.presets.mindspore_fixed(drop_overflow_update=False)
  ),
  "headroom": preset(ols.rules.HeadroomLossScale()),
  "fairseq": preset(ols.presets.fairseq()),
  "skip": lambda: of(skip=jnp.bool_(False)),
  "O1": lambda: of(loss_fn=ols.autocast(steps.loss_fn, "O1")),
  "float8": lambda: of(
    loss_fn=ols.autocast(steps.loss_fn, dot_dtype=jnp.float8_e4m3fn)
  ),
  "stochastic": narrow(ols.stochastic_rounding),
  "remainder": narrow(functools.partial(ols.master_weights, store="remainder")),
  "copy": narrow(ols.master_weights),
  "low state": lambda: of(
    ols.loss_scaling(ols.low_precision_state(ADAM), steps.RULE)
  ),
  "members": members,
  "scanned": scanned,
  "linen": example("linen_batch_norm"),
  "nnx": example("nnx_transformer"),
  "nnx accumulated": nnx_accumulated,
  "equinox accumulated": example("equinox_accumulation"),
  "gan": example("gan"),
}


def models():
  """Returns loss functions of models and their arguments."""
  x = jnp.ones((2, 16, 16, 3))
  words = jnp.ones((2, 8, 32))
  found = {}

  def add(name, module, *args):
    params = jax.eval_shape(module.init, jax.random.key(0), *args)

    def loss_fn(params, *args):
      out = module.apply(params, *args)
      return jnp.mean(jax.tree.leaves(out)[0] ** 2)

    found[name] = loss_fn, params, *args

  add("dense", nn.Sequential([nn.Dense(8), nn.relu, nn.Dense(4)]), words)
  add("conv", nn.Sequential([nn.Conv(8, (3, 3)), nn.GroupNorm(2)]), x)
  add(
    "pool",
    nn.Sequential([nn.Conv(8, (3, 3)), lambda x: nn.avg_pool(x, (2, 2))]),
    x,
  )
  add(
    "layer norm",
    nn.Sequential([nn.LayerNorm(), nn.Dense(4), nn.RMSNorm()]),
    words,
  )
  add("attention", nn.MultiHeadDotProductAttention(4), words)
  add("lstm", nn.RNN(nn.OptimizedLSTMCell(8)), words)
  add("gru", nn.RNN(nn.GRUCell(8)), words)
  add("transposed", nn.ConvTranspose(4, (3, 3)), x)
  add(
    "bilinear",
    nn.Sequential([nn.DenseGeneral((4, 4)), nn.softmax, nn.gelu]),
    words,
  )

  def routed(w, x):
    shares = jax.nn.softmax(jnp.einsum("bsd,de->bse", x, w["gate"]))
    out = jnp.einsum("bse,bsd,edf->bsf", shares, x, w["experts"])
    return jnp.mean(jax.nn.silu(out) ** 2)

  w = {"gate": jnp.ones((32, 4)), "experts": jnp.ones((4, 32, 32))}
  found["experts"] = routed, w, words

  def stacked(w, x):
    def layer(x, w):
      return x + jax.checkpoint(lambda x, w: jnp.tanh(x @ w))(x, w), None

    x, _ = jax.lax.scan(layer, x, w)
    return -jnp.mean(jax.nn.log_softmax(x)[..., 0])

  found["scan"] = stacked, jnp.ones((3, 32, 32)), words
  found["gradient"] = jax.grad(stacked), jnp.ones((3, 32, 32)), words
  module = test_frameworks.load("nnx_transformer")
  definition, arrays = nnx.split(module.make_state(0)[0])
  tokens = module.draw(np.random.default_rng(0), 2)
  found["nnx"] = (
    lambda arrays, batch: module.loss_fn(nnx.merge(definition, arrays), batch),
    arrays,
    tokens,
  )
  return found
