"""The public golden vectors, as a test. They lie outside the repository: without them this says so, and in CI it fails."""

import json
import os
from pathlib import Path

import pytest

from tests.golden.cases import find_cases, run_case
from tests.golden.peers import ADAPTERS, PEERS
from tests.golden.results import RESULTS, summarise

_ROOT = Path(os.environ.get("GOLDEN_DIR", Path(__file__).parents[3] / "shared" / "golden"))


@pytest.mark.parametrize("peer", PEERS)
def test_every_case_of_a_peer_agrees_or_says_why_not(peer):
    folders = find_cases(_ROOT / peer) if _ROOT.exists() else []
    if not folders and not os.environ.get("CI"):
        pytest.skip(f"no golden vectors in {_ROOT}; set GOLDEN_DIR to the folder that holds them")
    assert folders, f"no golden vectors in {_ROOT}"
    outcomes = [run_case(folder, adapters=ADAPTERS) for folder in folders]
    assert [outcome.line() for outcome in outcomes if outcome.status == "differs"] == []
    assert sum(outcome.status == "ok" for outcome in outcomes) > 0
    recorded = json.loads(RESULTS.read_text())[peer]
    assert summarise(outcomes)[peer] == recorded, (
        "run python -m tests.golden DIR --record, then learner.algorithms.document"
    )
