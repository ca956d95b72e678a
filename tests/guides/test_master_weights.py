"""The page on master weights is a program that prints what it shows."""

import pytest

from tests import documents


@pytest.mark.slow
def test_the_page_prints_what_it_shows():
  names = documents.run_as_shown(
    documents.read("docs/guides/master_weights.md")
  )
  opt_state = names["tx"].init(names["first_params"])
  assert opt_state.applied_steps == 0
