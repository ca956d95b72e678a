"""Lines about the loss scale, printed from compiled programs."""

import jax
import jax.numpy as jnp
import optax
import pytest

import optax_lossscale as ols
from optax_lossscale import instruments

AUTO = (jax.sharding.AxisType.Auto,)

TX = ols.loss_scaling(
  optax.sgd(0.1),
  ols.DynamicLossScale(2.0**15),
  check=ols.nonfinite(jnp.float16),
)


def step(state, gradient):
  _, state = TX.update(gradient[None], state)
  instruments.print_loss_scale(state, every=2)
  return state, None


def lines(capfd):
  jax.effects_barrier()
  return capfd.readouterr().out.splitlines()


GRADIENTS = jnp.array([2.0**10, 2.0**12, jnp.inf, jnp.nan, 1.0, 65504.0])
EXPECTED = [
  "step 2: clean, loss scale now 32768, headroom 4.0 bits, 2 applied, "
  "0 skipped (0.0 %)",
  "step 4: overflow with NaN, loss scale now 8192, 2 applied, "
  "2 skipped (50.0 %)",
  "step 6: clean, loss scale now 8192, headroom 0.0 bits, 4 applied, "
  "2 skipped (33.3 %)",
]


def test_every_second_step_prints_a_line(capfd):
  run = jax.jit(lambda state: jax.lax.scan(step, state, GRADIENTS)[0])
  run(TX.init(jnp.zeros(1)))
  assert lines(capfd) == EXPECTED


def test_outside_of_jit_it_prints_the_same(capfd):
  state = TX.init(jnp.zeros(1))
  for gradient in GRADIENTS:
    state, _ = step(state, gradient)
  assert lines(capfd) == EXPECTED


def test_nothing_is_printed_before_the_first_step(capfd):
  instruments.print_loss_scale(TX.init(jnp.zeros(1)), every=1)
  assert lines(capfd) == []


def test_of_many_devices_one_prints(capfd):
  tx = ols.loss_scaling(
    optax.sgd(0.1), ols.FixedLossScale(4.0), axis_name="data"
  )
  mesh = jax.make_mesh((4,), ("data",), axis_types=AUTO)

  @jax.jit
  @jax.shard_map(
    mesh=mesh, in_specs=(jax.P("data"), jax.P()), out_specs=jax.P("data")
  )
  def update(scaled_grads, state):
    updates, state = tx.update(scaled_grads, state)
    instruments.print_loss_scale(state, every=1)
    return updates

  update(jnp.ones(4), tx.init(jnp.zeros(1)))
  assert lines(capfd) == [
    "step 1: clean, loss scale now 4, headroom 16.0 bits, 1 applied, 0 skipped "
    "(0.0 %)"
  ]


@pytest.mark.slow
def test_under_vmap_only_runs_that_are_due_print(capfd):
  states = jax.vmap(TX.init)(jnp.zeros((2, 1)))
  states = states._replace(
    counts=states.counts._replace(applied_steps=jnp.array([1, 2], jnp.int32))
  )
  jax.vmap(step)(states, jnp.ones(2))
  assert [line[:6] for line in lines(capfd)] == ["step 2"]


@pytest.mark.parametrize("every", [0, -3])
def test_every_must_be_positive(every):
  with pytest.raises(ValueError, match="`every`"):
    instruments.print_loss_scale(TX.init(jnp.zeros(1)), every)


def test_a_requested_skip_is_printed_as_one(capfd):
  _, state = TX.update(jnp.ones(1), TX.init(jnp.zeros(1)), skip=True)
  instruments.print_loss_scale(state, every=1)
  (line,) = lines(capfd)
  assert line.startswith("step 1: skipped by `skip`, loss scale now 32768,")
  assert line.endswith(" 0 applied, 1 skipped (100.0 %)")
