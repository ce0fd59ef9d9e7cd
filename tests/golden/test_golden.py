"""The golden vectors, as a test: our mathematics against numbers made by running the peers."""

import json

import pytest

from tests.golden.cases import VECTORS, find_cases, run_case
from tests.golden.peers import ADAPTERS, PEERS
from tests.golden.results import RESULTS, summarise


@pytest.mark.parametrize("peer", PEERS)
def test_every_case_of_a_peer_agrees_or_says_why_not(peer):
    outcomes = [run_case(folder, adapters=ADAPTERS) for folder in find_cases(VECTORS / peer)]
    assert [outcome.line() for outcome in outcomes if outcome.status == "differs"] == []
    assert sum(outcome.status == "ok" for outcome in outcomes) > 0
    recorded = json.loads(RESULTS.read_text())[peer]
    assert summarise(outcomes)[peer] == recorded, "run python -m tests.golden --record, then make docs"


def test_the_vectors_are_those_of_the_recorded_peers():
    assert sorted(path.name for path in VECTORS.iterdir() if path.is_dir() and path.name != "_models") == sorted(PEERS)
