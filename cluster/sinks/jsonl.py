"""metrics.jsonl: one line a step, for `treadwheel info`, the curves and your own scripts."""

import json
import time
from collections.abc import Mapping
from typing import Any

from cluster.metrics import finite
from cluster.record.run_directory import METRICS, RunDirectory


class JsonLines:
    def __init__(self, directory: RunDirectory) -> None:
        self._directory = directory
        self._last = max((line["policy_version"] for line in directory.read_json_lines(METRICS)), default=-1)

    def step(self, version: int, metrics: Mapping[str, float]) -> None:
        line = {"policy_version": version, "time": time.time(), **finite(metrics)}
        if version > self._last:
            self._directory.append_json(METRICS, line)
            self._last = version
        else:
            self._replace(line)

    def event(self, record: Mapping[str, Any]) -> None:
        """Events have a file of their own."""

    def close(self) -> None: ...

    def _replace(self, line: Mapping[str, Any]) -> None:
        """The later numbers count. What a step does not say again stays: its evaluation, and when it was first made."""
        lines = {each["policy_version"]: each for each in self._directory.read_json_lines(METRICS)}
        before = lines.get(line["policy_version"], {})
        first_made = {"time": before["time"]} if before else {}
        lines[line["policy_version"]] = {**before, **line, **first_made}
        self._directory.replace_lines(METRICS, [json.dumps(lines[version]) for version in sorted(lines)])


def jsonl(*, directory: RunDirectory, num_steps: int) -> JsonLines:
    return JsonLines(directory)


def read_steps(directory: RunDirectory) -> dict[int, dict[str, float]]:
    """Numbers by policy version. A number that is not finite is left out."""
    steps = {line.pop("policy_version"): line for line in directory.read_json_lines(METRICS)}
    return {
        version: {name: value for name, value in numbers.items() if value is not None}
        for version, numbers in sorted(steps.items())
    }
