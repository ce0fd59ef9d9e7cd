"""What a rank is doing, and how long the parts of a step took."""

import os
import time

from cluster.contracts.phases import Timeline
from cluster.contracts.types import Progress


class Phases:
    """What a rank is doing, since when, and when it last got on with it."""

    def __init__(self, first: str) -> None:
        self.timeline = Timeline(first)
        self._moved = time.time()

    def enter(self, phase: str, *, step: int | None = None) -> None:
        """`step` is the one that the rank works for."""
        self.timeline.enter(phase, step=step)
        self._moved = time.time()

    def move(self) -> None:
        """A piece of the present phase is done."""
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
    """Seconds of one step, part by part."""

    def __init__(self) -> None:
        self._began = self._last = time.perf_counter()
        self.seconds: dict[str, float] = {}

    def lap(self, name: str) -> None:
        """The time since the last lap was this part's; the laps of a part that comes again add up."""
        now = time.perf_counter()
        self.seconds[name] = self.seconds.get(name, 0.0) + now - self._last
        self._last = now

    @property
    def total(self) -> float:
        """Until the last lap."""
        return self._last - self._began
