"""`doctor`: versions, devices, the table, and two sentences of advice."""

import dataclasses
from importlib import metadata
import platform
import re

import jax
import jax.numpy as jnp
import pytest

import optax_lossscale as ols
from optax_lossscale import cli
from optax_lossscale.compiled import compiling
from tests import documents


@pytest.fixture(scope="module")
def seen():
  return ols.hardware.probe()


def doctor(capsys):
  """Returns the lines that the command prints."""
  assert cli.main(["doctor"]) == 0
  out, err = capsys.readouterr()
  assert err == ""
  return out.splitlines()


def test_advice_versions_and_devices_come_before_the_table(seen, capsys):
  advice, check, empty, *lines = doctor(capsys)
  assert advice.startswith("Train in ") and check.startswith("For float16 ")
  assert empty == ""
  packages = ("jax", "jaxlib", "optax", "flax", "chex")
  assert lines[:7] == [
    f"python {platform.python_version()}",
    f"optax_lossscale {ols.__version__}",
    *(f"{name} {metadata.version(name)}" for name in packages),
  ]
  kind = jax.devices()[0].device_kind
  assert lines[7:9] == [f"devices: {jax.device_count()} x {kind}", ""]
  table = str(seen).splitlines()
  assert lines[9 : 9 + len(table)] == table
  legend = " ".join(lines[9 + len(table) :])
  for column in re.split(" {2,}", table[1])[1:]:
    assert re.search(rf"{re.escape(column)}[:,]", legend), column
  assert len(lines) == 9 + len(table) + 6


@pytest.mark.parametrize(
  ("product", "preferred", "advice"),
  [
    (float("inf"), "bfloat16", "Train in bfloat16, without loss scaling."),
    (65504.0, "float16", "Train in float16 with ols.DynamicLossScale()."),
    (65504.0, None, "Measure which is faster here, bfloat16 or float16."),
  ],
)
def test_the_check_and_the_dtype_are_those_that_were_observed(
  product, preferred, advice, seen, monkeypatch, capsys
):
  float16 = seen.dtypes["float16"]._replace(product=product)
  found = dataclasses.replace(
    seen,
    dtypes={**seen.dtypes, "float16": float16},
    preferred_dtype=preferred and jnp.dtype(preferred),
  )
  monkeypatch.setattr(ols.hardware, "probe", lambda: found)
  check = "For float16 use check=ols.saturated(jnp.float16) here."
  if product == float("inf"):
    check = "For float16 the default check is the right one here."
  assert doctor(capsys)[:2] == [advice, check]


@pytest.mark.parametrize("kind", [RuntimeError, AssertionError])
def test_without_a_device_the_versions_and_one_line_remain(
  kind, monkeypatch, capsys
):
  def devices():
    raise kind("no\ndriver")

  monkeypatch.setattr(jax, "devices", devices)
  assert cli.main(["doctor"]) == 2
  out, err = capsys.readouterr()
  assert len(out.splitlines()) == 7
  assert err == (
    "optax-lossscale doctor: error: JAX starts no device; is JAX_PLATFORMS "
    "right? no driver\n"
  )
  trace = documents.ROOT / "tests/traces/amax_digits.csv"
  assert cli.main(["simulate", str(trace)]) == 2
  assert capsys.readouterr() == ("", err.replace("doctor", "simulate"))


def test_the_page_shows_the_table_with_its_columns_and_rows(seen):
  section = documents.section(documents.read("docs/command_line.md"), "doctor")
  (shown,) = documents.blocks(section, "text")
  found = str(seen).splitlines()
  columns, *rows = shown.splitlines()[1:]
  assert columns == found[1]
  assert [x.split()[0] for x in rows] == [x.split()[0] for x in found[2:]]
  explained = re.findall(r"^\| ([\w/* ]+) \|", section, re.MULTILINE)
  assert explained == ["column", *re.split(" {2,}", columns)[1:]]


def test_compilers_are_made_once_their_size_is_said(monkeypatch, capsys):
  made = []

  def make(folder, announce):
    announce(folder)
    made.append(capsys.readouterr().out)
    return "/not " + folder

  monkeypatch.setattr(compiling, "make", make)
  assert cli.main(["doctor", "--make-compilers", "there"]) == 0
  assert made == [
    "XLA's compilers take about 1.9 GB on disk. They are installed into there\n"
  ]
  assert capsys.readouterr().out == (
    "Now set OPTAX_LOSSSCALE_COMPILERS='/not there'\n"
  )


def test_compilers_go_into_no_environment_that_is_there(tmp_path, capsys):
  assert cli.main(["doctor", "--make-compilers", str(tmp_path)]) == 2
  assert "must be new, got" in capsys.readouterr().err
  assert not [*tmp_path.iterdir()]
  (tmp_path / "\x1b").symlink_to("nowhere")
  assert cli.main(["doctor", "--make-compilers", f"{tmp_path}/\x1b"]) == 2
  assert rf"must be new, got {tmp_path}/\x1b:" in capsys.readouterr().err


def test_casts_need_compilers_and_a_target_that_is_known(monkeypatch, capsys):
  missing = "must be installed, got {!r}; run `optax-lossscale doctor"
  for place, targets, words in (
    ("/nowhere", "h200", missing),
    ("~no such user", "h200", missing),
    ("/nowhere", "h200,v5", "got 'v5'; did you mean 'v5e'?"),
  ):
    monkeypatch.setenv("OPTAX_LOSSSCALE_COMPILERS", place)
    assert cli.main(["doctor", "--on", targets]) == 2
    out, err = capsys.readouterr()
    assert not out and words.format(place) in err and err.count("\n") == 1
