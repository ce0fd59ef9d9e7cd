"""The run in the terminal: a live table, or without a terminal one plain line for each step."""

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from rich.console import RenderableType
from rich.text import Text

from cluster.contracts.errors import StorageError
from cluster.metrics import Sink
from cluster.record.run_directory import STATUS, RunDirectory
from cluster.sinks.console.drawing import Drawn
from cluster.sinks.console.plain import PlainLines, Warnings
from cluster.sinks.console.standing import Standing
from cluster.sinks.console.terminal import is_live, live
from cluster.sinks.console.words import Weight, printed

_STATUS_EVERY_S = 2.0


def console(*, directory: RunDirectory, num_steps: int, quiet: bool = False) -> Sink:
    """`quiet`: shows only warnings."""
    if quiet:
        return Warnings(stream=sys.stderr)
    if num_steps == 0 or not is_live(sys.stdout):
        return PlainLines(num_steps, stream=sys.stdout)
    return LiveTable(directory, num_steps=num_steps)


def standing_of(
    directory: RunDirectory, *, num_steps: int | None = None, now: Callable[[], float] = time.time
) -> Standing:
    """State of a run of which only the settings are known. They are not validated: another version may have written them."""
    settings = directory.settings()
    return Standing(
        title=directory.url,
        num_steps=settings.get("num_steps", 0) if num_steps is None else num_steps,
        max_off_policy_steps=settings.get("buffer", {}).get("max_off_policy_steps"),
        now=now,
    )


class LiveTable:
    """Numbers drawn in place, with warnings as permanent lines above them."""

    def __init__(self, directory: RunDirectory, *, num_steps: int) -> None:
        self._directory = directory
        self._standing = standing_of(directory, num_steps=num_steps)
        self._read_at = 0.0
        self._reader = threading.Thread()
        self._shown = contextlib.ExitStack()
        self._terminal = self._shown.enter_context(live(self._draw))

    def step(self, version: int, metrics: Mapping[str, float]) -> None:
        with self._standing.lock:
            self._standing.step(version, metrics, at=self._standing.now())

    def event(self, record: Mapping[str, Any]) -> None:
        with self._standing.lock:
            sentence = self._standing.event(record)
        for line in printed(record):
            self._terminal.print(Text(line, style="dim"), soft_wrap=True)
        if sentence and sentence.weight is Weight.WARNING:
            self._terminal.print(Text(f"{sentence.kind}: {sentence.words}", style="yellow"), soft_wrap=True)

    def close(self) -> None:
        self._shown.close()

    def _draw(self) -> RenderableType:
        # Reading an object store costs time and money, and the run's own events say the same.
        is_due = self._directory.is_local and self._standing.now() - self._read_at > _STATUS_EVERY_S
        if is_due and not self._reader.is_alive():
            self._read_at = self._standing.now()
            # Otherwise a file system that stands still would hold up the warning that it does.
            self._reader = threading.Thread(target=self._read_status, name="status", daemon=True)
            self._reader.start()
        return Drawn(self._standing)

    def _read_status(self) -> None:
        status = status_of(self._directory)
        with self._standing.lock:
            self._standing.status(status)


def status_of(directory: RunDirectory) -> dict[str, Any]:
    """status.json, with the phase of every actor; empty if it cannot be read."""
    with contextlib.suppress(StorageError):
        return directory.read_json(STATUS)
    return {}
