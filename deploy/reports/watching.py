"""`treadwheel info --watch`: shows a run's live table from its directory, in another process, until the run ends."""

import heapq
import sys
import time
from collections.abc import Callable
from typing import Any, TypeVar

from cluster.contracts.errors import StorageError
from cluster.record.run_directory import EVENTS, METRICS, RunDirectory
from cluster.sinks.console import Drawn, Standing, standing_of, status_of
from cluster.sinks.console.plain import PlainLines
from cluster.sinks.console.terminal import is_live, live
from deploy.reports.run_info import config_of
from deploy.viewer.tail import Tail

T = TypeVar("T")

_POLL_S, _STORE_POLL_S = 1.0, 10.0
"""Seconds between two looks into a directory on a disk, and in an object store, which bills each request."""
_OWNER_EVERY = 5
"""Every so many looks it checks whether the driver lives."""


def watch(directory: RunDirectory, *, sleep: Callable[[float], None] = time.sleep) -> None:
    """Returns when the run has ended. Without a terminal it prints lines as `train` does. Raises ConfigError if there is no run."""
    standing = standing_of(directory, num_steps=config_of(directory).num_steps)
    watched = Watched(directory, standing)
    every_s = _POLL_S if directory.is_local else _STORE_POLL_S
    if is_live(sys.stdout):
        watched.look()
        with live(lambda: Drawn(standing)):
            while not standing.is_over:
                sleep(every_s)
                watched.look()
        return
    lines = PlainLines(standing.num_steps, stream=sys.stdout)
    while True:
        for each in watched.look():
            if each["kind"] == "step":
                lines.step(each["policy_version"], each["numbers"], at=each["time"])
            else:
                lines.event(each)
        if standing.is_over:
            return
        sleep(every_s)


class Watched:
    """Updates a `Standing` from a run directory: each look reads the lines that are new since the last one."""

    def __init__(self, directory: RunDirectory, standing: Standing) -> None:
        self._directory, self._standing = directory, standing
        self._metrics, self._events = (Tail(directory, name, store_every_s=0.0) for name in (METRICS, EVENTS))
        self._num_looks = 0
        self._steps: dict[int, dict[str, Any]] = {}
        """The last line read for each policy version."""

    def look(self) -> list[dict[str, Any]]:
        """Events, and steps as records of kind `step` with their `numbers`, since the last look, in order."""
        news = self._read_on()
        # First the owner, then the events once more: a driver that has ended in between has logged its end by then.
        is_gone = self._num_looks % _OWNER_EVERY == 0 and self._unless_away(self._directory.owner, "away") is None
        if is_gone:
            news += self._read_on()
        self._num_looks += 1
        status = status_of(self._directory)
        with self._standing.lock:
            for each in news:
                if each["kind"] == "step":
                    self._standing.step(each["policy_version"], each["numbers"], at=each["time"])
                else:
                    self._standing.event(each)
            self._standing.status(status)
            if is_gone and not self._standing.is_over:
                self._standing.phase = "gone"
        return news

    def _read_on(self) -> list[dict[str, Any]]:
        # Events before steps: once the end is logged, all steps are.
        events = self._unless_away(self._events.new_records, [])
        steps = map(_step, filter(self._is_news, self._unless_away(self._metrics.new_records, [])))
        # Merges without reordering either list: clocks may differ, and a driver's end must stay before the next driver's start.
        return [*heapq.merge(events, steps, key=lambda each: each.get("time") or 0.0)]

    def _unless_away(self, ask: Callable[[], T], otherwise: T) -> T:
        """The answer; `otherwise` while an object store gives none. It may at the next look."""
        try:
            return ask()
        except StorageError:
            if self._directory.is_local:
                raise
            return otherwise

    def _is_news(self, line: dict[str, Any]) -> bool:
        """Whether the line differs from the last one of its version: a run that learns a step again writes all lines again."""
        version = line["policy_version"]
        before, self._steps[version] = self._steps.get(version), line
        return line != before


def _step(line: dict[str, Any]) -> dict[str, Any]:
    numbers = {name: value for name, value in line.items() if name not in ("policy_version", "time")}
    known = {name: value for name, value in numbers.items() if value is not None}
    return {"kind": "step", "policy_version": line["policy_version"], "time": line.get("time", 0.0), "numbers": known}
