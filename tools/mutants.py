"""Makes mutants of the package: small changes that a test should see.

  python tools/mutants.py list --seed 7 --count 30 FILE [FILE ...]
  python tools/mutants.py run LIST --only 3 -- -q -x tests/autocast

`list` picks places at random in functions of the files and prints one mutant a
line: its number, its place and what replaces what. `run` puts each mutant into
the file, runs pytest, restores the file and prints "killed" or "survived".
"""

import argparse
import ast
from collections.abc import Iterator
import pathlib
import random
import subprocess
import sys

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


def mutants(path: pathlib.Path) -> Iterator[tuple[int, int, str, str]]:
  """Yields the beginning and end of each place, its text and the new text."""
  text = path.read_text()
  starts = [0]
  for line in text.splitlines(keepends=True):
    starts.append(starts[-1] + len(line))

  def source(node: ast.AST) -> str:
    return ast.get_source_segment(text, node) or ""

  for node in _in_functions(ast.parse(text)):
    new = None
    match node:
      case ast.Compare(left, [operation], [right]):
        sign = _COMPARE[type(operation)]
        new = f"{source(left)} {sign} {source(right)}"
      case ast.BinOp(left, operation, right) if type(operation) in _BINARY:
        sign = _BINARY[type(operation)]
        new = f"({source(left)} {sign} {source(right)})"
      case ast.BoolOp(operation, values):
        sign = " or " if isinstance(operation, ast.And) else " and "
        new = f"({sign.join(f'({source(x)})' for x in values)})"
      case ast.UnaryOp(ast.Not(), operand):
        new = f"bool({source(operand)})"
      case ast.IfExp(test, body, other):
        new = f"({source(other)} if {source(test)} else {source(body)})"
      case ast.If(test):
        node, new = test, f"not ({source(test)})"
      case ast.Constant(bool() as value):
        new = str(not value)
      case ast.Constant(int() | float() as value):
        new = repr(value + 1)
      case ast.AugAssign() | ast.Expr(ast.Call()):
        new = "pass"
    if new is not None:
      begin = starts[node.lineno - 1] + node.col_offset
      end = starts[node.end_lineno - 1] + node.end_col_offset
      yield begin, end, text[begin:end], new


def _in_functions(tree: ast.Module) -> Iterator[ast.AST]:
  """Yields what functions do, without annotations and texts of errors."""
  waiting: list[tuple[ast.AST, bool]] = [(tree, False)]
  while waiting:
    node, inside = waiting.pop()
    if isinstance(node, (ast.arguments, ast.Raise, ast.JoinedStr)):
      continue
    if isinstance(node, ast.Call) and "typing.cast" in ast.unparse(node.func):
      continue
    if inside:
      yield node
    for name, child in ast.iter_fields(node):
      if name in ("annotation", "returns", "decorator_list", "bases"):
        continue
      children = child if isinstance(child, list) else [child]
      within = inside or isinstance(node, ast.FunctionDef)
      waiting += [(x, within) for x in children if isinstance(x, ast.AST)]


def make_list(paths: list[str], seed: int, count: int) -> None:
  """Prints mutants, spread over the files by their number of places."""
  places = [
    (path, *mutant) for path in paths for mutant in mutants(pathlib.Path(path))
  ]
  places.sort()
  chosen = sorted(random.Random(seed).sample(places, count))
  print(f"# seed {seed}, {count} of {len(places)} places")
  for number, (path, begin, end, old, new) in enumerate(chosen, 1):
    print(f"{number}\t{path}\t{begin}:{end}\t{old!r}\t{new!r}")


def run(mutants: str, only: list[int], arguments: list[str]) -> None:
  """Runs pytest on each mutant of a list."""
  for line in pathlib.Path(mutants).read_text().splitlines():
    if line.startswith("#"):
      continue
    number, name, place, old, new = line.split("\t")
    if only and int(number) not in only:
      continue
    path = pathlib.Path(name)
    text = path.read_text()
    begin, end = map(int, place.split(":"))
    if text[begin:end] != ast.literal_eval(old):
      print(f"{number}\tgone", flush=True)
      continue
    path.write_text(text[:begin] + ast.literal_eval(new) + text[end:])
    try:
      command = [sys.executable, "-m", "pytest", *arguments]
      done = subprocess.run(command, capture_output=True, text=True)
    finally:
      path.write_text(text)
    verdict = {0: "survived", 1: "killed"}.get(done.returncode, "broken")
    failed = [x for x in done.stdout.splitlines() if x.startswith("FAILED")]
    print(f"{number}\t{verdict}\t{failed[:1]}", flush=True)


if __name__ == "__main__":
  parser = argparse.ArgumentParser(description=__doc__)
  commands = parser.add_subparsers(dest="command", required=True)
  lists = commands.add_parser("list")
  lists.add_argument("files", nargs="+")
  lists.add_argument("--seed", type=int, required=True)
  lists.add_argument("--count", type=int, required=True)
  runs = commands.add_parser("run")
  runs.add_argument("list")
  runs.add_argument("--only", type=int, nargs="*", default=[])
  # What follows "--" is for pytest.
  end = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
  given = parser.parse_args(sys.argv[1:end])
  if given.command == "list":
    make_list(given.files, given.seed, given.count)
  else:
    run(given.list, given.only, sys.argv[end + 1 :])
