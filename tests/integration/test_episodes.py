"""Episodes on a real cluster: rows that add up, runs that repeat bit for bit, and hosts that die."""

import contextlib
import json
from pathlib import Path
from typing import NamedTuple

import psutil
import pytest

from cluster.contracts.segments import whole
from tests.integration.commands import Background, command_line, imported_once
from tests.integration.conversations import ENVIRONMENT, TEMPLATE
from tests.integration.faults import Run, assert_equal_bit_for_bit, until, write_run
from tests.models import make_tiny_model

pytestmark = [pytest.mark.ray, pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(1800)]
STEPS = 4


class Ended(NamedTuple):
    run: Run
    left_behind: list[str]


def run_file(folder: Path, **settings) -> Path:
    """Three turns of eight tokens each, which a random model seldom ends itself."""
    prompts = [{"messages": [{"role": "user", "content": f"say {number}"}]} for number in range(40)]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "prompts.jsonl").write_text("\n".join(map(json.dumps, prompts)))
    own = {
        "num_steps": STEPS,
        "prompts": {"name": "file", "path": str(folder / "prompts.jsonl")},
        "environment": ENVIRONMENT,
        "episodes": {"on_turn_length": "continue"},
        "sampling": {"max_tokens": 8},
        "reward": {},
        "algorithm": {"advantage": "rloo"},
    }
    return write_run(folder, make_tiny_model(folder / "model", chat_template=TEMPLATE), **own | settings)


@pytest.fixture(scope="module")
def file(tmp_path_factory) -> Path:
    return run_file(tmp_path_factory.mktemp("episodes"))


@pytest.fixture(scope="module")
def ended(file) -> Ended:
    run = Run(file.parent / "run")
    with Background("train", file, f"run_dir={run.path}", env=imported_once()) as driver:
        assert driver.exit_code() == 0, driver.output
        return Ended(run, driver.left_behind())


@pytest.fixture(scope="module")
def run(ended) -> Run:
    return ended.run


def test_every_episode_adds_up(run):
    for table in run.trajectories().values():
        (batch,) = table.combine_chunks().to_batches()
        rows = whole(batch).to_pylist()
        assert {len(row["turns"]) for row in rows} == {3}
        assert {row["environment"] for row in rows} == {"digits_wanted"}
        for row in rows:
            parts = dict(row["reward_components"])
            assert row["reward"] == pytest.approx(parts["environment"] + parts["earned/digits"])
            assert sum(row["token_rewards"]) == pytest.approx(row["reward"], abs=1e-6)
            assert sum(row["loss_mask"]) == sum(turn["end"] - turn["start"] for turn in row["turns"])
        assert {row["num_segments"] for row in batch.to_pylist()} == {1, 2}
        raw = [row for row in batch.to_pylist() if row["sample_index"] % 4 == 2]
        assert {row["num_segments"] for row in raw} == {1}
        assert all(json.loads(row["messages"])[0]["content"] == row["prompt_text"] for row in raw)


def test_the_learner_computes_what_the_engine_sampled_in_every_turn(run):
    """Off by one token, or by one mask, log-probs of a random model differ by whole nats."""
    assert max(numbers["mismatch/mean_abs_nats"] for numbers in run.metrics().values()) < 1e-4
    assert run.problems() == ()


@pytest.mark.exhaustive
def test_a_deterministic_run_repeats_bit_for_bit(run, file):
    again = Run(file.parent / "again").to_end(file)
    assert_equal_bit_for_bit(run, again, steps=range(1, STEPS + 1))


@pytest.fixture(scope="module")
def stopped(tmp_path_factory) -> Ended:
    """Asynchronous, two workers; environments' processes die in mid-episode, and a worker with its own."""
    folder = tmp_path_factory.mktemp("hurt")
    file = run_file(
        folder,
        num_steps=100_000,
        deterministic=False,
        environment={"name": ENVIRONMENT, "turns": 5},
        buffer={"groups_per_step": 4, "trajectories_per_group": 4, "max_off_policy_steps": 2},
        rollout__num_workers=2,
    )
    run = Run(folder / "run")
    with run.start(file) as driver:
        for step in (1, 3):
            until(lambda step=step: run.num_steps() >= step, process=driver)
            for number in (0, 1):
                until(lambda number=number: _kill_hosts(run, f"rollout-{number}"), process=driver)
        until(lambda: run.strike("rollout-1"), process=driver)
        until(lambda: run.events("recovery"), process=driver)
        mended_at = run.num_steps()
        until(lambda: run.num_steps() >= mended_at + 3, process=driver)
        driver.press_ctrl_c()
        assert driver.exit_code() == 130, driver.output
        return Ended(run, driver.left_behind())


@pytest.fixture(scope="module")
def hurt(stopped) -> Run:
    return stopped.run


def _kill_hosts(run: Run, worker: str) -> bool:
    """Whether there was one. It, and the worker, may end at this moment."""
    pid, num_killed = run.pid(worker), 0
    with contextlib.suppress(psutil.NoSuchProcess):
        for child in psutil.Process(pid).children() if pid else ():
            if "actors.environments.host.main" in command_line(child):
                child.kill()
                num_killed += 1
    return num_killed > 0


def test_deaths_of_hosts_and_workers_cost_no_group_and_the_run_replays_bit_for_bit(hurt):
    assert hurt.problems() == ()
    assert not hurt.events("quarantine")
    assert hurt.replay().rstrip().endswith(": equal")


def test_no_process_of_an_environment_outlives_its_run(ended, stopped):
    assert ended.left_behind == stopped.left_behind == []
