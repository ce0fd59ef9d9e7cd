"""vLLM on CPU keeps the old vocabulary head of a tied model after new weights, silently. A run must notice, and not go on."""

import json

import pytest

from tests.integration.commands import QUICKSTART, SMALL, treadwheel
from tests.models import make_tiny_model

pytestmark = [pytest.mark.ray, pytest.mark.engine, pytest.mark.acceptance, pytest.mark.timeout(1800)]


def test_a_run_with_a_stale_head_refuses_to_go_on_and_says_why(tmp_path):
    model = make_tiny_model(tmp_path / "model", tied=True)
    result = treadwheel(
        "train",
        QUICKSTART,
        *SMALL,
        f"run_dir={tmp_path / 'run'}",
        f"model.path={model}",
        "weights.repair_tied_head=false",
        # A random model earns no reward: the pull to the reference alone would leave it where it is.
        "algorithm.entropy_coefficient=0.1",
        "optimizer.warmup_steps=0",
        "num_steps=5",
    )
    assert result.returncode == 1, result.stdout + result.stderr
    assert "policy version 1" in result.stderr
    assert "canary" in result.stderr
    assert "head" in result.stderr
    assert "Traceback" not in result.stderr
    broadcasts = [
        event for event in map(json.loads, (tmp_path / "run" / "events.jsonl").open()) if event["kind"] == "broadcast"
    ]
    assert broadcasts == []
