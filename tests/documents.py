"""Code in Markdown pages, so that tests can run what a reader would type."""

import contextlib
import dis
import functools
import io
import pathlib
import re
import textwrap
from typing import NamedTuple

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax
import pytest

import optax_lossscale as ols

ROOT = pathlib.Path(__file__).parent.parent
# The lines of a step that the pages take for granted.
BACKWARD = """
value_and_grad = ols.scaled_value_and_grad(loss_fn, opt_state)
loss, scaled_grads = value_and_grad(params, batch)
"""
STEP = f"""{BACKWARD}
updates, opt_state = tx.update(scaled_grads, opt_state, params)
params = optax.apply_updates(params, updates)
"""


def read(page):
  """Returns the text of a page, by its path in the repository."""
  return (ROOT / page).read_text()


def section(text, title):
  """Returns the section of a title, of any level, with all below it."""
  heading = re.search(rf"^(#+) {re.escape(title)}$", text, re.MULTILINE)
  assert heading, f"There is no section {title!r}."
  rest = text[heading.end() :]
  level = len(heading[1])
  following = re.search(rf"^#{{1,{level}}} (?!#)", _no_code(rest), re.MULTILINE)
  return rest[: following.start()] if following else rest


def blocks(text, language="python"):
  """Returns the code blocks of one language."""
  return re.findall(rf"```{language}\n(.*?)```", text, flags=re.DOTALL)


def block(page, title, words):
  """Returns the one Python block of a section that has some words in it."""
  found = [x for x in blocks(section(page, title)) if words in x]
  assert len(found) == 1, (
    f"One Python block in the section {title!r} must have {words!r}, got "
    f"{len(found)}."
  )
  return found[0]


def quoted(page, title):
  """Returns what the prose of a section quotes, each on one line."""
  prose = re.sub(r"```.*?```", "", section(page, title), flags=re.DOTALL)
  return re.findall(r'"([^"]+)"', one_line(prose))


def one_line(text):
  """Returns a text with its line breaks and indents as single spaces."""
  return " ".join(str(text).split())


def run(text, names):
  """Runs a text's Python blocks in order, and returns all names."""
  names = dict(names)
  for block in blocks(text):
    exec(compile(block, "<block>", "exec"), names)
  return names


def step(code, names, carry=("params", "opt_state")):
  """Returns the jitted step that some lines of a page are.

  Args:
    code: the lines.
    names: what they find there; not changed.
    carry: what the step takes, before `batch`, and returns, before `loss`.
  """
  source = f"def train_step({', '.join(carry)}, batch):\n"
  source += textwrap.indent(code, "  ")
  source += f"  return {', '.join(carry)}, loss\n"
  names = dict(names)
  exec(compile(source, "<step>", "exec"), names)
  return jax.jit(names["train_step"])


@functools.cache
def spike_guard():
  """Returns the guard against spikes that the page on skipping shows.

  Its functions are under their names there, as other pages use them.
  """
  page, title = read("docs/guides/skipping.md"), "Spikes of the gradient norm"
  code = block(page, title, "class GuardState")
  return run(
    f"```python\n{code}```",
    {"jax": jax, "jnp": jnp, "ols": ols, "optax": optax},
  )


class Block(NamedTuple):
  """A Python block of a page."""

  line: int  # Of the page, where the code begins.
  titles: tuple[str, ...]  # Of the sections around it, the outermost first.
  code: str
  shown: str | None = None  # The output that the page shows below it.


class Page:
  """A page whose blocks a test runs in order, as its reader would.

  Tracebacks have the path and the lines of the page.

  Attributes:
    names: what the blocks find and define.
  """

  def __init__(self, path, names=(), without=None):
    """Reads a page.

    Args:
      path: of the page in the repository.
      names: what the page leaves to its reader.
      without: a pattern of text that is not for this test.
    """
    text = read(path)
    if without:
      text = re.sub(
        without, lambda x: "\n" * x[0].count("\n"), text, flags=re.S
      )
    self.names = dict(names)
    self._path, self._left = path, _python_blocks(text)

  def __getitem__(self, name):
    return self.names[name]

  def run(
    self, title=None, count=None, *, before="", compare=True, swap=(), **names
  ):
    """Runs the blocks that are next, and returns what they print.

    Args:
      title: of the section that has them; all that are left by default.
      count: how many to run of them.
      before: lines to run before each, as part of the same block.
      compare: whether the output must be the one that the page shows.
      swap: text of the page that is too long to run, by what runs instead.
      **names: to be defined before.
    """
    self.names |= names
    printed = []
    while self._left and len(printed) != count:
      if title is not None and title not in self._left[0].titles:
        break
      block = self._left.pop(0)
      for old, new in dict(swap).items():
        block = block._replace(code=block.code.replace(old, new))
      printed.append(self._run(block, before))
      if compare and block.shown is not None:
        assert_prints(printed[-1], block.shown, f"{self._path}:{block.line}")
    assert printed, f"{title!r} does not come next in {self._path}."
    return "".join(printed)

  def _run(self, block, before):
    lines = "\n" * (block.line - 1 - before.count("\n"))
    code = compile(lines + before + block.code, self._path, "exec")
    for name in _defined_first(code):  # So a proof takes it for no argument.
      self.names.pop(name, None)
    with contextlib.redirect_stdout(io.StringIO()) as printed:
      exec(code, self.names)
      jax.effects_barrier()
    return printed.getvalue()

  def end(self):
    """Asserts that each block of the page has run."""
    left = [f"{self._path}:{block.line}" for block in self._left]
    assert not left, f"No test runs the blocks at {', '.join(left)}."


