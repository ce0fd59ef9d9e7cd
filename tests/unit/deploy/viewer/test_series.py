"""Curves have few points, and lose no spike."""

from deploy.viewer import series
from tests.unit.deploy.viewer.run_files import CONFIG, step


def test_ten_thousand_steps_become_few_points_that_keep_the_spike_and_the_last():
    points = [(number, 0.0) for number in range(10_000)]
    points[4321], points[777] = (4321, 9.0), (777, -9.0)
    thin = series.thinned(points, 100)
    assert len(thin) <= 100
    assert {(4321, 9.0), (777, -9.0), (9999, 0.0)} <= set(thin)
    assert [at for at, _ in thin] == sorted({at for at, _ in thin})


def test_the_mean_of_a_long_curve_is_of_all_its_steps_and_a_largest_value_has_none():
    steps = [step(at, reward__mean=8.0 if at % 4 == 0 else 0.0, staleness__max=1.0) for at in range(1, 1601)]
    told = series.line(steps, "reward/mean", label="", kind="line")
    assert len(told["mean"]) == 200 and {value for _, value in told["mean"]} == {2.0}
    assert series.line(steps[:9], "reward/mean", label="", kind="line")["mean"] is None
    assert series.line(steps, "staleness/max", label="", kind="line")["mean"] == []


def test_the_mean_of_the_last_steps_is_of_as_many_as_they_are():
    assert series.means([(1, 2.0), (2, 4.0), (3, 5.0)], 2) == [(2, 3.0), (3, 5.0)]


def test_zero_is_a_number_and_one_that_no_axis_can_hold_is_none():
    steps = [step(1, a=0.5), step(2, a=0.0), step(3, a=1e301), step(4)]
    assert series.values(steps, "a") == [(1, 0.5), (2, 0.0)]
    assert series.latest([*steps[:2], *steps[3:]], "a") == 0.0


def test_few_points_stay_as_they_are():
    assert series.thinned([(1, 0.5), (2, 0.25)], 2) == [(1, 0.5), (2, 0.25)]


def test_an_evaluation_is_points_and_a_step_without_one_has_none():
    steps = [
        step(0, eval__accuracy=0.1),
        step(1, reward__mean=0.5),
        {**step(2), "reward/mean": None},
        step(3, reward__mean=0.25),
    ]
    (panel,) = series.panels(steps, CONFIG)
    assert panel["title"] == "Reward"
    assert [(line["name"], line["kind"], line["points"]) for line in panel["lines"]] == [
        ("reward/mean", "line", [(1, 0.5), (3, 0.25)]),
        ("eval/accuracy", "points", [(0, 0.1)]),
    ]


def test_staleness_has_its_bound():
    (panel,) = series.panels([step(1, staleness__max=1.0)], CONFIG)
    assert panel["bound"] == {"value": 2, "label": "bound 2"}
    (synchronous,) = series.panels([step(1, staleness__max=0.0)], {"buffer": {"max_off_policy_steps": 0}})
    assert synchronous["bound"] == {"value": 0, "label": "bound 0"}
    (unbound,) = series.panels([step(1, staleness__max=1.0)], {})
    assert unbound["bound"] is None


def test_the_time_left_is_that_of_the_last_steps_and_of_a_running_run_alone():
    steps = [step(1, time__step_s=90.0), *(step(number, time__step_s=2.0) for number in range(2, 8))]
    steps = steps[:1] + [step(number, time__step_s=2.0) for number in range(2, 30)]
    told = series.facts(steps, {"num_steps": 39}, state="running")
    assert (told["step"], told["step_s"], told["left_s"]) == (29, 2.0, 20.0)
    assert series.facts(steps, {"num_steps": 39}, state="finished")["left_s"] is None
    assert series.facts([], {}, state="starting")["step"] == 0


def test_a_run_keeps_its_colour_where_another_has_no_number():
    panels = series.compared({"a": [step(1, reward__mean=0.5)], "b": [step(1, reward__mean=0.25, time__step_s=2.0)]})
    assert [(panel["title"], [(line["name"], line["color"]) for line in panel["lines"]]) for panel in panels] == [
        ("Reward, sampled", [("a", 1), ("b", 2)]),
        ("A step", [("b", 2)]),
    ]


def test_a_spark_goes_from_corner_to_corner():
    assert series.spark([(1, 0.0), (3, 1.0)]) == "M0.0 22.0L100.0 2.0"
    assert series.spark([(1, 0.5), (3, 0.5)]) == "M0.0 22.0L100.0 22.0"
    assert series.spark([(1, 0.0)]) == ""
