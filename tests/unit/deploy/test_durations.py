import pytest

from cluster.contracts.errors import ConfigError
from deploy.durations import seconds


@pytest.mark.parametrize(("text", "expected"), [("90s", 90), ("30m", 1800), ("1.5h", 5400), ("0s", 0)])
def test_a_number_and_a_unit_are_seconds(text, expected):
    assert seconds(text, option="--wait-for-nodes") == expected


@pytest.mark.parametrize("text", ["", "30", "m", "30 m", "-5m", "1e9s", "nan", "2d", "30m5s", "ten minutes"])
def test_anything_else_is_refused_by_the_options_name(text):
    with pytest.raises(ConfigError, match=rf"^--wait-for-nodes={text!r} is not a time; write it as 90s, 10m or 2h$"):
        seconds(text, option="--wait-for-nodes")
