import pytest

from deploy.reports.panels import Mark, bound_shown, height, limits, marks, panels, spread, ticks
from deploy.viewer.fleet import versioned
from tests.unit.deploy.viewer.run_files import event, step


def titled(title, *steps, config=None):
    return next(panel for panel in panels(steps, config or {}) if panel.title == title)


def test_evaluations_are_points_with_their_errors_and_no_line():
    steps = [step(version, reward__mean=0.5) for version in range(1, 5)]
    steps += [step(5, reward__mean=0.5, eval__reward=0.25, eval__reward_stderr=0.1), step(6, eval__reward=0.5)]
    sampled, held_out = titled("Reward", *steps).curves
    assert sampled.is_line and sampled.points[0] == (1, 0.5)
    assert not held_out.is_line and held_out.points == ((5, 0.25), (6, 0.5)) and held_out.errors == (0.1, None)


def test_what_is_measured_at_every_tenth_step_has_no_line_between():
    (curve,) = titled("Entropy", *(step(version, learner__entropy_mean=1.0) for version in (1, 11, 21))).curves
    assert not curve.is_line
    (curve,) = titled("Entropy", *(step(version, learner__entropy_mean=1.0) for version in (1, 2, 3))).curves
    assert curve.is_line


def test_parts_of_the_reward_are_those_that_the_judge_named():
    numbers = {"reward/mean": 1.0, "reward/num_errors": 0.0, "reward/right": 0.5, "reward/right/num_failed": 1.0}
    numbers |= {"reward/mean/gsm8k": 0.75, "reward/num_timeouts": 0.0}
    lines = [{**step(version), **numbers} for version in (1, 2)]
    assert [curve.label for curve in titled("Parts of the reward", *lines).curves] == ["right"]
    assert [curve.label for curve in titled("Reward by source", *lines).curves] == ["gsm8k"]


def test_a_panel_says_how_many_lines_it_leaves_out():
    lines = [{**step(version), **{f"reward/part{at}": 1.0 for at in range(9)}} for version in (1, 2)]
    panel = titled("Parts of the reward", *lines)
    assert panel.unit == "6 of 9" and len(panel.curves) == 6


def test_a_number_that_was_not_finite_is_no_point():
    lines = [step(1, reward__mean=0.5), {**step(2), "reward/mean": None}, step(3, reward__mean=0.75)]
    assert titled("Reward", *lines).curves[0].points == ((1, 0.5), (3, 0.75))


def test_staleness_stands_under_the_bound_of_the_run():
    lines = [step(version, staleness__max=1.0) for version in (1, 2)]
    panel = titled("Staleness", *lines, config={"buffer": {"max_off_policy_steps": 3}})
    assert panel.bound == (3.0, "bound 3") and limits(panel) == (0.0, pytest.approx(3.18))
    assert ticks(panel) == [0.0, 1.0, 2.0, 3.0]


def test_a_bound_that_the_run_measured_counts_before_its_settings():
    lines = [step(version, staleness__max=1.0, staleness__bound=0.0) for version in (1, 2)]
    assert titled("Staleness", *lines, config={"buffer": {"max_off_policy_steps": 3}}).bound == (0.0, "bound 0")


def test_an_alarm_far_above_takes_no_room_on_a_logarithmic_axis():
    def panel(mismatch):
        lines = [step(version, mismatch__mean_abs_nats=mismatch) for version in (1, 2)]
        return titled("Mismatch, rollout to learner", *lines, config={"mismatch": {"alarm_nats": 0.5}})

    assert limits(panel(2e-6)) == pytest.approx((1e-6, 1e-5))
    assert limits(panel(0.02)) == pytest.approx((0.01, 1.0))
    assert limits(panel(0.0)) == pytest.approx((1.0, 10.0))
    assert (bound_shown(panel(2e-6)), bound_shown(panel(0.02))) == (None, (0.5, "alarm 0.5"))
    assert height(0.0, 0.01, 1.0, is_log=True) == 0.0, "no logarithm has it: it stands at the bottom"


def test_a_long_curve_is_pale_under_its_mean_and_keeps_its_spikes():
    lines = [step(version, reward__mean=9.0 if version == 777 else 0.5) for version in range(1, 2001)]
    (curve,) = titled("Reward", *lines).curves
    assert curve.is_long and len(curve.points) <= 401 and (777, 9.0) in curve.points
    assert curve.end == 0.5 and len(curve.mean) == 50


def test_a_new_drivers_trouble_stands_where_it_began():
    failed = {"actor": "rollout-0", "failure": "death", "reason": "signal 9", "decision": "restart"}
    events = [
        event("launched", 1.0),
        {**event("failure", 2.0, **failed), "policy_version": 3},
        event("launched", 8.0),
        event("resumed", 9.0, recorded_steps=7),
        event("failure", 10.0, **failed),
    ]
    found = marks(versioned(events))
    assert [(mark.step, mark.is_failure) for mark in found] == [(4, True), (8, False), (8, True)]
    assert found[1] == Mark(step=8, is_failure=False, words="resumed after 7 recorded steps")


def test_an_actor_that_leaves_its_node_is_no_trouble():
    left = {"actor": "rollout-0", "failure": "termination", "reason": "node n1 goes away", "decision": "drain"}
    assert not marks(versioned([event("launched", 1.0), event("failure", 10.0, **left)]))


def test_of_very_many_interruptions_the_last_are_marked():
    failed = {"actor": "rollout-0", "failure": "death", "reason": "signal 9", "decision": "restart"}
    found = marks({**event("failure", 1.0, **failed), "policy_version": at} for at in range(1, 100))
    assert (len(found), found[0].step, found[-1].step) == (60, 41, 100)


def test_labels_that_would_lie_on_one_another_are_moved_apart():
    assert spread([10.0, 11.0, 50.0], gap=5.0, low=0.0, high=100.0) == [10.0, 15.0, 50.0]
    assert spread([99.0, 98.0], gap=5.0, low=0.0, high=100.0) == [100.0, 95.0]
