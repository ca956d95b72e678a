"""Every preset against its plain-Python model, for a million steps."""

import jax
import numpy as np
import pytest

from optax_lossscale import presets
from tests import reference
from tests import support

pytestmark = pytest.mark.long

STEPS = 1_000_000

# Short windows, so that a million steps hold many moves; factors of two where
# nothing else is said.
ARGUMENTS = {
  "torch": {"growth_interval": 7},
  "torch_sharded": {"growth_interval": 7},
  "megatron": {"growth_interval": 7, "hysteresis": 3, "min_scale": 2.0**-20},
  "deepspeed": {
    "scale_window": 7,
    "delayed_shift": 3,
    "raise_error_at_min_scale": False,
  },
  "deepspeed_legacy": {"scale_window": 7, "consecutive_hysteresis": True},
  "apex": {"scale_window": 7, "min_loss_scale": 2.0**-10},
  "apex_hysteresis": {"growth_interval": 7, "hysteresis": 3},
  "fairseq": {"scale_window": 7, "tolerance": 0.25},
  "metaseq": {"scale_window": 3, "tolerance": 0.25},
  "colossalai": {"growth_interval": 7, "min_scale": 0.5, "max_scale": 2.0**40},
  "tf_exponential": {"init_loss_scale": 1024.0, "incr_every_n_steps": 7},
  "npu_exponential": {"init_loss_scale": 1024.0, "incr_every_n_steps": 7},
  "tensorflow": {"increment_period": 7},
  "keras": {"dynamic_growth_steps": 7},
  "mindspore": {"scale_window": 7},
  "mindspore_amp": {
    "scale_value": 1024.0,
    "scale_factor": 4,
    "scale_window": 7,
  },
  "mindspore_cell": {
    "loss_scale_value": 1024.0,
    "scale_factor": 4,
    "scale_window": 7,
  },
  "paddle": {"incr_every_n_steps": 7, "decr_every_n_nan_or_inf": 2},
  "paddle_op": {"incr_every_n_steps": 7, "decr_every_n_nan_or_inf": 2},
  "flax": {"growth_interval": 7},
  "jmp": {"loss_scale": 1024.0, "period": 7},
  "megatron_constant": {"initial_scale": 1024.0},
  "mindspore_fixed": {},
  "npu_fixed": {"loss_scale": 1024.0},
}
CONSTANT = {"megatron_constant", "mindspore_fixed", "npu_fixed"}
# Factors that are no powers of two, of the systems that compute in float32, or
# whose double products float32 holds the factors of.
OTHER_FACTORS = {
  "torch": {"growth_factor": 1.5, "backoff_factor": 0.75},
  "torch_sharded": {"growth_factor": 1.1, "backoff_factor": 0.8},
  "megatron": {"growth_factor": 1.1, "backoff_factor": 0.8},
  "apex_hysteresis": {"growth_factor": 1.5, "backoff_factor": 0.75},
  "colossalai": {"growth_factor": 1.1, "backoff_factor": 0.8},
  "tf_exponential": {"incr_ratio": 1.1},
  "npu_exponential": {"incr_ratio": 1.1},
  "tensorflow": {"multiplier": 1.1},
  "mindspore_amp": {"scale_factor": 3},
  "mindspore_cell": {"scale_factor": 3},
  "paddle": {"incr_ratio": 1.1, "decr_ratio": 0.8},
  "paddle_op": {"incr_ratio": 1.1, "decr_ratio": 0.8},
  "flax": {"growth_factor": 1.1, "backoff_factor": 0.8},
  "jmp": {"factor": 3},
}
CASES = [
  *ARGUMENTS.items(),
  *((system, ARGUMENTS[system] | x) for system, x in OTHER_FACTORS.items()),
]


def run_model(model):
  """Returns overflows at rates that change, S and failure after each."""
  generator = np.random.default_rng(0)
  rates = generator.choice([0.0, 0.01, 0.1, 0.3, 0.7, 1.0], STEPS // 500)
  wanted = generator.random(STEPS) < np.repeat(rates, 500)
  overflows, scales, failed = [], [], []
  for overflow in wanted.tolist():
    # S stays inside what float32 holds as normal numbers.
    if model.scale > 2.0**110:
      overflow = True
    elif model.scale < 2.0**-110:
      overflow = False
    model.update(overflow)
    overflows.append(overflow)
    scales.append(model.scale)
    failed.append(model.failed)
  return np.array(overflows), np.array(scales), np.array(failed)


@pytest.mark.parametrize(("system", "arguments"), CASES, ids=support.name)
def test_a_million_steps_are_the_models(system, arguments):
  rule = getattr(presets, system)(**arguments)
  model = reference.MODELS[system](**arguments)
  overflows, scales, failed = run_model(model)
  moves = np.count_nonzero(np.diff(scales))
  assert moves > 10_000 if system not in CONSTANT else moves == 0

  def step(state, overflow):
    state = rule.update(state, overflow)
    failure = getattr(state, "failure", None)
    failure = 0 if failure is None else failure
    return state, (state.loss_scale, failure)

  scan = jax.jit(lambda state, xs: jax.lax.scan(step, state, xs))
  state, (ours, failure) = scan(rule.init(), overflows)
  np.testing.assert_array_equal(np.asarray(ours, float), scales)
  np.testing.assert_array_equal(np.asarray(failure) != 0, failed)
  saved, expected = presets.to_state_dict(rule, state), model.state_dict()
  assert saved or system in CONSTANT
  # jmp's model also has the arguments among its attributes.
  assert saved == {key: expected[key] for key in saved}
