from pathlib import Path

import pytest

from deploy.docs.pages import pages

DOCS = Path(__file__).parents[4] / "docs"


@pytest.mark.parametrize("name", sorted(pages()))
def test_a_generated_page_is_what_the_code_says(name):
    assert (DOCS / name).read_text(encoding="utf-8") == pages()[name], "run `make docs`, and look at what changed"
