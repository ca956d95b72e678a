"""The public surface is what docs/surface.txt says, and stays small."""

import inspect
import pathlib
import re

import optax_lossscale as ols
from tests import surface

ROOT = pathlib.Path(__file__).parent.parent


def test_the_surface_is_that_of_the_contract():
  text = (ROOT / "docs" / "surface.txt").read_text()
  assert surface.text().splitlines() == text.splitlines(), (
    "a public name, signature or field has changed: if that is meant, run "
    "python -m tests.surface > docs/surface.txt"
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


# Names that an earlier draft of the surface had, where it had them.
REMOVED = (
  "ols.FloatStatus",
  "ols.SpikeGuard",
  "ols.accumulated_value_and_grad",
  "ols.float_status",
  "ols.instruments.Culprit",
  "ols.instruments.CulpritLeaf",
  "ols.instruments.ExponentHistogram",
  "ols.instruments.Replay",
  "ols.instruments.amax_by_leaf",
  "ols.instruments.culprit",
  "ols.instruments.exponent_histogram",
  "ols.instruments.histogram_by_leaf",
  "ols.instruments.history",
  "ols.instruments.swallowed_fraction",
  "ols.instruments.underflow_fraction",
  "ols.instruments.underflow_share",
  "ols.nnx.check_step",
  "ols.nnx.select_on_skip",
  "ols.plot.headroom",
  "ols.precision_schedule",
  "ols.rules.HistogramLossScale",
  "ols.rules.amax_tap",
  "ols.saturating",
  "ols.scale_cotangent",
  "ols.status_tap",
)
# Nobody may write these words at all, a parameter among them.
GONE = (
  "accumulated_value_and_grad",
  "swallowed_fraction",
  "underflow_fraction",
  "underflow_share",
  "histogram_by_leaf",
  "amax_by_leaf",
  "HistogramLossScale",
  "overflow_fn",
)


def written():
  """Yields what users read, by file: pages, notebooks, programs and source."""
  folders = "optax_lossscale", "tests", "examples", "benchmarks", "docs"
  patterns = ["*.md", "docs/**/*.md", "examples/*.md", "notebooks/*.ipynb"]
  for pattern in (*patterns, *(f"{x}/**/*.py" for x in folders)):
    for path in ROOT.glob(pattern):
      if path.name != "test_surface.py":
        yield str(path.relative_to(ROOT)), path.read_text()


def test_what_was_removed_is_not_there_and_not_written_about():
  patterns = [rf"\b{re.escape(x)}\b" for x in REMOVED]
  patterns += [rf"\b{x}\b" for x in GONE]
  patterns += [
    r"`(Culprit|Replay)`",
    r"`(history|precision_schedule|saturating)\(",
  ]
  for name in REMOVED:
    _, *modules, last = name.split(".")
    package = ".".join([ols.__name__, *modules])
    patterns += [rf"from {package} import [^\n]*\b{last}\b"]
    owner = getattr(ols, modules[0]) if modules else ols
    assert not hasattr(owner, last), name
  pattern = re.compile("|".join(patterns))
  found = {
    file: sorted({x.group() for x in pattern.finditer(text)})
    for file, text in written()
    if pattern.search(text)
  }
  assert not found
