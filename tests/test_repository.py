"""Workflows, metadata and templates, for contributors and maintainers.

The workflows cannot run here. Each of their commands is a part of .ci/run.
"""

import ast
import datetime
import pathlib
import re
import shutil
import subprocess
import tomllib

import pytest
import typst
import yaml

import optax_lossscale as ols
from tests import documents
from tools import mutants
from tools import set_home
from tools.originals import record

ROOT = documents.ROOT
PROJECT = tomllib.loads(documents.read("pyproject.toml"))["project"]
URL = PROJECT["urls"]["Source"]
HOME = URL.removeprefix("https://github.com/")
SITE = "{}.github.io/{}".format(*HOME.split("/")).lower()
PYTHONS = re.findall(r"Python :: (3\.\d+)", str(PROJECT["classifiers"]))
WORKFLOWS = sorted(ROOT.glob(".github/workflows/*.yml"))
FORMS = [
  ROOT / ".github/ISSUE_TEMPLATE" / name
  for name in ("bug.yml", "feature.yml", "figures.yml")
]
LOADED = {path.stem: yaml.safe_load(path.read_text()) for path in WORKFLOWS}
JOBS = {
  f"{workflow}-{name}": job
  for workflow, loaded in LOADED.items()
  for name, job in loaded["jobs"].items()
}
# The rights of a job, the variable that lets it run, and what it does.
WITH_RIGHTS = {
  "release-publish": (
    {"id-token": "write"},
    "PUBLISH_TO_PYPI",
    ["download-artifact", "pipx run 'twine>=6.1' upload"],
  ),
  "pages-deploy": (
    {"id-token": "write", "pages": "write"},
    "PUBLISH_TO_PAGES",
    ["deploy-pages"],
  ),
}
CITATION = yaml.safe_load(documents.read("CITATION.cff"))

each_job = pytest.mark.parametrize("job", JOBS.values(), ids=JOBS)
each_workflow = pytest.mark.parametrize("loaded", LOADED.values(), ids=LOADED)


def run_ci(*arguments):
  return subprocess.run(
    ["bash", ROOT / ".ci/run", *arguments], capture_output=True, text=True
  )


def parts():
  """Returns the parts that .ci/run lists, with the names of their arguments."""
  usage = run_ci("help").stderr
  found = re.findall(
    r"^\.ci/run (\w+)((?: [][A-Z]+)*)  +\S", usage, re.MULTILINE
  )
  return {name: arguments.split() for name, arguments in found}


def runs():
  """Yields every command of the workflows, for each value of its matrix."""
  for name, job in JOBS.items():
    if name in WITH_RIGHTS:
      continue  # They run nothing of the repository, as a test below says.
    matrix = job.get("strategy", {}).get("matrix", {})
    for step in job["steps"]:
      if "run" in step:
        for python in matrix.get("python", [None]):
          text = step["run"].replace("${{ matrix.python }}", str(python))
          yield job, python, text


def test_a_workflow_runs_nothing_but_parts_of_ci():
  listed = parts()
  assert len(listed) == 9
  used = set()
  for _, _, text in runs():
    program, part, *arguments = text.split()
    assert program == ".ci/run", text
    names = listed[part]
    needed = [name for name in names if not name.startswith("[")]
    assert len(needed) <= len(arguments) <= len(names), text
    used.add(part)
  assert used == set(listed)
  (sentence,) = re.findall(
    r"`.ci/run PART` runs one of its parts: (.*?)\.",
    documents.one_line(documents.read("docs/maintaining.md")),
  )
  assert re.findall(r"`(\w+)`", sentence) == list(listed)


def test_each_job_sets_up_the_python_that_its_part_looks_for():
  ci = documents.read(".ci/run")
  newest, oldest = re.findall(r"^\w+_python=(.*)$", ci, re.MULTILINE)
  assert (oldest, newest) == (PYTHONS[0], PYTHONS[-1])
  for job, python, text in runs():
    _, part, *arguments = text.split()
    (step,) = (x for x in job["steps"] if "python" in x.get("uses", ""))
    given = step["with"]["python-version"]
    if python is not None:
      assert given == "${{ matrix.python }}"
      assert arguments[0] == python
    else:
      assert given == (oldest if part == "oldest" else newest)


