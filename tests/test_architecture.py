"""The layers of docs/architecture.md, against the imports in the source."""

import ast
import collections
import pathlib
import re

import pytest

import optax_lossscale as ols
from optax_lossscale._jaxpr.operations import NAMES
from tests import documents

PACKAGE = pathlib.Path(ols.__file__).parent
TESTS = pathlib.Path(__file__).parent
PAGE = documents.read("docs/architecture.md")
FILES = sorted(PACKAGE.rglob("*.py"))

# The most lines of each part, without comments and blank ones, so that nobody
# saves on comments. Nothing raises a number: a change that adds lines takes as
# many out.
MOST_LINES = {
  "library": 13_900,
  "instruments": 6_653,
  "compiled": 1_240,
  "plot and cli": 1_150,
}
PARTS = {
  "instruments": "instruments",
  "compiled": "compiled",
  "plot": "plot and cli",
  "cli": "plot and cli",
}

# The most branches of a function; in the proof of a step eight have over 12.
MOST_BRANCHES = 18
BRANCHING = (
  ast.Assert,
  ast.comprehension,
  ast.ExceptHandler,
  ast.For,
  ast.If,
  ast.IfExp,
  ast.match_case,
  ast.While,
)

# The most lines and functions of all tests, and lines of a function.
MOST_TEST_LINES, MOST_TEST_FUNCTIONS, LONGEST_TEST = 34_330, 1_203, 60


def layers():
  """Returns the layer of every package, as the page's table has it."""
  table = documents.section(PAGE, "The layers")
  found = {}
  for number, cell in re.findall(
    r"^\| (\d+) \| ([^|]+)\|", table, re.MULTILINE
  ):
    for package in re.findall(r"`(\w+)(?:/|\.py)`", cell):
      found[package] = int(number)
  return found


def guarantees():
  """Returns the number of each guarantee on the page and the files it names."""
  table = documents.section(PAGE, "Guarantees")
  return [
    (int(number), re.findall(r"\]\(\.\./([^)]+)\)", cells))
    for number, cells in re.findall(r"^\| (\d+) \| (.+)", table, re.MULTILINE)
  ]


def package_of(parts):
  """Returns the package of a module, given its path below the library."""
  return parts[0].removesuffix(".py") if parts else "__init__"


def module_path(name):
  """Returns the path of a module below the library, as parts."""
  parts = name.split(".")[1:]
  folder = PACKAGE.joinpath(*parts)
  if (folder / "__init__.py").exists():
    return (*parts, "__init__.py")
  if parts and folder.with_suffix(".py").exists():
    return (*parts[:-1], f"{parts[-1]}.py")
  return None


def imports(path, text=None):
  """Yields what a file imports of the library, wherever in it, as paths."""
  tree = ast.parse(text or path.read_text())
  # A door names its rooms for type checkers, and imports them on demand.
  is_door = pathlib.Path(path).name == "__init__.py"
  unread = [
    x
    for node in tree.body
    if is_door and isinstance(node, ast.If)
    if ast.unparse(node.test) == "_typing.TYPE_CHECKING"
    for x in node.body
  ]
  for node in ast.walk(tree):
    if node in unread:
      continue
    if isinstance(node, ast.Import):
      imported = [(alias.name, None) for alias in node.names]
    elif isinstance(node, ast.ImportFrom):
      assert node.level == 0, f"{path}: relative import"
      # Each may be a module, or a name in the one that it comes from.
      imported = [
        (f"{node.module}.{alias.name}", node.module) for alias in node.names
      ]
    else:
      continue
    for name, parent in imported:
      if name.split(".")[0] == PACKAGE.name:
        yield module_path(name) or module_path(parent)


def arrows():
  """Yields the importing and the imported file, each with its package."""
  for path in FILES:
    own = path.relative_to(PACKAGE).parts
    for target in imports(path):
      yield path, package_of(own), target, package_of(target)


def test_every_package_is_on_the_page_and_no_other():
  packages = {package_of(path.relative_to(PACKAGE).parts) for path in FILES}
  assert packages - {"__init__", "__main__"} == set(layers())
  assert len(packages) <= 20


def test_a_package_imports_from_layers_above_it_only():
  layer = layers()
  wrong = [
    f"{path.relative_to(PACKAGE)} imports {'/'.join(target)}"
    for path, package, target, other in arrows()
    if package in layer
    and package != other
    # The library's face is for users, and for the programs at the bottom.
    and (other == "__init__" or layer[other] >= layer[package])
    and not (other == "__init__" and package == "cli")
  ]
  assert not wrong, "\n".join(wrong)


def test_no_part_grows():
  own = collections.Counter()
  for path in FILES:
    package = package_of(path.relative_to(PACKAGE).parts)
    lines = map(str.strip, path.read_text().splitlines())
    own[PARTS.get(package, "library")] += sum(
      bool(x) and x[0] != "#" for x in lines
    )
  grown = {
    x: f"{own[x]}, not {MOST_LINES[x]}" for x in own if own[x] > MOST_LINES[x]
  }
  assert not grown, "take lines out; no number is raised"


def complexity(function):
  """Returns 1 and the number of places where a function may branch."""
  total, left = 1, [*ast.iter_child_nodes(function)]
  while left:
    node = left.pop()
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
      continue  # It is counted by itself.
    left += ast.iter_child_nodes(node)
    total += isinstance(node, BRANCHING)
    if isinstance(node, ast.comprehension):
      total += len(node.ifs)
    if isinstance(node, ast.BoolOp):
      total += len(node.values) - 1
  return total


