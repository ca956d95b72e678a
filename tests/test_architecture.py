"""The layers of docs/architecture.md, against the imports in the source."""

import ast
import collections
import pathlib
import re

import pytest

import optax_lossscale as ols
from tests import documents

PACKAGE = pathlib.Path(ols.__file__).parent
TESTS = pathlib.Path(__file__).parent
PAGE = documents.read("docs/architecture.md")
FILES = sorted(PACKAGE.rglob("*.py"))

# The most lines of each package. Lower a number when lines go; where one has
# to grow, an entry in `GROWN` says why.
LINES = {
  "__init__": 127,
  "__main__": 8,
  "_autocast": 1744,
  "_base": 1218,
  "_jaxpr": 1310,
  "_precision": 1112,
  "_rules": 616,
  "_step": 3351,
  "checkpoints": 263,
  "cli": 395,
  "experimental": 415,
  "hardware": 1040,
  "instruments": 7021,
  "linen": 263,
  "nnx": 428,
  "plot": 726,
  "presets": 2268,
  "rules": 755,
}
# Triples of a package, how many lines more it has, and what they are for.
GROWN: list[tuple[str, int, str]] = [
  ("instruments", 1474, "`compile_report`, and what reads compiled programs"),
  ("instruments", 574, "`tune_precision`"),
  (
    "instruments",
    37,
    "histories written as a whole, replays under any debug switch",
  ),
  ("cli", 45, "names, terminals and streams of any kind"),
  ("plot", 12, "names that matplotlib would read as mathematics"),
  ("_base", 5, "text that is safe for a terminal"),
  ("_base", 170, "few kernels on GPUs"),
  ("_step", 12, "few kernels on GPUs"),
  ("experimental", 1, "what varies is read from `bits`"),
  ("experimental", 3, "values of a guard above 2^126"),
  ("_precision", 788, "remainders, stochastic rounding, bfloat16 moments"),
  ("_autocast", 495, "formats of products: float8, float32 results"),
  ("_autocast", 29, "overrides that leave a scope to the level, or to float8"),
  ("_jaxpr", 3, "a pattern for everything"),
  ("_jaxpr", 9, "a choice by platform counts once"),
  ("nnx", 10, "the arguments of `autocast` for them"),
  ("_step", 53, "`loss_scaling` around them sees the parameters' own dtypes"),
  ("__init__", 4, "their two names"),
  ("instruments", 90, "counts, a loss that gates, one of several updates"),
  ("_step", 23, "a guard without a limit is refused"),
  ("_autocast", 4, "a dtype or a small letter in place of a level"),
  ("experimental", 3, "what the limit's rounding is"),
  ("cli", 72, "`doctor --on` and `doctor --make-compilers`"),
  ("_base", 156, "paths, arguments of a wrong type, JAX's switches"),
  ("_precision", 13, "parameters that stay finite, and whose they are"),
  ("_step", 80, "stacks of states, flags of a wrong type"),
  ("instruments", 148, "paths compared as paths, S in other outputs, switches"),
  ("instruments", 25, "a right step in two lines, float16 without a rule"),
  ("__init__", 8, "names in submodules"),
  ("_rules", 3, "what the scalers of jmp can do"),
  ("_base", 25, "arguments of apex and fairseq, and of functions"),
  ("_autocast", 3, "that it is no decorator with arguments"),
  ("__init__", 2, "`cast_inputs`"),
  ("_autocast", 268, "marked functions"),
  ("_base", 1, "positions of arguments"),
  ("_jaxpr", 27, "marks, and which operations are kernels"),
  ("instruments", 37, "kernels in two reports"),
  ("linen", 21, "gradients that are not like the parameters"),
  ("nnx", 13, "swapped arguments"),
  ("plot", 9, "dtypes and scales of a wrong type"),
  ("checkpoints", 8, "leaves that are no arrays"),
  ("presets", 8, "the attributes of a scaler"),
  ("rules", 5, "states of a wrong type"),
  ("_autocast", 2, "a promotion that the program did not write"),
  ("_jaxpr", 1, "a transfer guard"),
  ("_rules", 1, "states of a wrong type"),
  ("cli", 1, "an argument's own choices"),
  ("_base", 87, "names of other systems, and the line to write instead"),
  ("_step", 40, "parameters that are no arrays, pairs, a loss scaled twice"),
  ("_autocast", 21, "a block, a device in place of a function"),
  ("presets", 12, "presets by other names"),
  ("_rules", 11, "arguments of other systems' rules"),
  ("cli", 8, "advice before the table"),
  ("__init__", 3, "names of other systems"),
]
# How many lines a package may be below its number before the number is stale.
SLACK = 10

# The most lines and functions of all tests, and lines of a function.
MOST_TEST_LINES, MOST_TEST_FUNCTIONS, LONGEST_TEST = 34_440, 1_203, 60


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
  for node in ast.walk(ast.parse(text or path.read_text())):
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


def test_no_package_grows_without_a_reason():
  most = collections.Counter(LINES)
  for package, lines, reason in GROWN:
    assert lines > 0 and reason
    most[package] += lines
  own = collections.Counter()
  for path in FILES:
    package = package_of(path.relative_to(PACKAGE).parts)
    own[package] += len(path.read_text().splitlines())
  grown = {x: f"{own[x]}, not {most[x]}" for x in own if own[x] > most[x]}
  assert not grown, "take lines out, or say in GROWN why there are more"
  stale = {x: own[x] for x in most if own[x] < most[x] - SLACK}
  assert not stale, "lower these numbers"


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
