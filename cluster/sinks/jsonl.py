"""metrics.jsonl: one line a step, for `treadwheel info`, the curves, and whoever reads JSON."""

import time
from collections.abc import Mapping
from typing import Any

from cluster.metrics import finite
from cluster.record.run_directory import METRICS, RunDirectory


class JsonLines:
    def __init__(self, directory: RunDirectory) -> None:
        self._directory = directory

    def step(self, version: int, metrics: Mapping[str, float]) -> None:
        self._directory.append_json(METRICS, {"policy_version": version, "time": time.time(), **finite(metrics)})

    def event(self, record: Mapping[str, Any]) -> None:
        """Events have a file of their own."""

    def close(self) -> None:
        self._directory.flush()


def jsonl(*, directory: RunDirectory, num_steps: int) -> JsonLines:
    return JsonLines(directory)


def read_steps(directory: RunDirectory) -> dict[int, dict[str, float]]:
    """Numbers by policy version. A step that was done again after a recovery counts as it was done last."""
    steps: dict[int, dict[str, float]] = {}
    for record in directory.read_json_lines(METRICS):
        version = record.pop("policy_version")
        steps.setdefault(version, {}).update({name: value for name, value in record.items() if value is not None})
    return dict(sorted(steps.items()))
