"""Ctrl-C at any moment: an orderly end, no process left behind, and the same command goes on."""

import json
from pathlib import Path

import pytest

from tests.integration.commands import QUICKSTART, SMALL, Background, treadwheel

pytestmark = [pytest.mark.ray, pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture
def command(tmp_path) -> tuple[str, ...]:
    return ("train", QUICKSTART, *SMALL, f"run_dir={tmp_path / 'run'}", "num_steps=8", "checkpoint.every_steps=2")


def steps_of(run_dir: Path) -> list[int]:
    file = run_dir / "metrics.jsonl"
    lines = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    return [line["policy_version"] for line in lines if "reward/mean" in line]


def test_a_run_that_was_stopped_goes_on_with_the_same_command(command, tmp_path):
    with Background(*command) as first:
        first.wait_until(lambda: 3 in steps_of(tmp_path / "run"))
        first.press_ctrl_c()
        assert first.exit_code() == 130, first.output
        assert first.left_behind() == []
        assert "stopped cleanly; the same command goes on" in first.output
        assert "Traceback" not in first.output
    done = max(steps_of(tmp_path / "run"))
    assert 3 <= done < 8
    assert f"{done} of 8" in treadwheel("info", tmp_path / "run").stdout

    second = treadwheel(*command)
    assert second.returncode == 0, second.stdout + second.stderr
    assert sorted(set(steps_of(tmp_path / "run"))) == list(range(1, 9))
    verdict = treadwheel("verify", tmp_path / "run")
    assert verdict.stdout.startswith("8 steps, 64 groups, 512 trajectories, "), verdict.stdout
    assert verdict.returncode == 0


def test_a_run_can_be_stopped_while_it_starts(command, tmp_path):
    events = tmp_path / "run" / "events.jsonl"
    with Background(*command) as starting:
        starting.wait_until(lambda: events.exists() and "launched" in events.read_text())
        starting.press_ctrl_c()
        assert starting.exit_code() == 130, starting.output
        assert starting.left_behind() == []
        assert "Traceback" not in starting.output


def test_a_run_that_is_told_to_terminate_ends_as_cleanly(command, tmp_path):
    with Background(*command) as told:
        told.wait_until(lambda: 1 in steps_of(tmp_path / "run"))
        told.terminate()
        assert told.exit_code() == 130, told.output
        assert told.left_behind() == []
        assert "stopped cleanly; the same command goes on" in told.output
        assert "SIGTERM" not in told.output