def test_the_matrices_are_the_supported_versions_of_python():
  matrices = [x["strategy"]["matrix"] for x in JOBS.values() if "strategy" in x]
  assert len(matrices) == 2
  assert matrices == [{"python": PYTHONS}] * 2


@each_workflow
def test_a_workflow_may_only_read(loaded):
  assert loaded["permissions"] == {"contents": "read"}
  assert "group" in loaded["concurrency"]


def test_only_publishing_gets_a_right_and_only_once_it_is_set_up():
  with_rights = {
    name: job for name, job in JOBS.items() if "permissions" in job
  }
  assert with_rights.keys() == WITH_RIGHTS.keys()
  page = documents.one_line(documents.read("docs/release.md"))
  for name, (rights, variable, does) in WITH_RIGHTS.items():
    job = with_rights[name]
    assert job["permissions"] == rights
    assert job["if"] == f"vars.{variable} == 'true'"
    assert f"gh variable set {variable} --body true" in page
    # It runs no code of the repository beside that right.
    steps = [step.get("run", step.get("uses")) for step in job["steps"]]
    for step, what in zip(steps, does, strict=True):
      assert what in step
  # YAML reads the key `on` as True.
  assert LOADED["release"][True] == {"push": {"tags": ["v*"]}}


@each_job
def test_a_job_ends_and_uses_actions_of_a_known_version(job):
  assert job["timeout-minutes"] <= 60
  for step in job["steps"]:
    if "uses" in step:
      # A tag can be moved to other code, a hash cannot.
      assert re.search(r"^actions/[\w-]+@[0-9a-f]{40}$", step["uses"])
    if "checkout" in step.get("uses", ""):
      assert step["with"] == {"persist-credentials": False}


@pytest.mark.parametrize(
  "arguments",
  [
    ("tests",),
    ("lint", "3.13"),
    ("package",),
    ("release", "v1"),
    ("find_python", "3.13"),
  ],
  ids=" ".join,
)
def test_arguments_that_no_part_takes_are_refused(arguments):
  done = run_ci(*arguments)
  assert done.returncode == 2
  assert done.stderr.startswith(".ci/run tests VERSION ")


def test_a_tag_of_another_version_is_refused(tmp_path):
  done = run_ci("release", "v99.0.0", str(tmp_path))
  assert done.returncode == 1
  assert done.stderr == f"The tag must be v{ols.__version__}, got v99.0.0.\n"
  assert not list(tmp_path.iterdir())


def test_a_release_has_a_date_in_the_changelog_and_in_the_citation():
  entry = rf"^## {re.escape(ols.__version__)} \((.*)\)$"
  (when,) = re.findall(entry, documents.read("CHANGELOG.md"), re.MULTILINE)
  if when == "unreleased":
    assert "date-released" not in CITATION
    done = run_ci("release", f"v{ols.__version__}", "nowhere")
    assert done.returncode == 1
    assert "CHANGELOG.md must have the date" in done.stderr
  else:
    assert str(CITATION["date-released"]) == when


def test_the_steps_of_a_release_set_its_version_and_its_date(tmp_path):
  page = documents.read("docs/release.md")
  assert re.findall(r"^(\d+)\. ", page, re.MULTILINE) == [
    str(number) for number in range(1, 11)
  ]
  files = "CHANGELOG.md", "CITATION.cff", "README.md", "SECURITY.md"
  files += ("optax_lossscale",)
  for name in files:
    copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copyfile
    copy(ROOT / name, tmp_path / name)
  for command in re.findall(r"^ +(sed .*)$", page, re.MULTILINE):
    subprocess.run(["bash", "-ec", command], cwd=tmp_path, check=True)
  citation = yaml.safe_load((tmp_path / "CITATION.cff").read_text())
  assert citation["version"] == "0.2.0"
  assert citation["date-released"] == datetime.date.today()
  assert citation["cff-version"] == CITATION["cff-version"]
  changes = (tmp_path / "CHANGELOG.md").read_text()
  headings = re.findall(r"^## (\S+) \((.*)\)$", changes, re.MULTILINE)
  assert headings[0] == ("0.2.0", str(datetime.date.today()))
  assert "unreleased" not in dict(headings).values()
  assert "Nothing has" not in (tmp_path / "SECURITY.md").read_text()
  readme = (tmp_path / "README.md").read_text()
  assert "Version 0.2.0, for jax" in readme and "In a clone" not in readme
  badges = re.findall(r"\[!\[(\w+)\]\(\S+\)\]\(\S+\)", readme.splitlines()[2])
  assert badges == ["Python", "License", "Tests", "Docs", "PyPI"]
  package = (tmp_path / "optax_lossscale" / "__init__.py").read_text()
  assert '\n__version__ = "0.2.0"\n' in package


