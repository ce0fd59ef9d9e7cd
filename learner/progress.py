"""The phase of a rank, and the durations of a step's parts."""

import os
import time

from cluster.contracts.phases import Timeline
from cluster.contracts.types import Progress


class Phases:
    """The phase of a rank, its start, and the time of the last progress in it."""

    def __init__(self, first: str) -> None:
        self.timeline = Timeline(first)
        self._moved = time.time()

    def enter(self, phase: str, *, step: int | None = None) -> None:
        """Begins a phase. `step`: the step that the rank works on."""
        self.timeline.enter(phase, step=step)
        self._moved = time.time()

    def move(self) -> None:
        """Notes progress in the present phase."""
        self._moved = time.time()

    def progress(self, *, actor: str, policy_version: int) -> Progress:
        phase, since = self.timeline.phase
        return Progress(
            actor=actor,
            phase=phase,
            policy_version=policy_version,
            since=since,
            last_progress=self._moved,
            pid=os.getpid(),
        )


class Laps:
    """Seconds of each part of one step."""

    def __init__(self) -> None:
        self._began = self._last = time.perf_counter()
        self.seconds: dict[str, float] = {}

    def lap(self, name: str) -> None:
        """Adds the time since the last lap to this part."""
        now = time.perf_counter()
        self.seconds[name] = self.seconds.get(name, 0.0) + now - self._last
        self._last = now

    @property
    def total(self) -> float:
        """Seconds until the last lap."""
        return self._last - self._began
