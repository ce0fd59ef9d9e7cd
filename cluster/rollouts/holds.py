"""Reward parts that wait for an endpoint that is away: events when a wait begins and ends, and its seconds per step."""

import asyncio
import time
from collections.abc import Iterable

from cluster.contracts.protocols import Events
from cluster.contracts.types import Hold


class Holds:
    """Times are as exact as the heartbeats that bring the services' progress. A part holds while any service holds it."""

    def __init__(self, events: Events) -> None:
        self._events = events
        self._now: dict[str, Hold] = {}
        self._held_s: dict[str, float] = {}
        self._counted_at = 0.0

    def note(self, holds: Iterable[Hold]) -> None:
        """`holds`: all holds of this moment. Logs `reward_held` and `reward_resumed`."""
        self._count()
        before, self._now = self._now, {hold.part: hold for hold in holds}
        for part, hold in self._now.items():
            if part not in before:
                message = f"{_named(part)} waits for {hold.endpoint}, which is away: {hold.reason}"
                self._events.event(
                    "reward_held", part=part, endpoint=hold.endpoint, reason=hold.reason, message=message
                )
        for part, hold in before.items():
            if part not in self._now:
                seconds = time.time() - hold.since
                message = f"{_named(part)} goes on: {hold.endpoint} is back after {seconds:.0f} s"
                self._events.event(
                    "reward_resumed", part=part, endpoint=hold.endpoint, seconds=seconds, message=message
                )

    def drain(self) -> dict[str, float]:
        """Seconds that each part held since the last call. Parts that did not hold are left out."""
        self._count()
        held_s, self._held_s = self._held_s, {}
        return {f"time/{part}/held_s".replace("//", "/"): seconds for part, seconds in held_s.items()}

    def _count(self) -> None:
        now = asyncio.get_running_loop().time()
        for part in self._now:
            self._held_s[part] = self._held_s.get(part, 0.0) + now - self._counted_at
        self._counted_at = now


def _named(part: str) -> str:
    return f"the part {part!r} of the reward" if part else "the reward"
