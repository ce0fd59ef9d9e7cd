"""Nodes that announce their end (spot termination, scale-down): workers leave them, and groups that wait there are copied off.

A worker finishes what it can. What it cannot finish in time goes on at other workers, token by token. What a node could still take with it
is what it finished after the last look. Such groups are sampled again.
"""

import asyncio
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
"""What is enough for a worker to hand over what it has, and for the driver to take it."""


class Fleet(Protocol):
    """The rollout workers."""

    @property
    def is_fixed(self) -> bool:
        """Whether workers keep their places until they fail."""
        ...

    def workers(self) -> list[RemoteActor]: ...

    def drain(self, name: str) -> None: ...


class Groups(Protocol):
    """Those under way, and those that wait for the learner."""

    def waiting(self) -> dict[int, Group]:
        """What is sampled and not taken."""
        ...

    def move(self, index: int, copies: Mapping[Any, Any]) -> bool:
        """These objects take the place of others in the group. False when it waits no more."""
        ...

    async def hand_over(self, actor: RemoteActor, *, copy: Copy, deadline_s: float) -> list[int]:
        """The worker gives up its unfinished groups. Those that others go on with, and do not begin anew."""
        ...


class Departures:
    """Leaves the nodes that go away. What was done is in events and in metrics."""

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
        self._announced: set[str] = set()
        self._evicted: dict[tuple[str, str], float | None] = {}
        """When a worker that leaves hands over what it has not finished, by its name and node; None: never, or it did."""
        self._being_saved: set[int] = set()
        self._num_evictions = 0
        self._num_saved = 0
        self._num_handed_over = 0

    async def leave(self, draining: Mapping[str, float | None]) -> None:
        """`draining` are all nodes that go away now, with the Unix seconds of their end; None where they do not say.

        Returns when copies and hand-overs that are due are made. It may be called again meanwhile.
        """
        self._evicted = {place: at for place, at in self._evicted.items() if place[1] in draining}
        self._announced &= draining.keys()
        on_node = defaultdict[str, list[RemoteActor]](list)
        for actor in self._fleet.workers() if draining else ():
            on_node[actor.node_id].append(actor)
        for node_id, deadline in draining.items():
            self._leave(node_id, deadline, on_node[node_id])
        if draining:
            await asyncio.gather(self._save(draining), *(self._hand_over(actor, draining) for actor in self._due()))

    def drain_stats(self) -> dict[str, float]:
        """Since the last call."""
        drained = {
            "rollout/spot_evictions": float(self._num_evictions),
            "rollout/groups_saved": float(self._num_saved),
            "rollout/groups_handed_over": float(self._num_handed_over),
        }
        self._num_evictions = self._num_saved = self._num_handed_over = 0
        return drained

    def _leave(self, node_id: str, deadline: float | None, workers: Sequence[RemoteActor]) -> None:
        """The node's workers finish what they can; others start elsewhere in their place. Workers of a fixed fleet stay to the end."""
        # A worker that died and came up elsewhere may have to leave again.
        here = [actor for actor in workers if (actor.name, node_id) not in self._evicted]
        leaving = [] if self._fleet.is_fixed else here
        if leaving or node_id not in self._announced:
            self._announced.add(node_id)
            self._tell(node_id, deadline, [actor.name for actor in leaving])
        for actor in leaving:
            self._evicted[actor.name, node_id] = None if deadline is None else hand_over_at(deadline, now=self._now())
            self._num_evictions += 1
            self._supervisor.note_leaving(actor)
            self._fleet.drain(actor.name)

    def _tell(self, node_id: str, deadline: float | None, workers: list[str]) -> None:
        seconds_left, notice = notice_of(node_id, deadline, now=self._now())
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
        """Workers that get no more time to finish what they have, each once."""
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
        """For calls and copies. A node that outlives its deadline leaves the others theirs."""
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
        """Whether a piece of the group was copied. One that could not be copied is tried again at the next look."""
        self._being_saved.add(index)
        try:
            copies = await self._copier.copies_of(group.pieces, leaving=leaving, deadline_s=deadline_s)
        except TreadwheelError:
            return False
        finally:
            self._being_saved.discard(index)
        return bool(copies) and self._groups.move(index, copies)


def notice_of(node_id: str, deadline: float | None, *, now: float) -> tuple[float | None, str]:
    """Seconds until the node's end, None where it does not say; and the notice in words."""
    seconds_left = None if deadline is None else max(deadline - now, 0.0)
    when = "" if seconds_left is None else f" in {seconds_left:.0f} s"
    return seconds_left, f"node {node_id[:8]} goes away{when}"


def hand_over_at(deadline: float, *, now: float) -> float:
    """Until when a worker goes on with what it has: ten seconds before its node's end, or in the middle of a notice that is shorter than
    twenty."""
    return max(deadline - _HANDING_OVER_S, (now + deadline) / 2)
