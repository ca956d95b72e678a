"""How the benchmarks measure: rounds, ratios, counts, checks and verdicts."""

import json
import math

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from benchmarks import accelerate
from benchmarks import cases
from benchmarks import checks
from benchmarks import flags
from benchmarks import measurement
from benchmarks import nonfinite
from benchmarks import parts
from benchmarks import patience
from benchmarks import peers
from benchmarks import phase
from benchmarks import report
from benchmarks import rounds
from benchmarks import summary
from benchmarks.peers import bare
from benchmarks.peers import this_library
from benchmarks.truth import verdict
import optax_lossscale as ols
from optax_lossscale._base import leaves
from optax_lossscale._base import siblings


@pytest.fixture(autouse=True)
def no_collections(monkeypatch):
  """Leaves out what takes most of the time of a small measurement."""
  monkeypatch.setattr(rounds.gc, "collect", lambda: 0)


def test_every_contender_has_one_turn_in_each_round():
  calls = []
  turns = {
    name: rounds.Turn(
      run=lambda name=name: calls.append(name),
      prepare=lambda: calls.append("prepare"),
    )
    for name in "abc"
  }
  seconds = rounds.interleave(turns, 20)
  assert [len(times) for times in seconds.values()] == [20] * 3
  assert set(calls[::2]) == {"prepare"}
  orders = [tuple(calls[start : start + 6 : 2]) for start in range(1, 126, 6)]
  assert all(sorted(order) == ["a", "b", "c"] for order in orders)
  assert len(set(orders)) == 6


def test_no_round_begins_after_the_end_of_the_time():
  turns = {"a": rounds.Turn(lambda: None)}
  assert len(rounds.interleave(turns, 9, until=0.0)["a"]) == 1


def test_a_ratio_compares_times_of_the_same_round():
  assert rounds.ratios([2.0, 9.0], [1.0, 3.0]) == [2.0, 3.0]
  with pytest.raises(ValueError):
    rounds.ratios([2.0], [1.0, 3.0])


def test_each_part_is_compared_with_the_contender_that_it_names(monkeypatch):
  times = {"a": [1.0, 1.0], "b": [2.0, 4.0], "c": [6.0, 4.0]}
  monkeypatch.setattr(rounds, "interleave", lambda turns, count: times)
  over = {"a": "a", "b": "a", "c": "b"}
  contenders = {x: parts.Contender(lambda: None, y) for x, y in over.items()}
  rows = parts._measure(contenders, 2)
  assert rows["b"]["ratio"].median == 3
  assert rows["c"]["ratio"].median == 2


def check(contender):
  """Checks a contender against the bare optimizer."""
  case = cases.make_case("10", "float16", tiny=True)
  params, scaled_grads = case.make_params(), case.make_scaled_grads()
  contender.start(params)
  contender.compile(scaled_grads)
  return checks.check(
    contender,
    params=params,
    scaled_grads=scaled_grads,
    overflowing=cases.overflowing(scaled_grads),
    expected=bare.bare().reference(params, cases.unscaled(scaled_grads)),
  )


@pytest.mark.long
def test_the_check_sees_what_a_contender_leaves_out():
  found = check(bare.bare())  # It neither unscales nor skips.
  assert found.difference > 1e-4
  assert not found.skips and not found.passed
  contender = this_library.loss_scaling()
  contender.update = lambda state, scaled_grads: state  # It takes no step.
  found = check(contender)
  assert found.skips and not found.passed


