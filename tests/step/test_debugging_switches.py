"""JAX's debugging switches, on a clean step and on one that overflows.

What docs/guides/debugging.md says of each of them. They are set by context
managers, so that nothing is left behind for other tests.
"""

import contextlib
import gc
import logging

import jax
from jax.experimental import checkify
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_lossscale as ols
from optax_lossscale import hardware
from tests.support import slow_but
from tests.support import to_bits

PARAMS = {
  "b": jnp.full((4,), 0.5),
  "w": jnp.full((3, 4), 0.25, jnp.float16),
}
# All positive: where S is too large, what overflows is inf, and nothing NaN.
BATCH = jnp.linspace(0.25, 1.0, 6).reshape(2, 3)
TOO_LARGE = 2.0**40

# Those that get in each other's way least are on together, to compile less.
SWITCHES = {
  "debug_infs": [lambda: jax.debug_infs(True)],
  "debug_nans, transfer_guard": [
    lambda: jax.debug_nans(True),
    lambda: jax.transfer_guard("disallow"),
  ],
  "debug_nans": [lambda: jax.debug_nans(True)],
  "disable_jit": [jax.disable_jit],
  "enable_checks, log_compiles, tracer_leaks": [
    lambda: jax.enable_checks(True),
    lambda: jax.log_compiles(True),
    jax.checking_leaks,
  ],
  "enable_x64": [lambda: jax.enable_x64(True)],
  "promotion": [
    lambda: jax.numpy_dtype_promotion("strict"),
    lambda: jax.numpy_rank_promotion("raise"),
  ],
  "transfer_guard": [lambda: jax.transfer_guard("disallow")],
}
CASES = [
  ("eager", "debug_infs"),
  ("eager", "debug_nans"),
  ("jit", "debug_infs"),
  ("jit", "debug_nans, transfer_guard"),
  ("jit", "disable_jit"),
  ("jit", "enable_checks, log_compiles, tracer_leaks"),
  ("jit", "enable_x64"),
  ("jit", "promotion"),
  ("schedule", "disable_jit"),
  ("schedule", "enable_x64"),
  ("schedule", "promotion"),
]


@contextlib.contextmanager
def switched(name):
  """Sets switches, and keeps to itself what they log."""
  logger = logging.getLogger("jax")
  level = logger.level
  logger.setLevel(logging.CRITICAL)
  try:
    with contextlib.ExitStack() as stack:
      for switch in SWITCHES[name]:
        stack.enter_context(switch())
      yield
  finally:
    logger.setLevel(level)


def loss_fn(params, batch):
  hidden = batch @ params["w"].astype(jnp.float32)
  return jnp.mean(jnp.tanh(hidden + params["b"][None]) ** 2)


def make_step(tx, loss_fn=loss_fn):
  """Returns a step with all that one is made of."""
  mixed_loss_fn = ols.autocast(loss_fn, "O1")

  def step(params, opt_state, average, batch):
    loss, scaled_grads = ols.scaled_value_and_grad(mixed_loss_fn, opt_state)(
      params, batch
    )
    norm = optax.tree.norm(ols.unscale(scaled_grads, opt_state)["b"])
    updates, opt_state = tx.update(scaled_grads, opt_state, params)
    params = optax.apply_updates(params, updates)
    average = ols.select_on_skip(opt_state, params, average)
    metrics = ols.loss_scale_metrics(opt_state)
    return params, opt_state, average, (loss, norm, metrics)

  return step


def make_tx(inner=None):
  # No Adam: it promotes implicitly itself.
  inner = inner or optax.sgd(0.5, momentum=0.5)
  return ols.loss_scaling(
    ols.master_weights(inner), ols.DynamicLossScale(1024.0)
  )


TX = make_tx()
SCHEDULE = ols.PrecisionSchedule(jnp.float16, until_step=4)


def make_schedule_step():
  train_step = SCHEDULE.make_train_step(loss_fn, TX)

  def step(params, opt_state, state, batch):
    params, opt_state, state, loss = train_step(params, opt_state, state, batch)
    return params, opt_state, state, (loss, ols.loss_scale_metrics(opt_state))

  return step


