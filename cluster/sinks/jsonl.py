"""metrics.jsonl: one line for each step, for `treadwheel info`, the curves and your own scripts."""

import contextlib
import json
import sys
import time
from collections.abc import Iterable, Mapping
from itertools import takewhile
from typing import Any

from cluster.contracts.errors import StorageError
from cluster.record.run_directory import METRICS, RunDirectory
from cluster.record.storage import finite

_FIRST_LOOK = 64
"""Number of last lines that are read first, to find those from a version on."""


class JsonLines:
    """The line of a step that is learned again is appended too, and the last line of each version is complete. Once all of these steps are
    there, or at a later step of the next driver, each version has one line again: only the lines from the first repeated version on are
    made anew, once."""

    def __init__(self, directory: RunDirectory) -> None:
        self._directory = directory
        self._waiting: list[dict[str, Any]] = []
        """Lines that are not written yet because the disk or the object store failed. Each step tries again."""
        self._last = -1
        self._repeated: int | None = None
        """The first version that has more than one line, or that comes after a later one. Earlier versions are in order."""
        self._latest: dict[int, dict[str, Any]] = {}
        """The last line of each version from a repeated one on; empty while none is repeated."""
        for line in directory.read_json_lines(METRICS):
            self._note(line["policy_version"])

    def step(self, version: int, metrics: Mapping[str, float]) -> None:
        self._waiting.append({"policy_version": version, "time": time.time(), **finite(metrics)})
        try:
            self._write_waiting()
        except StorageError as error:
            if len(self._waiting) == 1:  # the first of them
                with contextlib.suppress(OSError, ValueError):  # nobody may read it any more
                    print(f"treadwheel: {error}; lines wait until they can be written", file=sys.stderr, flush=True)

    def event(self, record: Mapping[str, Any]) -> None:
        """Events have their own file."""

    def close(self) -> None:
        """Raises StorageError for lines that still cannot be written."""
        self._write_waiting()
        self._put_in_order()

    def _note(self, version: int) -> None:
        """Notes a line that the file has."""
        if version <= self._last:
            self._repeated = version if self._repeated is None else min(version, self._repeated)
        self._last = max(version, self._last)

    def _write_waiting(self) -> None:
        while self._waiting:
            line = self._waiting[0]
            version = line["policy_version"]
            if version <= self._last:
                line = self._completed(line)
            self._directory.append_json(METRICS, line)
            self._note(version)
            if self._latest:
                self._latest[version] = line
            del self._waiting[0]
            if version == self._last:  # all steps that are learned again are there
                self._put_in_order()

    def _completed(self, line: dict[str, Any]) -> dict[str, Any]:
        """The line, and the numbers that only earlier lines of its version have."""
        version = line["policy_version"]
        if version < min(self._latest, default=self._last + 1):
            since = version if self._repeated is None else min(version, self._repeated)
            self._latest = {each["policy_version"]: each for each in _joined(self._lines_from(since))}
        before = self._latest.get(version)
        return _joined([before, line])[0] if before else line

    def _put_in_order(self) -> None:
        """Gives each version one line, in order."""
        if self._repeated is None:
            return
        lines = self._lines_from(self._repeated)
        self._directory.replace_last_lines(METRICS, len(lines), [json.dumps(each) for each in _joined(lines)])
        self._repeated, self._latest = None, {}

    def _lines_from(self, version: int) -> list[dict[str, Any]]:
        """The last lines, up to one of an earlier version."""
        count = _FIRST_LOOK
        while True:
            lines = [json.loads(line) for line in self._directory.read_last_lines(METRICS, count)]
            found = [*takewhile(lambda line: line["policy_version"] >= version, reversed(lines))]
            if len(found) < count:
                return found[::-1]
            count *= 4


def jsonl(*, directory: RunDirectory, num_steps: int) -> JsonLines:
    return JsonLines(directory)


def read_lines(directory: RunDirectory) -> list[dict[str, Any]]:
    """One line for each policy version, in order."""
    return _joined(directory.read_json_lines(METRICS))


def _joined(lines: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """One line for each version, in order. The later numbers count. Numbers that are not repeated stay, such as its evaluation, and so does
    the time of the first line."""
    found: dict[int, dict[str, Any]] = {}
    for line in lines:
        before = found.get(line["policy_version"])
        first_made = {"time": before["time"]} if before and "time" in before else {}
        found[line["policy_version"]] = {**before, **line, **first_made} if before else line
    return [found[version] for version in sorted(found)]


def read_steps(directory: RunDirectory) -> dict[int, dict[str, float]]:
    """Numbers by policy version, without those that are not finite."""
    return {
        line.pop("policy_version"): {name: value for name, value in line.items() if value is not None}
        for line in read_lines(directory)
    }
