"""The pages: which of them are tested, their tables, names and links."""

import ast
import json
import re

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import optax
import pytest

import optax_lossscale as ols
from optax_lossscale import hardware
from tests import documents

DOCS = documents.ROOT / "docs"


def test_the_first_hour_prints_what_the_page_shows(tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  with documents.reading("docs/first_hour.md") as page:
    page.run()


def test_gradient_error_is_measured_as_the_page_shows():
  with documents.reading("docs/does_it_matter.md") as page:
    # The page shows the output for a large model.
    printed = page.run(compare=False)
    assert printed.startswith("Gradient in float16, compared with float32\n")


@pytest.mark.slow
def test_float16_parameters_learn_what_the_page_shows():
  with documents.reading("docs/guides/master_weights.md") as page:
    page.run()


@pytest.mark.slow
def test_bfloat16_parameters_learn_what_the_page_shows(tmp_path):
  plt.figure(figsize=(7, 4), layout="constrained")
  with documents.reading("docs/guides/sixteen_bit_parameters.md") as page:
    page.run()
  picture = tmp_path / "sixteen_bit_parameters.png"
  plt.savefig(picture, dpi=110)
  plt.close("all")
  documents.assert_shows(picture, within=0.001)


def test_each_way_to_keep_bfloat16_parameters_takes_the_bytes_of_the_page():
  page = documents.read("docs/guides/sixteen_bit_parameters.md")
  ways = re.findall(r"^\| `(ols\..*?)` \| (.*?) \|", page, re.MULTILINE)
  assert len(ways) == 4
  params = jax.ShapeDtypeStruct((1024, 1024), jnp.bfloat16)
  for code, shown in ways:
    tx = eval(code, {"ols": ols, "inner": optax.adam(1e-3)})
    state = jax.tree.leaves(jax.eval_shape(tx.init, params))
    each = sum(x.size * x.dtype.itemsize for x in state) / params.size
    first, *others = map(int, re.findall(r"\d+", shown))
    # "2 + 4" is the parameter and what is added to its moments of 8 bytes.
    expected = 8 + others[0] if "+" in shown else first
    assert each == pytest.approx(expected, abs=1e-3), code


def pages_with_code():
  """Returns the paths of the pages that have Python blocks."""
  root = documents.ROOT
  pages = [root / "index.md", *DOCS.glob("*.md"), *DOCS.glob("guides/*.md")]
  paths = [str(page.relative_to(root)) for page in sorted(pages)]
  return [path for path in paths if documents.blocks(documents.read(path))]


def test_docs_has_only_pages_their_pictures_and_the_settings_of_the_site():
  made = {"reference", "programs", "thumbnails", "__pycache__"}  # By a build.
  others = {
    str(path.relative_to(DOCS))
    for path in DOCS.rglob("*")
    if path.is_file()
    and path.suffix not in (".md", ".png")
    and not made & set(path.parts)
  }
  static = {
    f"_static/{name}" for name in ("favicon.svg", "scorer.js", "site.css")
  }
  assert others == {"conf.py", *static}


@pytest.mark.parametrize("path", pages_with_code())
def test_a_page_with_code_is_read_by_a_test(path):
  tests = documents.ROOT.glob("tests/**/test_*.py")
  assert any(f'"{path}"' in test.read_text() for test in tests)


# Their first step is one for hardware that saturates.
SATURATING = {"checks.md", "ascend.md"}


def checks_of(page):
  """Returns the check of each call of `loss_scaling` in a page, or None."""
  text = page.read_text()
  if page.suffix == ".md":
    text = "".join(documents.blocks(text))
  elif page.suffix == ".ipynb":
    cells = json.loads(text)["cells"]
    code = [x["source"] for x in cells if x["cell_type"] == "code"]
    text = re.sub(
      r"^( *)%.*", r"\1pass", "\n".join(map("".join, code)), flags=re.M
    )
  calls = [
    node
    for node in ast.walk(ast.parse(text))
    if isinstance(node, ast.Call)
    and ast.unparse(node.func) == "ols.loss_scaling"
  ]
  keywords = [
    {x.arg: ast.unparse(x.value) for x in call.keywords}
    for call in sorted(calls, key=lambda call: call.lineno)
  ]
  return [x.get("check") for x in keywords]


@pytest.mark.parametrize(
  "page",
  [
    page
    for pattern in (
      "*.md",
      "docs/**/*.md",
      "notebooks/*.ipynb",
      "examples/*.py",
    )
    for page in sorted(documents.ROOT.glob(pattern))
    if checks_of(page)
  ],
  ids=lambda page: str(page.relative_to(documents.ROOT)),
)
def test_a_page_begins_with_a_step_that_needs_no_check(page):
  first, *_ = checks = checks_of(page)
  assert (first is None) == (page.name not in SATURATING)
  assert not [x for x in checks if str(x).startswith("ols.nonfinite(")]


def test_the_table_of_names_is_complete():
  names = [*ols.__all__]
  names += [f"experimental.{name}" for name in ols.experimental.__all__]
  names += [f"hardware.{name}" for name in hardware.__all__]
  reference = documents.read("docs/reference.md")
  for name in names:
    assert f"`{name}" in reference, name


def test_every_guide_is_in_the_table_of_guides_once_by_its_title():
  guides = DOCS / "guides"
  rows = re.findall(
    r"^\| \[(.+)\]\((\w+\.md)\) \| .+ \|$",
    (guides / "README.md").read_text(),
    re.MULTILINE,
  )
  expected = [
    (page.read_text().partition("\n")[0].removeprefix("# "), page.name)
    for page in guides.glob("*.md")
    if page.stem != "README"
  ]
  assert sorted(rows) == sorted(expected)


def measured_cards():
  """Returns the cards with measured figures, each by its maker and model."""
  machines = [
    json.loads(path.read_text())["machine"]["device"]
    for path in documents.ROOT.glob("benchmarks/measured/*.json")
  ]
  return sorted({re.match(r"\w+ \w+", x)[0] for x in machines if x != "cpu"})


def test_all_pages_say_the_same_about_where_the_library_has_run():
  cards = " and on one ".join(measured_cards())
  claim = f"has run on CPUs and on one {cards}"
  texts = {
    str(path.relative_to(documents.ROOT)): documents.one_line(path.read_text())
    for pattern in (
      "*.md",
      "docs/**/*.md",
      "benchmarks/**/*.md",
      "examples/*.py",
      "notebooks/*.ipynb",
      "paper/*.typ",
      "optax_lossscale/**/*.py",
    )
    for path in documents.ROOT.glob(pattern)
  }
  for page in ("CHANGELOG.md", "docs/checks.md"):
    assert re.search(rf"{claim}\b(?! and)", texts[page]), f"{page}: {claim}"
  other = re.compile(
    r"CPUs (?:only|alone)|only on CPUs"
    rf"|(?<!has run )on CPUs and on|has run on (?!CPUs and on one {cards}\b)"
  )
  assert not {k: other.findall(x) for k, x in texts.items() if other.search(x)}


def anchors(text):
  """Returns the anchors of a page's headings and of its cells."""
  prose = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
  headings = re.findall(r"^#+ (.*)$", prose, re.MULTILINE)
  made = {
    re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
    for heading in headings
  }
  return made | set(re.findall(r'id="([^"]+)"', text))


@pytest.mark.parametrize(
  "page",
  [
    *documents.ROOT.glob("*.md"),
    documents.ROOT / "notebooks" / "README.md",
    documents.ROOT / "benchmarks" / "truth" / "README.md",
    *documents.ROOT.glob("examples/*.md"),
    *DOCS.rglob("*.md"),
  ],
  ids=lambda page: page.stem,
)
def test_every_link_leads_somewhere(page):
  for link in re.findall(r"\]\(\s*([^)\s]+)\s*\)", page.read_text()):
    if link.startswith("https:"):
      continue
    target, _, anchor = link.partition("#")
    path = page.parent / target if target else page
    assert path.exists(), link
    assert not anchor or anchor in anchors(path.read_text()), link
