"""Tracing a function under a detector leaves nothing behind."""

import gc

import jax
import jax.numpy as jnp
import pytest

from optax_lossscale import hardware


def loss_fn(params, batch):
  return jnp.mean(jnp.tanh(batch @ params) ** 2)


DETECTING = {
  "float_status": lambda: jax.grad(
    hardware.float_status(loss_fn), has_aux=True
  ),
  "emulate_saturation": lambda: jax.grad(hardware.emulate_saturation(loss_fn)),
}


@pytest.mark.usefixtures("without_older_objects")
@pytest.mark.parametrize("name", DETECTING)
def test_a_trace_of_a_detector_leaves_no_tracer_and_no_object(name):
  def trace(times=1):
    for _ in range(times):
      jax.eval_shape(DETECTING[name](), jnp.ones(3), jnp.ones((2, 3)))
    gc.collect()
    return len(gc.get_objects())

  with jax.checking_leaks():
    trace()
  before = trace(3)
  # A few of JAX's own come and go; one trace of a gradient left over 50.
  assert trace(3) - before < 30
