"""Where judged groups go: into the buffer to be trained on, or into the numbers of an evaluation."""

import asyncio
from collections.abc import Callable
from dataclasses import asdict
from typing import Any, Protocol

from cluster.contracts.protocols import Events
from cluster.contracts.types import Group, GroupSummary, Ticket
from cluster.rollouts.buffer import Buffer
from cluster.rollouts.scoring import Scorers

_MOST_TOLD = 16
"""Kinds of failure that the console shows in a run; further ones are in the events."""

Keep = Callable[[GroupSummary], bool]
"""Which finished groups are worth training on."""


class Destination(Protocol):
    """Every ticket that is dispatched for it comes back once, by `add` or by `drop`."""

    def wants(self, ticket: Ticket) -> bool:
        """False when the group's result is of no use any more; it is still reported."""
        ...

    def hold(self, ticket: Ticket, size_bytes: int) -> None:
        """The group is sampled and waits to be judged."""
        ...

    async def add(self, ticket: Ticket, summary: GroupSummary, object_ref: Any) -> None:
        """The group is judged. Raises LostError when it went with its node."""
        ...

    def drop(self, ticket: Ticket, *, why: str) -> None:
        """The group will never be finished."""
        ...


class TrainingGroups:
    """Groups for the learner: enough rewards known, kept by the filters, with reference log-probs where the loss needs them."""

    def __init__(
        self, buffer: Buffer, *, scorers: Scorers, keep: Keep, max_failed_share: float, events: Events
    ) -> None:
        self._buffer = buffer
        self._scorers = scorers
        self._keep = keep
        self._max_failed_share = max_failed_share
        self._events = events
        self._failed_rewards = FailedRewards(events)

    def wants(self, ticket: Ticket) -> bool:
        return self._buffer.is_live(ticket.index)

    def hold(self, ticket: Ticket, size_bytes: int) -> None:
        self._buffer.hold(ticket.index, size_bytes)

    async def add(self, ticket: Ticket, summary: GroupSummary, object_ref: Any) -> None:
        self._failed_rewards.note(summary)
        if self._has_too_few_rewards(summary):
            self._drop(ticket, reason="rewards failed", why=describe(summary))
        elif not self._keep(summary):
            self._drop(ticket, reason="filtered", why="filtered")
        else:
            summary, object_ref = await self._scorers.add_reference_logprobs(object_ref) or (summary, object_ref)
            self._buffer.add(ticket.index, Group(object_ref=object_ref, summary=summary))

    def drop(self, ticket: Ticket, *, why: str) -> None:
        self._drop(ticket, reason=why, why=why)

    def _drop(self, ticket: Ticket, *, reason: str, why: str) -> None:
        if self.wants(ticket):  # else the buffer dropped it before, as a straggler
            self._events.event("drop", group_id=ticket.group_id, prompt_id=ticket.prompt.prompt_id, reason=reason)
        self._buffer.drop(ticket.index, why=why)

    def _has_too_few_rewards(self, summary: GroupSummary) -> bool:
        num_failed = summary.num_failed_rewards
        # A single known reward has nothing to be compared with: no group advantage is defined for it.
        num_known = summary.num_trajectories - num_failed
        is_alone = num_failed > 0 and num_known < 2
        return num_failed > self._max_failed_share * summary.num_trajectories or num_known == 0 or is_alone


class HeldOutGroups:
    """Groups of one evaluation."""

    def __init__(self, num_groups: int) -> None:
        self._num_open = num_groups
        self._all_reported = asyncio.Event()
        self.summaries: list[GroupSummary] = []
        self.num_dropped = 0
        """Groups whose prompt cannot be sampled or judged."""
        self._report(0)

    def wants(self, ticket: Ticket) -> bool:
        return True

    def hold(self, ticket: Ticket, size_bytes: int) -> None: ...

    async def add(self, ticket: Ticket, summary: GroupSummary, object_ref: Any) -> None:
        self.summaries.append(summary)
        self._report(1)

    def drop(self, ticket: Ticket, *, why: str) -> None:
        self.num_dropped += 1
        self._report(1)

    async def complete(self) -> None:
        """Returns when every group was reported."""
        await self._all_reported.wait()

    def _report(self, count: int) -> None:
        self._num_open -= count
        if self._num_open == 0:
            self._all_reported.set()


class FailedRewards:
    """Remembers which kinds of failure were shown."""

    def __init__(self, events: Events) -> None:
        self._events = events
        self._told: set[str] = set()

    def note(self, summary: GroupSummary) -> None:
        """Logs `reward_failure` if a reward of this group failed."""
        if summary.num_failed_rewards == 0:
            return
        news = [failure.kind for failure in summary.reward_failures if failure.kind not in self._told]
        is_shown = bool(news) and len(self._told) < _MOST_TOLD
        self._told.update(news if is_shown else ())
        self._events.event(
            "reward_failure",
            group_id=summary.group_id,
            prompt_id=summary.prompt_id,
            num_errors=summary.num_reward_errors,
            num_timeouts=summary.num_reward_timeouts,
            failures=[asdict(failure) for failure in summary.reward_failures],
            **({"message": f"prompt {summary.prompt_id!r}: {describe(summary)}"} if is_shown else {}),
        )


def describe(summary: GroupSummary) -> str:
    """`3 of 8 rewards failed: KeyError: 'anser'`, with each kind's first message."""
    reasons = "; ".join(failure.message for failure in summary.reward_failures) or "no reason given"
    return f"{summary.num_failed_rewards} of {summary.num_trajectories} rewards failed: {reasons}"
