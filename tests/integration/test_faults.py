"""Hangs, silence, full disks and slow rewards: each is noticed within its deadline, said loudly, and survived."""

import itertools
import resource
import signal

import psutil
import pytest

from cluster.contracts.phases import CAUSES
from tests.integration.commands import command_line
from tests.integration.faults import Run, until, write_run
from tests.models import make_tiny_model

pytestmark = [pytest.mark.ray, pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(1800)]
GROUPS = 4
"""Of each step."""


@pytest.fixture(scope="module")
def troubled(tmp_path_factory) -> Run:
    """Rewards that never return, a full disk under a checkpoint, and a worker and a reward service that stand still.

    The staleness bound allows eight groups at a time, the bytes not even one: then only the next step's four may be there.
    """
    folder = tmp_path_factory.mktemp("troubled")
    file = write_run(
        folder,
        make_tiny_model(folder / "model"),
        num_steps=30,
        deterministic=False,
        reward={"judge": "tests.integration.judges:never_for_some", "timeout_s": 0.5},
        learner={"num_threads": 1, "mini_batches": 4, "split_by": "trajectories"},
        buffer={
            "groups_per_step": GROUPS,
            "trajectories_per_group": 4,
            "max_off_policy_steps": 1,
            "max_size_bytes": 1,
        },
        # Silence is a hang after seconds: these actors have little to do.
        supervision={"heartbeat_s": 1, "hang_s": 10},
    )
    run = Run(folder / "run")
    with run.start(file) as driver:
        until(lambda: run.num_steps() >= 4, process=driver)
        learner = run.pid("learner-0")
        _, most = resource.prlimit(learner, resource.RLIMIT_FSIZE)
        resource.prlimit(learner, resource.RLIMIT_FSIZE, (64 * 1024, most))  # for this process the disk is full
        until(lambda: run.events("checkpoint_failed"), process=driver)
        resource.prlimit(learner, resource.RLIMIT_FSIZE, (most, most))
        until(lambda: run.pid("rollout-0") and run.pid("reward"), process=driver)
        struck = [run.strike(actor, signal.SIGSTOP) for actor in ("rollout-0", "reward")]
        stopped = [psutil.Process(pid) for pid in struck if pid is not None]
        assert len(stopped) == 2
        goes_on_from = run.num_steps()
        until(lambda: run.num_steps() >= goes_on_from + 3, process=driver)
        # What hung was replaced, so it goes.
        until(lambda: not any(each.is_running() for each in stopped), process=driver)
        until(lambda: run.pid("rollout-0") and run.pid("reward"), process=driver)
        (parent,) = {psutil.Process(run.pid(actor)).ppid() for actor in ("rollout-0", "reward")}
        assert "cluster.remote.fork_server" in command_line(psutil.Process(parent)), "forked, and so back in seconds"
        assert driver.exit_code() == 0, driver.output
    return run


def test_the_run_ends_with_every_group_consumed_once_and_is_replayed_to_any_step_bit_for_bit(troubled):
    assert troubled.num_steps() == 30
    assert troubled.replay("--to-step", 29) == f"29 steps replayed, weights {troubled.weights()[29]}: equal\n"
    assert troubled.problems() == ()
    consumed = [index for groups in troubled.groups() for index in groups]
    assert len(consumed) == len(set(consumed)) == 30 * GROUPS


def test_a_reward_that_never_returns_is_a_timeout_and_no_zero(troubled):
    assert sum(numbers["reward/num_timeouts"] for numbers in troubled.metrics().values()) > 0
    for table in troubled.trajectories().values():
        rewards, statuses = table["reward"].to_pylist(), table["reward_status"].to_pylist()
        assert [reward is None for reward in rewards] == [status == "timeout" for status in statuses]


def test_slow_rewards_slow_sampling_and_nothing_piles_up(troubled):
    waiting = [numbers["buffer/num_ready"] + numbers["buffer/num_under_way"] for numbers in troubled.metrics().values()]
    assert len(waiting) == 30 and max(waiting) == GROUPS, "eight would wait if nothing held them back"


def test_a_full_disk_under_a_checkpoint_is_an_event_and_later_checkpoints_are_good(troubled):
    failed = troubled.events("checkpoint_failed")
    assert failed and "File too large" in failed[0]["reason"] and "the last good one stands" in failed[0]["reason"]
    assert troubled.checkpoint(30), "saving went on once there was room"


def test_silence_is_a_hang_and_is_noticed_in_time(troubled):
    hangs = {event["actor"]: event["silent_s"] for event in troubled.events("hang")}
    limits = troubled.config().supervision
    # A machine that stands still for so long makes others look the same.
    assert hangs.keys() >= {"rollout-0", "reward"}
    # Asked every heartbeat, with an answer due within another one; a minute is for the machine.
    assert all(limits.hang_s < silent_s < limits.hang_s + 4 * limits.heartbeat_s + 60 for silent_s in hangs.values())
    assert {event["failure"] for event in troubled.events("failure")} == {"hang"}


def test_what_stood_still_was_restarted_and_the_time_of_no_actor_has_a_gap(troubled):
    phases = troubled.phases()
    restarted = {actor for actor, lines in phases.items() for line in lines if line["phase"] == "restarting"}
    assert {"rollout-0", "reward"} <= restarted
    for actor, lines in phases.items():
        assert all(one["end"] == other["start"] for one, other in itertools.pairwise(lines)), actor
    waits = {line["phase"] for line in phases["rollout-0"]}
    assert {"sampling", "loading weights", "waiting for learner", "waiting for rewards"} <= waits
    costs = [f"cost/rollout_worker/{cause}_s" for cause in CAUSES]
    told = sum(step.get(name, 0.0) for step in troubled.metrics().values() for name in costs)
    wall_clock = phases["rollout-0"][-1]["end"] - phases["rollout-0"][0]["start"]
    last_step = wall_clock - told
    assert 0.0 <= last_step < wall_clock / 2, "all but what came after the last step's numbers"
