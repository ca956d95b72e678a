"""`python -m benchmarks train-step`, with a model for which any CPU will do."""

import dataclasses
import importlib.util
import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import contest
from benchmarks import flax_training
from benchmarks import gpt2
from benchmarks import nonfinite
from benchmarks import train_step
import optax_lossscale as ols

pytestmark = pytest.mark.long

TINY = gpt2.SIZES["tiny"]
SMALL_CONTEST = contest.Contest(
  size=TINY, batch=2, length=16, rounds=1, steps=1, seed=0
)


@pytest.fixture(scope="module")
def results(tmp_path_factory):
  """What the command wrote, after a run in which nothing failed."""
  path = tmp_path_factory.mktemp("benchmark") / "folder" / "figures.json"
  arguments = (
    "--model tiny --batch 2 --length 16 --without-torch --rounds 2 --steps 1 "
    "--calls 2 --copy-size 1 --largest-leaf 1 --random-places 0"
  )
  assert train_step.main([*arguments.split(), "--output", str(path)]) == 0
  return json.loads(path.read_text())


def run_with_torch():
  torch = pytest.importorskip("torch", reason="torch is not installed")
  torch.set_num_threads(1)  # On few and busy cores its threads only wait.
  return torch


def test_every_part_is_written_with_the_machine_and_the_arguments(results):
  assert results.keys() == {
    *("command", "machine", "environment", "backend", "arguments"),
    *("nonfinite", "traffic", "step", "peak_memory"),
  }
  assert results["arguments"]["length"] == 16
  assert results["backend"] == jax.default_backend()


def test_no_nan_or_inf_is_missed(results):
  every_value_at_one_place = len(nonfinite.values("float16"))
  assert results["nonfinite"] == {
    "tried": every_value_at_one_place * len(nonfinite.DTYPES),
    "failures": [],
  }


def test_a_wrapper_that_overlooks_a_leaf_is_found_out(monkeypatch):
  loss_scaling = ols.loss_scaling
  monkeypatch.setattr(nonfinite, "DTYPES", ("bfloat16",))
  monkeypatch.setattr(
    nonfinite.ols,
    "loss_scaling",
    lambda inner, rule: loss_scaling(
      inner, rule, mask={"first": True, "leaf": False, "last": True}
    ),
  )
  outcome = nonfinite.run(seed=0, largest=1, random_places=0)
  seen_by_both = {"largest finite"}
  values = nonfinite.values("bfloat16").keys()
  assert [line.split(" at ")[0] for line in outcome.failures] == [
    value for value in values if value not in seen_by_both
  ]
  assert "overflow is False, nan is False" in outcome.failures[-1]


@pytest.mark.parametrize("dtype", nonfinite.DTYPES)
def test_values_are_what_their_names_say(dtype):
  unsigned = f"uint{jnp.finfo(dtype).bits}"
  for name, bits in nonfinite.values(dtype).items():
    value = float(np.array(bits, unsigned).view(jnp.dtype(dtype)))
    if "NaN" in name:
      assert math.isnan(value)
      is_quiet = bool(bits >> (jnp.finfo(dtype).nmant - 1) & 1)
      assert is_quiet == ("signalling" not in name)
    else:
      largest = float(jnp.finfo(dtype).max)
      assert (
        value
        == {"largest finite": largest, "inf": math.inf, "-inf": -math.inf}[name]
      )


def test_a_missed_nan_fails_the_command(monkeypatch, capsys):
  monkeypatch.setattr(
    nonfinite, "run", lambda **_: nonfinite.Outcome(8, ["NaN at 0 of it"])
  )
  assert train_step.main(["--parts", "nonfinite"]) == 1
  assert "NaN at 0 of it" in capsys.readouterr().out


def test_traffic_counts_what_an_update_must_move(results):
  params = jax.eval_shape(lambda: gpt2.init(TINY, 0))
  count = sum(leaf.size for leaf in jax.tree.leaves(params))
  bytes_per_parameter = {
    name: row["traffic"] / count
    for name, row in results["traffic"].items()
    if name != "copy of one array"
  }
  assert bytes_per_parameter == {
    "copy of AdamW's state": 24,
    "adamw, float32 gradients": 28,
    "loss_scaling(adamw), float32 gradients": 32,
    "adamw, float16 gradients": 26,
    "loss_scaling(adamw), float16 gradients": 28,
  }
  assert results["traffic"]["copy of one array"]["traffic"] == 2 * 2**20


def test_figures_are_quartiles_of_positive_numbers(results):
  rows = [*results["traffic"].values(), *results["step"]["contenders"].values()]
  for row in rows:
    quartiles = [
      values
      for name, values in row.items()
      if isinstance(values, list) and name != "losses"
    ]
    assert len(quartiles) >= 3
    for low, median, high in quartiles:
      assert 0 < low <= median <= high


