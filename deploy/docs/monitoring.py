"""docs/monitoring.md: from nothing to a dashboard, and what each alert means."""

import re

from deploy.docs import filled
from deploy.monitoring.alerts import ALERTS, Alert

_TEMPLATE = re.compile(r"{{ \$value(?: \| \w+)? }}")


def page() -> str:
    """The whole of docs/monitoring.md."""
    return filled("monitoring", alerts="\n\n".join(_section(alert) for alert in ALERTS))


def _section(alert: Alert) -> str:
    when = "at once" if alert.lasts == "0m" else f"after {alert.lasts}"
    summary = _TEMPLATE.sub("N", alert.summary)
    return f"### {alert.name}\n{alert.severity.capitalize()}, {when}: {summary}.\n\n{alert.advice}\n\n```promql\n{alert.expression}\n```"
