"""Prometheus's name and Grafana's unit of a metric: both follow from its name in the registry."""

import re
from functools import cache

from cluster.metrics import METRICS
from cluster.sinks.ray import exported_name
from learner.algorithms.objective.statistics import reported_names

EVENTS, LAST_STEP_TIME = "ray_treadwheel_events_total", "ray_treadwheel_last_step_time"
"""Series that every driver exports as long as it lives."""
SHOWN = 'run=~"$run"'
"""Label of the runs that a dashboard shows."""

_PLACEHOLDER = re.compile(r"<\w+>")
_SHARES = (
    r"share|fraction(_low|_high|_dual|_covariance)?|accuracy(_stderr)?|pass_at_.*|truncated|"
    r"filtered_tokens|dropped|outside|differs|ess"
)
_UNITS = (
    (r"hours$", "h"),
    (r"bytes_per_s$", "Bps"),
    (r"_per_s$", "short"),
    (r"_s$", "s"),
    (r"bytes$", "bytes"),
    (r"num_", "short"),
)
"""(pattern of a metric's name, Grafana's unit). The first match counts."""


@cache
def registry() -> dict[str, str]:
    """Every metric of a run and its meaning."""
    return METRICS | {f"learner/{name}": meaning for name, meaning in reported_names().items()}


def series(name: str, *, labels: str = "") -> str:
    """Query of a metric, one series a run, over all its drivers. `labels`: only of runs with these. Raises KeyError for a name that is not
    in the registry."""
    registry()[name]
    if _PLACEHOLDER.search(name):
        among = f"{_of_many(name)}, {labels}" if labels else _of_many(name)
        return f"max by (run, __name__) ({{{among}}})"
    selected = f"{{{labels}}}" if labels else ""
    return f"max by (run) (ray_{exported_name(name)}{selected})"


def causes(kind: str) -> str:
    """Query of the seconds of actors of a kind, by cause, of the runs that a dashboard shows."""
    prefix = f"ray_{exported_name(f'cost/{kind}/')}"
    found = f'max by (run, __name__) ({{__name__=~"{prefix}.+_s", {SHOWN}}})'
    return f'label_replace({found}, "cause", "$1", "__name__", "{prefix}(.+)_s")'


def unit(name: str) -> str:
    """Grafana's unit of a metric."""
    last = name.rpartition("/")[2]
    found = next((unit for pattern, unit in _UNITS if re.search(pattern, last)), None)
    return found or ("percentunit" if re.search(f"({_SHARES})$", last) else "short")


def _of_many(name: str) -> str:
    """Selector of all metrics of a name with placeholders, without those that the registry has under their own or longer names."""
    pattern = _pattern(name)
    plain = [each for each in registry() if not _PLACEHOLDER.search(each) and re.fullmatch(pattern, _pattern(each))]
    longer = [each for each in registry() if each.startswith(name) and each != name]
    others = "|".join(_pattern(each) for each in (*plain, *longer))
    return f'__name__=~"{pattern}"' + (f', __name__!~"{others}"' if others else "")


def _pattern(name: str) -> str:
    """Regular expression of a metric's series."""
    return "ray_treadwheel_" + ".+".join(exported_name(part)[len("treadwheel_") :] for part in _PLACEHOLDER.split(name))
