"""What the README shows works as printed."""

import email
import re
import shlex
import subprocess
import sys
import tomllib

import hatchling.build
import jax
import jax.numpy as jnp
import optax
import pytest
from readme_renderer import markdown

import optax_lossscale as ols
from tests import documents

README = documents.read("README.md")
(PROGRAM,) = documents.blocks(README)
(SHOWN,) = documents.blocks(README, "text")
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


def test_code_comes_first():
  lines = README.splitlines()
  assert len(lines) <= 120
  assert lines.index("```python") < 25


def test_the_program_prints_what_is_shown(tmp_path):
  program = tmp_path / "example.py"
  program.write_text(PROGRAM)
  run = [sys.executable, "-W", "error", str(program)]
  printed = subprocess.run(run, capture_output=True, text=True, check=True)
  pattern = r"(The step is right.*)\nloss (.*), S (.*)\n"
  got, shown = (
    re.fullmatch(pattern, text, re.DOTALL).groups()
    for text in (printed.stdout, SHOWN)
  )
  assert got[0] == shown[0]
  # Other versions and processors round otherwise.
  assert float(got[1]) == pytest.approx(float(shown[1]), rel=0.2)
  assert got[2] == shown[2]


def test_the_program_is_short_and_computes_in_float16():
  assert "ols.autocast(loss_fn)" in PROGRAM
  assert len([x for x in PROGRAM.splitlines() if x.strip()]) <= 30
  assert "precision (exact): Operations work in float16." in SHOWN


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
  project = tomllib.loads(documents.read("pyproject.toml"))["project"]
  for program, *words in commands(page):
    # The porting page quotes the options of other systems' programs.
    if page.parent.name == "porting" and program.startswith("--"):
      continue
    assert program in ("python3", ".ci/run") or program.startswith(".venv/bin/")
    if program == ".venv/bin/pip" and words[-1] != ".":
      (extra,) = re.findall(r"^\.\[(\w+)\]$", words[-1])
      assert extra in project["optional-dependencies"]
  # A command in a sentence has its path too.
  inline = re.findall(r"`([^`\n]+)`", page.read_text())
  for text in inline:
    assert not re.match(r"(optax-lossscale|python -m) \S+ -", text), text


def test_the_status_is_that_of_the_package():
  project = tomllib.loads(documents.read("pyproject.toml"))["project"]
  dependencies = dict(x.split(">=") for x in project["dependencies"])
  one_line = documents.one_line(README)
  assert f"jax {dependencies['jax']} and later" in one_line
  assert f"optax {dependencies['optax']} and later" in one_line
  lowest = project["requires-python"].removeprefix(">=")
  highest = re.findall(r"Python :: (3\.\d+)", str(project["classifiers"]))[-1]
  assert f"Python {lowest} to {highest}" in one_line
  assert f"Version {ols.__version__}," in README


def test_bfloat16_parameters_and_their_state_take_the_bytes_of_the_table():
  table = documents.section(README, "Parameters in bfloat16")
  ways = dict(re.findall(r"`(ols\..*)`.* \| (\d+) \|$", table, re.MULTILINE))
  assert len(ways) == 4
  params = jax.ShapeDtypeStruct((1024, 1024), jnp.bfloat16)
  for code, shown in ways.items():
    tx = eval(code, {"ols": ols, "adam": optax.adam(1e-3)})
    stored = jax.tree.leaves((params, jax.eval_shape(tx.init, params)))
    each = sum(x.size * x.dtype.itemsize for x in stored) / params.size
    assert each == pytest.approx(int(shown), abs=1e-3), code


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
        assert not anchor or anchor in headings, link
        assert (path.endswith(".png")) == (files.startswith(raw)), link
        pictures += path.endswith(".png")
  assert pictures == 1
