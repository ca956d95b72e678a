"""Histories in files: the library's, `train`'s, a user's; and other files."""

import json
import math
import os

import numpy as np
import pytest

import optax_lossscale as ols
from optax_lossscale import instruments
from optax_lossscale.demo import run as run_lib
from tests.instruments.histories import make_history
from tests.support import assert_same_bits

INF, NAN = math.inf, math.nan
HISTORY = instruments.History(
  step=np.array([3, 4, 7, 8, 9]),
  loss_scale=np.float32([2.0**15, 2.0**-14, 0.1, 1e30, 1]),
  amax=np.float32([0.1, INF, NAN, 0, 1e-42]),
  overflow=np.array([False, True, True, False, True]),
)


@pytest.fixture
def write(tmp_path):
  """Writes a file and returns its path."""

  def write_text(name, text):
    path = tmp_path / name
    content = text if isinstance(text, str) else json.dumps(text)
    path.write_text(content, encoding="utf-8")
    return path

  return write_text


@pytest.mark.parametrize("name", ["history.csv", "history.json", "HISTORY.CSV"])
def test_what_is_written_is_read_bit_for_bit(name, tmp_path):
  path = tmp_path / name
  instruments.write_history(path, HISTORY)
  assert_same_bits(instruments.read_history(str(path)), HISTORY)


def test_json_that_is_written_is_json(tmp_path):
  path = tmp_path / "history.json"
  instruments.write_history(path, HISTORY)

  def refuse(constant):
    raise AssertionError(constant)

  content = json.loads(path.read_text(), parse_constant=refuse)
  assert content["amax"][:4] == [0.1, "inf", "nan", 0]


@pytest.mark.parametrize(
  ("name", "content"),
  [
    ("a.csv", "amax\n1\ninf\n2.5\n"),
    ("a.csv", "\ufeffnote, amax \r\nx,1\r\n\r\ny,Infinity\r\nz,2.5\r\n"),
    ("a.json", [1, "inf", 2.5]),
    ("a.json", "[1, Infinity, 2.5]"),
    ("a.json", {"amax": [1, "inf", 2.5], "loss_scale": 1, "note": {}}),
  ],
)
def test_amax_alone_is_of_an_unscaled_run(name, content, write):
  history = instruments.read_history(write(name, content))
  assert_same_bits(history, make_history([1.0, INF, 2.5]))


def test_steps_may_begin_at_0(write):
  columns = {"step": [0, 1, 5], "amax": [1, "inf", 2.5]}
  for path in (
    write("a.csv", "step,amax\n0,1\n1,inf\n5,2.5\n"),
    write("a.json", columns),
  ):
    history = instruments.read_history(path)
    assert history.step.tolist() == [0, 1, 5]
    replay = instruments.replay(ols.FixedLossScale(4.0), history)
    assert replay.history.step.tolist() == [0, 1, 5] and replay.lost_steps == 1
    instruments.write_history(path, history)
    assert_same_bits(instruments.read_history(path), history)


@pytest.mark.parametrize("separator", [",", ";", "\t"])
def test_columns_are_separated_as_the_first_line_does_it(separator, write):
  lines = [
    ["run", '"a; b, c"', "step", "amax", "loss_scale"],
    ['"x,y;z"', "", "0", "1.5", "8"],
    ['"x,y;z"', "", "1", "inf", "4"],
  ]
  text = "\n".join(separator.join(line) for line in lines)
  history = instruments.read_history(write("a.csv", text), run="x,y;z")
  assert history.step.tolist() == [0, 1] and history.amax.tolist() == [1.5, INF]
  assert history.loss_scale.tolist() == [8, 4]


def test_steps_that_were_not_scaled_are_left_out(write):
  text = "step,loss_scale,amax\n1,2,3\n2,,3\n3,2,\n4,4,5\n"
  columns = {
    "step": [1, 2, 3, 4],
    "loss_scale": [2, None, 2, 4],
    "amax": [3, 3, None, 5],
  }
  for path in (write("a.csv", text), write("a.json", columns)):
    history = instruments.read_history(path)
    assert history.step.tolist() == [1, 4]
    assert history.amax.tolist() == [3, 5]