@pytest.mark.long
def test_a_contender_that_fails_is_named_and_the_others_are_measured(
  monkeypatch,
):
  def fail():
    raise RuntimeError("no such thing")

  absent = peers.Peer(fail, ("no_such_module",))
  monkeypatch.setitem(peers.PEERS, "broken", peers.Peer(fail))
  monkeypatch.setitem(peers.PEERS, "absent", absent)
  case = cases.make_case("10", "float32", tiny=True)
  results = measurement.measure(case, ["bare", "broken", "absent"], 2)
  assert results["broken"].problem == "RuntimeError: no such thing"
  assert results["absent"].problem == "not installed"
  assert len(results["bare"].seconds) == 2
  rows = summary.summarize(case, results)["contenders"]
  assert [row["ratio"] is None for row in rows] == [False, True, True]
  monkeypatch.setattr(patience, "_MANY_LEAVES", 1)
  monkeypatch.setattr(patience, "SECONDS", 0.01)
  results = measurement.measure(case, ["bare"], 1)
  assert "to compile it takes more than 0.01 s" in results["bare"].problem


@pytest.mark.slow
@pytest.mark.parametrize(
  ("joins_large", "groups"), [(False, (1, 1, 2, 3)), (True, (2, 2, 3, 5))]
)
def test_flags_in_other_groups_give_the_bits_of_the_library(
  joins_large, groups, monkeypatch
):
  monkeypatch.setattr(siblings, "_LARGE", 100)
  params = [jnp.full(x, 3.0) for x in 6 * [(3,)] + 4 * [(9, 20)]]
  adamw = optax.adamw(0.1)
  scaled = ols.loss_scaling(adamw, ols.DynamicLossScale())

  def run(step, tx):
    """Returns all arrays after each of three steps, the second one skipped."""
    state, found = (params, jax.jit(tx.init)(params)), []
    for value in (1.0, jnp.inf, 2.0):
      grads = [x.at[..., -1].set(value) for x in params]
      state = jax.jit(step)(state, grads)
      found += [x for x in jax.tree.leaves(state) if x.size > 1]
    return found, ols.get_loss_scale(state[1])

  expected, scale = run(phase.make(scaled), scaled)
  assert [x.size for x in expected] == 9 * [x.size for x in params]
  for count, number in zip(flags.COUNTS, groups, strict=True):
    step = flags.make(phase.CHECK, adamw, count, joins_large=joins_large)
    found = run(step, optax.chain(phase.CHECK, adamw))
    assert found[1] == scale
    jax.tree.map(np.testing.assert_array_equal, found[0], expected)
    shared = jax.make_jaxpr(
      lambda x, count=count: [*flags._flags(x, params, count, joins_large)]
    )(True)
    barriers = [x for x in shared.eqns if x.primitive.name.endswith("barrier")]
    assert len(barriers[-1].outvars) == number


def test_a_rate_in_an_array_gives_the_bits_of_adamw():
  adamw = optax.adamw(0.1)
  params = [jnp.full(3, 3.0), jnp.full((2, 2), -0.5)]
  state = params, adamw.init(params)
  expected = jax.jit(phase.make(adamw))(state, params)
  found = jax.jit(flags.rate_from_array(0.1))(state, params)
  chex.assert_trees_all_equal(found, expected)


def test_a_check_that_found_nan_is_a_failure_that_json_can_hold():
  case = cases.make_case("10", "float32", tiny=True)
  found = checks.Check(difference=float("nan"), skips=True)
  result = measurement.Result("bare", check=found, seconds=[1.0])
  (row,) = summary.summarize(case, {"bare": result})["contenders"]
  assert json.loads(json.dumps(row["check"], allow_nan=False)) == {
    "difference": None,
    "skips": True,
    "passed": False,
  }
  assert summary.cells(row)[0] == "bare (its check failed)"
  assert not summary.all_checks_passed([{"contenders": [row]}])


def test_a_wrapper_that_overlooks_a_leaf_is_found(monkeypatch):
  monkeypatch.setattr(
    leaves, "overwrites", lambda path: leaves.path_name(path) == "leaf"
  )
  _, failures = nonfinite.run(sizes=(1,), dtypes=("bfloat16",))
  expected = nonfinite.values("bfloat16").keys() - {"largest finite"}
  assert {line.split(" at ")[0] for line in failures} == expected
  assert "overflow is False, nan is False" in failures[-1]


