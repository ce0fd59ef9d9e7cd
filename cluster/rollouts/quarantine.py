"""Prompts that may have killed an actor: blamed together, tried alone, quarantined when proven guilty."""

from collections.abc import Iterable, Sequence

from cluster.contracts.errors import (
    EngineError,
    FailureKind,
    TreadwheelError,
    UnreachableError,
    WeightsError,
    headline,
)
from cluster.contracts.protocols import Events
from cluster.contracts.types import Ticket

_MOST_REMEMBERED = 10_000
"""Most prompts with a count of failures: those blamed last."""


_Key = tuple[bool, str]
"""(whether the prompt is held out, its id). A training source and a held-out source of one name give the same ids."""


def _key(ticket: Ticket) -> _Key:
    return ticket.index < 0, ticket.prompt.prompt_id


class Suspects:
    """All prompts of a dead actor are blamed. One that fails alone is guilty; one whose group is finished is innocent.

    Memory stays small: only the prompts blamed last have counts, and each guilty prompt has cost an actor.
    """

    def __init__(self, *, max_failures: int, events: Events) -> None:
        """`max_failures` deaths prove a prompt guilty; before the last one it is tried alone."""
        self._max_failures = max_failures
        self._events = events
        self._num_failures: dict[_Key, int] = {}
        """By prompt; the one blamed last is at the end."""
        self._guilty: set[_Key] = set()

    def has(self, ticket: Ticket) -> bool:
        """Whether the prompt is a suspect: one more failure would prove it guilty, so it must be tried alone."""
        num_failures = self._num_failures.get(_key(ticket), 0)
        return num_failures > 0 and num_failures >= self._max_failures - 1

    def any_of(self, tickets: Iterable[Ticket]) -> bool:
        """Whether one of the prompts is a suspect."""
        return bool(self._num_failures) and any(self.has(ticket) for ticket in tickets)

    @property
    def knows_guilty(self) -> bool:
        """Whether any prompt was proven guilty."""
        return bool(self._guilty)

    def is_guilty(self, ticket: Ticket) -> bool:
        """Whether the prompt was proven guilty before, perhaps in an earlier epoch. It is not tried again."""
        return _key(ticket) in self._guilty

    def blame(self, tickets: Sequence[Ticket], error: TreadwheelError, *, alone: bool) -> None:
        """Counts one failure against each prompt. `alone`: there is one ticket, and the actor had no other."""
        for key in dict.fromkeys(map(_key, tickets)):
            self._num_failures[key] = self._num_failures.pop(key, 0) + 1
            if len(self._num_failures) > _MOST_REMEMBERED:
                del self._num_failures[next(iter(self._num_failures))]
        for ticket in tickets if alone else ():
            if self._num_failures[_key(ticket)] >= self._max_failures:
                self.absolve(ticket)
                self._guilty.add(_key(ticket))
                self.quarantine(ticket, reason=headline(error))

    def absolve(self, ticket: Ticket) -> None:
        """The group is finished, so its prompt is innocent."""
        self._num_failures.pop(_key(ticket), None)

    def quarantine(self, ticket: Ticket, *, reason: str) -> None:
        """Logs that this group is not trained on, and why."""
        prompt_id = ticket.prompt.prompt_id
        self._events.event("quarantine", prompt_id=prompt_id, group_id=ticket.group_id, reason=reason)


def may_be_their_doing(error: TreadwheelError, *, given_up: TreadwheelError | None) -> bool:
    """Whether the prompts of a call may have caused the `error` that ended it.

    `given_up`: the error for which the driver had given the actor up before; None when it had not. A call that dies after that was killed
    by the driver, so the question is whether a prompt of the actor may have caused `given_up`. Any other error concerns the call that
    raised it. Prompts are not blamed for lost nodes: spot nodes disappear without notice, and some prompt is always under way.
    """
    if isinstance(error, WeightsError):
        return False
    if given_up is None or error.kind is not FailureKind.DEATH:
        return not isinstance(error, UnreachableError)
    is_hang = given_up.kind is FailureKind.HANG and given_up.stage != "load"  # no prompt makes weights late
    is_death = given_up.kind is FailureKind.DEATH and not isinstance(given_up, UnreachableError)
    return is_hang or is_death or isinstance(given_up, EngineError)
