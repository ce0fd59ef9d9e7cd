"""Evacuates nodes that announce their end (spot termination, scale-down): workers leave, finished groups go to the driver's node.

A leaving worker finishes the groups that it can. Other workers continue the rest from the last sampled token. Groups that finish on the
node after the last copy are lost with it and are sampled again.
"""

import asyncio
import math
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

from cluster.contracts.errors import TreadwheelError
from cluster.contracts.types import Group
from cluster.remote.actor import RemoteActor
from cluster.remote.objects import Copier
from cluster.rollouts.giving_up import Copy
from cluster.supervision.supervisor import Supervisor

_LONGEST_COPY_S = 60.0
_HANDING_OVER_S = 10.0
"""Enough time for a worker to hand over its unfinished groups and for the driver to copy them."""


class Fleet(Protocol):
    """The rollout workers."""

    @property
    def is_fixed(self) -> bool:
        """Whether workers keep their places until they fail, and are not drained."""
        ...

    def workers(self) -> list[RemoteActor]: ...

    def drain(self, name: str) -> None: ...


class Groups(Protocol):
    """Groups under way, and groups that wait for the learner."""

    def waiting(self) -> dict[int, Group]:
        """Sampled groups that the learner has not taken, by index."""
        ...

    def move(self, index: int, copies: Mapping[Any, Any]) -> bool:
        """Replaces objects of the group by their `copies`. False when the group no longer waits."""
        ...

    async def hand_over(self, actor: RemoteActor, *, copy: Copy, deadline_s: float) -> list[int]:
        """The worker gives up its unfinished groups. Returns the indices of those that other workers continue; the rest restart."""
        ...


