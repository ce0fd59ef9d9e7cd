"""The generated files of deploy/grafana/. `python -m deploy.monitoring` writes them."""

from pathlib import Path

import yaml

from deploy.monitoring import dashboard
from deploy.monitoring.alerts import groups

FOLDER = Path(__file__).parents[1] / "grafana"
_NOTE = "# Made by `python -m deploy.monitoring`; what each alert means and what to do: docs/monitoring.md.\n"


def files() -> dict[str, str]:
    """Content by name."""
    rules = yaml.safe_dump({"groups": groups()}, sort_keys=False, width=120, allow_unicode=True)
    return {"treadwheel.json": dashboard.made(), "alerts.yaml": _NOTE + rules}
