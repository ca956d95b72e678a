"""The benchmark of the update phase: that it runs, and what it writes."""

import json

import pytest

from benchmarks import __main__ as command
from benchmarks import cases
from benchmarks import checks
from benchmarks import machine
from benchmarks import measurement
from benchmarks import patience
from benchmarks import peers
from benchmarks import report
from benchmarks import rounds
from benchmarks import summary
from benchmarks.peers import bare
from benchmarks.peers import this_library

pytestmark = pytest.mark.long

# What needs nothing beyond the library and its tests.
PEERS = (
  *("bare", "one more read", "optax_lossscale", "lax.cond"),
  *("flax", "apply_if_finite"),
)


@pytest.fixture(scope="module")
def content(tmp_path_factory):
  folder = tmp_path_factory.mktemp("benchmarks") / "new"
  options = ["--tiny", "--cases", "10", "--rounds", "3", "--out", str(folder)]
  assert command.main([*options, "--peers", *PEERS]) == 0
  return json.loads((folder / "update.json").read_text())


def test_everybody_does_what_is_measured(content):
  for case in content["cases"]:
    for row in case["contenders"]:
      assert row["problem"] == ""
      is_bare = row["name"] in ("bare", "one more read")
      assert row["check"] is None if is_bare else row["check"]["passed"]
  assert summary.all_checks_passed(content["cases"])


def test_every_case_has_every_contender(content):
  cases = [(case["name"], case["gradients"]) for case in content["cases"]]
  assert cases == [("10", "float16"), ("10", "float32")]
  for case in content["cases"]:
    assert [row["name"] for row in case["contenders"]] == list(PEERS)
    assert case["parameters"] == 2 * 16 * 8


def test_every_raw_figure_is_written(content):
  for case in content["cases"]:
    for row in case["contenders"]:
      assert len(row["seconds"]) == 3
      assert row["median_seconds"] == sorted(row["seconds"])[1]
      assert row["ratio"].keys() == {"low", "median", "high"}
      share = row["temporary_bytes"] / (4 * case["parameters"])
      assert row["temporaries_percent"] == pytest.approx(100 * share)
      assert row["compilation_ratio"] > 0


def test_machine_versions_and_date_are_told(content):
  description = content["machine"]
  assert content["command"].startswith("python -m benchmarks update --tiny")
  headline = machine.headline(
    {**description, "versions": {"a": "1", "b": None}}
  )
  for part in (description["cpu"], "a 1", "not installed: b", "20"):
    assert part in headline
  for package in ("jax", "jaxlib", "optax", "flax", "optax-lossscale"):
    assert description["versions"][package]


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


def test_check_notices_who_neither_unscales_nor_skips():
  found = check(bare.bare())
  assert found.difference > 1e-4
  assert not found.skips
  assert not found.passed


def test_check_notices_who_takes_no_step():
  contender = this_library.loss_scaling()
  contender.update = lambda state, scaled_grads: state
  found = check(contender)
  assert found.skips
  assert not found.passed


def test_peer_that_makes_nan_can_be_written():
  case = cases.make_case("10", "float32", tiny=True)
  found = checks.Check(difference=float("nan"), skips=True)
  result = measurement.Result("bare", check=found, seconds=[1.0])
  (row,) = summary.summarize(case, {"bare": result})["contenders"]
  assert row["check"] == {"difference": None, "skips": True, "passed": False}
  assert summary.cells(row)[0] == "bare (its check failed)"
  assert not summary.all_checks_passed([{"contenders": [row]}])


def test_peer_that_fails_is_told_and_the_others_are_measured(monkeypatch):
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


def test_who_takes_too_long_to_compile_is_left_out(monkeypatch):
  monkeypatch.setattr(patience, "_MANY_LEAVES", 1)
  case = cases.make_case("10", "float32", tiny=True)
  monkeypatch.setattr(patience, "SECONDS", 0.01)
  results = measurement.measure(case, ["bare"], 1)
  assert "to compile it takes more than 0.01 s" in results["bare"].problem
  assert results["bare"].seconds == []


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
  assert {name: len(times) for name, times in seconds.items()} == {
    "a": 20,
    "b": 20,
    "c": 20,
  }
  assert set(calls[::2]) == {"prepare"}
  orders = [tuple(calls[start : start + 6 : 2]) for start in range(1, 126, 6)]
  assert len(orders) == 21
  assert all(sorted(order) == ["a", "b", "c"] for order in orders)
  assert len(set(orders)) == 6


def test_ratio_is_taken_within_the_round():
  assert rounds.ratios([2.0, 9.0], [1.0, 3.0]) == [2.0, 3.0]
  with pytest.raises(ValueError):
    rounds.ratios([2.0], [1.0, 3.0])


def test_quartiles():
  assert rounds.quartiles([5.0, 1.0, 2.0, 4.0, 3.0]) == (2.0, 3.0, 4.0)
  assert rounds.quartiles([7.0]) == (7.0, 7.0, 7.0)


def test_table_is_markdown():
  table = report.markdown(["", "ms"], [["bare", "1.00"], ["a", "10.25"]])
  assert table.splitlines() == [
    "|      |    ms |",
    "| ---- | ----: |",
    "| bare |  1.00 |",
    "| a    | 10.25 |",
  ]


def test_what_is_not_finite_is_not_written(tmp_path):
  path = tmp_path / "results.json"
  with pytest.raises(ValueError):
    report.write(path, {"ratio": float("nan")})
  assert list(tmp_path.iterdir()) == []


def test_commands_are_listed(capsys):
  assert command.main(["--help"]) == 0
  listed = capsys.readouterr().out
  assert all(f"\n{name} " in listed for name in command._COMMANDS)
  assert command.main(["nonsense"]) == 2
  assert "There is no benchmark 'nonsense'." in capsys.readouterr().err


def test_out_must_be_a_folder(tmp_path, capsys):
  (tmp_path / "file").touch()
  with pytest.raises(SystemExit):
    command.main(["update", "--out", str(tmp_path / "file")])
  assert "--out: must be a folder" in capsys.readouterr().err


@pytest.mark.parametrize(
  "option",
  [["--peers", "nobody"], ["--rounds", "0"], ["--cases", "7"]],
  ids=["peer", "rounds", "case"],
)
def test_bad_option_is_refused(option, capsys):
  with pytest.raises(SystemExit):
    command.main(["update", *option])
  assert option[0] in capsys.readouterr().err
