"""Prints the public surface: each public name with its signature or fields.

The text is tools/surface.txt. Write it anew after a change of the surface:

  python -m tests.surface > tools/surface.txt
"""

import ast
import inspect
import textwrap
import types

import optax_lossscale as ols

HEAD = """\
The public surface of optax_lossscale. It grows; what is here changes only in
a version whose entry in CHANGELOG.md names it, except in `experimental`. The
command that writes this file: python -m tests.surface > tools/surface.txt
"""


def names_of(module):
  """Returns the public names that a module exports."""
  return getattr(module, "__all__", None) or sorted(
    name
    for name, value in vars(module).items()
    if not name.startswith("_")
    and getattr(value, "__module__", None) == module.__name__
  )


def modules():
  """Returns all public modules by name, the package's face first."""
  found = {"ols": ols}
  for name in dir(ols):
    if isinstance(value := getattr(ols, name), types.ModuleType):
      found[f"ols.{name}"] = value
  return found


class _WithoutModules(ast.NodeTransformer):
  """Writes `checks.Check` as `Check`, however a file imports it."""

  def __init__(self, module):
    self.module = module

  def visit_Attribute(self, node):
    owner = getattr(self.module, getattr(node.value, "id", ""), None)
    is_own = getattr(owner, "__name__", "").startswith(f"{ols.__name__}.")
    return ast.Name(node.attr) if is_own else self.generic_visit(node)


def parse(value):
  """Returns the syntax tree of a function or a class."""
  tree = ast.parse(textwrap.dedent(inspect.getsource(value)))
  module = inspect.getmodule(value)
  return _WithoutModules(module).visit(tree).body[0]


def is_public(name):
  return not name.startswith("_") or name in ("__call__", "__bool__")


def signature(name, node):
  """Returns a function's signature as its source has it."""
  returns = f" -> {ast.unparse(node.returns)}" if node.returns else ""
  return f"{name}({ast.unparse(node.args)}){returns}"


def members(cls):
  """Returns the fields, properties and methods of a class, its own first."""
  lines = {}
  for base in cls.__mro__:
    if not base.__module__.startswith("optax_lossscale"):
      continue
    parsed = parse(base)
    if any("kw_only=True" in ast.unparse(x) for x in parsed.decorator_list):
      lines.setdefault(f"{base}*", "*")
    for node in parsed.body:
      if isinstance(node, ast.AnnAssign) and node.target.id == "_":
        lines.setdefault(f"{base}*", "*")  # Fields below go by name alone.
      elif isinstance(node, ast.AnnAssign) and is_public(node.target.id):
        lines.setdefault(node.target.id, ast.unparse(node))
      elif isinstance(node, ast.FunctionDef) and is_public(node.name):
        kinds = [ast.unparse(x) for x in node.decorator_list]
        kind = "".join(f"@{x} " for x in kinds if "method" in x or "prop" in x)
        lines.setdefault(node.name, kind + signature(node.name, node))
  return list(lines.values())


def describe(name, value):
  """Yields the lines about one public name."""
  if inspect.isclass(value):
    bases = [x.__name__ for x in value.__bases__ if x is not object]
    yield f"class {name}" + (f"({', '.join(bases)})" if bases else "")
    yield from (f"  {line}" for line in members(value))
  elif inspect.isfunction(value):
    yield signature(name, parse(inspect.unwrap(value)))
  else:
    yield f"{name}: {type(value).__name__}"


def text():
  """Returns the whole surface as text."""
  lines = [HEAD]
  for prefix, module in modules().items():
    for name in names_of(module):
      if not isinstance(value := getattr(module, name), types.ModuleType):
        lines += describe(f"{prefix}.{name}", value)
    lines.append("")
  return "\n".join(lines).rstrip() + "\n"


if __name__ == "__main__":
  print(text(), end="")