def arguments(tx=TX, loss_scale=None, extra=PARAMS, params=PARAMS):
  opt_state = tx.init(params)
  if loss_scale is not None:
    opt_state = optax.tree.set(opt_state, loss_scale=jnp.float32(loss_scale))
  return params, opt_state, extra, BATCH


def make_light_step(loss_fn=loss_fn):
  """Returns a step for what is run operation by operation."""

  def float16_loss_fn(params, batch):
    return loss_fn(params, batch).astype(jnp.float16)

  def step(params, opt_state, average, batch):
    _, scaled_grads = ols.scaled_value_and_grad(float16_loss_fn, opt_state)(
      params, batch
    )
    updates, opt_state = TX.update(scaled_grads, opt_state, params)
    params = optax.apply_updates(params, updates)
    average = ols.select_on_skip(opt_state, params, average)
    return params, opt_state, average, ols.loss_scale_metrics(opt_state)

  return step


STEPS = {
  "jit": (lambda: jax.jit(make_step(TX)), lambda: PARAMS),
  "light": (lambda: jax.jit(make_light_step()), lambda: PARAMS),
  "eager": (make_light_step, lambda: PARAMS),
  "schedule": (lambda: jax.jit(make_schedule_step()), SCHEDULE.init),
}


def run(kind, switch, loss_scale=None):
  """Returns what a step returned with a switch on."""
  make, make_extra = STEPS[kind]
  prepared = arguments(loss_scale=loss_scale, extra=make_extra())
  with switched(switch):
    return jax.block_until_ready(make()(*prepared))


@pytest.fixture(scope="module")
def expected():
  """The parameters after a clean step without any switch."""
  params, *_ = jax.jit(make_step(TX))(*arguments())
  return params


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "switch"), CASES)
def test_a_clean_step_runs(switch, kind, expected):
  params, opt_state, *_ = run(kind, switch)
  assert opt_state.applied_steps == 1 and not opt_state.overflow
  for name, leaf in params.items():
    assert leaf.dtype == PARAMS[name].dtype
    np.testing.assert_allclose(leaf, expected[name], rtol=2e-3)


@pytest.mark.slow
@pytest.mark.parametrize(
  ("kind", "switch"), [case for case in CASES if "debug_infs" not in case]
)
def test_a_step_that_overflows_is_skipped(switch, kind):
  params, opt_state, *_ = run(kind, switch, TOO_LARGE)
  assert opt_state.skipped and not opt_state.nan
  assert to_bits(params) == to_bits(PARAMS)
  assert ols.get_loss_scale(opt_state) == TOO_LARGE / 2


@pytest.mark.parametrize("kind", ["light", "eager"])
def test_debug_infs_stops_at_an_overflow(kind):
  with pytest.raises(FloatingPointError, match="inf"):
    run(kind, "debug_infs", TOO_LARGE)


def nan_loss_fn(params, batch):
  """Returns a finite loss; the derivative of its root at 0 is inf * 0."""
  return loss_fn(params, batch) + jnp.sum(jnp.sqrt(params["b"] * 0))


def test_debug_nans_stops_at_a_gradient_that_is_nan():
  """With donated buffers too, though it has to run again."""
  step = jax.jit(make_light_step(nan_loss_fn), donate_argnums=(0, 1))
  prepared = jax.tree.map(jnp.copy, arguments())
  with switched("debug_nans"), pytest.raises(FloatingPointError, match="nan"):
    jax.block_until_ready(step(*prepared))


def test_debug_nans_stops_an_eager_step_in_the_optimizer():
  """Records why: it runs on what overflowed, and is taken back after."""
  tx = ols.loss_scaling(optax.adam(0.5), ols.DynamicLossScale(8.0))
  scaled_grads = jnp.array([jnp.inf, 1.0])
  state = tx.init(scaled_grads)
  with switched("debug_nans"):
    _, after = jax.jit(tx.update)(scaled_grads, state)
    assert after.skipped
    with pytest.raises(FloatingPointError, match="nan.* div"):
      tx.update(scaled_grads, state)


