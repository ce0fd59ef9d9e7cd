"""Ctrl-C or SIGTERM at any moment: an orderly end, no process left behind, and the same command goes on."""

import json
from pathlib import Path

import pytest

from tests.integration.commands import QUICKSTART, SMALL, Background, treadwheel

pytestmark = [pytest.mark.ray, pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture
def command(tmp_path) -> tuple[str, ...]:
    return ("train", QUICKSTART, *SMALL, f"run_dir={tmp_path / 'run'}", "num_steps=200")


def steps_of(run_dir: Path) -> list[int]:
    file = run_dir / "metrics.jsonl"
    lines = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    return [line["policy_version"] for line in lines if "reward/mean" in line]


def assert_ended_cleanly(stopped: Background) -> None:
    assert stopped.exit_code() == 130, stopped.output
    assert stopped.left_behind() == []
    assert "Traceback" not in stopped.output
    assert "never retrieved" not in stopped.output
    assert "SIGTERM" not in stopped.output


def test_a_run_that_was_stopped_goes_on_with_the_same_command_and_can_be_told_to_terminate(command, tmp_path):
    run_dir = tmp_path / "run"
    with Background(*command) as first:
        first.wait_until(lambda: 3 in steps_of(run_dir))
        first.press_ctrl_c()
        assert_ended_cleanly(first)
        done = max(steps_of(run_dir))
        assert f"stopped; step {done} is saved, and the same command goes on from there" in first.output
    assert [path.name for path in (run_dir / "checkpoints").iterdir()] == [f"step-{done:06d}"]
    assert f"{done} of 200" in treadwheel("info", run_dir).stdout

    with Background(*command, "checkpoint.stop_timeout_s=0") as second:
        second.wait_until(lambda: done + 3 in steps_of(run_dir))
        second.terminate()
        assert_ended_cleanly(second)
        assert (
            f"the last checkpoint is that of step {done}: the same command learns steps {done + 1} to" in second.output
        )
    done = max(steps_of(run_dir))
    assert sorted(set(steps_of(run_dir))) == list(range(1, done + 1))
    verdict = treadwheel("verify", run_dir)
    assert verdict.returncode == 0, verdict.stdout


def test_a_run_can_be_stopped_while_it_starts(command, tmp_path):
    events = tmp_path / "run" / "events.jsonl"
    with Background(*command) as starting:
        starting.wait_until(lambda: events.exists() and "launched" in events.read_text())
        starting.press_ctrl_c()
        assert_ended_cleanly(starting)