def test_overflow_is_what_the_file_says_and_what_is_not_finite(write):
  text = "amax,overflow\n1,0\n1,1\n1,True\ninf,0\nnan,0\n1,false\n"
  history = instruments.read_history(write("a.csv", text))
  assert history.overflow.tolist() == [False, True, True, True, True, False]


def result(run, seed, *steps):
  """What came of a run: of each step its S, amax and whether it overflowed."""
  found = run_lib.Result(run, seed)
  for i, (scale, amax, overflow) in enumerate(steps, start=1):
    found.steps.append(
      run_lib.Step(i, "float16", 1.0, scale, overflow, overflow, amax)
    )
  return found


@pytest.fixture(params=["csv", "json"])
def trained(request, tmp_path):
  """Writes results as `train` does and returns the path."""

  def write_results(results):
    path = tmp_path / f"task.{request.param}"
    if request.param == "csv":
      run_lib.write_csv(path, results)
    else:
      run_lib.write_json(path, {"seeds": [0, 1]}, results)
    return path

  return write_results


UNSCALED = (None, None, None)
RESULTS = [
  result("float32, none", 0, UNSCALED),
  result("a", 0, (8.0, INF, True), (4.0, 0.1, False), UNSCALED),
]
OTHERS = [
  result("a", 1, (2.0, 3.0, False)),
  result("b, x", 0, (2.0, 5.0, False)),
]
EXPECTED = instruments.History(
  np.array([1, 2]),
  np.float32([8, 4]),
  np.float32([INF, 0.1]),
  np.array([True, False]),
)


def test_the_one_run_with_an_amax_is_read(trained):
  assert_same_bits(instruments.read_history(trained(RESULTS)), EXPECTED)


def test_one_of_several_runs_is_chosen(trained):
  path = trained(RESULTS + OTHERS)
  assert_same_bits(instruments.read_history(path, run="a", seed=0), EXPECTED)
  assert instruments.read_history(path, "a", 1).amax.tolist() == [3]
  assert instruments.read_history(path, "b, x").amax.tolist() == [5]


@pytest.mark.parametrize(
  ("choice", "words"),
  [
    ({}, "2 runs.*`run`: 'a', 'b, x'"),
    ({"run": "a"}, "2 seeds.*`seed`: 0, 1"),
    ({"run": "c"}, "no run 'c'.*'a', 'b, x'"),
    ({"run": "float32, none"}, "no run 'float32, none' with an amax"),
    ({"run": "a", "seed": 7}, "no seed 7.*0, 1"),
  ],
)
def test_a_choice_that_is_left_or_wrong_is_told(choice, words, trained):
  path = trained(RESULTS + OTHERS)
  with pytest.raises(ValueError, match=words) as error:
    instruments.read_history(path, **choice)
  assert str(path) in str(error.value)


def test_run_without_loss_scaling_is_told(trained):
  with pytest.raises(ValueError, match="no step has an amax"):
    instruments.read_history(trained(RESULTS[:1]))


_TEXT = r"runs\[0\].run must be text, got "