def test_strict_promotion_stops_adam_without_us_too():
  adam = optax.adam(0.5)
  state = adam.init(PARAMS["b"])
  refused = pytest.raises(ValueError, match="implicit dtype promotion")
  with switched("promotion"), refused:
    adam.update(PARAMS["b"], state)


def test_a_program_that_forbids_transfers_starts():
  tx = ols.loss_scaling(optax.adam(1e-3), ols.DynamicLossScale())
  params = jax.device_put(PARAMS)
  with jax.transfer_guard("disallow"):
    jax.eval_shape(tx.init, params)
    opt_state = jax.jit(tx.init)(params)
    _, opt_state = jax.jit(tx.update)(params, opt_state, params)
  assert ols.get_loss_scale(opt_state) == 2.0**15


def test_the_transfer_guard_stops_eager_optax_without_us_too():
  """Records why: outside jit, each number in the code is a transfer."""
  adam = optax.adam(0.5)
  state = adam.init(PARAMS["b"])
  refused = pytest.raises(Exception, match="Disallowed host-to-device transfer")
  with switched("transfer_guard"), refused:
    adam.update(PARAMS["b"], state)
  with refused:
    run("eager", "transfer_guard")


@pytest.mark.slow
def test_float64_parameters_beside_narrower_ones():
  """The authority is the optimizer alone, in float32 and in float64."""
  wide = {"a": jnp.float32, "b": jnp.float32, "c": jnp.float64}
  with jax.enable_x64(True):
    params = {
      "a": jnp.linspace(0, 1, 4, dtype=jnp.float16),
      "b": jnp.linspace(0, 1, 4, dtype=jnp.float32),
      "c": jnp.linspace(0, 1, 4, dtype=jnp.float64),
    }
    gradients = jax.tree.map(lambda x: (x + 1) / 3, params)
    inner = optax.sgd(2.0**-6, momentum=0.5)
    tx = ols.loss_scaling(inner, ols.DynamicLossScale(1024.0))
    scaled = jax.tree.map(lambda x: x * jnp.asarray(1024, x.dtype), gradients)
    update = jax.jit(tx.update)
    updates, state = update(scaled, tx.init(params), params)

    bare_params, bare_gradients = (
      {name: jnp.asarray(tree[name], wide[name]) for name in wide}
      for tree in (params, gradients)
    )
    bare_updates, bare_state = jax.jit(inner.update)(
      bare_gradients, inner.init(bare_params), bare_params
    )
    assert to_bits(state.inner_state) == to_bits(bare_state)
    for name, leaf in updates.items():
      assert leaf.dtype == params[name].dtype
      assert to_bits(leaf) == to_bits(bare_updates[name].astype(leaf.dtype))
    scaled["c"] = scaled["c"].at[0].set(jnp.inf)
    _, after = update(scaled, state, params)
    assert after.skipped
    assert to_bits(after.inner_state) == to_bits(state.inner_state)
    outer = jax.tree.leaves(after._replace(inner_state=()))
    assert not any(leaf.dtype in ("float64", "int64") for leaf in outer)


def checked_loss_fn(params, batch):
  loss = loss_fn(params, batch)
  checkify.check(loss < 0, "the loss is {loss}", loss=loss)
  return loss


def check_updates(updates, params):
  checkify.check(jnp.sum(updates["b"]) < 0, "the updates are positive")
  return updates


CHECKED = {
  "float_status": lambda: hardware.float_status(checked_loss_fn),
  "emulate_saturation": lambda: hardware.emulate_saturation(checked_loss_fn),
}


@pytest.mark.parametrize("name", CHECKED)
def test_a_check_in_the_loss_is_reported_through(name):
  checked = checkify.checkify(jax.jit(CHECKED[name]()))
  error, _ = checked(PARAMS, BATCH)
  assert "the loss is" in error.get()


DETECTING = {
  "float_status": lambda: jax.jit(
    jax.grad(hardware.float_status(loss_fn), has_aux=True)
  ),
  "float_status around": lambda: jax.jit(
    hardware.float_status(jax.grad(loss_fn))
  ),
  "emulate_saturation": lambda: jax.jit(
    jax.grad(hardware.emulate_saturation(loss_fn))
  ),
  "emulate_saturation eagerly": lambda: jax.grad(
    hardware.emulate_saturation(loss_fn)
  ),
  "emulate_saturation around": lambda: jax.jit(
    hardware.emulate_saturation(jax.grad(loss_fn))
  ),
}


