"""Destinations of judged groups: the buffer, for training, or the result of an evaluation."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from cluster.contracts.protocols import Events
from cluster.contracts.types import Group, GroupSummary, Ticket
from cluster.rollouts.buffer import Buffer
from cluster.rollouts.scoring import Scorers, describe
from cluster.rollouts.tickets import TicketOffice

DroppedBy = Callable[[GroupSummary], str | None]
"""The name of the filter that drops a judged group; None: it trains."""

WantsReference = Callable[[int], bool]
"""Whether the reference scores the group at this place in the start order."""

Choose = Callable[[GroupSummary], list[int]]
"""Indices of the trajectories that an over-sampled group keeps."""


Measure = Callable[[int, GroupSummary], None]
"""Called with every judged group that has enough rewards, before its trajectories are chosen and before filters."""


class Destination(Protocol):
    """Every ticket that is dispatched for it comes back once, by `add` or by `drop`."""

    def wants(self, ticket: Ticket) -> bool:
        """False when the group's result is no longer needed. The group must still be reported."""
        ...

    def hold(self, ticket: Ticket, size_bytes: int) -> None:
        """The group is sampled and waits to be judged."""
        ...

    async def add(self, ticket: Ticket, group: Group) -> None:
        """The group is judged. Raises LostError when its data was lost with a node."""
        ...

    def move(self, ticket: Ticket, copies: Mapping[Any, Any]) -> None:
        """Replaces objects of an added group by their `copies`, if the group is still kept."""
        ...

    def drop(self, ticket: Ticket, *, why: str) -> None:
        """The group will never be finished."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """Source and destination of the groups to train on."""

    buffer: Buffer
    office: TicketOffice
    destination: Destination


class TrainingGroups:
    """Fills the buffer: drops groups with too many failed rewards, chooses trajectories, filters, and adds reference log-probs."""

    def __init__(
        self,
        buffer: Buffer,
        *,
        scorers: Scorers,
        dropped_by: DroppedBy,
        choose: Choose | None,
        wants_reference: WantsReference,
        max_failed_share: float,
        measure: Measure | None = None,
        events: Events,
    ) -> None:
        """`choose` None: a group keeps all its trajectories."""
        self._buffer = buffer
        self._scorers = scorers
        self._dropped_by = dropped_by
        self._choose = choose
        self._wants_reference = wants_reference
        self._max_failed_share = max_failed_share
        self._measure = measure
        self._events = events

    def wants(self, ticket: Ticket) -> bool:
        return self._buffer.is_live(ticket.index)

    def hold(self, ticket: Ticket, size_bytes: int) -> None:
        self._buffer.hold(ticket.index, size_bytes)

    async def add(self, ticket: Ticket, group: Group) -> None:
        candidates = group.summary
        if not candidates.can_train(max_failed_share=self._max_failed_share):
            self._note(candidates)
            return self._drop(ticket, reason="rewards failed", why=describe(candidates))
        if self._measure is not None:
            self._measure(ticket.index, candidates)
        if self._choose is not None:
            group = group.of(self._choose(candidates))
        dropped_by = self._dropped_by(group.summary)
        if not dropped_by and self._wants_reference(ticket.index):
            group = await self._scorers.with_reference_logprobs(group)
        self._note(candidates)  # only now: a group that the scorer lost comes again
        if dropped_by:
            self._drop(ticket, reason=dropped_by, why=f"filter {dropped_by!r} dropped it")
        else:
            self._buffer.add(ticket.index, group)

    def move(self, ticket: Ticket, copies: Mapping[Any, Any]) -> None:
        self._buffer.move(ticket.index, copies)

    def drop(self, ticket: Ticket, *, why: str) -> None:
        self._drop(ticket, reason=why, why=why)

    def _note(self, candidates: GroupSummary) -> None:
        """Counts a judged group, whether or not it trains. Without a choice the step's groups are counted instead."""
        if self._choose is not None:
            self._buffer.note_candidates(candidates)

    def _drop(self, ticket: Ticket, *, reason: str, why: str) -> None:
        if self.wants(ticket):  # else the buffer has dropped it as a straggler
            self._events.event("drop", group_id=ticket.group_id, prompt_id=ticket.prompt.prompt_id, reason=reason)
        self._buffer.drop(ticket.index, reason=reason, why=why)


class HeldOutGroups:
    """Groups of one evaluation."""

    def __init__(self, num_groups: int) -> None:
        self.num_open = num_groups
        """Groups that are not reported yet."""
        self.summaries: list[GroupSummary] = []
        self.num_dropped = 0
        """Groups whose prompt cannot be sampled or judged."""

    def wants(self, ticket: Ticket) -> bool:
        return True

    def hold(self, ticket: Ticket, size_bytes: int) -> None: ...

    async def add(self, ticket: Ticket, group: Group) -> None:
        self.summaries.append(group.summary)
        self.num_open -= 1

    def move(self, ticket: Ticket, copies: Mapping[Any, Any]) -> None: ...

    def drop(self, ticket: Ticket, *, why: str) -> None:
        self.num_dropped += 1
        self.num_open -= 1
