"""What Prometheus calls a metric, and in which unit it is: both follow from its name in the registry."""

import re
from functools import cache

from cluster.metrics import METRICS
from cluster.sinks.ray import exported_name
from learner.algorithms.objective.statistics import reported_names

EVENTS, LAST_STEP_TIME = "ray_treadwheel_events_total", "ray_treadwheel_last_step_time"
"""As every driver exports them, for as long as it lives."""

_PLACEHOLDER = re.compile(r"<\w+>")
_SHARES = r"share|fraction(_low|_high|_dual|_covariance)?|accuracy|pass_at_.*|truncated|filtered_tokens|dropped|outside|differs|ess"
_UNITS = (
    (r"hours$", "h"),
    (r"bytes_per_s$", "Bps"),
    (r"_per_s$", "short"),
    (r"_s$", "s"),
    (r"bytes$", "bytes"),
    (r"num_", "short"),
)
"""Grafana's units by what a name holds; the first that fits."""


@cache
def registry() -> dict[str, str]:
    """Every metric of a run and its meaning."""
    return METRICS | {f"learner/{name}": meaning for name, meaning in reported_names().items()}


def series(name: str) -> str:
    """A metric's series of each run, whichever driver sets them. Raises KeyError for a name that the registry lacks."""
    return _over_drivers(name, "")


def shown(name: str) -> str:
    """The same of the runs that a dashboard shows."""
    return _over_drivers(name, 'run=~"$run"')


def shown_causes(kind: str) -> str:
    """Seconds of actors of a kind, by cause, of the runs that a dashboard shows."""
    prefix = f"ray_{exported_name(f'cost/{kind}/')}"
    found = f'max by (run, __name__) ({{__name__=~"{prefix}.+_s", run=~"$run"}})'
    return f'label_replace({found}, "cause", "$1", "__name__", "{prefix}(.+)_s")'


def unit(name: str) -> str:
    """As Grafana calls it."""
    last = name.rpartition("/")[2]
    found = next((unit for pattern, unit in _UNITS if re.search(pattern, last)), None)
    return found or ("percentunit" if re.search(f"({_SHARES})$", last) else "short")


def _over_drivers(name: str, labels: str) -> str:
    registry()[name]
    if _PLACEHOLDER.search(name):
        among = f"{_of_many(name)}, {labels}" if labels else _of_many(name)
        return f"max by (run, __name__) ({{{among}}})"
    selected = f"{{{labels}}}" if labels else ""
    return f"max by (run) (ray_{exported_name(name)}{selected})"


def _of_many(name: str) -> str:
    """Selects what a name with placeholders stands for, less what the registry knows by another name."""
    pattern = "ray_treadwheel_" + ".+".join(
        exported_name(part)[len("treadwheel_") :] for part in _PLACEHOLDER.split(name)
    )
    plain = [f"ray_{exported_name(each)}" for each in registry() if not _PLACEHOLDER.search(each)]
    others = "|".join(each for each in plain if re.fullmatch(pattern, each))
    return f'__name__=~"{pattern}"' + (f', __name__!~"{others}"' if others else "")
