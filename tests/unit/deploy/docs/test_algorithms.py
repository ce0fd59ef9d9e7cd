"""What the page of the mathematics needs of every docstring."""

import pytest

from cluster.contracts.plugins import Plugin, find, names
from learner.algorithms.registry.homes import HOMES
from learner.algorithms.registry.variants import docstring_sections


@pytest.mark.parametrize("field", HOMES)
def test_every_variant_states_formula_source_degenerate_case_and_peers(field):
    for name in names(HOMES[field]):
        function = find(Plugin(name=name), home=HOMES[field], field=field)
        missing = {"Formula", "Source", "Degenerate", "Peers"} - docstring_sections(function).keys()
        assert not missing, f"{field}: {name} lacks {missing}"