class Departures:
    """Evacuates nodes. Reports each action as an event and in metrics."""

    def __init__(
        self,
        *,
        fleet: Fleet,
        groups: Groups,
        supervisor: Supervisor,
        copier: Copier | None = None,
        now: Callable[[], float] = time.time,
    ) -> None:
        """`now` gives Unix seconds, as deadlines are."""
        self._fleet = fleet
        self._groups = groups
        self._supervisor = supervisor
        self._copier = copier or Copier()
        self._now = now
        self._announced: set[tuple[str, float | None]] = set()
        """Nodes with their present deadlines, which may be announced anew."""
        self._evicted: dict[tuple[str, str], float | None] = {}
        """By worker name and node id: Unix seconds at which a leaving worker hands over its groups. None: it did."""
        self._being_saved: set[int] = set()
        self._num_evictions = 0
        self._num_saved = 0
        self._num_handed_over = 0

    async def leave(self, draining: Mapping[str, float | None]) -> None:
        """`draining`: all nodes that have announced their end, with its Unix seconds; None: unknown.

        Returns after the copies and hand-overs that are due. May be called again before it returns.
        """
        self._evicted = {place: at for place, at in self._evicted.items() if place[1] in draining}
        self._announced &= draining.items()
        on_node = defaultdict[str, list[RemoteActor]](list)
        for actor in self._fleet.workers() if draining else ():
            on_node[actor.node_id].append(actor)
        for node_id, deadline in draining.items():
            self._leave(node_id, deadline, on_node[node_id])
        if draining:
            await asyncio.gather(self._save(draining), *(self._hand_over(actor, draining) for actor in self._due()))

    def drain_stats(self) -> dict[str, float]:
        """Counts since the last call."""
        drained = {
            "rollout/spot_evictions": float(self._num_evictions),
            "rollout/groups_saved": float(self._num_saved),
            "rollout/groups_handed_over": float(self._num_handed_over),
        }
        self._num_evictions = self._num_saved = self._num_handed_over = 0
        return drained

    def _leave(self, node_id: str, deadline: float | None, workers: Sequence[RemoteActor]) -> None:
        """Drains the node's workers; others start elsewhere in their place. Workers of a fixed fleet stay until the node ends."""
        # A worker that died and came up elsewhere may have to leave again.
        here = [actor for actor in workers if (actor.name, node_id) not in self._evicted]
        leaving = [] if self._fleet.is_fixed else here
        is_new = (node_id, deadline) not in self._announced
        if not (leaving or is_new):
            return
        self._announced.add((node_id, deadline))
        now = self._now()
        self._tell(node_id, deadline, [actor.name for actor in leaving], now=now)
        at = math.inf if deadline is None else hand_over_at(deadline, now=now)
        for actor in workers if is_new else ():
            if self._evicted.get((actor.name, node_id)) is not None:
                self._evicted[actor.name, node_id] = at
        for actor in leaving:
            self._evicted[actor.name, node_id] = at
            self._num_evictions += 1
            self._supervisor.note_leaving(actor)
            self._fleet.drain(actor.name)

    def _tell(self, node_id: str, deadline: float | None, workers: list[str], *, now: float) -> None:
        seconds_left, notice = notice_of(node_id, deadline, now=now)
        message = notice + (f"; {', '.join(workers)} leaves it" if workers else "")
        self._supervisor.events.event(
            "node_leaves",
            node_id=node_id,
            deadline=deadline,
            seconds_left=seconds_left,
            actors=workers,
            message=message,
        )

    def _due(self) -> list[RemoteActor]:
        """Workers whose time to finish groups is over. Each is returned once."""
        at = {actor: self._evicted.get((actor.name, actor.node_id)) for actor in self._fleet.workers()}
        due = [actor for actor, seconds in at.items() if seconds is not None and self._now() >= seconds]
        self._evicted |= {(actor.name, actor.node_id): None for actor in due}
        return due

    async def _hand_over(self, actor: RemoteActor, draining: Mapping[str, float | None]) -> None:
        copy, deadline_s = self._copier.copy, self._seconds_left([draining[actor.node_id]])
        if indices := await self._groups.hand_over(actor, copy=copy, deadline_s=deadline_s):
            self._num_handed_over += len(indices)
            message = f"{actor.name} handed over {len(indices)} groups that it could not finish"
            self._supervisor.events.event("groups_handed_over", actor=actor.name, groups=indices, message=message)

    def _seconds_left(self, deadlines: Iterable[float | None]) -> float:
        """Deadline of calls and copies: the first of `deadlines` that has not passed yet, between 1 and 60 s from now."""
        seconds = [_LONGEST_COPY_S if deadline is None else deadline - self._now() for deadline in deadlines]
        return min(max(min([each for each in seconds if each > 0] or seconds), 1.0), _LONGEST_COPY_S)

    async def _save(self, draining: Mapping[str, float | None]) -> None:
        waiting = {index: group for index, group in self._groups.waiting().items() if index not in self._being_saved}
        copying = partial(self._saved, leaving=draining.keys(), deadline_s=self._seconds_left(draining.values()))
        saved = await asyncio.gather(*(copying(index, group) for index, group in waiting.items()))
        if indices := [index for index, is_saved in zip(waiting, saved, strict=True) if is_saved]:
            self._num_saved += len(indices)
            message = f"{len(indices)} finished groups were copied off nodes that go away"
            self._supervisor.events.event("groups_saved", groups=indices, nodes=dict(draining), message=message)

    async def _saved(self, index: int, group: Group, *, leaving: Collection[str], deadline_s: float) -> bool:
        """Whether a piece of the group was copied. A failed copy is tried again by the next `leave`."""
        self._being_saved.add(index)
        try:
            copies = await self._copier.copies_of(group.pieces, leaving=leaving, deadline_s=deadline_s)
        except TreadwheelError:
            return False
        finally:
            self._being_saved.discard(index)
        return bool(copies) and self._groups.move(index, copies)


def notice_of(node_id: str, deadline: float | None, *, now: float) -> tuple[float | None, str]:
    """(seconds until the node's end, the notice as text). None: unknown."""
    seconds_left = None if deadline is None else max(deadline - now, 0.0)
    when = "" if seconds_left is None else f" in {seconds_left:.0f} s"
    return seconds_left, f"node {node_id[:8]} goes away{when}"


def hand_over_at(deadline: float, *, now: float) -> float:
    """Unix seconds at which a worker stops sampling: 10 s before its node's end, or in the middle of a notice shorter than 20 s."""
    return max(deadline - _HANDING_OVER_S, (now + deadline) / 2)
