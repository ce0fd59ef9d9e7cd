"""What changes from step to step."""

import pytest

from cluster.contracts.algorithm_config import AdaptiveKlConfig
from learner.algorithms.objective.controllers import KlController


def test_the_adaptive_coefficient_follows_the_measured_kl():
    controller = KlController(coefficient=0.1, adaptive=AdaptiveKlConfig(target=6.0, horizon=100))
    assert controller.observe(12.0, num_trajectories=10).coefficient == pytest.approx(0.1 * 1.02)
    assert controller.observe(0.0, num_trajectories=10).coefficient == pytest.approx(0.1 * 0.98)
    assert KlController(coefficient=0.1).observe(99.0, num_trajectories=10).coefficient == 0.1


def test_a_step_of_more_trajectories_than_the_horizon_corrects_fully_and_no_further():
    """Without a bound, 1,024 trajectories on a horizon of 200 would make β negative: 0.1 · (1 − 0.2 · 5.12)."""
    adaptive = AdaptiveKlConfig(target=6.0, horizon=200)
    for num_trajectories in (200, 1024):
        observed = KlController(coefficient=0.1, adaptive=adaptive).observe(0.0, num_trajectories=num_trajectories)
        assert observed.coefficient == pytest.approx(0.08)
