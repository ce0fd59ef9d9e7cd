"""Ray's own metrics, which its Prometheus endpoint exports: `ray_treadwheel_reward_mean` and so on, tagged with the run."""

import re
from collections.abc import Mapping
from typing import Any

from ray.util.metrics import Counter, Gauge

from cluster.metrics import METRICS
from cluster.record.run_directory import RunDirectory


class RayMetrics:
    """Gauges hold the last step's numbers; events count by kind."""

    def __init__(self, run: str) -> None:
        self._tags = {"run": run}
        self._gauges: dict[str, Gauge] = {}
        self._events = Counter("treadwheel_events", description="Events by kind.", tag_keys=("run", "kind"))

    def step(self, version: int, metrics: Mapping[str, float]) -> None:
        for name, value in {**metrics, "policy_version": float(version)}.items():
            if name not in self._gauges:
                description = METRICS.get(name, name)
                self._gauges[name] = Gauge(exported_name(name), description=description, tag_keys=("run",))
            self._gauges[name].set(value, tags=self._tags)

    def event(self, record: Mapping[str, Any]) -> None:
        self._events.inc(tags={**self._tags, "kind": str(record["kind"])})

    def close(self) -> None:
        """Ray exports until the driver ends."""


def ray(*, directory: RunDirectory, num_steps: int) -> RayMetrics:
    return RayMetrics(directory.url.rstrip("/").rpartition("/")[2])


def exported_name(name: str) -> str:
    """Prometheus knows letters, digits and underscores."""
    return f"treadwheel_{re.sub(r'[^a-zA-Z0-9_]', '_', name)}"
