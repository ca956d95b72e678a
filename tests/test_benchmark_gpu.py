"""`python -m benchmarks gpu`, in sizes for which any CPU will do."""

import dataclasses
import json
import math

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from benchmarks import __main__ as command
from benchmarks import contest
from benchmarks import gpt2
from benchmarks import gpu
from benchmarks import guarantees
from benchmarks import jax_training
from benchmarks import kernels
from benchmarks import nonfinite
from benchmarks import phase
from benchmarks import rounds
from benchmarks import traffic
import optax_lossscale as ols
from optax_lossscale._base import leaves
from tests import excess_precision

TINY = gpt2.SIZES["tiny"]
# A loop whose body has one fusion and one copy, and what launches nothing.
PROGRAM = """\
HloModule jit_f, entry_computation_layout={(f32[8]{0})->f32[]}

%fused (p.1: f32[8]) -> f32[8] {
  %p.1 = f32[8]{0} parameter(0)
  ROOT %exp = f32[8]{0} exponential(%p.1)
}

%body (p.2: (s32[], f32[8])) -> (s32[], f32[8]) {
  %p.2 = (s32[], /*index=1*/f32[8]{0}) parameter(0)
  %i = s32[] get-tuple-element(%p.2), index=0
  %x = f32[8]{0} get-tuple-element(%p.2), index=1
  %i.2 = s32[] copy(%i)
  %y = f32[8]{0} fusion(%x), kind=kLoop, calls=%fused
  ROOT %pair = (s32[], f32[8]{0}) tuple(%i.2, %y)
}

%condition (p.3: (s32[], f32[8])) -> pred[] {
  %p.3 = (s32[], f32[8]{0}) parameter(0)
  %j = s32[] get-tuple-element(%p.3), index=0
  ROOT %more = pred[] fusion(%j), kind=kLoop, calls=%fused
}

ENTRY %main (x.1: f32[8]) -> f32[] {
  %x.1 = f32[8]{0} parameter(0)
  %zero = s32[] constant(0)
  %start = (f32[8]{0}, u32[]) copy-start(%x.1)
  %done = f32[8]{0} copy-done(%start)
  %first = (s32[], f32[8]{0}) tuple(%zero, %done)
  %loop = (s32[], f32[8]{0}) while(%first), condition=%condition, body=%body
  %last = f32[8]{0} get-tuple-element(%loop), index=1
  %b = f32[8] conditional(%zero, %x, %x), branch_computations={%fused, %fused}
  %product = (f32[8]{0}, s8[64]{0}) custom-call(%b), custom_call_target="gemm"
  %bits = f32[8]{0} bitcast(%last)
  ROOT %sum = f32[] reduce(%bits, %zero), dimensions={0}, to_apply=%fused
}
"""


@pytest.fixture(scope="module")
def written(tmp_path_factory):
  """The figures and the page, without train steps."""
  folder = tmp_path_factory.mktemp("benchmark") / "new"
  with pytest.MonkeyPatch.context() as patch:
    patch.delitem(gpu._PARTS, "Train step")
    # Some so small that they can never be folded.
    small = jax.ShapeDtypeStruct((3,), jnp.float32)
    patch.setattr(gpu, "_params", lambda plan: [gpu._SMALL_LEAF] * 2 + [small])
    assert command.main(["gpu", "--tiny", "--out", str(folder)]) == 0
  figures = json.loads((folder / "gpu.json").read_text())
  return figures, (folder / "gpu.md").read_text()


def run_with_torch():
  torch = pytest.importorskip("torch", reason="torch is not installed")
  torch.set_num_threads(1)  # On few and busy cores its threads only wait.
  return torch


@pytest.mark.slow
def test_every_part_is_written_with_the_machine(written):
  figures, page = written
  assert figures["parts"].keys() == gpu._PARTS.keys() - {"Train step"}
  assert figures["problems"] == {}
  assert figures["machine"]["device"] in page
  assert figures["hardware"] == repr(ols.hardware.probe())
  for name in figures["parts"]:
    assert f"## {name}" in page


@pytest.mark.slow
def test_every_guarantee_holds(written):
  figures, _ = written
  rows = figures["parts"]["Guarantees"]
  assert len(rows) == 1 + len(guarantees.CHECKS)
  assert all(row.keys() == {"seen"} for row in rows.values())
  every_value_thrice = 3 * len(nonfinite.values("float16"))
  cases = int(rows["every NaN and inf is seen"]["seen"].split()[0])
  assert cases >= every_value_thrice


