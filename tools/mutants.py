"""Measures what the tests see: mutants of the package, and who tells them.

  python tools/mutants.py list --seed 45 --count 120 > tools/mutants_seed_45.txt
  python tools/mutants.py cover FOLDER
  python tools/mutants.py run tools/mutants_seed_45.txt FOLDER [--first]
  python tools/mutants.py report tools/mutants_seed_45.txt FOLDER

A mutant is the package with one small defect. `list` picks them by a seed, and
spreads them over the packages by lines of code. `cover` runs each file of tests
in a process of its own and notes the lines that it executes. `run` gives each
mutant to the files that execute its line, those of its package first, and notes
every test that fails. `report` counts.

FOLDER holds the notes and a copy of the tree for each job, so the tree itself
does not change. A second `run` goes on where the first was stopped. A file that
was stopped by its limit, or never begun, is unknown: it is not called weak.
"""

import argparse
import ast
import collections
from collections.abc import Callable
from collections.abc import Iterator
import concurrent.futures
import json
import os
import pathlib
import random
import resource
import shutil
import signal
import statistics
import subprocess
import sys
import threading
import typing

PACKAGE = "optax_lossscale"

_COMPARE = {
  ast.Lt: "<=",
  ast.LtE: "<",
  ast.Gt: ">=",
  ast.GtE: ">",
  ast.Eq: "!=",
  ast.NotEq: "==",
  ast.Is: "is not",
  ast.IsNot: "is",
  ast.In: "not in",
  ast.NotIn: "in",
}
_BINARY = {
  ast.Add: "-",
  ast.Sub: "+",
  ast.Mult: "+",
  ast.FloorDiv: "*",
  ast.Mod: "*",
  ast.Div: "*",
  ast.BitOr: "&",
  ast.BitAnd: "|",
}


class Mutant(typing.NamedTuple):
  """`old` at this place of this file becomes `new`."""

  kind: str
  path: str
  line: int
  column: int
  old: str
  new: str

  def of(self, text: str) -> str:
    """The file's text with the defect."""
    lines = text.splitlines(keepends=True)
    start = sum(map(len, lines[: self.line - 1])) + self.column
    if not text.startswith(self.old, start):
      raise ValueError(f"{self.path}:{self.line} no longer has {self.old!r}.")
    return text[:start] + self.new + text[start + len(self.old) :]


# Making the list.


def mutants(path: pathlib.Path) -> Iterator[Mutant]:
  """Yields every mutant of a file."""
  text = path.read_text()

  def source(node: ast.AST) -> str:
    return ast.get_source_segment(text, node) or ""

  for node in _in_functions(ast.parse(text)):
    place, kind, new = node, "", ""
    match node:
      case ast.Compare(left, [operation], [right]):
        kind = "comparison"
        new = f"{source(left)} {_COMPARE[type(operation)]} {source(right)}"
      case ast.Constant(bool() as value):
        kind, new = "constant", str(not value)
      case ast.UnaryOp(ast.USub(), ast.Constant(0.0)):
        kind, new = "constant", "0.0"
      case ast.Constant(int() | float() as value):
        kind, new = "constant", repr(value + 1)
      case ast.BinOp(left, operation, right) if type(operation) in _BINARY:
        kind = "operator"
        new = f"({source(left)} {_BINARY[type(operation)]} {source(right)})"
      case ast.BoolOp(operation, values):
        sign = " or " if isinstance(operation, ast.And) else " and "
        kind, new = (
          "operator",
          f"({sign.join(f'({source(x)})' for x in values)})",
        )
      case ast.UnaryOp(ast.Not(), operand):
        kind, new = "operator", f"bool({source(operand)})"
      case ast.IfExp(test, body, other):
        kind = "branch"
        new = f"({source(other)} if {source(test)} else {source(body)})"
      case ast.If(test):
        place, kind, new = test, "branch", f"(not ({source(test)}))"
      case ast.AugAssign() | ast.Expr(ast.Call()) | ast.Raise():
        kind, new = "deletion", "pass"
      case ast.Assign([ast.Attribute() | ast.Subscript()]):
        kind, new = "deletion", "pass"
    if kind:
      # The tree counts columns in bytes.
      line = text.splitlines()[place.lineno - 1]
      column = len(line.encode()[: place.col_offset].decode())
      old = source(place)
      yield Mutant(kind, str(path), place.lineno, column, old, new)


