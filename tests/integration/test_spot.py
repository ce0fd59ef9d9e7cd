"""Nodes that announce their end lose nothing; those that do not lose nothing that the learner took. Real `ray start --block` nodes."""

import contextlib
import json
from typing import Any

import pytest

from tests.integration.faults import (
    Run,
    assert_equal_bit_for_bit,
    learner_held,
    slowed,
    undisturbed_run,
    until,
    write_run,
)
from tests.integration.ray_nodes import SYSTEM, SpotNode, ray_nodes
from tests.models import make_tiny_model

pytestmark = [
    pytest.mark.ray,
    pytest.mark.engine,
    pytest.mark.acceptance,
    pytest.mark.timeout(1800),
    pytest.mark.own_process,
]
NOTICE_S = 30.0


def spot_run(folder, *, model=None, **settings):
    """Two workers, each on a spot node of its own; all else is on the head, which has no room for another one."""
    defaults = {
        "num_steps": 100_000,
        "deterministic": False,
        "algorithm": {},
        "buffer": {"groups_per_step": 4, "trajectories_per_group": 4, "max_off_policy_steps": 1},
        "learner__cpus_per_rank": 1.7,
        "rollout__num_workers": 2,
        "rollout__cpus_per_worker": 0.8,
        "supervision": {"heartbeat_s": 1, "hang_s": 600},  # the learner is held
        "elastic": {"spot": SpotNode.LABEL},
    }
    return Run(folder / "run"), write_run(folder, model or make_tiny_model(folder / "model"), **defaults | settings)


def assert_nothing_is_lost_or_doubled(run: Run) -> None:
    consumed = [index for groups in run.groups() for index in groups]
    assert consumed == [*range(len(consumed))]
    assert run.problems() == ()


def test_finished_groups_leave_a_node_that_ends_and_what_a_killed_node_took_is_sampled_again(tmp_path):
    run, file = spot_run(tmp_path)
    with contextlib.ExitStack() as stack:
        cluster = stack.enter_context(ray_nodes(num_cpus=2, _system_config=SYSTEM))
        told, killed = (stack.enter_context(SpotNode(cluster, num_cpus=1, notice_s=NOTICE_S)) for _ in range(2))
        driver = stack.enter_context(run.start(file, "--address", cluster.address))
        until(lambda: {"rollout-0", "rollout-1"} <= run.samplers(), process=driver)

        # The next steps' groups wait, each on the node of the worker that sampled it.
        with learner_held(run, process=driver):
            told.terminate()
            until(lambda: run.events("groups_saved"), process=driver)
            until(told.has_ended, process=driver)
        goes_on_from = run.num_steps()
        until(lambda: run.num_steps() >= goes_on_from + 3, process=driver)
        assert not run.events("groups_lost")

        stack.enter_context(SpotNode(cluster, num_cpus=1, notice_s=NOTICE_S))
        until(lambda: num_workers(run) == 2, process=driver)
        killed.kill()
        until(lambda: {event["failure"] for event in run.events("failure")} != {"termination"}, process=driver)
        goes_on_from = run.num_steps()
        until(lambda: run.num_steps() >= goes_on_from + 3, process=driver)
        # Ray's head does not look for the killed node's seat without end.
        until(lambda: seat_states(cluster) <= {"CREATED", "REMOVED"}, process=driver)
        driver.press_ctrl_c()
        assert driver.exit_code() == 130, driver.output
    assert_nothing_is_lost_or_doubled(run)
    (leaving,) = run.events("node_leaves")
    assert leaving["node_id"] == told.node_id and 0 < leaving["seconds_left"] <= NOTICE_S
    assert len(leaving["actors"]) == 1 and {event["actor"] for event in run.events("worker_left")} == {
        *leaving["actors"]
    }
    steps = run.whole_steps()
    num_saved = sum(len(event["groups"]) for event in run.events("groups_saved"))
    assert num_saved > 0 and sum(step["rollout/groups_saved"] for step in steps) == num_saved
    assert sum(step["rollout/spot_evictions"] for step in steps) == 1


