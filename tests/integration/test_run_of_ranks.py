"""Whole runs on two ranks and two workers: they learn what one of each learns, and one rank goes on where two ended. And on engines of two
processes, which come and go together."""

import signal
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.integration.commands import command_line
from tests.integration.faults import Run, write_endless_run, write_run
from tests.integration.waiting import until
from tests.models import make_tiny_model

pytestmark = [pytest.mark.ray, pytest.mark.engine, pytest.mark.acceptance, pytest.mark.timeout(1800)]

LEARNED: dict[str, Any] = {
    "algorithm": {"preset": "ppo", "value": {"learning_rate": 1e-3}},
    "learner__lora": {"rank": 4, "publish": "adapter"},
}
"""All weights of a critic, and adapters of the policy."""
COMPARED = ("reward/mean", "learner/policy_logprob_mean", "learner/gradient_norm", "learner/tokens")
TWO = ("learner.num_ranks=2", "learner.cpus_per_rank=0.5", "learner.sequence_parallel_size=2", "rollout.num_workers=2")


def test_two_ranks_that_share_passes_learn_what_one_learns_and_one_goes_on_where_they_ended(tmp_path: Path):
    model = make_tiny_model(tmp_path / "model")
    # A deterministic run is refused another number of ranks.
    file = write_run(tmp_path, model, deterministic=False, num_steps=2, checkpoint__every_steps=1, **LEARNED)
    one = Run(tmp_path / "one").to_end(file, "num_steps=3")
    two = Run(tmp_path / "two").to_end(file, *TWO)
    (started,) = two.events("started")
    # So short a run may end before its second worker is there.
    assert {"learner-0", "learner-1"} <= started["actors"].keys()
    resumed = two.to_end(file, "num_steps=3")
    assert [event["recorded_steps"] for event in resumed.events("resumed")] == [2]
    # Every seed is a trajectory's own, whoever samples it.
    assert resumed.trajectories()[1] == one.trajectories()[1]
    expected, found = one.metrics(), resumed.metrics()
    assert found.keys() == expected.keys() == {1, 2, 3}
    for name in COMPARED:
        assert found[1][name] == pytest.approx(expected[1][name], rel=1e-5), name
        # The order of sums differs, and with it, by a token now and then, what is sampled later.
        assert found[3][name] == pytest.approx(expected[3][name], rel=0.1, abs=0.01), name
    assert resumed.problems() == ()


def test_an_engine_of_two_processes_samples_through_a_run_and_its_processes_end_with_one_another_and_with_their_actor(
    tmp_path: Path,
):
    """A mixture of experts whose choices the learner replays: they come from the engine's first process. Weights go through the object
    store, and after a resume through a group of all processes."""
    model = make_tiny_model(tmp_path / "model", architecture="qwen3_moe")
    engine = {"tensor_parallel_size": 2, "routing_replay": True, "cpus_per_worker": 0.5, "kv_cache_bytes": 64 * 1024**2}
    on_policy = {"groups_per_step": 4, "trajectories_per_group": 4}
    file, run = write_endless_run(tmp_path, model, rollout=engine, buffer=on_policy), Run(tmp_path / "run")
    with run.start(file) as driver:
        until(lambda: run.num_steps() >= 1, process=driver)
        first = _processes_of_engine(run)
        first[1].send_signal(signal.SIGKILL)
        until(lambda: run.events("recovery"), process=driver)
        goes_on_from, second = run.num_steps(), _processes_of_engine(run)
        until(lambda: run.num_steps() > goes_on_from, process=driver)
        driver.press_ctrl_c()
        assert driver.exit_code() == 130, driver.output
    (failure,) = run.events("failure")
    assert failure["actor"] == "rollout-0"
    # The one that was left ends with it.
    assert "2 processes these are gone" in failure["reason"] and f"{first[1].pid} (-9)" in failure["reason"]
    resumed = run.to_end(file, f"num_steps={run.num_steps() + 2}", "weights.transport=collective")
    assert psutil.wait_procs([*first, *second], timeout=120)[1] == []
    assert resumed.problems() == ()
    for numbers in resumed.metrics().values():
        assert numbers["mismatch/mean_abs_nats"] < 1e-4 and numbers["learner/routing_differs"] < 0.01


def _processes_of_engine(run: Run) -> list[psutil.Process]:
    """In the order of their ranks; not what else its actor started."""
    pid = run.pid("rollout-0")
    assert pid is not None
    names = {process.pid: command_line(process) for process in psutil.Process(pid).children()}
    found = [psutil.Process(child) for child, name in sorted(names.items()) if "VLLM" in name or "spawn_main" in name]
    assert len(found) == 2, names
    return found
