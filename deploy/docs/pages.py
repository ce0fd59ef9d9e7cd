"""All generated pages. docs/metrics.md and docs/monitoring.md, with the meaning of each alert, are made here."""

import re
from collections.abc import Iterator

from cluster.metrics import METRICS
from deploy.docs import algorithms, coming_from, configuration, filled, rows, variants
from deploy.monitoring.alerts import ALERTS, Alert
from learner.algorithms.objective.statistics import DERIVED, OF_THE_LEARNER, QUANTITIES, reported_name

_TEMPLATE = re.compile(r"{{ \$value(?: \| \w+)? }}")


def pages() -> dict[str, str]:
    """Content by file name below docs/."""
    metrics = rows((f"`{name}`", text) for name, text in METRICS.items())
    return {
        "configuration.md": configuration.configuration(),
        "config_schema.json": configuration.schema(),
        "metrics.md": filled("metrics", cluster=metrics, learner=rows(_of_the_learner())),
        "monitoring.md": filled("monitoring", alerts="\n\n".join(_section(alert) for alert in ALERTS)),
        "algorithms.md": algorithms.page(),
        "variants.md": variants.page(),
        "coming_from.md": coming_from.page(),
    }


def _of_the_learner() -> Iterator[tuple[str, str]]:
    for name, (kinds, meaning) in QUANTITIES.items():
        yield ", ".join(f"`learner/{reported_name(name, kind)}`" for kind in kinds), meaning
    for name, meaning in {**DERIVED, **OF_THE_LEARNER}.items():
        yield f"`learner/{name}`", meaning


def _section(alert: Alert) -> str:
    when = "at once" if alert.lasts == "0m" else f"after {alert.lasts}"
    summary = _TEMPLATE.sub("N", alert.summary)
    return f"### {alert.name}\n{alert.severity.capitalize()}, {when}: {summary}.\n\n{alert.advice}\n\n```promql\n{alert.expression}\n```"