REFERENCE = [1.0, 1.2, 0.8, 1.1, 0.9]


def compare(scores, reference=REFERENCE, more_is_better=False):
  return verdict.compare(
    scores, reference=reference, matters=0.1, more_is_better=more_is_better
  ).verdict


@pytest.mark.parametrize(
  ("by", "more_is_better", "expected"),
  [
    (-1.0, True, "worse"),
    (math.nan, False, "worse"),
    (math.inf, True, "worse"),
    (-math.inf, False, "worse"),
  ],
)
def test_the_verdict_has_the_sign_of_the_score(by, more_is_better, expected):
  scores = [x + by for x in REFERENCE]
  assert compare(scores, more_is_better=more_is_better) == expected


def test_the_verdict_needs_a_gap_that_is_clear_consistent_and_matters():
  """NumPy decides the same on random scores."""
  rng = np.random.default_rng(0)
  seen = set()
  for _ in range(500):
    theirs = rng.normal(size=5)
    ours = theirs + rng.normal(size=5) * rng.choice([0.1, 1]) + rng.normal() * 3
    matters = rng.choice([0.01, 1.0, 4.0])
    gap = np.mean(ours - theirs)
    differs = (
      abs(gap) > 2 * np.std(theirs, ddof=1)
      and abs(np.sum(np.sign(ours - theirs))) == 5
      and abs(gap) >= matters
    )
    expected = "no difference"
    if differs:
      expected = "worse" if gap > 0 else "better"
    seen.add(expected)
    found = verdict.compare(ours, theirs, matters=matters, more_is_better=False)
    assert found.verdict == expected
    assert found.mean == pytest.approx(gap)
    assert found.visible == max(matters, 2 * np.std(theirs, ddof=1))
  assert len(seen) == 3


def test_a_reference_that_is_not_finite_is_refused():
  with pytest.raises(ValueError, match="float32's scores must be finite"):
    compare(REFERENCE, reference=[math.nan, *REFERENCE[1:]])


@pytest.mark.parametrize(
  ("alone", "scaled", "reading"),
  [
    ("no difference", "no difference", "no need seen"),
    ("worse", "no difference", "needs loss scaling"),
    ("worse", "better", "needs loss scaling"),
    ("worse", "worse", "not cured by loss scaling"),
    ("no difference", "worse", "worse with loss scaling"),
  ],
)
def test_a_workload_needs_loss_scaling_if_that_cures_it(alone, scaled, reading):
  found = {"float16": alone, "dynamic": scaled, "headroom": "worse"}
  assert verdict.reading(found) == reading


def row(*seconds, compilation=(1.0, 2.0)):
  """The figures of `accelerate` that its verdict reads."""
  trace, compile_ = compilation
  cost = {"trace_seconds": trace, "compile_seconds": compile_}
  return {"seconds": list(seconds), "compilations": [cost] * 3}


def test_faster_steps_earn_the_second_compilation_back():
  figures = accelerate.earned_back(
    row(4.0, 4.0, 4.0),
    row(1.0, 2.0, 3.0, compilation=(2.0, 3.7)),
    row(4.0, 4.0, 4.0),
  )
  # Nine steps of ten are two seconds faster in the median.
  assert figures["saved"]["median"] == pytest.approx(1.8)
  assert figures["compilation"] == pytest.approx(2.7)
  assert figures["steps"] == pytest.approx(1.5)
  assert figures["hours"] == pytest.approx(1.5 * 4 / 3600)
  slower_full_part = accelerate.earned_back(row(4.0), row(3.0), row(14.0))
  assert slower_full_part["saved"]["median"] == pytest.approx(-0.1)


def test_figures_that_are_not_finite_are_not_written(tmp_path):
  with pytest.raises(ValueError):
    report.write(tmp_path / "results.json", {"ratio": float("nan")})
  assert list(tmp_path.iterdir()) == []
