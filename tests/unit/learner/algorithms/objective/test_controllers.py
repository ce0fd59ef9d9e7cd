"""What changes from step to step."""

import pytest

from learner.algorithms.objective.controllers import AdaptiveKl, FixedKl


def test_the_adaptive_coefficient_follows_the_measured_kl():
    controller = AdaptiveKl(coefficient=0.1, target=6.0, horizon=100)
    assert controller.observe(12.0, num_trajectories=10).coefficient == pytest.approx(0.1 * 1.02)
    assert controller.observe(0.0, num_trajectories=10).coefficient == pytest.approx(0.1 * 0.98)
    assert FixedKl(coefficient=0.1).observe(99.0, num_trajectories=10).coefficient == 0.1
