"""Carries the turns of one call to the engine and their completions back."""

import asyncio
from collections.abc import Sequence

from actors.rollout.engine_thread import EngineThread, Outcome
from actors.rollout.episodes.lockstep import AtOnce, Lockstep, Place
from actors.rollout.episodes.play import EngineRefusalError
from actors.rollout.inbox import Inbox
from cluster.contracts.errors import DataError, WeightsError, headline
from cluster.contracts.protocols import EngineRequest
from cluster.contracts.types import Completion


class TurnSampler:
    """Samples turns of the episodes of one call."""

    def __init__(self, engine: EngineThread, inbox: Inbox, *, pace: AtOnce | Lockstep) -> None:
        """`inbox` gets errors that end the whole call."""
        self._engine = engine
        self._inbox = inbox
        self._loop = asyncio.get_running_loop()
        self._waiting: dict[str, asyncio.Future[Completion | DataError]] = {}
        self.pace = pace

    async def sample(self, place: Place, request: EngineRequest) -> Completion:
        """Raises EngineRefusalError if the engine refuses the request. When cancelled, aborts the request."""
        answer = self._waiting[request.request_id] = self._loop.create_future()
        self.pace.ask(place, request, self._submit)
        try:
            outcome = await answer
        except asyncio.CancelledError:
            self.pace.withdraw(place)
            self._engine.abort([request.request_id])
            raise
        finally:
            del self._waiting[request.request_id]
        if isinstance(outcome, DataError):
            raise EngineRefusalError(headline(outcome))
        return outcome

    def _submit(self, requests: Sequence[EngineRequest]) -> None:
        self._engine.submit(requests, self._tell)

    def _tell(self, request_id: str, outcome: Outcome) -> None:
        """Runs in the engine's thread."""
        if isinstance(outcome, WeightsError):
            self._inbox.put(outcome)
        else:
            self._loop.call_soon_threadsafe(self._hear, request_id, outcome)

    def _hear(self, request_id: str, outcome: Completion | DataError) -> None:
        if (answer := self._waiting.get(request_id)) and not answer.done():
            answer.set_result(outcome)
