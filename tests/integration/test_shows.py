"""The shows as a user runs them: a model that learns what only the environment's words can teach it."""

import json
from math import sqrt
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

from tests.integration.commands import treadwheel

pytestmark = [pytest.mark.ray, pytest.mark.engine, pytest.mark.acceptance, pytest.mark.timeout(1800)]

GUESS = "deploy/runs/guess.yaml"
SOLVED = "environment/guess/solved"
BLIND_BOUND = 6 / 20
"""Six guesses among twenty numbers, of a player who hears nothing."""
GROUPS_A_STEP = 32


def trained(run_dir: Path, *overrides: str) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """The metrics of each step, and the summary."""
    result = treadwheel("train", GUESS, f"run_dir={run_dir}", *overrides)
    assert result.returncode == 0, result.stdout + result.stderr
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if "reward/mean" in line], json.loads((run_dir / "summary.json").read_text())


def solved(steps: list[dict[str, Any]]) -> float:
    return fmean(step[SOLVED] for step in steps)


def test_it_learns_to_guess_by_what_it_is_told(tmp_path):
    steps, summary = trained(tmp_path / "run")
    assert solved(steps[:1]) < BLIND_BOUND
    assert solved(steps[-5:]) >= 0.7
    assert steps[-1]["environment/guess/num_failed"] == 0
    # Sampled at temperature 1, on secrets that were not trained on.
    assert summary["eval_first"] < BLIND_BOUND
    assert summary["eval_last"] >= 0.7
    assert treadwheel("verify", tmp_path / "run").returncode == 0


def test_where_the_answers_are_noise_it_gets_no_better_than_blind(tmp_path):
    steps, _ = trained(tmp_path / "run", "environment.feedback=noise", "num_steps=25", "evaluation.prompts=null")
    # A group shares its secret: groups are the independent draws.
    error = sqrt(BLIND_BOUND * (1 - BLIND_BOUND) / (10 * GROUPS_A_STEP))
    assert solved(steps[-10:]) <= BLIND_BOUND + 3 * error