def test_the_citation_is_that_of_the_package():
  assert CITATION["version"] == ols.__version__
  assert CITATION["license"] == PROJECT["license"]
  assert CITATION["abstract"] == PROJECT["description"]
  assert CITATION["keywords"] == PROJECT["keywords"]
  assert CITATION["url"] == PROJECT["urls"]["Homepage"]
  assert CITATION["repository-code"] == URL


def addresses(root, names, home):
  """Returns the addresses of a home in these files."""
  site = "{}.github.io/{}".format(*home.split("/"))
  texts = [(root / name).read_text(errors="replace") for name in names]
  found = re.findall(r"https?://[^\s)\"'<>`]+", "\n".join(texts))
  return [x for x in found if home in x or site.lower() in x.lower()]


def test_one_command_moves_the_repository_to_another_address(tmp_path, capsys):
  listed = ("ls-files", "-z", "--cached", "--others", "--exclude-standard")
  made = (".git", ".venv", "*cache*", ".hypothesis", "*.egg-info", "site")
  shutil.copytree(
    ROOT, tmp_path, ignore=shutil.ignore_patterns(*made), dirs_exist_ok=True
  )
  for command in ("init", "add"):
    subprocess.run(["git", command, "."], cwd=tmp_path, check=True)
  listed = subprocess.run(
    ["git", "ls-files", "-z"], cwd=tmp_path, check=True, capture_output=True
  )
  names = sorted(filter(None, listed.stdout.decode().split("\0")))
  before = addresses(tmp_path, names, HOME)
  assert len(before) >= 20

  new = "Jane-D/scaling.jax"
  set_home.main([new], tmp_path)
  assert len(addresses(tmp_path, names, new)) == len(before)
  assert not addresses(tmp_path, names, HOME)
  changed = capsys.readouterr().out.splitlines()
  assert {"README.md", "pyproject.toml", "notebooks/quickstart.ipynb"} <= set(
    changed
  )
  set_home.main([HOME], tmp_path)
  for name in names:
    assert (tmp_path / name).read_bytes() == (ROOT / name).read_bytes(), name


@pytest.mark.parametrize(
  ("tool", "words", "message"),
  [
    (set_home, "", "required: OWNER/NAME"),
    (record, "", "required: SYSTEM"),
    (record, "torch nobody", "SYSTEM: invalid choice: 'nobody'"),
    (mutants, "", "required: command"),
    (mutants, "list --seed 1 --count 0", "--count: must be 1 or more"),
    (mutants, "list --seed 1 --count 1 --packages no", "--packages: invalid"),
    (mutants, "cover new --jobs 0", "--jobs: must be 1 or more, got '0'"),
    (mutants, "cover new --seconds -1", "--seconds: must be 1 or more"),
    (mutants, "cover README.md", "folder: must be a folder to write to: "),
    (mutants, "cover new --tests tests/no", "--tests must be beginnings of"),
    (mutants, "run no.txt new", "list: cannot be read: [Errno 2]"),
    (mutants, "report README.md new", "list: cannot be read: "),
    (mutants, "run list.txt new", "run `cover` first"),
    (mutants, "run list.txt new --most 0", "--most: must be 1 or more"),
  ],
)
def test_a_bad_option_of_a_tool_ends_in_one_line(
  tool, words, message, tmp_path, monkeypatch, capsys
):
  monkeypatch.chdir(tmp_path)
  (tmp_path / "README.md").write_text("nothing")
  (tmp_path / "list.txt").write_text("")
  with pytest.raises(SystemExit) as ended:
    tool.main(words.split())
  out, err = capsys.readouterr()
  (line,) = err.splitlines()
  assert (ended.value.code, out) == (2, "")
  assert ": error: " in line and message in line


