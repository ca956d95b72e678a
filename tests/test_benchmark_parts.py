"""`python -m benchmarks parts`: that its programs do what they are named."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import __main__ as command
from benchmarks import autocast_models
from benchmarks import compilation
from benchmarks import parts
from benchmarks import rounds
import optax_lossscale as ols

pytestmark = pytest.mark.slow

PARAMS = [np.float32([[0.5, -0.25], [1, 2]])]
X = np.arange(16, dtype=np.float32).reshape(8, 2) / 16
BATCH = X, -X


def loss_fn(params, batch):
  x, y = batch
  return jnp.mean((x @ params[0] - y) ** 2)


def gradient(params, batch):
  x, y = batch
  return x.T @ (x @ params[0] - y) * (2 / x.size)


@pytest.fixture(scope="module")
def training():
  contenders = parts.training(loss_fn, PARAMS, BATCH)
  for contender in contenders.values():
    contender.run()
  return contenders


def test_every_train_step_moves_the_parameters_alike(training):
  # AdamW's first step: the rate times the gradient's sign, and the decay.
  (params,) = PARAMS
  moved = params - 1e-4 * (np.sign(gradient(PARAMS, BATCH)) + 1e-4 * params)
  for contender in training.values():
    np.testing.assert_allclose(contender.state[0][0], moved, rtol=1e-6)


def test_a_train_step_logs_or_records_what_its_name_says(training):
  _, metrics = training["loss_scale_metrics"].result
  amax = np.max(np.abs(gradient(PARAMS, BATCH))) * 2.0**10
  np.testing.assert_allclose(metrics["amax"], amax, rtol=1e-6)
  history = ols.instruments.get_history(training["record"].state[1])
  np.testing.assert_allclose(history.amax, [amax], rtol=1e-6)
  ols.get_loss_scale(training["loss_scaling"].state[1])
  with pytest.raises(ValueError, match="must hold"):
    ols.get_loss_scale(training["bare"].state[1])


def test_accumulated_gradients_are_those_of_the_scan():
  contenders = parts.accumulation(loss_fn, PARAMS, BATCH)
  for contender in contenders.values():
    contender.run()
    loss, (scaled,) = contender.result[:2]
    np.testing.assert_allclose(loss, loss_fn(PARAMS, BATCH), rtol=1e-6)
    np.testing.assert_allclose(
      scaled, gradient(PARAMS, BATCH) * 2.0**10, rtol=1e-5
    )


def test_only_the_select_keeps_batch_statistics_after_an_overflow():
  images = np.full((4, 4, 4, 3), np.inf, np.float32)
  model = autocast_models.ResNet(jnp.float32, 2)
  kept = {}
  contenders = parts.batch_norm(model, (images, np.arange(4)))
  for name, contender in contenders.items():
    contender.run()
    assert contender.state[1].skipped
    kept[name] = all(
      map(jnp.all, map(jnp.isfinite, jax.tree.leaves(contender.state[2])))
    )
  assert kept == {"loss_scaling": False, "select_on_skip": True}


def test_a_ratio_is_taken_to_whom_a_contender_is_over(monkeypatch):
  def contender(over):
    return parts.Contender(lambda: None, over)

  times = {"a": [1.0, 1.0], "b": [2.0, 4.0], "c": [6.0, 4.0]}
  monkeypatch.setattr(rounds, "interleave", lambda turns, count: times)
  contenders = {"a": contender("a"), "b": contender("a"), "c": contender("b")}
  rows = parts._measure(contenders, 2)
  assert rows["b"]["ratio"].median == 3
  assert rows["c"]["ratio"].median == 2


# It compiles every program of the benchmark, which takes most of a minute.
@pytest.mark.long
def test_parts_are_measured_and_written(tmp_path, capsys):
  words = ["--tiny", "--rounds", "2", "--out", str(tmp_path)]
  assert command.main(["parts", *words]) == 0
  content = json.loads((tmp_path / "parts.json").read_text())
  assert {name.partition(",")[0] for name in content["parts"]} == {
    *parts._PARTS
  }
  for rows in content["parts"].values():
    for name, row in rows.items():
      assert row["over"] in rows
      assert (row["ratio"] == [1, 1, 1]) == (row["over"] == name)
      assert len(row["seconds"]) == 3
  assert "compile, 2 leaves, mesh\n" in capsys.readouterr().out


def test_leaves_on_a_mesh_are_on_several_devices(monkeypatch):
  seen = []

  def compile_ahead(step, state, grads):
    seen.extend(jax.tree.leaves(grads))
    return None, compilation.Compilation(1.0, 2.0, None)

  monkeypatch.setattr(compilation, "compile_ahead", compile_ahead)
  for layout in ("plain", "mesh"):
    for contender in parts.compilations(1, layout, (2,)).values():
      contender.run()
  devices = [len(leaf.sharding.device_set) for leaf in seen]
  assert devices == [1] * 3 + [jax.device_count()] * 3


def test_compilations_note_their_seconds():
  contenders = parts.compilations(2, "mesh", (2,))
  for contender in contenders.values():
    contender.run()
    assert [len(x) for x in contender.figures.values()] == [1, 1]
