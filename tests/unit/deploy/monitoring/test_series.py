"""What a dashboard shows is in the unit of what was measured."""

import pytest

from deploy.monitoring.series import unit


@pytest.mark.parametrize(
    "name", ["learner/clip_fraction_covariance", "learner/routing_differs", "weights/changed_share"]
)
def test_a_share_is_in_percent(name):
    assert unit(name) == "percentunit"
