"""The page of the mathematics is made of the code."""

import pytest

from learner.algorithms.document import PAGE, page
from learner.algorithms.injection import HOMES, docstring_sections, variants


def test_the_page_is_up_to_date():
    assert PAGE.read_text() == page(), "run python -m learner.algorithms.document"


@pytest.mark.parametrize("home", sorted(set(HOMES.values())))
def test_every_variant_states_formula_source_degenerate_case_and_peers(home):
    for name, function in variants(home).items():
        missing = {"Formula", "Source", "Degenerate", "Peers"} - docstring_sections(function).keys()
        assert not missing, f"{home}.{name} lacks {missing}"
