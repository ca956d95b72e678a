"""Public functions under JAX's debugging switches and transfer guards.

Every docstring runs without implicit promotion, see conftest.py.
"""

import contextlib
import doctest
import importlib
import pkgutil
import re

import jax
import jax.numpy as jnp
from matplotlib.figure import Figure
import numpy as np
import optax
import pytest

import optax_lossscale as ols
from optax_lossscale import hardware
from optax_lossscale import instruments
from optax_lossscale import plot
from optax_lossscale import presets
from optax_lossscale import rules
from tests import support


class OnGpu:
  """An array that a guard keeps on its device; on a CPU it keeps none."""

  def __init__(self, x):
    self.array, self.shape, self.dtype, self.ndim = x, x.shape, x.dtype, x.ndim

  def __array__(self, dtype=None, copy=None):
    assert jax.config.jax_transfer_guard_device_to_host == "allow"
    return np.asarray(self.array, dtype)


def loss_fn(params, x):
  return jnp.mean((x @ params["w"] + params["b"]) ** 2)


def train_step(params, state, x):
  _, scaled_grads = ols.scaled_value_and_grad(loss_fn, state)(params, x)
  updates, state = TX.update(scaled_grads, state, params)
  return optax.apply_updates(params, updates), state


TX = ols.loss_scaling(optax.sgd(0.5), ols.DynamicLossScale(8.0))
RECORDING = instruments.record(TX, 2)
PARAMS = {"w": jnp.eye(4), "b": jnp.ones(4)}
X, LARGE = jnp.ones((8, 4)), jnp.full((8, 4), 300.0)
STATE = TX.init(PARAMS)
SKIPPED = TX.update(PARAMS, STATE, skip=True)[1]
RECORDED = RECORDING.update(PARAMS, RECORDING.init(PARAMS))[1]
ALL = instruments.leaf_stats(PARAMS)
STATS = jax.tree.map(OnGpu, ALL)
APEX = presets.apex(init_scale=8.0)
SAVED = {"loss_scaler0": {"loss_scale": 8.0, "unskipped": 0}}

# Functions that cannot be jitted. LARGE makes inf in float16.
ON_HOST = {
  "WarmStart": lambda: rules.WarmStart(APEX),
  "exponent_histogram": lambda: plot.exponent_histogram(
    STATS, loss_scale=8.0, ax=Figure().subplots()
  ),
  "from_state_dict": lambda: presets.from_state_dict("apex", SAVED),
  "get_history": lambda: instruments.get_history(jax.tree.map(OnGpu, RECORDED)),
  "gradient_error": lambda: instruments.gradient_error(
    loss_fn, loss_scales=[1, 2**30]
  )(PARAMS, X),
  "heat_map": lambda: plot.heat_map(
    STATS, loss_scale=8.0, ax=Figure().subplots()
  ),
  "leaf": lambda: ALL.leaf("w").headroom(),
  "precision_report": lambda: instruments.precision_report(
    ols.autocast(loss_fn), PARAMS, X
  ),
  "probe": hardware.probe,
  "raise_if_failed": lambda: ols.raise_if_failed(
    jax.tree.map(OnGpu, SKIPPED), 1
  ),
  "share_lost": lambda: STATS.share_lost(loss_scale=8.0),
  "to_state_dict": lambda: presets.to_state_dict(
    ols.DynamicLossScale(), jax.tree.map(OnGpu, STATE.loss_scale_state)
  ),
  "tune_precision": lambda: instruments.tune_precision(
    loss_fn, PARAMS, LARGE, dtypes=[jnp.float16]
  ),
  "where_overflow": lambda: instruments.where_overflow(
    jax.grad(ols.autocast(loss_fn))
  )(PARAMS, LARGE),
}


@pytest.mark.parametrize("name", ON_HOST)
def test_a_function_of_the_host_may_do_what_a_program_forbids(name):
  with (
    jax.transfer_guard("disallow_explicit"),
    jax.debug_infs(True),
    jax.debug_nans(True),
  ):
    ON_HOST[name]()


# Functions of finite values that return finite values.
FINITE = {
  "accumulate": lambda: ols.accumulate(
    ols.scaled_value_and_grad(loss_fn, STATE), microbatches=2, drop=True
  )(PARAMS, X),
  "emulate_saturation": lambda: hardware.emulate_saturation(
    lambda x: x * x - x
  )(LARGE.astype(jnp.float16)),
  "metrics": lambda: ols.loss_scale_metrics(STATE),
}


@pytest.mark.parametrize("name", FINITE)
def test_finite_values_make_no_inf(name):
  with jax.debug_infs(True):
    FINITE[name]()


@pytest.mark.usefixtures("without_older_objects")
@pytest.mark.parametrize("switch", [jax.disable_jit, jax.checking_leaks])
def test_a_step_is_proved_under(switch):
  with switch():
    report = instruments.check_step(
      train_step, PARAMS, STATE, jax.eval_shape(lambda: X)
    )
  assert report.ok and {x.verdict for x in report.laws[:3]} == {"proved"}


@contextlib.contextmanager
def leaks_and_checks():
  with jax.checking_leaks(), jax.enable_checks(True):
    yield


FLOAT16 = "a product in float16 is inf"
# Switches, and the examples that they stop.
SWITCHES = {
  "leaks_and_checks": (leaks_and_checks, {}),
  "debug_nans": (lambda: jax.debug_nans(True), {}),
  "debug_infs": (
    lambda: jax.debug_infs(True),
    {
      "FloatStatus": FLOAT16,
      "float_status": FLOAT16,
      "status_tap": FLOAT16,
    },
  ),
  **{
    x: (
      lambda x=x: jax.set_mesh(support.make_mesh(x)),
      {"make_varying": "it has a mesh of its own"},
    )
    for x in support.AXIS_TYPES
  },
  "disable_jit": (jax.disable_jit, {}),
}


def examples():
  """Yields the examples of every docstring."""
  for _, name, _ in pkgutil.walk_packages(ols.__path__, "optax_lossscale."):
    if not name.endswith(("__main__", "_compile_child")):
      module = importlib.import_module(name)
      yield from doctest.DocTestFinder(exclude_empty=True).find(module)


@pytest.mark.slow
@pytest.mark.parametrize(
  "name",  # Two of them take minutes.
  support.slow_but(
    SWITCHES.keys() - {"Auto", "disable_jit"}, SWITCHES, pytest.mark.long
  ),
)
def test_every_example_runs_under(name):
  switch, reasons = SWITCHES[name]
  stopped = {}
  for example in examples():
    # These have inf or NaN on purpose.
    if name.startswith("debug") and re.search(
      r"jnp\.(inf|nan)", example.docstring
    ):
      continue
    runner, text = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS), []
    with switch():
      runner.run(example, out=text.append)
    if runner.failures:
      stopped[example.name.rpartition(".")[2]] = "".join(text)
  assert stopped.keys() == reasons.keys(), "".join(stopped.values())