@pytest.mark.parametrize(
  ("name", "content", "words"),
  [
    ("a.csv", "", "line 1: .*amax"),
    ("a.csv", "max\n1\n", "line 1: .*amax, got 'max'"),
    ("a.csv", "amax\n", "no step has an amax"),
    ("a.csv", "amax\n1\nx\n", "line 3, column amax: .*number, got 'x'"),
    ("a.csv", "step,amax\n1,\n2,-1\n", "line 3, column amax: .*negative"),
    ("a.csv", "amax,loss_scale\n1,0\n", "line 2, column loss_scale: .*'0'"),
    ("a.csv", "amax,loss_scale\n1,nan\n", "line 2, column loss_scale: .*nan"),
    ("a.csv", "amax,loss_scale\n1,1e-39\n", "normal float32, got '1e-39'"),
    ("a.csv", "amax,overflow\n1,2\n", "line 2, column overflow: .*0 or 1"),
    ("a.csv", "amax,step\n1,1.5\n", "line 2, column step: .*'1.5'"),
    ("a.csv", "amax,step\n1,-1\n", "line 2, column step: .*from 0, got '-1'"),
    ("a.csv", "step;amax\n1;1,5\n", "column amax: .*got '1,5'; .*as a point"),
    ("a.csv", "amax;step\n1;2\n1;2;3\n", "line 3: must have 2 columns"),
    ("a.json", {"amax": [[1, 2], 3]}, r"must be a number, got \[1, 2\]\."),
    ("a.csv", "amax,step\n1,2\n1,2\n", "line 3, column step: .*got 2 after 2"),
    ("a.csv", "amax,step\n1,2\n1\n", "line 3: must have 2 columns.*got 1"),
    ("a.csv", 'amax\n"1\n', "line 2|unexpected end"),
    ("a.json", "{", "line 1 column 2"),
    ("a.json", "[" * 100_000, "recursion"),
    ("a.json", {}, "a list amax"),
    ("a.json", 3, "the file must be an object, got 3"),
    ("a.json", [], "no step has an amax"),
    ("a.json", {"amax": 3}, "amax must be a list, got 3"),
    ("a.json", {"amax": [1, [2]]}, r"amax\[1\]: .*number, got \[2\]"),
    ("a.json", {"amax": [True]}, r"amax\[0\]: .*number, got True"),
    ("a.json", {"amax": [1], "step": [1, 2]}, "each of the 1 of amax, got 2"),
    ("a.json", {"amax": [1, 2], "loss_scale": [1, "x"]}, r"loss_scale\[1\]"),
    ("a.json", {"amax": [10**400]}, r"amax\[0\]: must be a number"),
    ("a.json", {"runs": 3}, "runs must be a list"),
    ("a.json", {"runs": [3]}, r"runs\[0\] must be an object"),
    ("a.json", {"runs": [[3]]}, r"runs\[0\] must be an object, got \[3\]\.$"),
    ("a.json", {"runs": [{"run": "a", "seed": 0}]}, "no step has an amax"),
    (
      "a.json",
      {"runs": [{"history": {"amax": [1, -2]}}]},
      r"runs\[0\].history.amax\[1\]: .*negative, got -2",
    ),
    ("a.json", {"runs": [{"run": ["a"], "history": {"amax": [1]}}]}, _TEXT),
    ("a.json", {"runs": [{"run": 3, "history": {"amax": [1]}}]}, _TEXT),
    (
      "a.json",
      {"runs": [{"seed": [0], "history": {"amax": [1]}}]},
      r"runs\[0\].seed must be an integer, got \[0\]",
    ),
    (
      "a.json",
      {"run": ["a"], "amax": [1]},
      r"run must be text, got \['a'\]; sev",
    ),
    (
      "a.json",
      {"run": ["a", "b"], "seed": [0, 0], "amax": [1, 2]},
      r"run must be text.*; several runs are objects in a list `runs`",
    ),
    (
      "a.json",
      {"seed": [0], "amax": [1]},
      r"seed must be an integer, got \[0\]",
    ),
    (
      "a.json",
      '{"amax": [1], "amax": [2]}',
      "key .amax. must come once, got it",
    ),
    (
      "a.json",
      '{"runs": [{"history": {"amax": [1], "amax": [2]}}]}',
      "key .amax. must come once, got it twice",
    ),
    ("a.json", '{"%s": 1, "%s": 2}' % (2 * ("x" * 10**5,)), "key 'x*[.]"),
    ("a.csv", "amax, amax\n1,2\n", "line 1: column amax .*once, got it twice"),
    ("a.csv", "amax,seed,seed\n1,0,1\n", "line 1: column seed must come once"),
    ("a.csv", "x" * 10**5 + "\n1\n", "columns must be amax, got 'xxx"),
    ("a.json", {"x" * 10**5: 1}, "a list amax, got .'xxx"),
    ("a.txt", "amax\n1\n", "must end in .csv or .json, got '.txt'"),
  ],
)
def test_what_is_no_history_is_told_with_its_place(name, content, words, write):
  path = write(name, content)
  with pytest.raises(ValueError, match=words) as error:
    instruments.read_history(path)
  assert str(error.value).startswith(str(path))
  assert len(str(error.value)) < len(str(path)) + 200


