"""Settings of the site, which `sphinx-build -aEW -c docs . site` builds.

The source is the root of the repository, so that a link from page to page is
the same here as there. `index.md` has the order of the pages, and a folder's
README that of the pages in it.
"""

import base64
import collections
from collections.abc import Iterable
import inspect
import json
import pathlib
import posixpath
import re
import struct
import tomllib
from types import ModuleType
from typing import Any

from docutils import nodes
from sphinx import addnodes
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment
from sphinx.errors import ExtensionError

import optax_lossscale as ols

ROOT = pathlib.Path(__file__).parent.parent
# Every build writes these anew.
REFERENCE = ROOT / "docs" / "reference"
THUMBNAILS = ROOT / "docs" / "images" / "thumbnails"
PROGRAMS = ROOT / "docs" / "programs"
# What a page says whose code is one; the site adds the file.
ONE_PROGRAM = re.compile(r"The code of this page is\sone program\.")
# The names that a search must lead from, by the page.
SEARCHED = {
  f"docs/porting/{page}": names
  for page, names in tomllib.loads(
    (ROOT / "tools" / "names.toml").read_text()
  ).items()
}
URLS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["urls"]

project = "optax_lossscale"
author = "The optax_lossscale authors"
version = release = ols.__version__

extensions = [
  "myst_nb",
  "sphinx.ext.autodoc",
  "sphinx.ext.napoleon",
  "sphinx_copybutton",
  "sphinx_design",
]
include_patterns = [
  "*.md",
  "benchmarks/measured/h100.md",
  "benchmarks/truth/README.md",
  "docs/**",
  "examples/*.md",
  "notebooks/*",
]
exclude_patterns = ["README.md"]  # Its sections are pages.

myst_enable_extensions = ["colon_fence"]
# As GitHub makes them.
myst_heading_anchors = 4
# The tests execute the notebooks. The site shows the outputs that are stored.
nb_execution_mode = "off"
# By default these are loaded from another host.
nb_ipywidgets_js: dict[str, dict[str, str]] = {}

# The docstrings name the types, with their shapes.
autodoc_typehints = "none"
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
default_role = "code"  # A word in backticks, in a docstring.
maximum_signature_line_length = 72
napoleon_custom_sections = [("Attributes", "params_style")]
napoleon_use_rtype = False
toc_object_entries = False
copybutton_prompt_text = r">>> |\.\.\. "
copybutton_prompt_is_regexp = True
copybutton_only_copy_prompt_lines = True

html_theme = "furo"
html_favicon = "_static/favicon.svg"
html_title = f"optax_lossscale {version}"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_search_scorer = str(ROOT / "docs" / "_static" / "scorer.js")
html_copy_source = False
html_show_copyright = False
html_show_sphinx = False


def public_modules() -> list[ModuleType]:
  """Returns the public modules, the package first."""
  found = [getattr(ols, name) for name in dir(ols)]
  return [ols, *(x for x in found if isinstance(x, ModuleType))]


def public_names() -> dict[str, Any]:
  """Returns all public functions and classes, by their full names."""
  found = {
    f"{module.__name__}.{name}": getattr(module, name)
    for module in public_modules()
    for name in module.__all__
  }
  return {k: v for k, v in found.items() if not isinstance(v, ModuleType)}


def short(name: str) -> str:
  """Returns a full name without the package's."""
  return name.removeprefix("optax_lossscale.")


def write_reference(app: Sphinx) -> None:
  """Writes a page for each public name, and for each public module."""
  directives = {}
  for name, value in public_names().items():
    if inspect.isclass(value):
      directives[short(name)] = f".. autoclass:: {name}\n   :members:\n"
    else:
      directives[short(name)] = f".. autofunction:: {name}\n"
  for module in public_modules()[1:]:
    title = short(module.__name__)
    pages = "".join(f"   {title}.{name}\n" for name in module.__all__)
    directives[title] = (
      f".. automodule:: {module.__name__}\n\n.. toctree::\n\n{pages}"
    )
  REFERENCE.mkdir(exist_ok=True)
  for page in REFERENCE.glob("*.rst"):
    if page.stem not in directives:
      page.unlink()
  for title, directive in directives.items():
    page = REFERENCE / f"{title}.rst"
    text = f"{title}\n{'=' * len(title)}\n\n{directive}"
    # Sphinx reads again what is newer than the last build.
    if not page.exists() or page.read_text() != text:
      page.write_text(text)


