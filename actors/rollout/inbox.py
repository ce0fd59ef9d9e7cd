"""How news from the engine's thread reach the coroutines that wait for them, in the order in which they came."""

import asyncio
from typing import Any

from actors.rollout.engine_thread import Outcome
from cluster.contracts.errors import WeightsError


class Inbox:
    """What one waiting call gets from the engine's thread."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._events: asyncio.Queue[Any] = asyncio.Queue()

    def put(self, event: Any) -> None:
        self._loop.call_soon_threadsafe(self._events.put_nowait, event)

    def put_outcome(self, request_id: str, outcome: Outcome) -> None:
        self.put(outcome if isinstance(outcome, WeightsError) else (request_id, outcome))

    async def get(self) -> Any:
        return await self._events.get()