def test_what_is_no_text_is_told(tmp_path):
  path = tmp_path / "a.csv"
  path.write_bytes(b"amax\n\xff\n")
  with pytest.raises(ValueError, match="not text in UTF-8"):
    instruments.read_history(path)


def test_file_that_is_not_there_is_the_systems_error(tmp_path):
  with pytest.raises(FileNotFoundError):
    instruments.read_history(tmp_path / "a.csv")


def test_ending_is_checked_before_anything_is_written(tmp_path):
  with pytest.raises(ValueError, match=".txt"):
    instruments.write_history(tmp_path / "a.txt", HISTORY)
  assert list(tmp_path.iterdir()) == []


def test_runs_of_one_label_and_seed_are_told_with_their_places(write):
  history = {"amax": [1]}
  runs = [
    {"run": "a", "seed": 0, "history": history},
    {"run": "a", "seed": 1, "history": history},
    {"run": "a", "seed": 0, "history": history},
  ]
  path = write("a.json", {"runs": runs})
  with pytest.raises(ValueError, match=r"the same for runs\[0\], runs\[2\]"):
    instruments.read_history(path, "a", 0)
  with pytest.raises(ValueError, match="2 seeds .*by `seed`: 0, 1"):
    instruments.read_history(path)
  assert instruments.read_history(path, "a", 1).amax.tolist() == [1]


def test_runs_without_a_seed_are_told_with_their_places(write):
  runs = [{"run": "a", "history": {"amax": [1]}}] * 2
  path = write("a.json", {"runs": runs})
  with pytest.raises(ValueError, match="`run` and `seed` of its own, got the"):
    instruments.read_history(path)
  with pytest.raises(ValueError, match="no seed 0 of this run; .*: none"):
    instruments.read_history(path, seed=0)


def test_a_run_without_a_label_is_told_as_such(write):
  runs = [{"history": {"amax": [1]}}, {"run": "a", "history": {"amax": [1]}}]
  path = write("a.json", {"runs": runs})
  with pytest.raises(ValueError, match="2 runs .*by `run`: none, 'a'"):
    instruments.read_history(path)


def test_a_history_alone_in_json_may_have_a_label_and_a_seed(write):
  path = write("a.json", {"run": "a", "seed": 3, "amax": [1]})
  history = instruments.read_history(path, run="a", seed=3)
  assert history.amax.tolist() == [1]
  with pytest.raises(ValueError, match="no run 'b'.*there are: 'a'"):
    instruments.read_history(path, run="b")


def test_spaces_around_a_cell_are_not_part_of_it(write):
  path = write("a.csv", "run , seed, amax\na , 0, 1\n b, 0 ,2\na,0,3\n")
  assert instruments.read_history(path, "a", 0).amax.tolist() == [1, 3]
  path = write("a.json", {"runs": [{"seed": " 0", "history": {"amax": [1]}}]})
  assert instruments.read_history(path, seed=0).amax.tolist() == [1]


@pytest.mark.parametrize("name", ["a.csv", "a.json"])
def test_what_never_ends_is_not_read(name, tmp_path):
  path = tmp_path / name
  path.symlink_to("/dev/zero")
  with pytest.raises(ValueError, match="must be a file, got a folder, device"):
    instruments.read_history(path)
  path.unlink()
  os.mkfifo(path)  # Which would wait for somebody who writes.
  with pytest.raises(ValueError, match="must be a file"):
    instruments.read_history(path)


def test_a_link_to_a_file_is_read(write, tmp_path):
  link = tmp_path / "link.csv"
  link.symlink_to(write("a.csv", "amax\n1\n"))
  assert instruments.read_history(link).amax.tolist() == [1]
