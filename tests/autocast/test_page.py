"""What docs/autocast.md says is so."""

import contextlib
import io
import re

from optax_lossscale._autocast import _value
from optax_lossscale._autocast import levels
from tests import documents

PAGE = documents.read("docs/autocast.md")


def test_the_example_prints_what_the_page_shows():
  printed = io.StringIO()
  with contextlib.redirect_stdout(printed):
    documents.run(PAGE, {})
  assert printed.getvalue() == "".join(documents.blocks(PAGE, "text"))


def test_the_page_names_every_treatment_and_kind():
  words = set(re.findall(r"`([A-Z_]+)`", PAGE))
  assert words >= {x.name for x in levels.Treatment}
  assert words >= {x.name for x in _value.Kind}


def test_the_files_that_the_page_names_are_there():
  package = documents.ROOT / "optax_lossscale"
  places = (documents.ROOT, package, package / "_autocast", package / "_jaxpr")
  for name in set(re.findall(r"`([\w/]+\.py)`", PAGE)):
    assert any((place / name).exists() for place in places), name
