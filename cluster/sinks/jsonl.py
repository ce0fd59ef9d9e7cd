"""metrics.jsonl: one line for each step, for `treadwheel info`, the curves and your own scripts."""

import contextlib
import json
import time
from collections.abc import Mapping
from typing import Any

from cluster.contracts.errors import StorageError
from cluster.record.run_directory import METRICS, RunDirectory
from cluster.record.storage import finite


class JsonLines:
    def __init__(self, directory: RunDirectory) -> None:
        self._directory = directory
        self._waiting: list[dict[str, Any]] = []
        """Lines that are not written yet because the disk or the object store failed. Each step tries again."""
        self._last = max((line["policy_version"] for line in directory.read_json_lines(METRICS)), default=-1)

    def step(self, version: int, metrics: Mapping[str, float]) -> None:
        self._waiting.append({"policy_version": version, "time": time.time(), **finite(metrics)})
        with contextlib.suppress(StorageError):
            self._write_waiting()

    def event(self, record: Mapping[str, Any]) -> None:
        """Events have their own file."""

    def close(self) -> None:
        """Raises StorageError for lines that still cannot be written."""
        self._write_waiting()

    def _write_waiting(self) -> None:
        while self._waiting:
            line = self._waiting[0]
            if line["policy_version"] > self._last:
                self._directory.append_json(METRICS, line)
                self._last = line["policy_version"]
            else:
                self._replace(line)
            del self._waiting[0]

    def _replace(self, line: Mapping[str, Any]) -> None:
        """The later numbers count. Numbers that are not repeated stay, such as its evaluation, and so does the time of the first line."""
        lines = {each["policy_version"]: each for each in self._directory.read_json_lines(METRICS)}
        before = lines.get(line["policy_version"], {})
        first_made = {"time": before["time"]} if before else {}
        lines[line["policy_version"]] = {**before, **line, **first_made}
        self._directory.replace_lines(METRICS, [json.dumps(lines[version]) for version in sorted(lines)])


def jsonl(*, directory: RunDirectory, num_steps: int) -> JsonLines:
    return JsonLines(directory)


def read_lines(directory: RunDirectory) -> list[dict[str, Any]]:
    """The last line of each policy version, in order."""
    lines = {line["policy_version"]: line for line in directory.read_json_lines(METRICS)}
    return [lines[version] for version in sorted(lines)]


def read_steps(directory: RunDirectory) -> dict[int, dict[str, float]]:
    """Numbers by policy version, without those that are not finite."""
    return {
        line.pop("policy_version"): {name: value for name, value in line.items() if value is not None}
        for line in read_lines(directory)
    }