def flushing(histogram):
  return lambda x: histogram(jnp.where(jnp.abs(x) < 2.0**-14, 0, x))


@pytest.mark.parametrize(
  ("check", "module", "name", "break_it"),
  [
    (
      guarantees._skip,
      guarantees.ols,
      "loss_scaling",
      lambda make: lambda inner, rule: make(inner, None),
    ),
    (
      guarantees._growth,
      guarantees.ols,
      "DynamicLossScale",
      lambda make: (
        lambda *args, growth_interval: make(
          *args, growth_interval=growth_interval + 1
        )
      ),
    ),
    (
      guarantees._float16_loss,
      guarantees.ols,
      "scaled_value_and_grad",
      lambda make: lambda loss_fn, state: jax.value_and_grad(loss_fn),
    ),
    (
      guarantees._saturated,
      guarantees.ols,
      "saturated",
      lambda make: lambda dtype: ols.nonfinite(),
    ),
    (
      guarantees._narrowed,
      guarantees,
      "_HALF",
      # What a compiler makes of it that leaves the cast out.
      lambda half: np.float32,
    ),
    (
      guarantees._saturating,
      ols.hardware,
      "emulate_saturation",
      # What a compiler makes of it that leaves the casts out.
      lambda make: excess_precision.unrounded,
    ),
    (
      guarantees._status,
      ols.hardware,
      "float_status",
      lambda make: lambda function: make(lambda x: function(x * 0.5)),
    ),
    (
      guarantees._swallowed,
      ols.instruments,
      "swallowed_share",
      lambda make: lambda x, y: make(x.astype(jnp.float32), y),
    ),
    (
      guarantees._leaf_stats,
      ols.instruments,
      "leaf_stats",
      flushing,
    ),
    (
      guarantees._master_weights,
      guarantees.ols,
      "master_weights",
      lambda make: lambda inner: make(optax.sgd(0.26)),
    ),
  ],
)
def test_what_does_not_hold_is_found_out(
  check, module, name, break_it, monkeypatch
):
  monkeypatch.setattr(module, name, break_it(getattr(module, name)))
  with pytest.raises(AssertionError):
    check()


def test_a_guarantee_that_does_not_hold_fails_the_command(
  monkeypatch, tmp_path
):
  def check():
    """It holds."""
    raise AssertionError("3 of 8 differ")

  monkeypatch.setattr(guarantees, "CHECKS", (check,))
  monkeypatch.setattr(
    nonfinite, "run", lambda **_: (8, ["NaN at 0 of float16[1]: missed"])
  )
  monkeypatch.setattr(gpu, "_PARTS", {"Guarantees": (gpu._guarantees, 1.0)})
  assert gpu.main(["--tiny", "--out", str(tmp_path)]) == 1
  page = (tmp_path / "gpu.md").read_text()
  assert "AssertionError: 3 of 8 differ" in page
  assert "1 wrong, such as NaN at 0 of float16[1]: missed" in page


@pytest.mark.parametrize(
  ("reason", "code"),
  [
    ("TimeoutError: no time was left", 0),
    ("ModuleNotFoundError: torch is not installed", 0),
    ("IndexError: index 0 is out of bounds", 1),
  ],
)
def test_a_program_that_fails_fails_the_command(
  reason, code, monkeypatch, tmp_path
):
  parts = {"One": (lambda plan, until: [{"a": {"left_out": reason}}], 1.0)}
  monkeypatch.setattr(gpu, "_PARTS", parts)
  assert gpu.main(["--tiny", "--out", str(tmp_path)]) == code


def test_a_part_that_fails_is_reported_and_the_others_run(
  monkeypatch, tmp_path
):
  def fail(plan, until):
    yield {"measured before": {"kernels": 7}}
    # A crash from here on would not take it away.
    assert "measured before" in (tmp_path / "gpu.json").read_text()
    assert "measured before" in (tmp_path / "gpu.md").read_text()
    raise RuntimeError("out of memory\nand so on")

  def succeed(plan, until):
    yield {"another": {"kernels": 1234}}

  parts = {"One": (fail, 1.0), "Two": (succeed, 1.0)}
  monkeypatch.setattr(gpu, "_PARTS", parts)
  assert gpu.main(["--tiny", "--out", str(tmp_path)]) == 1
  figures = json.loads((tmp_path / "gpu.json").read_text())
  assert figures["parts"] == {
    "One": {"measured before": {"kernels": 7}},
    "Two": {"another": {"kernels": 1234}},
  }
  assert figures["problems"] == {
    "One": {"left_out": "RuntimeError: out of memory"}
  }
  assert "| another |   1,234 |" in (tmp_path / "gpu.md").read_text()


