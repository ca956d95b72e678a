"""Lines about the loss scale, printed by compiled programs."""

import jax
import jax.numpy as jnp
import optax
import pytest

import optax_lossscale as ols
from optax_lossscale import instruments
from tests import support

TX = ols.loss_scaling(
  optax.sgd(0.1), support.Stub(2.0**11), check=ols.nonfinite(jnp.float16)
)
GRADIENTS = jnp.array([2.0**10, 2.0**12, jnp.inf, jnp.nan, 1.0, 65504.0])
EXPECTED = [
  "step 2: clean, loss scale now 8192, headroom 4.0 bits, 2 applied, "
  "0 skipped (0.0 %)",
  "step 4: overflow with NaN, loss scale now 2048, 2 applied, "
  "2 skipped (50.0 %)",
  "step 6: clean, loss scale now 8192, headroom 0.0 bits, 4 applied, "
  "2 skipped (33.3 %)",
]


def step(state, gradient, every=2, **options):
  _, state = TX.update(gradient[None], state, **options)
  instruments.print_loss_scale(state, every)
  return state, None


def printed(capfd):
  jax.effects_barrier()
  return capfd.readouterr().out.splitlines()


def test_every_second_step_prints_a_line(capfd):
  state = TX.init(jnp.zeros(1))
  instruments.print_loss_scale(state, every=1)
  assert printed(capfd) == []  # No step has run.
  jax.jit(lambda state: jax.lax.scan(step, state, GRADIENTS))(state)
  assert printed(capfd) == EXPECTED


def test_an_overflow_and_a_step_of_skip_are_distinguished(capfd):
  state, _ = step(TX.init(jnp.zeros(1)), jnp.float32(jnp.inf), 1)
  step(state, jnp.ones(()), 1, skip=True)
  first, second = printed(capfd)
  assert first.startswith("step 1: overflow, loss scale now 1024, 0 applied, ")
  assert second.startswith("step 2: skipped by `skip`, loss scale now 1024")


def test_one_of_many_devices_prints(capfd):
  tx = ols.loss_scaling(
    optax.sgd(0.1), ols.FixedLossScale(4.0), axis_name="data"
  )

  def update(scaled_grads):
    updates, state = tx.update(scaled_grads, tx.init(jnp.zeros(1)))
    instruments.print_loss_scale(state, every=1)
    return updates

  jax.jit(support.on_each_device(update, support.SPREAD))(jnp.ones(8))
  (line,) = printed(capfd)
  assert line.startswith("step 1: clean, loss scale now 4, headroom 16.0 bits")


@pytest.mark.slow
def test_only_runs_that_are_due_print_under_vmap(capfd):
  states = jax.vmap(TX.init)(jnp.zeros((2, 1)))
  states = states._replace(
    counts=states.counts._replace(applied_steps=jnp.array([1, 2], jnp.int32))
  )
  jax.vmap(step)(states, jnp.ones(2))
  assert [line[:6] for line in printed(capfd)] == ["step 2"]


def test_every_must_be_positive():
  with pytest.raises(ValueError, match="`every`"):
    instruments.print_loss_scale(TX.init(jnp.zeros(1)), 0)