def _in_functions(tree: ast.Module) -> Iterator[ast.AST]:
  """Yields what functions do, without annotations and texts of errors."""
  waiting: list[tuple[ast.AST, bool]] = [(tree, False)]
  while waiting:
    node, inside = waiting.pop()
    if inside:
      yield node
    if isinstance(node, (ast.arguments, ast.Raise, ast.JoinedStr)):
      continue
    if isinstance(node, ast.Call) and "typing.cast" in ast.unparse(node.func):
      continue
    for name, child in ast.iter_fields(node):
      if name in ("annotation", "returns", "decorator_list", "bases"):
        continue
      children = child if isinstance(child, list) else [child]
      within = inside or isinstance(node, ast.FunctionDef)
      waiting += [(x, within) for x in children if isinstance(x, ast.AST)]


def code_lines(path: pathlib.Path) -> int:
  """Counts the lines that hold code, without docstrings."""
  nodes = list(ast.walk(ast.parse(path.read_text())))
  texts = {
    x.value
    for x in nodes
    if isinstance(x, ast.Expr) and isinstance(x.value, ast.Constant)
  }
  return len(
    {x.lineno for x in nodes if hasattr(x, "lineno") and x not in texts}
  )


def choose(seed: int, count: int, packages: list[str]) -> list[Mutant]:
  """Picks mutants: packages by their lines of code, then kinds, then places."""
  lines = collections.Counter()
  places = collections.defaultdict(lambda: collections.defaultdict(list))
  for path in sorted(pathlib.Path(PACKAGE).rglob("*.py")):
    package = path.parts[1]
    if packages and package not in packages:
      continue
    lines[package] += code_lines(path)
    for mutant in mutants(path):
      places[package][mutant.kind].append(mutant)
  draw = random.Random(seed)
  chosen: set[Mutant] = set()
  shares = {x: count * lines[x] / lines.total() for x in places}
  counts = {x: int(share) for x, share in shares.items()}
  by_rest = sorted(shares, key=lambda x: counts[x] - shares[x])
  for package in by_rest[: count - sum(counts.values())]:
    counts[package] += 1
  for package, wanted in counts.items():
    end = len(chosen) + wanted
    while len(chosen) < end:
      kind = draw.choice(sorted(places[package]))
      chosen.add(draw.choice(places[package][kind]))
  return sorted(chosen, key=lambda x: x[1:])


def read(name: str) -> list[Mutant]:
  """Reads a list; the number of a mutant is its place in it."""
  rows = pathlib.Path(name).read_text().splitlines()
  return [Mutant(*ast.literal_eval(row)) for row in rows]


# Running tests, with this file as a plugin of pytest.


def pytest_configure(config) -> None:
  """Begins to note lines, if asked to."""
  if name := os.environ.get("MUTANTS_LINES"):
    config.add_cleanup(_note_lines(pathlib.Path(name)))


def pytest_collection_modifyitems(items) -> None:
  """Puts the quick tests first."""
  items.sort(key=lambda x: x.get_closest_marker("slow") is not None)


def pytest_runtest_logreport(report) -> None:
  """Notes the outcome of a test."""
  if report.failed or report.when == "call":
    _note(report)


def pytest_collectreport(report) -> None:
  """Notes a file that cannot be imported."""
  if report.failed:
    _note(report)


def _note(report) -> None:
  with open(os.environ["MUTANTS_OUTCOMES"], "a") as file:
    print(json.dumps([report.nodeid, report.outcome]), file=file)