def every_name_has_a_page(app: Sphinx, env: BuildEnvironment) -> None:
  """Fails the build if the reference lacks a public name."""
  missing = public_names().keys() - env.domaindata["py"]["objects"].keys()
  if missing:
    raise ExtensionError(
      f"Every public name must have a page, got none for {sorted(missing)}."
    )


def index_searched_names(app: Sphinx, doctree: nodes.document) -> None:
  """Adds to a page the index entries that the search looks for first."""
  names = SEARCHED.get(app.env.current_document.docname, [])
  # Without a target, so the result shows the text around the name.
  entries = [("single", name, "", "main", None) for name in names]
  doctree += addnodes.index(entries=entries)


def every_searched_name_leads_to_its_page(
  app: Sphinx, failed: Exception | None
) -> None:
  """Fails the build if a search does not show the page of a name first."""
  path = pathlib.Path(app.outdir) / "searchindex.js"
  if failed or not path.exists():  # Only a site has a search.
    return
  text = path.read_text().removeprefix("Search.setIndex(").removesuffix(")")
  index = json.loads(text)
  # By Sphinx's searchtools.js a main entry that is the whole query scores 100,
  # titles up to 16, objects up to 26 and words up to 15. _static/scorer.js
  # leaves nothing of an entry that is longer than the query.
  first = {
    entry: {index["docnames"][page] for page, _, is_main in found if is_main}
    for entry, found in index["indexentries"].items()
  }
  expected = collections.defaultdict(set)
  for page, names in SEARCHED.items():
    for name in names:
      expected[name.lower()].add(page)
  wrong = {
    name: sorted(first.get(name, []))
    for name, pages in expected.items()
    if first.get(name) != pages
  }
  if wrong:
    raise ExtensionError(
      "A search must lead from each name in tools/names.toml to its page "
      f"first, got {wrong}."
    )


def leave_out_fields(
  app: Sphinx, what: str, name: str, value: Any, skip: bool, options: Any
) -> bool | None:
  """Leaves the fields of a NamedTuple to the docstring of the class."""
  is_field = isinstance(value, type(ols.LossScalingState.overflow))
  return True if is_field else None


def show_what_is_required(
  app: Sphinx, what: str, name: str, value: Any, options: Any, *signature: Any
) -> tuple[str, str] | None:
  """Hides the default by which the library sees a missing argument."""
  arguments, returned = signature
  return arguments and (re.sub(r"=[\w.]*MISSING\b", "", arguments), returned)


def prepare_page(app: Sphinx, page: str, content: list[str]) -> None:
  """Adapts a page of the repository to the site."""
  text = content[0]
  folder, _, name = page.rpartition("/")
  if name == "README":
    # The pages that it links to, each once.
    pages = dict.fromkeys(re.findall(r"\]\((\w+)\.(?:md|ipynb)[#)]", text))
    text += toctree(pages) if pages else ""
  if page == "docs/reference":
    names = [name for name in dir(ols) if not name.startswith("_")]
    text += toctree(f"reference/{name}" for name in names)
  if page == "notebooks/README":
    text = re.sub(r"(?m)(^\|.*\n)+", cards_of_notebooks, text, count=1)
  if ONE_PROGRAM.search(text):
    write_program(name, text)
    link = (
      f"{{download}}`Download this page's code </docs/programs/{name}.py>`."
    )
    text = ONE_PROGRAM.sub(link, text)
  content[0] = re.sub(
    r"\]\((?!\w+:|#|/)([^)\s]+)\)",
    lambda link: f"]({on_the_site(folder, link[1])})",
    text,
  )


