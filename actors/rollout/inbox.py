"""Passes events from the engine's thread to waiting coroutines, in order."""

import asyncio
from collections import deque
from typing import Any

from actors.rollout.engine_thread import Outcome
from cluster.contracts.errors import WeightsError


class Inbox:
    """The events for one waiting call."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._coming: deque[Any] = deque()
        self._wakes_loop = False
        """A wake-up of the event loop is scheduled. One serves for all events of an engine step: each wake-up makes the engine's thread
        wait."""
        self._events: asyncio.Queue[Any] = asyncio.Queue()

    def put(self, event: Any) -> None:
        self._coming.append(event)
        if not self._wakes_loop:
            self._wakes_loop = True
            self._loop.call_soon_threadsafe(self._look)

    def put_outcome(self, request_id: str, outcome: Outcome) -> None:
        self.put(outcome if isinstance(outcome, WeightsError) else (request_id, outcome))

    async def get(self) -> Any:
        return await self._events.get()

    def _look(self) -> None:
        self._wakes_loop = False  # set before reading: a later event is read now, or schedules another wake-up
        while self._coming:
            self._events.put_nowait(self._coming.popleft())
