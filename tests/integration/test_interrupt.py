"""Ctrl-C, SIGTERM or a terminal that closes, at any moment: an orderly end, no process left behind, and the same command goes on.

The command runs where a user has modules of their own: their judge is found there, and never stands for a package of Python's or ours.
"""

import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from cluster.record.run_directory import RunDirectory
from cluster.sinks.jsonl import read_steps
from tests.integration.commands import QUICKSTART, ROOT, SMALL, Background, treadwheel

pytestmark = [pytest.mark.ray, pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(1800)]


TRAP = "raise SystemExit(f'{__name__} was taken from the working directory')\n"
HELD = "the judge waits as long as this file is there"
JUDGE = f"""
import json, os, pathlib, time

while pathlib.Path(__file__).with_name({HELD!r}).exists():
    time.sleep(0.1)

def judge(*, prompt, completion, columns):
    return {{"reward": float(columns["answer"] in completion), "sees_token": "HF_TOKEN" in os.environ}}
"""


@pytest.fixture
def command(tmp_path) -> tuple[str, ...]:
    own = ("reward.judge=my_rewards:judge", f"model.path={ROOT / 'deploy/quickstart/model'}")
    return (
        "train",
        str(ROOT / QUICKSTART),
        *SMALL,
        *own,
        f"run_dir={tmp_path / 'run'}",
        "num_steps=2000",
        "checkpoint.every_steps=null",
    )


@pytest.fixture
def start(tmp_path) -> Callable[..., Background]:
    """Starts a command in a folder with a user's judge, and with files that are named as our packages."""
    for name in ("json", "yaml", "actors", "cluster", "learner", "deploy"):
        (tmp_path / f"{name}.py").write_text(TRAP)
    (tmp_path / "my_rewards.py").write_text(JUDGE)
    env = {"HF_TOKEN": "secret", "PYTHONPATH": str(ROOT)}
    return partial(Background, env=env, cwd=tmp_path)


def steps_of(run_dir: Path) -> list[int]:
    lines = RunDirectory(str(run_dir)).read_json_lines("metrics.jsonl")
    return [line["policy_version"] for line in lines if "reward/mean" in line]


def assert_ended_cleanly(stopped: Background) -> None:
    assert stopped.exit_code() == 130, stopped.output
    assert stopped.left_behind() == []
    assert "Traceback" not in stopped.output
    assert "never retrieved" not in stopped.output
    assert "SIGTERM" not in stopped.output


@pytest.mark.usefixtures("in_a_terminal")
def test_a_run_that_was_stopped_goes_on_with_the_same_command_and_saves_also_when_its_terminal_closes(
    command, start, tmp_path
):
    """Seen before: Ray, which a terminal that closes tells too, was gone before the learner had saved."""
    run_dir = tmp_path / "run"
    with start(*command) as first:
        first.wait_until(lambda: 2 in steps_of(run_dir))
        first.press_ctrl_c()
        assert_ended_cleanly(first)
        done = max(steps_of(run_dir))
        assert f"stopped; step {done} is saved, and the same command goes on from there" in first.output
    assert [path.name for path in (run_dir / "checkpoints").iterdir()] == [f"step-{done:06d}"]
    assert len(list((run_dir / "learned").iterdir())) == done, "what it learned is on record, the step under way too"
    assert f"{done} of 2000" in treadwheel("info", run_dir).stdout
    assert 'data-state="stopped">stopped<' in (run_dir / "report.html").read_text()

    with start(*command) as second:
        second.wait_until(lambda: done + 1 in steps_of(run_dir))
        second.hang_up()
        assert_ended_cleanly(second)
        done = max(steps_of(run_dir))
        assert f"stopped; step {done} is saved" in second.output
    assert steps_of(run_dir) == list(range(1, done + 1))
    verdict = treadwheel("verify", run_dir)
    assert verdict.returncode == 0, verdict.stdout
    steps = read_steps(RunDirectory(str(run_dir)))
    assert {numbers["reward/sees_token"] for step, numbers in steps.items() if step > 0} == {0.0}


def test_a_run_saves_when_its_whole_process_group_is_told_to_terminate(command, start, tmp_path):
    """Seen before: Ray was gone at once, and after a minute the run ended as if it had been killed."""
    with start(*command) as run:
        run.wait_until(lambda: 2 in steps_of(tmp_path / "run"))
        run.time_out()
        assert_ended_cleanly(run)
        assert f"stopped; step {max(steps_of(tmp_path / 'run'))} is saved" in run.output


@pytest.mark.exhaustive
def test_a_run_that_is_told_to_terminate_and_has_no_time_to_save_says_what_is_learned_again(command, start, tmp_path):
    with start(*command, "checkpoint.stop_timeout_s=0") as run:
        run.wait_until(lambda: 2 in steps_of(tmp_path / "run"))
        run.terminate()
        assert_ended_cleanly(run)
        assert "there is no checkpoint: the same command learns steps 1 to" in run.output


def test_a_run_can_be_stopped_while_it_starts(command, start, tmp_path):
    events = tmp_path / "run" / "events.jsonl"
    with start(*command) as starting:
        starting.wait_until(lambda: events.exists() and "launched" in events.read_text())
        starting.press_ctrl_c()
        assert_ended_cleanly(starting)


@pytest.mark.parametrize("end", ["Ctrl-C", pytest.param("SIGTERM", marks=pytest.mark.exhaustive), "SIGKILL"])
def test_a_run_can_be_stopped_while_it_is_checked_and_its_ray_starts(end, command, start, tmp_path):
    (tmp_path / HELD).touch()  # the check tries the judge
    with start(*command) as starting:
        starting.wait_until(lambda: any("raylet" in name for name in starting.living()))
        assert not (tmp_path / "run").exists(), "it is checked still"
        if end == "Ctrl-C":
            starting.press_ctrl_c()
            assert_ended_cleanly(starting)
            assert starting.output == "treadwheel: interrupted\n"
        else:
            starting.send(signal.SIGTERM if end == "SIGTERM" else signal.SIGKILL)
            assert starting.exit_code() != 0
            assert starting.left_behind() == []


def test_a_refused_run_says_why_and_leaves_no_ray_that_it_has_begun(command, start, tmp_path):
    with start(*command, "prompts={name: file, path: absent.jsonl}") as refused:
        assert refused.exit_code() == 2
        assert refused.output.startswith("treadwheel: prompts='file': path='absent.jsonl' cannot be read")
        assert refused.output.count("\n") == 1 and refused.left_behind() == []
    assert not (tmp_path / "run").exists()