def test_no_function_branches_too_often():
  found = {
    f"{path.relative_to(PACKAGE)}::{node.name}": complexity(node)
    for path in FILES
    for node in ast.walk(ast.parse(path.read_text()))
    if isinstance(node, ast.FunctionDef)
  }
  assert found["__init__.py::_remedy"] == 5
  assert not {x: n for x, n in found.items() if n > MOST_BRANCHES}
  assert sum(n > 12 and "instruments/step" in x for x, n in found.items()) <= 8


def test_tests_grow_by_rows_of_tables():
  texts = {path: path.read_text() for path in TESTS.rglob("*.py")}
  lines = sum(len(text.splitlines()) for text in texts.values())
  assert lines <= MOST_TEST_LINES, "a row or a helper, not another file"
  functions = {
    f"{path.name}::{node.name}": node.end_lineno - node.lineno + 1
    for path, text in texts.items()
    for node in ast.walk(ast.parse(text))
    if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
  }
  assert len(functions) <= MOST_TEST_FUNCTIONS
  long = {x: length for x, length in functions.items() if length > LONGEST_TEST}
  assert not long


def test_no_file_imports_itself_by_way_of_others():
  edges = {}
  for path, _, target, _ in arrows():
    edges.setdefault(path, set()).add(PACKAGE.joinpath(*target))
  done = set()

  def visit(path, above):
    assert path not in above, " -> ".join(map(str, (*above, path)))
    if path not in done:
      for other in edges.get(path, ()):
        if other != PACKAGE / "__init__.py":
          visit(other, (*above, path))
      done.add(path)

  for path in FILES:
    visit(path, ())


def test_a_packages_private_files_are_its_own():
  wrong = [
    f"{path.relative_to(PACKAGE)} imports {'/'.join(target)}"
    for path, package, target, other in arrows()
    if package != other and any(part.startswith("_") for part in target[1:])
    if target[-1] != "__init__.py"
  ]
  assert not wrong, "\n".join(wrong)


def compared_texts(tree):
  """Yields what compares words of a finding, or the name of a primitive."""
  for node in ast.walk(tree):
    operands = []
    if isinstance(node, ast.Compare):
      operands = [node.left, *node.comparators]
    elif isinstance(getattr(node, "func", None), ast.Attribute):
      is_about_ends = re.search("(start|end)swith|fix$", node.func.attr)
      operands = [node.func.value, *node.args] if is_about_ends else []
    for x in [z for y in operands for z in getattr(y, "elts", [y])]:
      text = str(x.value) if isinstance(x, ast.Constant) else ""
      if (
        " " in text
        or text in NAMES
        or getattr(x, "attr", "") in ("text", "remedy", "reason")
      ):
        yield ast.unparse(node)


def test_no_verdict_of_a_step_hangs_on_english_or_a_name_of_jax():
  found = "'a' in x.text; x in ('a b', y); x.remedy.endswith(y); x == 'exp'"
  for text in found.split("; "):
    assert [*compared_texts(ast.parse(text))] == [text]
  for path in (PACKAGE / "instruments/step").glob("*.py"):
    assert not [*compared_texts(ast.parse(path.read_text()))], path


def files_of_one_step():
  """Returns the files that the step's two entries reach by imports."""
  left = [PACKAGE / "_step/loss_scaling.py", PACKAGE / "_step/backward.py"]
  reached = set()
  while left:
    path = left.pop()
    if path not in reached and path.name != "__init__.py":
      reached.add(path)
      left += [PACKAGE.joinpath(*target) for target in imports(path)]
  return reached


def test_the_step_knows_nothing_of_what_stands_on_it():
  reached = files_of_one_step()
  packages = {package_of(path.relative_to(PACKAGE).parts) for path in reached}
  assert packages == {"_base", "_jaxpr", "_rules", "_step"}


def test_an_upward_import_would_be_found():
  text = "def late():\n  from optax_lossscale._step import states\n"
  assert list(imports("x.py", text)) == [("_step", "states.py")]
  text = "import math, optax_lossscale.presets"
  assert list(imports("x.py", text)) == [("presets", "__init__.py")]
  text = "from optax_lossscale import rules, _Name, linen"
  found = [("rules", "__init__.py"), ("__init__.py",), ("linen.py",)]
  assert list(imports("x.py", text)) == found


def test_the_guarantees_are_those_of_the_page():
  numbers = [number for number, _ in guarantees()]
  assert numbers == list(range(1, 19))
  tests = "".join(x.read_text() for x in TESTS.rglob("test_*.py"))
  named = {int(x) for x in re.findall(r"\ndef test_guarantee_(\d+)_", tests)}
  assert named == set(numbers)


@pytest.mark.parametrize(
  ("number", "files"), guarantees(), ids=lambda x: str(x) if x else ""
)
def test_each_guarantee_is_tested_where_the_page_says(number, files):
  assert files
  for file in files:
    text = (documents.ROOT / file).read_text()
    assert f"\ndef test_guarantee_{number}_" in text, file


def test_the_page_has_every_file_of_the_steps_package_and_none_but_the_steps():
  named = set(
    re.findall(r"\b_\w+/\w+\.py", documents.section(PAGE, "One step"))
  )
  reached = {
    "/".join(path.relative_to(PACKAGE).parts) for path in files_of_one_step()
  }
  # The page also names some files of other packages.
  assert {x for x in reached if x.startswith("_step/")} <= named <= reached
