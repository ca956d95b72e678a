"""The examples of frameworks run, learn, and step as the guides say."""

import functools
import importlib.util
import pathlib

from flax import nnx
import numpy as np
import pytest

import optax_lossscale as ols
from tests import support

ROOT = pathlib.Path(__file__).parents[2]
NAMES = ("linen_batch_norm", "nnx_transformer", "equinox_accumulation", "gan")

each_example = pytest.mark.parametrize("name", NAMES)


@functools.cache
def load(name):
  """Returns the module of an example, which is compiled once."""
  path = ROOT / "examples" / f"{name}.py"
  spec = importlib.util.spec_from_file_location(f"examples_{name}", path)
  module = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(module)
  return module


@pytest.fixture
def too_large(monkeypatch):
  """Lets every S start too high, and grow soon after each overflow."""
  rule = ols.DynamicLossScale(2.0**26, growth_interval=50)
  monkeypatch.setattr(ols, "DynamicLossScale", lambda: rule)
  load.cache_clear()
  yield
  load.cache_clear()


def counts(result):
  """Returns the applied and the skipped steps of each optimizer."""
  metrics = [x for x in result.values() if isinstance(x, dict)] or [result]
  return [(int(x["applied_steps"]), int(x["skipped_steps"])) for x in metrics]


def after_some_steps(name):
  """Returns an example, arguments of a later step, and a batch."""
  example, rng = load(name), np.random.default_rng(0)
  state = example.make_state(0)
  args = state if isinstance(state, tuple) else (state,)
  for _ in range(12):
    outputs = example.train_step(*args, example.draw(rng, example.BATCH))
    if not isinstance(args[0], nnx.Module):  # Those change in place.
      args = outputs[: len(args)]
  return example, args, example.draw(rng, example.BATCH)


@pytest.mark.parametrize("name", support.slow_but(("gan",), NAMES))
def test_it_says_what_it_does_and_where_to_read_on(name, capsys):
  result = load(name).main(["--steps", "2", "--seed", "1"])
  lines = capsys.readouterr().out.splitlines()
  assert "step" in lines[0]
  assert any("skipped 0" in line for line in lines)
  page = lines[-1].removeprefix("Next: ")
  assert (ROOT / page).is_file() and page.endswith(".md")
  assert set(counts(result)) == {(2, 0)}


@pytest.mark.parametrize(
  ("option", "value"),
  [("steps", "0"), ("steps", "-1"), ("seed", "-1"), ("seed", f"{2**32}")],
)
@pytest.mark.parametrize("name", (*NAMES, "language_model"))
def test_a_bad_option_ends_in_one_line(name, option, value, capsys):
  with pytest.raises(SystemExit) as ended:
    load(name).main([f"--{option}", value])
  out, err = capsys.readouterr()
  assert (ended.value.code, out) == (2, "")
  (line,) = err.splitlines()
  assert f": error: --{option} must be " in line
  assert line.endswith(f", got {value}")


# At a smaller S float16 loses more low bits.
@pytest.mark.slow
@pytest.mark.usefixtures("too_large")
@each_example
def test_its_step_is_right(name):
  # Not the first step, on which the moving average equals the parameters.
  example, args, batch = after_some_steps(name)
  report = ols.instruments.check_step(example.train_step, *args, batch)
  verdicts = {law.verdict for law in report.laws if law.name != "precision"}
  assert verdicts == {"proved"} and report.ok, report
  (precision,) = [x.text for x in report.laws if x.name == "precision"]
  assert "float16" in precision


@pytest.mark.long
@pytest.mark.usefixtures("too_large")
@each_example
def test_it_learns_and_survives_overflows(name):
  result = load(name).main([])
  if name == "gan":
    assert result["share"] > 0.75
    assert result["found"] == 8
  else:
    assert result["accuracy"] > 0.9
  for applied, skipped in counts(result):
    assert skipped > 5
    assert applied > 10 * skipped
