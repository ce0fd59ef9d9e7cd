"""Every metric is in a panel of Grafana's dashboard."""

import json
import re
from functools import cache
from typing import Any

from cluster.sinks.ray import exported_name
from deploy.monitoring.dashboard import made
from deploy.monitoring.series import registry

WORDS = {"k": "4", "name": "guess", "part": "style", "role": "tool"}
"""For placeholders; others become `math`."""


def test_every_metric_is_in_a_panel():
    metrics = [re.sub(r"<(\w+)>", lambda found: WORDS.get(found[1], "math"), name) for name in registry()]
    assert [metric for metric in metrics if not _panels_of(metric)] == []


def test_standard_errors_are_not_among_the_shares_that_they_belong_to():
    assert "Held out" in _panels_of("eval/pass_at_4") and "Held out" in _panels_of("eval/accuracy")
    assert _panels_of("eval/pass_at_4_stderr") == _panels_of("eval/accuracy_stderr") == ["eval"]


def test_held_out_numbers_of_a_source_are_beside_those_of_all_sources():
    assert _panels_of("eval/accuracy/math") == _panels_of("eval/accuracy") == ["Held out"]
    assert _panels_of("eval/reward/math") == _panels_of("eval/reward") == ["Reward"]


def _panels_of(metric: str) -> list[str]:
    """Titles of the panels with a query that finds the metric."""
    series = f"ray_{exported_name(metric)}"
    return [panel["title"] for panel in _panels() if any(_finds(each["expr"], series) for each in panel["targets"])]


@cache
def _panels() -> list[dict[str, Any]]:
    whole = json.loads(made())["panels"]
    return [panel for each in whole for panel in (each, *each.get("panels", ())) if "targets" in panel]


def _finds(query: str, series: str) -> bool:
    selected = re.search(r'__name__=~"([^"]+)"(?:, __name__!~"([^"]+)")?', query)
    if selected is None:
        return re.search(rf"\b{series}\b", query) is not None
    return bool(re.fullmatch(selected[1], series)) and not (selected[2] and re.fullmatch(selected[2], series))
