"""Dots lie where their values are, and none on another."""

from pytest import approx

from deploy.viewer.dots import Axis, axis_of, dots, histogram, mean_and_spread, round_numbers


def test_an_axis_may_be_as_long_as_floats_allow():
    axis = axis_of([-1.7e308, 1.7e308])
    assert axis.place(0.0) == 0.5 and [each["value"] for each in axis.ticks()] == [-1e308, 0.0, 1e308]


def test_an_axis_goes_from_the_smallest_to_the_largest_and_equal_values_are_in_its_middle():
    assert axis_of([0.5, -1.0, 2.0]) == Axis(low=-1.0, high=2.0)
    assert axis_of([0.0, 0.0]).place(0.0) == 0.5
    assert axis_of([-4.0]).place(-4.0) == axis_of([1e300]).place(1e300) == 0.5
    assert axis_of([]) == Axis(low=0.0, high=1.0)


def test_axes_have_round_numbers():
    assert round_numbers(0.0, 1.0) == [0.0, 0.25, 0.5, 0.75, 1.0]
    assert round_numbers(-0.52, 1.1) == [-0.5, 0.0, 0.5, 1.0]
    assert round_numbers(1e9, 1e9 + 4) == [1e9 + at for at in range(5)]
    assert round_numbers(0.0, 4e-15) == [0.0, 1e-15, 2e-15, 3e-15, 4e-15]
    assert round_numbers(1.0, 80.0, is_whole=True) == [20.0, 40.0, 60.0, 80.0]
    assert round_numbers(0, 1, is_whole=True) == [0.0, 1.0]


def test_ticks_are_round_numbers_in_their_places():
    assert axis_of([-1.0, 1.0]).ticks() == [
        {"value": -1.0, "percent": 0.0},
        {"value": -0.5, "percent": 25.0},
        {"value": 0.0, "percent": 50.0},
        {"value": 0.5, "percent": 75.0},
        {"value": 1.0, "percent": 100.0},
    ]


def test_equal_rewards_stand_in_one_heap_and_not_on_each_other():
    placed = dots([0.0, 1.0, 1.0, 1.0, 1.0], axis_of([0.0, 1.0]))
    assert placed[0] == {"percent": 0.0, "dx": 0.0, "dy": 0.0, "r": 3.44}
    assert [(dot["percent"], dot["dx"], dot["dy"]) for dot in placed[1:]] == [
        (100.0, -4.0, -8.0),
        (100.0, -4.0, 0.0),
        (100.0, -4.0, 8.0),
        (100.0, 4.0, 0.0),
    ]
    many = dots([1.0] * 300, axis_of([0.0, 1.0]))
    assert len({(dot["dx"], dot["dy"]) for dot in many}) == 300


def test_a_histogram_counts_every_value_once_its_largest_too():
    assert histogram([0.0, 0.1, 1.0], Axis(low=0.0, high=1.0), num_bins=4) == [
        {"percent": 0.0, "count": 2, "share": 1.0},
        {"percent": 75.0, "count": 1, "share": 0.5},
    ]
    assert histogram([], axis_of([])) == []


def test_spread_is_that_of_the_values_themselves():
    assert mean_and_spread([1.0, 0.0, 1.0, 0.0]) == {"mean": 0.5, "std": 0.5}
    assert mean_and_spread([]) == {"mean": None, "std": None}
    # A perplexity may be as large; its square is no number.
    assert mean_and_spread([1e200, -1e200]) == {"mean": 0.0, "std": approx(1e200)}