each_detector = pytest.mark.parametrize(
  "name", slow_but(["emulate_saturation"], DETECTING)
)


@each_detector
def test_a_detector_runs_where_leaks_are_looked_for(name):
  with jax.checking_leaks():
    jax.block_until_ready(DETECTING[name]()(PARAMS, BATCH))


@each_detector
@pytest.mark.slow
def test_each_trace_of_a_detector_leaves_nothing_in_memory(name):
  def count_after(traces):
    for _ in range(traces):
      DETECTING[name]()(PARAMS, BATCH)
    gc.collect()
    return len(gc.get_objects())

  before = count_after(3)
  # A few of JAX's own come and go; one trace of a gradient left over 50.
  assert count_after(5) - before < 20


@pytest.mark.slow
@pytest.mark.parametrize("where", ["loss", "inner", "schedule"])
def test_a_check_in_a_step_is_reported(where):
  tx, step = TX, None
  if where == "loss":
    step = make_step(tx, checked_loss_fn)
  elif where == "inner":
    tx = make_tx(optax.chain(optax.stateless(check_updates), optax.sgd(1.0)))
    step = make_step(tx)
  else:
    step = SCHEDULE.make_train_step(checked_loss_fn, tx)
  extra = SCHEDULE.init() if where == "schedule" else PARAMS
  checked = jax.jit(checkify.checkify(step, errors=checkify.user_checks))
  error, _ = checked(*arguments(tx, extra=extra))
  assert ("positive" if where == "inner" else "the loss is") in error.get()


def test_checkify_finds_nothing_in_a_clean_step():
  checked = jax.jit(
    checkify.checkify(make_step(TX), errors=checkify.all_checks)
  )
  error, (_, opt_state, *_) = checked(*arguments())
  assert error.get() is None
  assert opt_state.applied_steps == 1


def test_checkify_tells_of_what_is_skipped():
  """Records why: it looks at all that was computed, not at what was kept."""
  tx = ols.loss_scaling(optax.adam(0.5), ols.DynamicLossScale(8.0))
  scaled_grads = jnp.array([jnp.inf, 1.0])
  checked = jax.jit(checkify.checkify(tx.update, errors=checkify.float_checks))
  error, (updates, state) = checked(scaled_grads, tx.init(scaled_grads))
  assert error.get() is not None
  assert state.skipped
  np.testing.assert_array_equal(updates, [0, 0])


def test_checkify_without_jit_hides_that_the_state_is_an_argument():
  """Records why jit is needed: checkify closes over all arguments."""
  checked = checkify.checkify(make_step(TX))
  with pytest.raises(ValueError, match="must be an argument of the function"):
    checked(*arguments())


def test_key_reuse_cannot_follow_a_key_that_a_skip_keeps():
  """Records why: the state holds the old key or the new one."""
  noise = optax.add_noise(0.5, 0.5, key=jax.random.key(0))
  tx = ols.loss_scaling(noise, ols.DynamicLossScale(8.0))
  scaled_grads = PARAMS["b"]
  update, state = jax.jit(tx.update), tx.init(scaled_grads)
  refused = pytest.raises(jax.errors.KeyReuseError, match="already consumed")
  with jax.debug_key_reuse(True), refused:
    update(scaled_grads, state)


def test_prints_are_neither_lost_nor_doubled(capfd):
  def printing_loss_fn(params, batch):
    loss = loss_fn(params, batch)
    jax.debug.print("loss {}", loss)
    return loss

  def print_updates(updates, params):
    jax.debug.print("updates {}", updates["b"])
    return updates

  tx = make_tx(optax.chain(optax.stateless(print_updates), optax.sgd(1.0)))
  step = jax.jit(make_step(tx, printing_loss_fn))
  jax.block_until_ready(step(*arguments(tx)))
  jax.effects_barrier()
  lines = capfd.readouterr().out.splitlines()
  assert [line.split()[0] for line in lines] == ["loss", "updates"]
