"""How news from the engine's thread reach the coroutines that wait for them, in the order in which they came."""

import asyncio
from collections import deque
from typing import Any

from actors.rollout.engine_thread import Outcome
from cluster.contracts.errors import WeightsError


class Inbox:
    """What one waiting call gets from the engine's thread."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._coming: deque[Any] = deque()
        self._is_told = False
        """The loop is to look at what comes. Of a step that ends many requests it hears once: each time that it wakes, the engine's thread
        waits for it."""
        self._events: asyncio.Queue[Any] = asyncio.Queue()

    def put(self, event: Any) -> None:
        self._coming.append(event)
        if not self._is_told:
            self._is_told = True
            self._loop.call_soon_threadsafe(self._look)

    def put_outcome(self, request_id: str, outcome: Outcome) -> None:
        self.put(outcome if isinstance(outcome, WeightsError) else (request_id, outcome))

    async def get(self) -> Any:
        return await self._events.get()

    def _look(self) -> None:
        self._is_told = False  # before it looks: what comes meanwhile is seen now, or told of again
        while self._coming:
            self._events.put_nowait(self._coming.popleft())
