"""The public surface is what tools/surface.txt says, and stays small."""

import inspect
import pathlib

from tests import surface

ROOT = pathlib.Path(__file__).parent.parent


def test_the_surface_is_that_of_the_contract():
  text = (ROOT / "tools" / "surface.txt").read_text()
  assert surface.text().splitlines() == text.splitlines(), (
    "a public name, signature or field has changed: if that is meant, run "
    "python -m tests.surface > tools/surface.txt"
  )


def callables():
  """Yields each public function, method and class, by its name."""
  for prefix, module in surface.modules().items():
    for name in surface.names_of(module):
      value = getattr(module, name)
      if inspect.isfunction(value):
        yield f"{prefix}.{name}", inspect.unwrap(value)
      elif inspect.isclass(value):
        for own, method in vars(value).items():
          if inspect.isfunction(method) and surface.is_public(own):
            yield f"{prefix}.{name}.{own}", method


def test_no_function_has_more_parameters_than_one_remembers():
  many = {}
  for name, function in callables():
    arguments = surface.parse(function).args
    own = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
    many[name] = [x.arg for x in own if x.arg != "self"]
  assert len(many) > 100
  assert not {x: many[x] for x in many if len(many[x]) > 8}