@contextlib.contextmanager
def reading(path, without=None, **names):
  """Yields a page, and then asserts that all its blocks have run.

  A page that imports nothing itself gets the usual modules, and a small
  training: what such pages leave to their reader.

  Args:
    path: of the page in the repository.
    without: a pattern of text that is not for this test.
    **names: what the page leaves to its reader besides, or instead.
  """
  is_program = "import optax_lossscale as ols" in read(path)
  page = Page(path, names if is_program else training() | names, without)
  yield page
  page.end()


@functools.cache
def whole(path):
  """Returns a page whose blocks have all run, once for all tests of it."""
  with reading(path) as page:
    page.run()
  return page


def training():
  """Returns a linear regression, and an optimizer with loss scaling for it."""

  def loss_fn(params, batch):
    return jnp.mean((batch @ params["w"] - 1) ** 2)

  rule, inner = ols.DynamicLossScale(), optax.sgd(0.5)
  tx = ols.loss_scaling(inner, rule)
  params = {"w": jnp.full((4, 8), 0.25)}
  names = {"functools": functools, "jax": jax, "jnp": jnp, "np": np}
  names |= {"ols": ols, "optax": optax, "params": params, "loss_fn": loss_fn}
  names |= {"batch": np.linspace(-1, 1, 128, dtype=np.float32).reshape(32, 4)}
  names |= {"rule": rule, "inner": inner, "tx": tx}
  return names | {"opt_state": tx.init(params)}


def assert_prints(printed, shown, place="The code"):
  """Asserts that code prints what a page shows.

  Words and integers must be the same, and other numbers within a tenth: they
  depend on the release of JAX and on the processor.
  """
  decimal = re.compile(r"(?<![a-z\d])\d+\.\d+")
  message = f"{place} prints\n{printed}"
  assert decimal.split(printed) == decimal.split(shown), message
  numbers = [float(x) for x in decimal.findall(printed)]
  expected = [float(x) for x in decimal.findall(shown)]
  assert numbers == pytest.approx(expected, rel=0.1), message


def assert_shows(picture, within):
  """Asserts that a picture is the one in docs/images of the same name.

  Args:
    picture: the path of a file.
    within: the mean difference of a pixel's colors, from 0 to 1. Another
      version of matplotlib may draw letters and edges otherwise.
  """
  drawn, stored = map(
    plt.imread, (picture, ROOT / "docs" / "images" / picture.name)
  )
  assert drawn.shape == stored.shape
  assert np.abs(drawn - stored).mean() < within


def _defined_first(code):
  """Returns the names that code defines before it reads them."""
  of_functions = [x for x in code.co_consts if hasattr(x, "co_names")]
  first = {name: "" for function in of_functions for name in function.co_names}
  for instruction in dis.get_instructions(code):
    if instruction.opname in ("LOAD_NAME", "STORE_NAME"):
      first.setdefault(instruction.argval, instruction.opname)
  return [name for name, opname in first.items() if opname == "STORE_NAME"]


def _python_blocks(text):
  """Returns the Python blocks of a page, each with the output shown below."""
  titles, found = [], []
  pattern = r"^(#+) ([^\n]+)$|^```(\w+)\n(.*?)^```"
  for match in re.finditer(pattern, text, re.MULTILINE | re.DOTALL):
    mark, title, language, code = match.groups()
    if mark:
      titles = [x for x in titles if x[0] < len(mark)] + [(len(mark), title)]
      continue
    around = tuple(title for _, title in titles)
    if language == "python":
      line = text.count("\n", 0, match.start(4)) + 1
      found.append(Block(line, around, code))
    elif language == "text" and found and found[-1].titles == around:
      assert found[-1].shown is None
      found[-1] = found[-1]._replace(shown=code)
  return found


def _no_code(text):
  """Returns text of the same length, without the `#` that code has."""
  return re.sub(
    r"```.*?```", lambda match: " " * len(match[0]), text, flags=re.DOTALL
  )