@pytest.mark.slow
def test_what_there_is_no_time_for_is_left_out(monkeypatch, tmp_path):
  monkeypatch.setattr(gpu, "_PARTS", {"Part": (gpu._kernels, 0.5)})
  assert gpu.main(["--tiny", "--out", str(tmp_path), "--minutes", "0"]) == 0
  assert (
    "Left out: TimeoutError: no time was left"
    in (tmp_path / "gpu.md").read_text()
  )
  # What has begun ends early.
  makers = {
    name: lambda: traffic._check([np.ones(3)], "float16") for name in "ab"
  }
  rows = traffic.measure(makers, rounds=9, calls=1, until=math.inf)
  assert all("seconds" in row for row in rows.values())
  made = contest.Contest.__new__(contest.Contest)
  made.rows = {}
  made.add(["jax float16"], until=0.0)
  assert made.rows == {
    "jax float16": {"left_out": "TimeoutError: no time was left"}
  }
  turns = {"a": rounds.Turn(lambda: None)}
  assert len(rounds.interleave(turns, 9, until=0.0)["a"]) == 1


def test_kernels_of_a_program_are_what_it_launches():
  # Two of the loop's body, one of its condition, one in each branch, and in the
  # entry computation a copy that is waited for, a call of a library and a sum.
  assert kernels.count(PROGRAM) == 2 + 1 + 2 + 3


def test_kernels_of_this_backend_are_counted():
  compiled = (
    jax.jit(lambda x: lax.sort(x) + lax.sort(-x)[::-1])
    .lower(jax.ShapeDtypeStruct((100,), jnp.float32))
    .compile()
  )
  assert kernels.figures(compiled)["kernels"] >= 3


@pytest.mark.slow
def test_leaves_are_grouped_as_they_are_tried(monkeypatch):
  monkeypatch.setattr(traffic, "GROUPS", ((1, 4096), (4, 4096), (4, 10_000)))
  before = traffic.bits._TOGETHER, traffic.bits._SMALL
  makers = traffic.groups(
    {"leaves": [jax.ShapeDtypeStruct((5_000,), "f4")] * 4}
  )
  rows = traffic.measure(makers, rounds=1, calls=1, until=math.inf)
  apart, together, joined = (
    rows[f"leaves, {n} together, joined below {size}"]
    for n, size in ((1, "4,096"), (4, "4,096"), (4, "10,000"))
  )
  assert together["kernels"] < apart["kernels"]
  assert joined["kernels"] < apart["kernels"]
  assert before == (traffic.bits._TOGETHER, traffic.bits._SMALL)


def test_a_wrapper_that_overlooks_a_leaf_is_found_out(monkeypatch):
  monkeypatch.setattr(
    leaves, "overwrites", lambda path: leaves.path_name(path) == "leaf"
  )
  _, failures = nonfinite.run(sizes=(1,), dtypes=("bfloat16",))
  seen_by_both = {"largest finite"}
  values = nonfinite.values("bfloat16").keys()
  assert [line.split(" at ")[0] for line in failures] == [
    value for value in values if value not in seen_by_both
  ]
  assert "overflow is False, nan is False" in failures[-1]


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


@pytest.mark.slow
def test_traffic_counts_what_an_update_must_move(written):
  figures, _ = written
  count = 2 * gpu._SMALL_LEAF.size + 3
  rows = figures["parts"]["Update phase"]
  bytes_per_parameter = {
    name: row["traffic"] / count for name, row in rows.items()
  }
  without = ", no command buffers"
  assert bytes_per_parameter == {
    "copy of one array": 8,
    "sum of one array": 4,
    "adamw, float16": 26,
    "loss_scaling(adamw), float16": 28,
    "the check, float16": 2,
    "adamw, float32": 28,
    "loss_scaling(adamw), float32": 32,
    "the check, float32": 4,
    "adamw under lax.cond, float16": 28,
    f"adamw, float16{without}": 26,
    f"loss_scaling(adamw), float16{without}": 28,
    f"adamw under lax.cond, float16{without}": 28,
  }
  for row in rows.values():
    for key in ("seconds", "bandwidth", "over_limit"):
      low, median, high = row[key]
      assert 0 < low <= median <= high


