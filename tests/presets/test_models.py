"""Every preset, with any arguments, against the plain-Python model."""

import copy
import inspect

from hypothesis import assume
from hypothesis import given
from hypothesis import settings
from hypothesis import strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from optax_lossscale import presets
from optax_lossscale.presets import declaration
from tests import reference
from tests import support
from tests.presets import test_arguments
from tests.presets import traces

SEQUENCES = support.every_sequence(7)

powers = st.integers(-10, 10).map(lambda x: 2.0**x)
# S may start where it can grow out of float32, or shrink out of it.
scales = st.sampled_from([2.0**-126, 2.0**-124, 2.0**124, 2.0**127]) | powers
counts = st.integers(1, 4)
flags = st.booleans()
STRATEGIES = {
  "scale": scales,
  "scale from one": scales.filter(lambda x: x >= 1),
  # Apex counts on where S does not move; here nothing does.
  "dynamic or scale": st.just("dynamic"),
  "growth": st.sampled_from([2, 2.0, 4.0, 2.0**20]),
  "backoff": st.sampled_from([0.5, 0.25, 2.0**-20]),
  "count": counts,
  "bound": powers,
  "bound or none": st.none() | powers,
  "ceiling": powers,
  "ceiling or none": st.none() | powers,
  "share": st.sampled_from([0.0, 0.25, 0.5, 0.75, 1.0]),
  "flag": flags,
  "refill": st.sampled_from(["clean", "growth"]),
  "two": st.just(2.0),
}
# Where the system computes in float32, as the engine does.
IN_FLOAT32 = {
  "scale": scales | st.floats(2.0**-100, 2.0**100),
  "growth": st.floats(1.001, 9.0) | STRATEGIES["growth"],
  "backoff": st.floats(0.1, 0.999) | STRATEGIES["backoff"],
}


@st.composite
def arguments_of(draw, system):
  """Any arguments of a preset, of which short sequences show what they do."""
  strategies = STRATEGIES | (IN_FLOAT32 if system in traces.FLOAT32 else {})
  names = inspect.signature(reference.MODELS[system]).parameters
  kinds = test_arguments.KINDS[system]
  arguments = {name: draw(strategies[kinds[name]]) for name in names}
  # Below its minimum fairseq ends a run even on an overflow that it tolerates,
  # the preset on one that is to shrink S.
  is_fairseq = system == "fairseq"
  assume(
    not is_fairseq or arguments["init_scale"] > arguments["min_loss_scale"]
  )
  return arguments


def follow(rule, state, models):
  """Runs a rule and models over every sequence, and compares them.

  Returns the last state, and which sequences have not left float32.
  """
  is_normal = np.full(len(models), True)
  for overflows in SEQUENCES.T:
    # Nothing in the rule looks at more than its own element.
    state = rule.update(state, overflows)
    for model, overflow in zip(models, overflows.tolist(), strict=True):
      model.update(overflow)
    expected = np.array([model.scale for model in models])
    # Where the original's S leaves them, this library's is held.
    is_normal &= (expected >= traces.SMALLEST) & (expected <= traces.LARGEST)
    loss_scale = np.broadcast_to(state.loss_scale, len(models))
    np.testing.assert_array_equal(loss_scale[is_normal], expected[is_normal])
    failure = getattr(state, "failure", None)
    failed = np.zeros(len(models), bool) if failure is None else failure != 0
    expected = np.array([model.failed for model in models])
    np.testing.assert_array_equal(failed[is_normal], expected[is_normal])
  return state, is_normal


def spread(state):
  return jax.tree.map(lambda x: jnp.full(len(SEQUENCES), x), state)


@pytest.mark.parametrize(
  "system",
  support.slow_but(["torch", "megatron", "npu_exponential"], reference.MODELS),
)
@given(st.data())
@settings(max_examples=6)
def test_a_preset_moves_s_as_its_model_and_resumes_as_it(system, data):
  arguments = data.draw(arguments_of(system))
  try:
    rule = getattr(presets, system)(**arguments)
  except ValueError:  # The first S may lie beyond the bounds.
    if not declaration.PRESETS[system].starts_within_bounds:
      raise
    assume(False)
  models = [reference.MODELS[system](**arguments) for _ in SEQUENCES]
  states, is_normal = follow(rule, spread(rule.init()), models)

  assume(is_normal.any())
  i = data.draw(st.sampled_from(np.flatnonzero(is_normal)))
  state = jax.tree.map(lambda x: x if x.ndim == 0 else x[i], states)
  saved, model = presets.to_state_dict(rule, state), models[i]
  expected = model.state_dict()
  assert saved == {key: expected[key] for key in saved}
  _, resumed = presets.from_state_dict(rule, saved)
  if system != "apex_hysteresis":  # NeMo does not read a count that it saves.
    assert presets.to_state_dict(rule, resumed) == saved
  if hasattr(model, "resume"):  # It loses counts.
    model.resume()
  model.failed = False
  follow(rule, spread(resumed), [copy.copy(model) for _ in SEQUENCES])