def write_program(name: str, text: str) -> None:
  """Writes the code of a page as a file."""
  PROGRAMS.mkdir(exist_ok=True)
  code = re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)
  (PROGRAMS / f"{name}.py").write_text("\n\n".join(code))


def toctree(pages: Iterable[str]) -> str:
  """Returns a list of pages for the sidebar."""
  return "\n```{toctree}\n:hidden:\n\n" + "\n".join(pages) + "\n```\n"


def on_the_site(folder: str, link: str) -> str:
  """Returns where a relative link leads: to a page, or to the source."""
  path = link.partition("#")[0]
  target = posixpath.normpath(posixpath.join(folder, path))
  if target == "README.md":
    return "/index.md"  # It includes what the README shows.
  if target.endswith((".md", ".ipynb", ".png")):
    return link
  return f"{URLS['Source']}/tree/main/{target}"


def cards_of_notebooks(table: re.Match[str]) -> str:
  """Returns a card with a picture for each row of the table."""
  cards = []
  for name, shows in re.findall(
    r"\[(\w+)\]\(\w+\.ipynb\) \| (.*) \|", table[0]
  ):
    cells = json.loads((ROOT / f"notebooks/{name}.ipynb").read_text())["cells"]
    title = "".join(cells[0]["source"]).splitlines()[0].removeprefix("# ")
    pictures = [
      base64.b64decode(output["data"]["image/png"])
      for cell in cells
      for output in cell.get("outputs", [])
      if "image/png" in output.get("data", {})
    ]
    THUMBNAILS.mkdir(exist_ok=True)
    if not pictures:
      raise ExtensionError(f"{name}.ipynb must store a picture for its card.")
    # The card is 4 by 3. A PNG has its width and height in these bytes.
    sizes = [struct.unpack(">II", picture[16:24]) for picture in pictures]
    misfits = [abs(width / height - 4 / 3) for width, height in sizes]
    best = pictures[misfits.index(min(misfits))]
    (THUMBNAILS / f"{name}.png").write_bytes(best)
    cards.append(
      f":::{{grid-item-card}} {title}\n:link: {name}\n:link-type: doc\n"
      f":img-top: /docs/images/thumbnails/{name}.png\n\n{shows}\n:::\n"
    )
  return f"::::{{grid}} 1 2 2 3\n:gutter: 3\n\n{''.join(cards)}::::\n"


def link_names(app: Sphinx, doctree: nodes.document, page: str) -> None:
  """Lets public names in the text lead to their pages."""
  names = {short(name) for name in public_names()}
  names |= {short(module.__name__) for module in public_modules()}
  for code in list(doctree.findall(nodes.literal)):
    prefix, name = re.match(r"(ols\.)?([\w.]*)", code.astext()).groups()
    target = f"docs/reference/{name}"
    # One word alone may be another system's name, such as `torch`.
    is_ours = name in names and (prefix or "." in name or name in ols.__all__)
    is_linked = isinstance(code.parent, nodes.reference)
    if is_ours and not is_linked and target != page:
      uri = app.builder.get_relative_uri(page, target)
      link = nodes.reference("", "", internal=True, refuri=uri)
      code.replace_self(link)
      link += code


def refuse_block_quotes(app: Sphinx, doctree: nodes.document) -> None:
  """Fails the build if code in a docstring would be set as prose."""
  page = app.env.current_document.docname
  if page.startswith("docs/reference/"):
    for quote in doctree.findall(nodes.block_quote):
      raise ExtensionError(
        f"Code in a docstring must follow `::`, got {quote.astext()!r} on "
        f"{page}."
      )


def setup(app: Sphinx) -> None:
  """Connects all this to the build."""
  app.connect("builder-inited", write_reference)
  app.connect("source-read", prepare_page)
  app.connect("autodoc-skip-member", leave_out_fields)
  app.connect("autodoc-process-signature", show_what_is_required)
  app.connect("doctree-read", refuse_block_quotes)
  app.connect("doctree-read", index_searched_names)
  app.connect("doctree-resolved", link_names)
  app.connect("env-check-consistency", every_name_has_a_page)
  app.connect("build-finished", every_searched_name_leads_to_its_page)
