"""What the README shows works as printed."""

import contextlib
import email
import io
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib

import hatchling.build
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from readme_renderer import markdown

import optax_lossscale as ols
from tests import documents

README = documents.read("README.md")
PASTE, TESTS = documents.blocks(README, "sh")[0].splitlines()
(DIFF,) = documents.blocks(README, "diff")
(CHECKED,) = documents.blocks(README, "text")
PROJECT = tomllib.loads(documents.read("pyproject.toml"))["project"]
RELEASE = documents.ROOT / "docs" / "release.md"
# Pages whose commands follow the set-up that the README gives.
FOLLOWING = [
  # A release needs other programs; tests/test_repository.py has its steps.
  *sorted({*(documents.ROOT / "docs").rglob("*.md")} - {RELEASE}),
  documents.ROOT / "examples" / "README.md",
  documents.ROOT / "notebooks" / "README.md",
  documents.ROOT / "CONTRIBUTING.md",
  documents.ROOT / "SECURITY.md",
]


def table(text):
  """Returns the rows of a table: the other cells, by the first one."""
  lines = re.findall(r"^\| *(.*?) *\|$", text, re.MULTILINE)
  rows = [re.split(r" *\| *", line) for line in lines]
  return {name: cells for name, *cells in [rows[0], *rows[2:]]}


def test_what_to_paste_and_what_to_change_come_first():
  lines = README.splitlines()
  assert len(lines) <= 110
  assert lines.index("```sh") < 15
  assert lines.index("```diff") < 40
  assert len(re.findall("^[+-]", DIFF, re.MULTILINE)) == 6
  # Whoever has a clone begins at the second command.
  assert TESTS.startswith(PASTE.split(" && ")[2])


@pytest.mark.long
def test_the_pasted_line_works_on_a_fresh_machine(tmp_path):
  clone, home, folder = (tmp_path / x for x in ("clone", "home", "folder"))
  made = (".git", ".venv", "*cache*", "*.egg-info", "site")
  shutil.copytree(documents.ROOT, clone, ignore=shutil.ignore_patterns(*made))
  author = ("-c", "user.name=A", "-c", "user.email=a@b.c")
  for words in (["init", "-q"], ["add", "."], [*author, "commit", "-qm", "."]):
    subprocess.run(["git", *words], cwd=clone, check=True)
  home.mkdir()
  folder.mkdir()
  kept = {k: v for k, v in os.environ.items() if k.startswith("PIP_")}
  python = tmp_path / "bin" / "python3"
  python.parent.mkdir()
  python.symlink_to(getattr(sys, "_base_executable", sys.executable))
  led = {
    "GIT_CONFIG_COUNT": "1",
    "GIT_CONFIG_KEY_0": f"url.{clone}.insteadOf",
    "GIT_CONFIG_VALUE_0": PROJECT["urls"]["Source"],
  }
  path = f"{python.parent}{os.pathsep}{os.environ['PATH']}"
  done = subprocess.run(
    ["bash", "-c", PASTE],
    cwd=folder,
    env={**kept, **led, "HOME": str(home), "PATH": path},
    capture_output=True,
    text=True,
  )
  assert done.returncode == 0, done.stderr
  lines = done.stdout.split("final loss", 1)[1].splitlines()[1:]
  printed = [re.split(r" {2,}", line) for line in lines if "  " in line]
  shown = table(documents.section(README, "See it work"))
  assert shown.pop("") == [
    *("final loss", "held-out accuracy", "skipped steps", "last S")
  ]
  assert {x: [y for y in z if y] for x, z in shown.items()} == {
    name: cells for name, *cells in printed
  }


@pytest.mark.parametrize("marks", [" -", " +"])
def test_the_lines_that_change_are_a_step_in_float32_and_one_in_float16(marks):
  lines = [x for x in DIFF.splitlines() if x and x[0] in marks]
  outer, inner = [], []
  for line in lines:
    (inner if "params" in line or "opt_state" in line else outer).append(
      line[1:]
    )
  names = documents.training() | {"optax": optax}
  exec("\n".join(outer), names)
  step = documents.step("\n".join(inner) + "\n", names)
  params, batch = names["params"], names["batch"]
  opt_state = names["tx"].init(params)
  moved, _, loss = step(params, opt_state, batch)
  expected = names["loss_fn"](params, batch)
  np.testing.assert_allclose(loss, expected, rtol=1e-3)
  # Adam's first step is its rate.
  moved = jnp.abs(moved["w"] - params["w"])
  np.testing.assert_allclose(moved, 1e-3, rtol=1e-2)
  if "+" in marks:
    (code,) = documents.blocks(README)
    names |= {"train_step": step, "opt_state": opt_state}
    with contextlib.redirect_stdout(io.StringIO()) as printed:
      exec(code, names)
    assert printed.getvalue() == CHECKED