def test_the_step_is_timed_in_each_precision(results):
  step = results["step"]
  assert step["not_run"] == {}
  assert list(step["contenders"]) == [
    "jax float32",
    "jax bfloat16",
    "jax float16",
    "jax float16, loss_scaling",
  ]
  bare = step["contenders"]["jax float16"]
  assert bare["over_jax_float16"] == bare["over_own_float16"] == [1, 1, 1]


def test_first_loss_is_that_of_a_model_that_knows_nothing(results):
  for row in results["step"]["contenders"].values():
    assert row["losses"][0] == pytest.approx(
      math.log(TINY.vocabulary), rel=0.02
    )


def test_loss_scaling_does_not_change_the_losses(results):
  rows = results["step"]["contenders"]
  scaled = rows["jax float16, loss_scaling"]
  assert scaled["losses"] == pytest.approx(
    rows["jax float16"]["losses"], rel=1e-3
  )
  assert scaled["skipped_steps"] == 0


def test_a_contender_that_fails_is_reported_and_fails_the_command(
  monkeypatch, capsys
):
  def fail(*_, **__):
    raise RuntimeError("out of memory\nand so on")

  monkeypatch.setattr(flax_training, "Training", fail)
  monkeypatch.setattr(gpt2, "init", lambda *_: {})
  arguments = ["--parts", "step", "--model", "tiny", "--without-torch"]
  assert train_step.main(arguments) == 1
  output = capsys.readouterr().out
  assert "jax float32: RuntimeError: out of memory\n" in output
  assert "and so on" not in output


def test_torch_that_is_not_installed_is_said_to_be_so(monkeypatch):
  find_spec = importlib.util.find_spec
  monkeypatch.setattr(
    importlib.util,
    "find_spec",
    lambda name: None if name == "torch" else find_spec(name),
  )
  monkeypatch.setattr(contest, "_in_jax", lambda *_: {})
  monkeypatch.setattr(gpt2, "init", lambda *_: {})
  outcome = contest.run(SMALL_CONTEST, with_torch=True)
  assert outcome["not_run"] == {"torch": "not installed"}


def test_small_is_gpt2_small_with_its_vocabulary_padded():
  small = gpt2.SIZES["small"]
  params = jax.eval_shape(lambda: gpt2.init(small, 0))
  count = sum(leaf.size for leaf in jax.tree.leaves(params))
  padding = (small.vocabulary - small.tokens) * small.width
  assert count - padding == 124_439_808


def test_all_implementations_of_attention_agree():
  params = gpt2.init(TINY, 0)
  batch = batch_of_tiny()
  losses = [
    jax.jit(gpt2.make_loss_fn(gpt2.GPT2(TINY, "float32", attention)))(
      params, batch
    )
    for attention in ("plain", "xla")
  ]
  assert float(losses[0]) == pytest.approx(float(losses[1]), rel=1e-6)


def test_torch_computes_the_same_loss_and_gradients():
  torch = run_with_torch()
  from benchmarks import torch_gpt2

  # Two layers, so that one taken for the other would show.
  size = dataclasses.replace(TINY, layers=2)
  model = gpt2.GPT2(size, "float32")
  params = gpt2.init(size, 0)
  batch = batch_of_tiny()
  value_and_grad = jax.jit(jax.value_and_grad(gpt2.make_loss_fn(model)))
  loss, grads = value_and_grad(params, batch)

  peer = torch_gpt2.GPT2(size)
  peer.load_state_dict(torch_gpt2.from_flax(params))
  peer_loss = peer(*(torch.from_numpy(part).long() for part in batch))
  peer_loss.backward()

  assert float(loss) == pytest.approx(peer_loss.item(), rel=1e-6)
  expected = torch_gpt2.from_flax(grads)
  for name, parameter in peer.named_parameters():
    error = torch.linalg.vector_norm(parameter.grad - expected[name])
    # The gradient of the keys' bias is 0: there is only rounding to compare.
    assert error <= 1e-4 * torch.linalg.vector_norm(expected[name]), name


def test_torch_trains_as_jax_does():
  run_with_torch()
  from benchmarks import torch_training

  batches = gpt2.make_batches(TINY, batch=2, length=16, count=2, seed=0)
  model = gpt2.GPT2(TINY, "float16")
  params = gpt2.init(TINY, 0)
  ours = flax_training.Training(
    model, params, batches, rule=ols.DynamicLossScale(2.0**15)
  )
  theirs = torch_training.Training(
    TINY,
    params,
    batches,
    dtype="float16",
    init_scale=2.0**15,
    device="cpu",
    compiled=False,
  )
  expected = [ours.step() for _ in range(4)]
  assert [theirs.step() for _ in range(4)] == pytest.approx(expected, rel=1e-3)
  assert theirs.loss_scaling()["loss_scale"] == 2.0**15


def batch_of_tiny():
  return gpt2.make_batches(TINY, batch=2, length=16, count=1, seed=0)[0]
