"""`treadwheel scale` says no where the driver would not obey, and a driver reads an order once."""

import pytest

from cluster.contracts.errors import ConfigError
from cluster.run_directory import RunDirectory
from deploy.configuration import resolved_yaml, validated
from deploy.steering import CONTROL, scale


def claimed(path, **settings) -> RunDirectory:
    """A run directory with a living driver: this process."""
    directory = RunDirectory(str(path))
    directory.claim(resolved_yaml(validated({"model": {"path": "some/model"}, "prompts": "file", **settings})))
    return directory


def test_an_order_is_left_for_the_driver(tmp_path):
    directory = claimed(tmp_path)
    scale(directory, rollout_workers=4)
    assert directory.read_text(CONTROL) == '{\n  "rollout_workers": 4\n}\n'


@pytest.mark.parametrize(
    ("settings", "asked", "reason"),
    [
        ({}, 0, "rollout_workers=0: a run needs at least 1"),
        ({"deterministic": True}, 2, "is deterministic, which worker samples what is fixed; start a run of its own"),
        (
            {"elastic": {"max_workers": 3}},
            4,
            "rollout_workers=4 is outside .* elastic.max_workers=3; ask for a number between",
        ),
    ],
)
def test_what_the_driver_would_not_do_is_refused(settings, asked, reason, tmp_path):
    directory = claimed(tmp_path, **settings)
    with pytest.raises(ConfigError, match=reason):
        scale(directory, rollout_workers=asked)
    assert not directory.exists(CONTROL)


def test_a_run_without_a_driver_is_not_steered(tmp_path):
    claimed(tmp_path).release()
    with pytest.raises(ConfigError, match="has no living driver; set rollout"):
        scale(RunDirectory(str(tmp_path)), rollout_workers=4)
