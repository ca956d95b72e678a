"""Code in Markdown pages, so that tests can run what a reader would type."""

import contextlib
import io
import pathlib
import re
import textwrap

import jax
import pytest

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
  """Returns a section of a page with what is below it.

  Args:
    text: the page.
    title: of the section, of any level.
  """
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
  """Returns the one Python block of a section that has some words in it.

  Args:
    page: the text of a page.
    title: of the section, of any level.
    words: what no other block of the section has.
  """
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
  """Runs the Python blocks one after the other and returns all names.

  Args:
    text: a page or a section.
    names: what the blocks find there; not changed.
  """
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


def run_as_shown(page):
  """Runs a page that is one program, and returns the names it leaves behind.

  What it prints must be what the page shows, and the numbers within a tenth:
  they depend on the release of JAX and on the processor.
  """
  names = {}
  block_and_output = r"```python\n(.*?)```(?:\n+```text\n(.*?)```)?"
  for code, shown in re.findall(block_and_output, page, flags=re.DOTALL):
    with contextlib.redirect_stdout(io.StringIO()) as printed:
      exec(compile(code, "<block>", "exec"), names)
    found, expected = (
      re.split(r"(?<![a-z\d])(\d[\d.]*)", x)
      for x in (printed.getvalue(), shown)
    )
    assert found[::2] == expected[::2]
    numbers = ([float(x) for x in text[1::2]] for text in (found, expected))
    assert next(numbers) == pytest.approx(next(numbers), rel=0.1)
  return names


def _no_code(text):
  """Returns text of the same length with code blanked: `#` is no heading."""
  return re.sub(
    r"```.*?```", lambda match: " " * len(match[0]), text, flags=re.DOTALL
  )
