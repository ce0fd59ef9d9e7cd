"""Running mean and spread."""

import pytest
from torch import float64, tensor

from cluster.contracts.errors import DataError
from learner.algorithms.moments import RunningMoments


def test_running_moments_are_those_of_everything_so_far():
    moments = RunningMoments().update(tensor([1.0, 3.0]))
    assert (moments.mean, moments.std) == pytest.approx((2.0, 2**0.5))
    moments = moments.update(tensor([8.0]))
    assert (moments.mean, moments.std) == pytest.approx((4.0, 13**0.5))  # (9 + 1 + 16) / 2
    moments = moments.update(tensor([4.0, 14.0, 18.0]))
    assert (moments.mean, moments.std) == pytest.approx((8.0, 45.2**0.5))  # (49 + 25 + 0 + 16 + 36 + 100) / 5
    assert moments.update(tensor([])) == moments


def test_normalised_values_are_spreads_from_the_mean_and_may_be_restored():
    moments = RunningMoments(mean=3.0, var=2.0, count=2)  # a spread of 2 with ddof 1
    assert moments.normalise(tensor([7.0])).tolist() == [2.0]
    assert moments.restore(tensor([2.0])).tolist() == [7.0]


@pytest.mark.parametrize("values", [[3.0], [0.1] * 7, [0.0, 0.0], [2e-16, -1e-16, 0.0]])
def test_values_without_variance_are_not_scaled(values):
    moments = RunningMoments().update(tensor(values))
    assert moments.std == 1.0
    again = moments.update(tensor(values) + tensor(values) * 1e-8)
    assert again.std == 1.0 and again.count == 2 * len(values)


@pytest.mark.parametrize("values", [[1e155, 0.0], [1e155, 1e155], [-1e200, 1.0]])
@pytest.mark.parametrize("before", [RunningMoments(), RunningMoments().update(tensor([1.0, 2.0]))])
def test_values_whose_squares_no_number_holds_are_refused_by_name(values, before):
    """Seen before: OverflowError from within, or an infinite std, by which all rewards became 0."""
    with pytest.raises(DataError, match=r"values up to 1e\+(155|200) have no spread"):
        before.update(tensor(values, dtype=float64))
