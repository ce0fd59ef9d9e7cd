"""What changes from step to step."""

import pytest
from torch import tensor

from learner.algorithms.objective.controllers import AdaptiveKl, FixedKl, RunningMoments


def test_the_adaptive_coefficient_follows_the_measured_kl():
    controller = AdaptiveKl(coefficient=0.1, target=6.0, horizon=100)
    assert controller.observe(12.0, num_trajectories=10).coefficient == pytest.approx(0.1 * 1.02)
    assert controller.observe(0.0, num_trajectories=10).coefficient == pytest.approx(0.1 * 0.98)
    assert FixedKl(coefficient=0.1).observe(99.0, num_trajectories=10).coefficient == 0.1


def test_running_moments_are_those_of_everything_so_far():
    moments = RunningMoments().update(tensor([1.0, 3.0]))
    assert (moments.mean, moments.std) == pytest.approx((2.0, 2**0.5))
    moments = moments.update(tensor([8.0]))
    assert (moments.mean, moments.std) == pytest.approx((4.0, 13**0.5))  # (9 + 1 + 16) / 2


@pytest.mark.parametrize("values", [[3.0], [0.1] * 7, [0.0, 0.0]])
def test_values_without_variance_are_not_scaled(values):
    moments = RunningMoments().update(tensor(values))
    assert moments.std == 1.0
    again = moments.update(tensor(values) + tensor(values) * 1e-8)
    assert again.std == 1.0 and again.count == 2 * len(values)
