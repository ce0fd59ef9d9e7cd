"""Prompts that may have killed an actor: blamed together, tried alone, quarantined when proven. `cluster/rollouts/worker_pool.py` asks."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence

from cluster.contracts.errors import DataError, TreadwheelError, headline
from cluster.contracts.types import Refusal, Ticket
from cluster.supervision.policy import is_poison
from cluster.supervision.supervisor import Supervisor


class Suspects:
    """A dead actor's prompts are all suspects; one that fails alone is guilty, one that succeeds alone is absolved."""

    def __init__(self, supervisor: Supervisor) -> None:
        self._history = supervisor.history
        self._config = supervisor.config
        self._events = supervisor.events
        self._num_running = 0
        self._is_one_alone = False
        self._changed = asyncio.Condition()

    def has(self, ticket: Ticket) -> bool:
        """One more failure would quarantine it: it must run alone."""
        return self._history.prompt_failures.get(ticket.prompt.prompt_id, 0) >= self._config.max_prompt_failures - 1

    def blame(self, tickets: Sequence[Ticket], error: TreadwheelError, *, alone: bool) -> list[Ticket]:
        """Counts a failure against each prompt. The guilty one, if it failed too often and `alone`: quarantined, and said so."""
        is_refusal = isinstance(error, DataError)
        if is_refusal and not alone:
            for ticket in tickets:  # one of them is guilty: which, each shows alone
                self._history.prompt_failures[ticket.prompt.prompt_id] = self._config.max_prompt_failures - 1
            return []
        for ticket in tickets:
            # What the engine refuses alone it always will.
            self._history.blame([ticket.prompt.prompt_id] * (self._config.max_prompt_failures if is_refusal else 1))
        guilty = [t for t in tickets if alone and is_poison(t.prompt.prompt_id, self._history, self._config)]
        for ticket in guilty:
            self._events.event(
                "quarantine",
                prompt_id=ticket.prompt.prompt_id,
                group_id=ticket.group_id,
                reason=headline(error),
            )
        return guilty

    def refuse(self, refusal: Refusal) -> None:
        """No worker can sample this prompt: nobody else is suspected, and it needs no second try."""
        self._events.event("quarantine", prompt_id=refusal.prompt_id, group_id=refusal.group_id, reason=refusal.reason)

    def absolve(self, ticket: Ticket) -> None:
        """It ran alone and nothing died."""
        self._history.absolve(ticket.prompt.prompt_id)

    @contextlib.asynccontextmanager
    async def turn(self, *, alone: bool) -> AsyncIterator[None]:
        """Many at the same time, or one `alone`."""
        async with self._changed:
            await self._changed.wait_for(lambda: not self._is_one_alone and not (alone and self._num_running))
            self._num_running += 1
            self._is_one_alone = alone
        try:
            yield
        finally:
            async with self._changed:
                self._num_running -= 1
                self._is_one_alone = False
                self._changed.notify_all()
