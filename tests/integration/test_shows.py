"""The shows as a user runs them: a model that learns what only the environment's words can teach it."""

import json
from math import sqrt
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

from tests.integration.commands import treadwheel

pytestmark = [
    pytest.mark.ray,
    pytest.mark.engine,
    pytest.mark.acceptance,
    pytest.mark.timeout(1800),
]

BLIND_BOUND = 6 / 20
"""Six guesses among twenty numbers, of a player who hears nothing."""
STEPS = {"guess": 32, "calculator": 5, "note": 8, "grid": 7}
"""Of 45, 8, 12 and 15: by then it solves far more than a player who learned nothing, and the rest of a show perfects it."""


def trained(
    show: str, run_dir: Path, *overrides: str, environment: str | None = None
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """The metrics of each step, and the summary."""
    settings = (f"run_dir={run_dir}", f"num_steps={STEPS[show]}", *overrides)
    result = treadwheel("train", f"deploy/runs/{show}.yaml", *settings)
    assert result.returncode == 0, result.stdout + result.stderr
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "reward/mean" in line]
    assert sum(step[f"environment/{environment or show}/num_failed"] for step in steps) == 0
    return steps, json.loads((run_dir / "summary.json").read_text())


def mean(steps: list[dict[str, Any]], metric: str) -> float:
    return fmean(step[metric] for step in steps)


@pytest.fixture(scope="module")
def guessed(tmp_path_factory):
    """The run of the guessing show, its steps and its summary."""
    run_dir = tmp_path_factory.mktemp("guess") / "run"
    return run_dir, *trained("guess", run_dir)


def test_it_learns_to_guess_by_what_it_is_told(guessed):
    run_dir, steps, summary = guessed
    assert mean(steps[:1], "environment/guess/solved") < BLIND_BOUND
    assert mean(steps[-5:], "environment/guess/solved") >= 0.55
    # Sampled at temperature 1, on secrets that were not trained on.
    assert summary["eval_first"] < BLIND_BOUND
    assert summary["eval_last"] >= 0.55
    assert treadwheel("verify", run_dir).returncode == 0


@pytest.mark.exhaustive
def test_where_the_answers_are_noise_what_it_learnt_is_no_better_than_blind(guessed, tmp_path):
    """Nor what it goes on to learn from them."""
    *_, last = sorted((guessed[0] / "checkpoints").iterdir())
    noise = ("environment.feedback=noise", f"model.path={last / 'model'}", "num_steps=5", "evaluation.prompts=null")
    steps, _ = trained("guess", tmp_path / "run", *noise)
    # A group shares its secret: groups are the independent draws.
    error = sqrt(BLIND_BOUND * (1 - BLIND_BOUND) / sum(step["learner/groups"] for step in steps))
    assert mean(steps, "environment/guess/solved") <= BLIND_BOUND + 3 * error


def test_it_learns_to_ask_the_calculator(tmp_path):
    steps, _ = trained("calculator", tmp_path / "run")
    for metric in ("environment/calculator/called", "environment/calculator/right"):
        assert mean(steps[:1], metric) < 0.4
        assert mean(steps[-2:], metric) >= 0.9


@pytest.mark.exhaustive
def test_a_broken_calculator_is_asked_less_and_less(tmp_path):
    steps, _ = trained("calculator", tmp_path / "run", "environment.tool=broken")
    assert mean(steps[-2:], "environment/calculator/called") < 0.5 * mean(steps[:1], "environment/calculator/called")
    assert mean(steps, "environment/calculator/right") < 0.01


def test_credit_reaches_the_note_that_was_written_before_the_context_was_wiped(tmp_path):
    steps, _ = trained("note", tmp_path / "run", environment="note_to_self")
    for metric in ("noted", "remembered"):
        assert mean(steps[:1], f"environment/note_to_self/{metric}") < 0.4
        assert mean(steps[-2:], f"environment/note_to_self/{metric}") >= 0.9


@pytest.mark.exhaustive
def test_where_the_last_segment_alone_is_credited_notes_stay_as_they_were(tmp_path):
    unaware = (
        "environment={name: 'tests.integration.credit:marked_note'}",
        "algorithm.advantage_shaping=['tests.integration.credit:behind_the_mark']",
    )
    steps, _ = trained("note", tmp_path / "run", *unaware, environment="marked_note")
    assert mean(steps[-2:], "environment/marked_note/noted") < 0.4
    assert mean(steps[-2:], "environment/marked_note/remembered") < 0.4


def test_it_learns_to_walk_by_what_each_step_earns(tmp_path):
    steps, _ = trained("grid", tmp_path / "run")
    assert mean(steps[:1], "environment/grid/arrived") < 0.2
    assert mean(steps[-3:], "environment/grid/arrived") >= 0.5
    assert mean(steps[-3:], "reward/mean") >= mean(steps[:1], "reward/mean") + 0.5