def _note_lines(result: pathlib.Path) -> Callable[[], None]:
  """Begins to note lines of the package; what it returns writes them."""
  monitoring, found = sys.monitoring, collections.defaultdict(set)
  root = f"{os.getcwd()}/"

  def line(code, number):
    if code.co_filename.startswith(f"{root}{PACKAGE}/"):
      found[code.co_filename.removeprefix(root)].add(number)
    return monitoring.DISABLE

  tool, event = monitoring.COVERAGE_ID, monitoring.events.LINE
  monitoring.use_tool_id(tool, "mutants")
  monitoring.register_callback(tool, event, line)
  monitoring.set_events(tool, event)

  def end() -> None:
    monitoring.set_events(tool, 0)
    lines = {name: sorted(numbers) for name, numbers in found.items()}
    result.write_text(json.dumps(lines))

  return end


# Running pytest.


class Job:
  """Runs files of tests, one after the other, in a copy of the tree."""

  def __init__(self, folder: pathlib.Path, number: int) -> None:
    self.tree = folder / f"tree-{number}"
    self.folder = folder
    shutil.rmtree(self.tree, ignore_errors=True)
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(command, capture_output=True, text=True, check=True)
    for name in map(pathlib.Path, names.stdout.splitlines()):
      if name.exists():
        (self.tree / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(name, self.tree / name)

  def test(self, unit: str, seconds: int, **more: str) -> dict[str, typing.Any]:
    """Runs a file of tests for at most so many seconds of one processor."""
    outcomes = self.tree.with_suffix(".jsonl")
    outcomes.write_text("")
    # A program that was compiled for another mutant is not compiled again. JAX
    # finds it by its text, so it is the same program.
    environment = {
      "PYTHONPATH": os.pathsep.join([str(self.tree), str(self.tree / "tools")]),
      "PYTHONDONTWRITEBYTECODE": "1",
      "MUTANTS_OUTCOMES": str(outcomes),
      "JAX_PLATFORMS": "cpu",
      "JAX_COMPILATION_CACHE_DIR": str(self.folder / "compiled"),
      "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
      "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }
    options = ["-q", "-p", "mutants", "-p", "no:cacheprovider", "-m"]
    with open(self.tree.with_suffix(".txt"), "w") as output:
      process = subprocess.Popen(
        [sys.executable, "-m", "pytest", *options, "not long", unit],
        cwd=self.tree,
        env=os.environ | environment | more,
        stdout=output,
        stderr=output,
        start_new_session=True,
        preexec_fn=lambda: resource.setrlimit(
          resource.RLIMIT_CPU, (seconds, seconds)
        ),
      )
      # Tests that wait for another process do not use up their seconds.
      timer = threading.Timer(
        4 * seconds, os.killpg, (process.pid, signal.SIGKILL)
      )
      timer.start()
      _, status, usage = os.wait4(process.pid, 0)
      timer.cancel()
      process.returncode = os.waitstatus_to_exitcode(status)
    noted = [json.loads(x) for x in outcomes.read_text().splitlines()]
    return {
      "unit": unit,
      "failed": sorted({x for x, outcome in noted if outcome == "failed"}),
      "passed": len({x for x, outcome in noted if outcome == "passed"}),
      "seconds": round(usage.ru_utime + usage.ru_stime, 1),
      "complete": process.returncode >= 0,
    }


def _units(tests: list[str]) -> list[str]:
  """The files of tests; the doctests are one."""
  files = map(str, pathlib.Path("tests").rglob("test_*.py"))
  units = [*sorted(files), PACKAGE]
  return [x for x in units if x.startswith(tuple(tests))] if tests else units


def _notes(path: pathlib.Path) -> list[dict[str, typing.Any]]:
  if not path.exists():
    return []
  return [json.loads(x) for x in path.read_text().splitlines()]


def _in_jobs(
  folder: pathlib.Path,
  jobs: int,
  work: Callable[[Job, typing.Any], Iterator[dict[str, typing.Any]]],
  tasks: list[typing.Any],
  path: pathlib.Path,
) -> None:
  """Shares tasks among jobs and appends what they find to `path`."""
  waiting, lock = collections.deque(tasks), threading.Lock()

  def run(job: Job) -> None:
    while True:
      with lock:
        if not waiting:
          return
        task = waiting.popleft()
      for found in work(job, task):
        with lock, path.open("a") as file:
          print(json.dumps(found), file=file)

  with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
    for done in [pool.submit(run, Job(folder, x)) for x in range(jobs)]:
      done.result()


def cover(
  folder: pathlib.Path, jobs: int, seconds: int, tests: list[str]
) -> None:
  """Notes the lines that each file of tests executes, and what fails today."""
  path = folder / "cover.jsonl"
  known = {x["unit"] for x in _notes(path)}

  def work(job: Job, unit: str) -> Iterator[dict[str, typing.Any]]:
    lines = job.tree.with_suffix(".json")
    lines.unlink(missing_ok=True)
    found = job.test(unit, seconds, MUTANTS_LINES=str(lines))
    if found["complete"]:
      found["lines"] = json.loads(lines.read_text())
    yield found

  units = [x for x in _units(tests) if x not in known]
  _in_jobs(folder, jobs, work, units, path)


def run(
  name: str,
  folder: pathlib.Path,
  jobs: int,
  seconds: int,
  most: int,
  first: bool,
) -> None:
  """Gives each mutant of a list to the files that execute its line."""
  covered = _notes(folder / "cover.jsonl")
  before = {test for x in covered for test in x["failed"]}
  path = folder / f"{pathlib.Path(name).stem}.jsonl"
  known = collections.defaultdict(list)
  for found in _notes(path):
    known[found["mutant"]].append(found)

  def work(
    job: Job, task: tuple[int, Mutant]
  ) -> Iterator[dict[str, typing.Any]]:
    number, mutant = task
    spent = sum(x["seconds"] for x in known[number])
    done = {x["unit"] for x in known[number]}
    told = {x for found in known[number] for x in found["failed"]} - before
    place = job.tree / mutant.path
    text = place.read_text()
    place.write_text(mutant.of(text))
    try:
      for unit in _covering(mutant, covered):
        if spent >= most or (first and told):
          return
        if unit not in done:
          found = job.test(unit, seconds)
          spent += found["seconds"]
          told |= {*found["failed"]} - before
          yield {"mutant": number, **found}
    finally:
      place.write_text(text)

  _in_jobs(folder, jobs, work, list(enumerate(read(name), 1)), path)


def _covering(
  mutant: Mutant, covered: list[dict[str, typing.Any]]
) -> list[str]:
  """The files that execute a mutant's line, those of its package first.

  Among them, files with few lines come first. A file that had no time to tell
  its lines comes last.
  """
  package = mutant.path.split("/")[1].removeprefix("_").removesuffix(".py")
  near = (f"tests/{package}/", f"tests/test_{package}.py")
  sizes = {}
  for found in covered:
    lines = found.get("lines")
    if lines is None:
      sizes[found["unit"]] = sys.maxsize
    elif mutant.line in lines.get(mutant.path, ()):
      sizes[found["unit"]] = sum(map(len, lines.values()))
  return sorted(sizes, key=lambda x: (not x.startswith(near), sizes[x]))


# What was found.

# Pages, doctests, notebooks, recorded originals and guarantees see everything.
WIDE = (
  PACKAGE,
  "tests/examples/",
  "tests/guides/",
  "tests/presets/test_presets.py::test_a_preset_moves_s_",
  "tests/test_notebooks.py",
  "tests/test_pages.py",
  "tests/test_porting.py",
  "tests/test_readme.py",
)


def report(name: str, folder: pathlib.Path) -> None:
  """Prints each mutant with the files that tell it, then the counts."""
  covered = _notes(folder / "cover.jsonl")
  before = {test for x in covered for test in x["failed"]}
  found = collections.defaultdict(list)
  for note in _notes(folder / f"{pathlib.Path(name).stem}.jsonl"):
    found[note["mutant"]].append(note)
  verdicts, files = collections.Counter(), []
  for number, mutant in enumerate(read(name), 1):
    notes = found[number]
    units = _covering(mutant, covered)
    unknown = len(units) - sum(x["complete"] for x in notes)
    told = sorted({x for note in notes for x in note["failed"]} - before)
    narrow = {
      x.partition("::")[0]
      for x in told
      if not x.startswith(WIDE) and "::test_guarantee_" not in x
    }
    verdict = "killed" if told else "unknown" if unknown else "survived"
    verdicts[verdict] += 1
    if told:
      files.append(len(narrow))
    print(
      f"{number} {verdict} {mutant.path}:{mutant.line} {mutant.old!r} ->"
      f" {mutant.new!r}\n  {len(told)} tests fail, in {len(narrow)} narrow"
      f" files; {unknown} of {len(units)} files unknown"
    )
    for file in sorted(narrow):
      print(f"    {file}")
  print(dict(verdicts))
  if files:
    print(f"files: median {statistics.median(files)}, worst {max(files)}")


class _Parser(argparse.ArgumentParser):
  """argparse without the usage before an error."""

  def error(self, message: str) -> typing.NoReturn:
    self.exit(2, f"{self.prog}: error: {message}\n")


def _count(text: str) -> int:
  if not text.isdecimal() or not int(text):
    raise argparse.ArgumentTypeError(f"must be 1 or more, got {text!r}")
  return int(text)


def _list(text: str) -> str:
  try:
    read(text)
  except (OSError, SyntaxError, TypeError, ValueError) as error:
    raise argparse.ArgumentTypeError(f"cannot be read: {error}") from error
  return text


def _folder(text: str) -> pathlib.Path:
  try:
    (path := pathlib.Path(text).resolve()).mkdir(parents=True, exist_ok=True)
  except OSError as error:
    raise argparse.ArgumentTypeError(
      f"must be a folder to write to: {error}"
    ) from error
  return path


def main(argv: list[str] | None = None) -> None:
  """Runs a command."""
  parser = _Parser(description=__doc__)
  commands = parser.add_subparsers(dest="command", required=True)
  lists, covers, runs, reports = map(
    commands.add_parser, ["list", "cover", "run", "report"]
  )
  packages = {x.parts[1] for x in pathlib.Path(PACKAGE).rglob("*.py")}
  lists.add_argument("--seed", type=int, required=True)
  lists.add_argument("--count", type=_count, required=True)
  lists.add_argument(
    "--packages", nargs="*", choices=sorted(packages), default=[]
  )
  covers.add_argument(
    "--tests", nargs="*", default=[], help="beginnings of paths"
  )
  runs.add_argument(
    "--first", action="store_true", help="leave a mutant when a file tells it"
  )
  for command in runs, reports:
    command.add_argument("list", type=_list)
  for command in covers, runs, reports:
    command.add_argument("folder", type=_folder)
  for command, seconds in (covers, 600), (runs, 90):
    command.add_argument("--jobs", type=_count, default=os.cpu_count())
    command.add_argument("--seconds", type=_count, default=seconds)
  runs.add_argument(
    "--most", type=_count, default=300, help="seconds for one mutant"
  )
  given = vars(parser.parse_args(argv))
  if not _units(given.get("tests", [])):
    parser.error(f"--tests must be beginnings of paths, got {given['tests']}")
  if "list" in given and not (given["folder"] / "cover.jsonl").exists():
    parser.error(f"run `cover` first, got no cover.jsonl in {given['folder']}")
  match given.pop("command"):
    case "list":
      for mutant in choose(**given):
        print(repr(tuple(mutant)))
    case "cover":
      cover(**given)
    case "run":
      run(given.pop("list"), **given)
    case "report":
      report(given.pop("list"), **given)


if __name__ == "__main__":
  main()
