"""Groups between worker and destination: each is judged and then added, dropped, or reported as lost."""

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from cluster.contracts.errors import LostError
from cluster.contracts.types import Group
from cluster.rollouts.lanes import Job
from cluster.rollouts.scoring import Scorers


@dataclass(slots=True, kw_only=True)
class _Sampled:
    job: Job
    group: Group
    copies: dict[Any, Any] = field(default_factory=dict[Any, Any])
    """Copies of the group's objects from a leaving node, by the original."""


class Judging:
    """The groups that are being judged."""

    def __init__(
        self,
        *,
        scorers: Scorers,
        tasks: asyncio.TaskGroup,
        lost: Callable[[Job, LostError], None],
        wake: Callable[[], None],
    ) -> None:
        """`lost` gets each job whose group was lost with a node. `wake` is called when a group has been judged."""
        self._scorers = scorers
        self._tasks = tasks
        self._lost = lost
        self._wake = wake
        self._under_way: dict[int, _Sampled] = {}

    def start(self, job: Job, group: Group) -> None:
        sampled = _Sampled(job=job, group=group)
        self._under_way[job.ticket.index] = sampled
        self._tasks.create_task(self._judge(sampled))

    def job(self, index: int) -> Job | None:
        """The job of group `index`; None when it is not being judged."""
        return sampled.job if (sampled := self._under_way.get(index)) else None

    @property
    def is_any(self) -> bool:
        """Whether a group is being judged."""
        return bool(self._under_way)

    def groups(self) -> dict[int, Group]:
        """Groups as they were sampled, by index. Evaluations have negative indices."""
        return {index: sampled.group for index, sampled in self._under_way.items()}

    def move(self, index: int, copies: Mapping[Any, Any]) -> bool:
        """Replaces objects of the group by their `copies`. False when it is not being judged."""
        if (sampled := self._under_way.get(index)) is None:
            return False
        sampled.copies.update(copies)
        sampled.group = sampled.group.moved(copies)
        return True

    async def _judge(self, sampled: _Sampled) -> None:
        job = sampled.job
        try:
            judged = await self._judged(sampled)
            if judged is None:
                job.drop("quarantined")
            elif not job.is_wanted:
                job.drop("straggler")
            else:
                await self._add(sampled, judged)
        except LostError as error:
            self._lost(job, error)
        finally:
            del self._under_way[job.ticket.index]
        self._wake()

    async def _add(self, sampled: _Sampled, judged: Group) -> None:
        job = sampled.job
        while True:
            copies = dict(sampled.copies)
            try:
                await job.destination.add(job.ticket, judged.moved(copies))
                return job.destination.move(job.ticket, sampled.copies)
            except LostError:
                if sampled.copies.keys() == copies.keys():  # else it was copied before its node was lost
                    raise

    async def _judged(self, sampled: _Sampled) -> Group | None:
        while True:
            group = sampled.group
            try:
                return await self._scorers.judge(sampled.job.ticket, group)
            except LostError:
                if sampled.group is group:  # else it was copied before its node was lost
                    raise
