"""Prompts that may have killed an actor: blamed together, tried alone, quarantined when proven guilty."""

from collections.abc import Sequence

from cluster.contracts.errors import TreadwheelError, headline
from cluster.contracts.protocols import Events
from cluster.contracts.types import Ticket


class Suspects:
    """All prompts of a dead actor are blamed. One that fails alone is guilty; one whose group is finished is innocent.

    What is remembered stays small: a blame is forgotten when its group is finished, and the guilty have each cost an actor.
    """

    def __init__(self, *, max_failures: int, events: Events) -> None:
        """`max_failures` deaths prove a prompt guilty; before the last one it is tried alone."""
        self._max_failures = max_failures
        self._events = events
        self._num_failures: dict[str, int] = {}
        self._guilty: set[str] = set()

    def has(self, ticket: Ticket) -> bool:
        """One more failure would prove it guilty, so it must be tried alone."""
        return self._num_failures.get(ticket.prompt.prompt_id, 0) >= self._max_failures - 1

    def is_guilty(self, ticket: Ticket) -> bool:
        """Its prompt was proven guilty before, perhaps in an earlier epoch: it is not tried again."""
        return ticket.prompt.prompt_id in self._guilty

    def blame(self, tickets: Sequence[Ticket], error: TreadwheelError, *, alone: bool) -> list[Ticket]:
        """Counts a failure against each prompt. Returns the tickets whose prompt that proves guilty."""
        for ticket in tickets:
            prompt_id = ticket.prompt.prompt_id
            self._num_failures[prompt_id] = self._num_failures.get(prompt_id, 0) + 1
        guilty = [t for t in tickets if alone and self._num_failures[t.prompt.prompt_id] >= self._max_failures]
        for ticket in guilty:
            self.absolve(ticket)
            self._guilty.add(ticket.prompt.prompt_id)
            self.quarantine(ticket, reason=headline(error))
        return guilty

    def absolve(self, ticket: Ticket) -> None:
        """Its group is finished: the failures were another's."""
        self._num_failures.pop(ticket.prompt.prompt_id, None)

    def quarantine(self, ticket: Ticket, *, reason: str) -> None:
        """Writes down that this group will not be trained on, and why."""
        prompt_id = ticket.prompt.prompt_id
        self._events.event("quarantine", prompt_id=prompt_id, group_id=ticket.group_id, reason=reason)
