"""What steps and events come to."""

import pytest

from cluster.sinks.console.standing import Pace, Standing

SAMPLED = {"time/step_s": 2.0, "rollout/num_workers": 2.0, "rollout/num_wanted": 2.0}


@pytest.fixture
def standing() -> Standing:
    return Standing(title="runs/a", num_steps=10, max_off_policy_steps=1, now=lambda: 100.0)


def test_the_time_left_is_that_of_recent_steps_evaluations_included():
    pace = Pace()
    for version in range(1, 101):
        pace.step(version, version * 1.0, is_sampled=True)
    for version in range(101, 151):  # from here on steps take 4 s
        pace.step(version, 100.0 + (version - 100) * 4.0, is_sampled=True)
    assert pace.seconds_per_step == 4.0
    assert pace.seconds_left(160) == 40.0


def test_it_counts_down_within_a_step_and_waits_for_one_that_takes_longer():
    pace = Pace()
    pace.step(1, 10.0, is_sampled=True)
    pace.step(2, 14.0, is_sampled=True)
    assert [pace.seconds_left(4, now=now) for now in (14.0, 15.0, 18.0, 60.0)] == [8.0, 7.0, 4.0, 4.0]


def test_a_version_that_comes_again_begins_a_new_pace():
    pace = Pace()
    for version, at in ((1, 10.0), (2, 14.0), (2, 15.0)):
        pace.step(version, at, is_sampled=True)
    assert pace.seconds_per_step is None


def test_a_run_that_was_away_tells_no_pace_before_two_steps(standing):
    standing.step(1, SAMPLED, at=10.0)
    standing.event({"kind": "launched", "time": 5000.0})
    standing.step(2, SAMPLED, at=5010.0)
    assert standing.pace.seconds_per_step is None
    standing.step(3, SAMPLED, at=5012.0)
    assert standing.pace.seconds_per_step == 2.0


def test_a_worker_that_failed_serves_again_when_it_is_back(standing):
    standing.step(1, SAMPLED, at=10.0)
    assert (standing.num_serving, standing.num_wanted) == (2, 2)
    standing.event({"kind": "failure", "actor": "rollout-1", "decision": "restart", "reason": "died"})
    assert (standing.num_serving, standing.num_restarts) == (1, 1)
    standing.event({"kind": "recovery", "actor": "rollout-1", "seconds": 3.0})
    assert standing.num_serving == 2
    for decision in ("drain", "abort"):
        standing.event({"kind": "failure", "actor": "rollout-0", "decision": decision, "reason": "x"})
    assert (standing.num_serving, standing.num_restarts) == (2, 1)


def test_a_worker_that_failed_does_not_serve_though_the_last_status_says_so_until_the_next_driver_starts(standing):
    standing.event({"kind": "launched", "time": 1.0})
    actors = [{"actor": f"rollout-{number}", "phase": "sampling", "since": 1.0} for number in range(2)]
    standing.status({"time": 2.0, "actors": actors})
    standing.event({"kind": "failure", "actor": "rollout-1", "decision": "restart", "reason": "died"})
    assert standing.num_serving == 1
    standing.event({"kind": "launched", "time": 2.0})
    assert standing.num_serving == 2


def test_only_an_order_of_rollout_workers_changes_how_many_are_wanted(standing):
    for actors, number in (("rollout_workers", 3), ("reward_services", 5)):
        standing.event({"kind": "scale", "actors": actors, "num_workers": number, "before": 2, "reason": "x"})
    assert standing.num_wanted == 3


def test_the_status_of_an_earlier_driver_says_nothing(standing):
    actor = {"actor": "rollout-0", "phase": "sampling", "since": 1.0}
    standing.event({"kind": "launched", "time": 50.0})
    standing.status({"time": 49.0, "actors": [actor]})
    assert standing.num_serving is None
    standing.status({"time": 51.0, "actors": [actor]})
    assert standing.num_serving == 1


def test_of_a_version_that_comes_again_the_later_number_counts(standing):
    for version, reward in ((1, 0.1), (2, 0.2), (3, 0.3), (2, 0.5), (3, float("nan"))):
        standing.step(version, {"reward/mean": reward}, at=1.0)
    assert standing.rewards == [(1, 0.1), (2, 0.5)]


def test_a_run_of_many_steps_keeps_its_first_and_last_reward(standing):
    for version in range(1, 10_002):
        standing.step(version, {"reward/mean": version / 10_000}, at=float(version))
    assert len(standing.rewards) <= 4000
    assert (standing.rewards[0], standing.rewards[-1]) == ((1, 0.0001), (10_001, 1.0001))


@pytest.mark.parametrize(("kind", "phase"), [("stopping", "stopping"), ("finished", "finished"), ("failed", "failed")])
def test_it_tells_how_it_ends(standing, kind, phase):
    standing.event({"kind": "launched", "time": 1.0})
    standing.event({"kind": "started", "time": 2.0, "actors": {}})
    assert standing.phase == "running" and not standing.is_over
    standing.event({"kind": kind, "time": 3.0})
    standing.step(1, SAMPLED, at=3.0)
    assert standing.phase == phase and standing.is_over == (kind != "stopping")


def test_a_run_that_goes_on_after_its_node_went_away_is_stopped_when_it_is(standing):
    """Seen before: `info --watch`, which reads the events of all drivers, said preempted."""
    for kind in ("launched", "preempted", "stopped", "launched", "stopped"):
        standing.event({"kind": kind, "time": 1.0})
    assert (standing.phase, standing.is_preempted) == ("stopped", False)
