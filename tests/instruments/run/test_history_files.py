"""Histories in CSV files of the library and of users, and other files."""

import collections
import math
import os
import resource
import stat

import numpy as np
import pytest

from optax_lossscale import instruments
from tests.instruments.run.histories import make_history
from tests.support import assert_same_bits

INF, NAN = math.inf, math.nan
HISTORY = instruments.History(
  step=np.array([3, 4, 7, 8, 9]),
  loss_scale=np.float32([2.0**15, 2.0**-14, 0.1, 1e30, 1]),
  amax=np.float32([0.1, INF, NAN, 0, 1e-42]),
  overflow=np.array([False, True, True, False, True]),
)

Record = collections.namedtuple("Record", "step loss scale overflow")


@pytest.fixture
def write(tmp_path):
  """Writes a file and returns its path."""

  def write_text(text):
    path = tmp_path / "a.csv"
    path.write_text(text, encoding="utf-8")
    return path

  return write_text


def test_a_written_history_is_read_bit_for_bit(tmp_path):
  path = tmp_path / "history"
  instruments.write_history(path, HISTORY)
  assert path.read_bytes().startswith(
    b"step,loss_scale,amax,overflow\n3,32768.0,0.1,0\n"
  )
  assert_same_bits(instruments.read_history(str(path)), HISTORY)
  # A history that cannot be written leaves the file alone.
  size = len(HISTORY.amax)
  for wrong in (
    {"amax": HISTORY.amax[:2]},
    {"amax": None},
    {name: np.ones((size, 2)) for name in HISTORY._fields},
    {"step": ["a"] * size},
    {"step": np.arange(size) + 0.5},
    {"overflow": [7] * size},
    {"loss_scale": [None] * size},
  ):
    with pytest.raises(ValueError, match="`history` must h"):
      instruments.write_history(path, HISTORY._replace(**wrong))
  # So does another record, which looks like one.
  with pytest.raises(TypeError, match="`history` must be a History, got Rec"):
    instruments.write_history(path, Record(*HISTORY))
  assert_same_bits(instruments.read_history(path), HISTORY)


def test_a_history_is_written_as_a_whole_and_through_no_link(tmp_path):
  path, link = tmp_path / "h.csv", tmp_path / "link"
  path.write_text("old")
  path.chmod(0o606)
  before = resource.getrlimit(resource.RLIMIT_FSIZE)
  resource.setrlimit(resource.RLIMIT_FSIZE, (20, before[1]))  # A full disk.
  try:
    with pytest.raises(OSError, match="too large: .*h.csv"):
      instruments.write_history(path, HISTORY)
  finally:
    resource.setrlimit(resource.RLIMIT_FSIZE, before)
  assert path.read_text() == "old"
  link.symlink_to(path)
  instruments.write_history(link, HISTORY)
  assert path.read_text() == "old" and not link.is_symlink()
  instruments.write_history(path, HISTORY)
  assert path.read_bytes() == link.read_bytes()
  modes = [stat.S_IMODE(x.stat().st_mode) for x in (path, link)]
  assert modes[0] == 0o606 != modes[1]
  assert {*tmp_path.iterdir()} == {path, link}
  os.mkfifo(link.with_name("pipe"))
  both = os.open(link.with_name("pipe"), os.O_RDWR | os.O_NONBLOCK)
  for place in (link.with_name("pipe"), f"/dev/fd/{both}"):
    instruments.write_history(place, HISTORY)
    assert os.read(both, 9999) == path.read_bytes()
  os.close(both)


@pytest.mark.parametrize(
  "text",
  [
    "amax\n1\ninf\n2.5\n",
    "\ufeffamax , note\r\n1,x\r\n\r\nInfinity,\r\n 2.5,z;1\r\n",
  ],
)
def test_a_file_with_amax_alone_is_an_unscaled_run(text, write):
  history = instruments.read_history(write(text))
  assert_same_bits(history, make_history([1.0, INF, 2.5]))


def test_steps_may_begin_at_0_and_leave_gaps(write):
  history = instruments.read_history(write("step,amax\n0,1\n1,inf\n5.0,2.5\n"))
  assert history.step.tolist() == [0, 1, 5]


def test_a_step_overflowed_if_the_file_says_so_or_amax_is_not_finite(write):
  text = "amax,overflow\n1,0\n1,1\n1,True\ninf,0\nnan,0\n1,false\n1e39,0\n"
  history = instruments.read_history(write(text))
  assert history.overflow.tolist() == [0, 1, 1, 1, 1, 0, 1]


@pytest.mark.parametrize(
  ("text", "words"),
  [
    ("", "line 1: .*amax, got ''"),
    ("amax\n", "must have a line for each step, got no steps"),
    ("amax\n1\nx\n", "line 3, column amax: .*number.*, got 'x'"),
    ("step,amax\n1,1\n2,-1\n", "line 3, column amax: .*from 0.*'-1'"),
    ("amax,loss_scale\n1,0\n", "line 2, column loss_scale: .*'0'"),
    ("amax,loss_scale\n1,1e-39\n", "normal float32, got '1e-39'"),
    ("amax,overflow\n1,2\n", "line 2, column overflow: .*0 or 1, got '2'"),
    ("amax,step\n1,1.5\n", "line 2, column step: .*'1.5'"),
    ("amax,step\n1,-1\n", "line 2, column step: .*from 0, got '-1'"),
    ("amax,step\n1,2\n1,2\n", "line 3, column step: .*2 after 2; .*one run"),
    ("amax\n1,5\n", "line 2: must have as many.*1, got 2"),
    ('amax\n"1\n', "line 2: must have cells between commas.*not CSV: unexp"),
    ('{"step": 1,"amax":2}', "line 1: must name the columns .* not CSV"),
    ("amax, amax\n1,2\n", "line 1: column amax .*once, got it twice"),
    ("amax\n" + "x" * 10**5, "got 'xxx"),
  ],
)
def test_another_file_is_refused_with_the_place(text, words, write):
  path = write(text)
  with pytest.raises(ValueError, match=words) as error:
    instruments.read_history(path)
  assert str(error.value).startswith(str(path))
  assert len(str(error.value)) < len(str(path)) + 200


def test_only_a_text_file_is_read(write, tmp_path):
  path = tmp_path / "b.csv"
  with pytest.raises(FileNotFoundError):
    instruments.read_history(path)
  path.write_bytes(b"amax\n\xff\n")
  with pytest.raises(ValueError, match="text in UTF-8, got"):
    instruments.read_history(path)
  path.unlink()
  path.symlink_to("/dev/zero")
  with pytest.raises(ValueError, match="must be a file, got a folder, device"):
    instruments.read_history(path)
  path.unlink()
  os.mkfifo(path)  # Reading would wait for a writer.
  with pytest.raises(ValueError, match="must be a file"):
    instruments.read_history(path)
  path.unlink()
  path.symlink_to(write("amax\n1\n"))
  assert instruments.read_history(path).amax.tolist() == [1]