def seat_states(cluster: Any) -> set[str]:
    return {group["state"] for group in cluster.global_state.placement_group_table().values()}


def num_workers(run: Run) -> float:
    return [*run.metrics().values()][-1]["rollout/num_workers"]


def test_what_a_worker_cannot_finish_before_its_node_ends_goes_on_at_another_worker(tmp_path):
    """The worker is slowed: its two groups take several times the notice, on a fast machine too."""
    model = make_tiny_model(tmp_path / "model", max_context=2_500)
    run, file = spot_run(
        tmp_path,
        model=model,
        num_steps=1,
        rollout__num_workers=1,
        sampling={"max_tokens": 2_400, "ignore_eos": True},
        buffer={"groups_per_step": 2, "trajectories_per_group": 2},
    )
    with contextlib.ExitStack() as stack:
        cluster = stack.enter_context(ray_nodes(num_cpus=2, _system_config=SYSTEM))
        nodes = [stack.enter_context(SpotNode(cluster, num_cpus=1, notice_s=20.0)) for _ in range(2)]
        driver = stack.enter_context(run.start(file, "--address", cluster.address))
        until(lambda: run.pid("rollout-0"), process=driver)
        with slowed(run, "rollout-0"):
            until(lambda: sampling_s(run) > 1.0, process=driver)
            (told,) = (node for node in nodes if node.runs(run.pid("rollout-0")))
            told.terminate()
            until(lambda: run.events("groups_handed_over"), process=driver)
        assert driver.exit_code() == 0, driver.output
        until(told.has_ended)
    (handed_over,) = run.events("groups_handed_over")
    assert (handed_over["actor"], handed_over["groups"]) == ("rollout-0", [0, 1])
    (step,) = run.metrics().values()
    assert step["rollout/groups_handed_over"] == 2 and step["mismatch/max_abs_nats"] < 1e-3
    assert step["tokens/sampled"] == 4 * 2_400
    assert not run.events("groups_lost")
    assert_nothing_is_lost_or_doubled(run)


def sampling_s(run: Run) -> float:
    """Since when the worker samples, as it said last; 0 while it does not."""
    status = run.path / "status.json"
    actors = json.loads(status.read_text())["actors"] if status.exists() else ()
    found = (each["last_progress"] - each["since"] for each in actors if each["phase"] == "sampling")
    return next(found, 0.0)


def test_a_run_whose_learners_node_ends_saves_and_the_same_command_goes_on_bit_for_bit(tmp_path, tmp_path_factory):
    file, undisturbed = undisturbed_run(tmp_path_factory)
    run = Run(tmp_path / "run")
    with contextlib.ExitStack() as stack:
        cluster = stack.enter_context(ray_nodes(num_cpus=1, _system_config=SYSTEM))
        told = stack.enter_context(SpotNode(cluster, num_cpus=3, notice_s=NOTICE_S))
        arguments = (file, "checkpoint.every_steps=100", "learner.cpus_per_rank=1.7", "--address", cluster.address)
        with run.start(*arguments) as driver:
            until(lambda: run.num_steps() >= 1, process=driver)
            with slowed(run, "rollout-0"):  # it has not ended when the notice is heard
                told.terminate()
                assert driver.exit_code() == 75, driver.output
            assert "the same command goes on from there" in driver.output
        until(told.has_ended)
        stack.enter_context(SpotNode(cluster, num_cpus=3, notice_s=NOTICE_S))
        run.to_end(*arguments)
    (preempted,) = run.events("preempted")
    assert preempted["node_id"] == told.node_id and "learner's node" in preempted["message"]
    (saved, last) = (event["policy_version"] for event in run.events("checkpoint"))
    assert 1 <= saved < last == 12 and [event["recorded_steps"] for event in run.events("resumed")] == [saved]
    assert_equal_bit_for_bit(undisturbed, run, steps=range(1, 13), checkpoint=12)
    assert run.problems() == ()
