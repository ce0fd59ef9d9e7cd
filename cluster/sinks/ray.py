"""Ray's own metrics, exported at its Prometheus endpoint: `ray_treadwheel_reward_mean` and so on, tagged with the run:
its directory's name and four letters of its identity, since one Prometheus may see several directories of a name.

A gauge keeps its last number until the run ends. Events are counted by kind, `launched` and the run's end (`finished`, `stopped` or
`failed`) among them, so a driver that died shows as a launch without an end. An actor that leaves its node counts as `drain`, not as
`failure`.
"""

import re
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from ray import is_initialized
from ray.util.metrics import Counter, Gauge

from cluster.metrics import ENDS, METRICS, in_ascii
from cluster.record.run_directory import RunDirectory
from cluster.sinks.tracked import identity

REPEAT_S = 5.0
"""Ray exports every 10 s the gauges set since the last export, and drops a gauge that two exports lacked."""


class RayMetrics:
    """Gauges and counters of a run. Numbers and events wait until Ray is connected, since it would silently drop them before."""

    def __init__(self, run: str, *, now: Callable[[], float] = time.time) -> None:
        self._tags = {"run": run}
        self._now = now
        self._numbers: dict[str, float] = {"last_step_time": now()}
        self._waiting: list[str] = []
        """Kinds of events that are not counted yet."""
        self._gauges: dict[str, Gauge] = {}
        self._events = Counter("treadwheel_events", description="Events by kind.", tag_keys=("run", "kind"))
        self._lock = threading.Lock()
        self._has_ended = threading.Event()

    def step(self, version: int, metrics: Mapping[str, float]) -> None:
        with self._lock:
            if version != self._numbers.get("policy_version"):
                self._numbers["last_step_time"] = self._now()
            self._numbers |= {**metrics, "policy_version": float(version)}
        self.repeat()

    def event(self, record: Mapping[str, Any]) -> None:
        kind = "drain" if record.get("decision") == "drain" else str(record["kind"])
        with self._lock:
            self._waiting.append(kind)
        self.repeat()
        if kind in ENDS:
            self.close()

    def repeat(self) -> None:
        """Sets every gauge to its last number again, and counts the waiting events."""
        with self._lock:
            if not is_initialized():
                return
            for name, value in self._numbers.items():
                if name not in self._gauges:
                    description = METRICS.get(name, name)
                    self._gauges[name] = Gauge(exported_name(name), description=description, tag_keys=("run",))
                self._gauges[name].set(value, tags=self._tags)
            for kind in self._waiting:
                self._events.inc(tags={**self._tags, "kind": kind})
            self._waiting.clear()

    def repeat_until_the_end(self) -> None:
        while not self._has_ended.wait(REPEAT_S):
            self.repeat()

    def close(self) -> None:
        self._has_ended.set()


def ray(*, directory: RunDirectory, num_steps: int) -> RayMetrics:
    metrics = RayMetrics(f"{directory.name}-{identity(directory)[:4]}")
    threading.Thread(target=metrics.repeat_until_the_end, name="ray-metrics", daemon=True).start()
    return metrics


def exported_name(name: str) -> str:
    """A name for Prometheus: ASCII letters, digits and underscores."""
    return f"treadwheel_{re.sub(r'[^a-zA-Z0-9_]', lambda found: in_ascii(found[0]), name)}"