def test_the_figures_of_a_gpu_are_those_that_were_measured():
  rows = table(documents.section(README, "What it buys, and what it costs"))
  assert rows.pop("") == ["ms", "peak GB"]
  measured = json.loads(documents.read("benchmarks/measured/h100.json"))
  programs = [
    *("jax float32", "jax TF32", "jax float16, O1, loss_scaling"),
    *("jax float16, loss_scaling", "jax bfloat16"),
  ]
  found = [measured["parts"]["Train step"][name] for name in programs]
  assert [*rows.values()] == [
    [f"{1e3 * x['seconds'][1]:.1f}", f"{x['peak'] / 1e9:.1f}"] for x in found
  ]
  assert [x["attention"] for x in found[3:]] == ["cudnn", "cudnn"]


def test_the_rows_on_other_libraries_are_those_that_a_test_runs():
  links = re.compile(r"\[([^]]*)\](\[.*?\]|\(.*?\))")
  everything, shown = (
    table(links.sub(r"\1", text))
    for text in (
      documents.read("docs/different.md"),
      documents.section(README, "How it differs"),
    )
  )
  assert len(shown) == 7
  columns = [everything[""].index(name) for name in shown[""]]
  for name, cells in shown.items():
    assert cells == [everything[name][column] for column in columns], name


def commands(page):
  """Returns the words of every shell command, in the page's order."""
  return [
    shlex.split(command)
    for block in documents.blocks(page.read_text(), "sh")
    for command in block.split("&&")
  ]


@pytest.mark.parametrize(
  "page", [documents.ROOT / "README.md", *FOLLOWING], ids=lambda page: page.stem
)
def test_every_command_is_that_of_the_environment_that_was_made(page):
  for program, *words in commands(page):
    if (program, page.name) in (("git", "README.md"), ("cd", "README.md")):
      continue  # What leads to a clone, which all others take for granted.
    # The porting page quotes the options of other systems' programs.
    if page.parent.name == "porting" and program.startswith("--"):
      continue
    assert program in ("python3", ".ci/run") or program.startswith(".venv/bin/")
    if program == ".venv/bin/pip" and words[-1] != ".":
      (extra,) = re.findall(r"^\.\[(\w+)\]$", words[-1])
      assert extra in PROJECT["optional-dependencies"]
  # A command in a sentence has its path too.
  inline = re.findall(r"`([^`\n]+)`", page.read_text())
  for text in inline:
    assert not re.match(r"(optax-lossscale|python -m) \S+ -", text), text


def test_the_status_is_that_of_the_package():
  dependencies = dict(x.split(">=") for x in PROJECT["dependencies"])
  one_line = documents.one_line(README)
  assert f"jax {dependencies['jax']} and later" in one_line
  assert f"optax {dependencies['optax']} and later" in one_line
  lowest = PROJECT["requires-python"].removeprefix(">=")
  highest = re.findall(r"Python :: (3\.\d+)", str(PROJECT["classifiers"]))[-1]
  assert f"Python {lowest} to {highest}" in one_line
  assert f"Version {ols.__version__}," in README


def test_the_package_index_renders_it_with_links_that_lead_there(
  tmp_path, monkeypatch
):
  monkeypatch.chdir(documents.ROOT)
  name = hatchling.build.prepare_metadata_for_build_wheel(str(tmp_path))
  metadata = email.message_from_string(
    (tmp_path / name / "METADATA").read_text()
  )
  assert metadata["Description-Content-Type"] == "text/markdown"
  rendered = markdown.render(metadata.get_payload())
  links = re.findall(r'<(?:a|img)\b[^>]* (?:href|src)="([^"]+)"', rendered)
  # The renderer gives each heading a link to itself.
  links = [link for link in links if not link.startswith("#user-content-")]
  assert len(links) == len(re.findall(r"\]\(", README))
  home = metadata.get_all("Project-URL")
  (source,) = (x.split(", ")[1] for x in home if x.startswith("Source"))
  raw = source.replace("github.com", "raw.githubusercontent.com")
  tag = f"v{ols.__version__}"
  headings = re.findall(r"^#+ (.*)$", README, re.MULTILINE)
  headings = {heading.lower().replace(" ", "-") for heading in headings}
  pictures = 0
  for link in links:
    assert link.startswith("https://"), link
    for files in (f"{source}/blob/{tag}/", f"{raw}/{tag}/"):
      if link.startswith(files):
        path, _, anchor = link.removeprefix(files).partition("#")
        assert (documents.ROOT / path).is_file(), link
        assert not anchor or path != "README.md" or anchor in headings, link
        assert (path.endswith(".png")) == (files.startswith(raw)), link
        pictures += path.endswith(".png")
  assert pictures == 1