@pytest.mark.slow
def test_an_update_under_cond_is_the_same_update():
  params = {"w": jnp.linspace(-1, 1, 7), "b": jnp.ones(2)}
  adamw, rule = optax.adamw(3e-4), ols.DynamicLossScale()
  scaled = ols.loss_scaling(adamw, rule)
  ours = params, scaled.init(params)
  theirs = params, (phase.CHECK.init(params), adamw.init(params))
  conditional = jax.jit(phase.make_conditional(phase.CHECK, adamw))
  for value in (3.0, jnp.inf, 5.0):
    gradients = jax.tree.map(lambda x, v=value: jnp.full_like(x, v), params)
    ours = jax.jit(phase.make(scaled))(ours, gradients)
    theirs = conditional(theirs, gradients)
  states = ours[1]._replace(inner_state=()), ours[1].inner_state
  expected = (ours[0], states[1])
  for x, y in zip(
    jax.tree.leaves((theirs[0], theirs[1][1])),
    jax.tree.leaves(expected),
    strict=True,
  ):
    np.testing.assert_allclose(x, y, rtol=1e-6)
  assert theirs[1][0].skipped_steps == ours[1].skipped_steps == 1


@pytest.fixture(scope="module")
def rows():
  """What a contest writes of every precision in JAX."""
  made = contest.Contest(TINY, batch=2, length=16)
  made.add(list(contest.VARIANTS), math.inf)
  made.time(rounds=2, steps=1, until=math.inf)
  return made.rows


@pytest.mark.long
def test_the_step_is_timed_in_each_precision(rows):
  assert rows.keys() == contest.VARIANTS.keys()
  for row in rows.values():
    assert "left_out" not in row
    low, median, high = row["seconds"]
    assert 0 < low <= median <= high
  assert rows[contest.FLOAT16]["over_float16"] == (1, 1, 1)


@pytest.mark.long
def test_first_loss_is_that_of_a_model_that_knows_nothing(rows):
  for row in rows.values():
    assert row["losses"][0] == pytest.approx(
      math.log(TINY.vocabulary), rel=0.02
    )


@pytest.mark.long
@pytest.mark.parametrize("name", [x for x in contest.VARIANTS if "," in x])
def test_loss_scaling_does_not_change_the_losses(rows, name):
  bare = rows["jax float32" if "float32" in name else contest.FLOAT16]
  assert rows[name]["losses"] == pytest.approx(bare["losses"], rel=1e-3)
  assert rows[name].get("skipped_steps", 0) == 0


def test_contenders_that_fail_are_left_out(monkeypatch):
  def fail(*_, **__):
    raise RuntimeError("out of memory\nand so on")

  find_spec = contest.importlib.util.find_spec
  monkeypatch.setattr(jax_training, "Training", fail)
  monkeypatch.setattr(gpt2, "init", lambda *_: {})
  monkeypatch.setattr(
    contest.importlib.util,
    "find_spec",
    lambda name: None if name == "torch" else find_spec(name),
  )
  made = contest.Contest(TINY, batch=1, length=8)
  made.add(["jax float16", "torch float16"], math.inf)
  made.time(rounds=1, steps=1, until=math.inf)
  assert made.rows == {
    "jax float16": {"left_out": "RuntimeError: out of memory"},
    "torch float16": {
      "left_out": "ModuleNotFoundError: torch is not installed"
    },
  }


@pytest.mark.slow
def test_small_is_gpt2_small_with_its_vocabulary_padded():
  small = gpt2.SIZES["small"]
  params = jax.eval_shape(lambda: gpt2.init(small, 0))
  count = sum(leaf.size for leaf in jax.tree.leaves(params))
  padding = (small.vocabulary - small.tokens) * small.width
  assert count - padding == 124_439_808


@pytest.mark.long
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


@pytest.mark.long
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


@pytest.mark.long
def test_torch_trains_as_jax_does():
  run_with_torch()
  from benchmarks import torch_training

  batches = gpt2.make_batches(TINY, batch=2, length=16, count=2, seed=0)
  model = gpt2.GPT2(TINY, "float16")
  params = gpt2.init(TINY, 0)
  ours = jax_training.Training(
    model, params, batches, rule=ols.DynamicLossScale(2.0**15)
  )
  theirs = torch_training.Training(
    TINY,
    params,
    batches,
    dtype="float16",
    init_scale=2.0**15,
    device="cpu",
  )
  expected = [ours.step() for _ in range(4)]
  assert [theirs.step() for _ in range(4)] == pytest.approx(expected, rel=1e-3)
  assert theirs.loss_scaling()["loss_scale"] == 2.0**15


def batch_of_tiny():
  return gpt2.make_batches(TINY, batch=2, length=16, count=1, seed=0)[0]