@pytest.mark.parametrize(
  "home",
  [
    "optax-lossscale",
    "https://github.com/jane/scaling",
    "a/b.git",
    "a/",
    "a/a.github.io",
  ],
)
def test_an_address_that_github_does_not_allow_is_refused(
  home, tmp_path, capsys
):
  with pytest.raises(SystemExit):
    set_home.main([home], tmp_path)
  assert f"must be OWNER/NAME, such as jane/optax-lossscale, got {home!r}" in (
    documents.one_line(capsys.readouterr().err)
  )


def test_every_address_is_that_of_the_project():
  for name, url in PROJECT["urls"].items():
    assert url.startswith((URL, f"https://{SITE}/")), name
  found = re.compile(r"github\.com/([\w.-]+/optax[-_]lossscale)\b")
  for path in [*ROOT.glob("*.*"), *ROOT.glob("docs/**/*.md")]:
    if path.suffix in (".cff", ".md", ".toml"):
      assert set(found.findall(path.read_text())) <= {HOME}, path


@pytest.mark.parametrize("path", FORMS, ids=lambda path: path.stem)
def test_a_form_is_one_that_github_accepts(path):
  form = yaml.safe_load(path.read_text())
  assert set(form) == {"name", "description", "labels", "body"}
  keys = [field["id"] for field in form["body"]]
  labels = [field["attributes"]["label"] for field in form["body"]]
  assert len(set(keys)) == len(set(labels)) == len(form["body"])
  for field in form["body"]:
    assert field["type"] in ("input", "textarea")
    assert set(field) <= {"type", "id", "attributes", "validations"}
    # GitHub refuses `render` in a field of one line.
    allowed = {"label", "description", "placeholder"}
    allowed |= {"render"} if field["type"] == "textarea" else set()
    assert set(field["attributes"]) <= allowed
  assert form["body"][0]["validations"] == {"required": True}
  for command in re.findall(
    r"[.\w/]*python -m benchmarks \S+ --[^`]+", str(form)
  ):
    assert f"\n{command}\n" in documents.read("docs/costs.md")


def test_a_commit_is_checked_as_ci_checks_it():
  config = yaml.safe_load(documents.read(".pre-commit-config.yaml"))
  (repository,) = config["repos"]
  hooks = {
    x["entry"].removesuffix(" --force-exclude") for x in repository["hooks"]
  }
  ci = re.findall(
    r"^  (\.venv/bin/ruff.*?)(?: --check)? \.$",
    documents.read(".ci/run"),
    re.MULTILINE,
  )
  assert hooks == set(ci)
  assert len(hooks) == 2


def test_the_paper_has_four_pages():
  pages = typst.compile(ROOT / "paper/paper.typ", format="svg")
  assert len(pages) == 4


# The promises of SECURITY.md.


def test_the_package_neither_loads_pickles_nor_executes_text():
  modules = {"ctypes", "marshal", "pickle", "shelve", "subprocess"}
  modules |= {"http", "requests", "socket", "urllib"}
  calls = {"__import__", "compile", "eval", "exec"}
  package = pathlib.Path(ols.__file__).parent
  starts = set()
  for path in package.rglob("*.py"):
    for node in ast.walk(ast.parse(path.read_text())):
      if isinstance(node, ast.Import):
        names = {alias.name.partition(".")[0] for alias in node.names}
        if "subprocess" in names:
          starts.add(str(path.relative_to(package)))
        assert not names & modules - {"subprocess"}, path
      elif isinstance(node, ast.ImportFrom):
        assert node.module.partition(".")[0] not in modules, path
      elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
        assert node.func.id not in calls, path
      elif isinstance(node, ast.keyword):
        assert node.arg != "allow_pickle", path
  # The one that SECURITY.md names.
  assert starts == {"compiled/compiling.py"}
