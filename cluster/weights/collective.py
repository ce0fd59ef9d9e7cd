"""Weights over torch.distributed: the learner's first rank sends each bucket once, to the processes of all engines at the same time.

This is the driver's end, which decides the members of process groups and makes sure that each broadcast ends. If a member is lost, the
others give up and get the weights in a group without it. With `weights.deltas` a group gets only the changes if all of its workers proved
the version before, else the whole weights. The other two ends are in `process_group.py`.
"""

import asyncio
import time
import uuid
from collections.abc import Awaitable, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import count
from typing import Any

from cluster.contracts.errors import (
    BroadcastError,
    DeadlineError,
    LostError,
    TreadwheelError,
    WeightsError,
    WorkerError,
)
from cluster.contracts.protocols import ActorHandle, PublishingLearner
from cluster.contracts.types import BroadcastStats, Packed, RankGroup
from cluster.weights.delivery import Bases, Result, fetched, proof_of, stats_of

_GRACE_S = 30.0
"""Extra time of a worker's call beyond the group's own limit, so that a silent member fails alone, without those that waited for it."""
_VAIN_ROUNDS = 2
"""Consecutive rounds in which no worker gets weights though none is lost. Then each worker gets them in its own group, or has failed."""
_LEARNER_LOST = (WorkerError, DeadlineError, LostError)
_Sent = tuple[Result, int]
"""A worker's result, and the number of bytes sent to it."""


@dataclass(frozen=True, slots=True)
class _Version:
    """A version that was packed. A delivery keeps to it, although the next one may be packed meanwhile."""

    learner: PublishingLearner
    manifest: Any
    """Object ref."""
    packed: Packed


@dataclass(frozen=True, slots=True)
class _Lasting:
    """The group of the fleet, kept from broadcast to broadcast."""

    group: RankGroup
    workers: Sequence[ActorHandle]

    def serves(self, packed: Packed, workers: Sequence[ActorHandle]) -> bool:
        """Whether exactly these processes are its members."""
        same = len(workers) == len(self.workers) and all(map(lambda one, other: one is other, workers, self.workers))
        return same and packed.sender == self.group.sender


class CollectiveTransport:
    """Keeps the weights in the learner's memory, so that a worker may join while the learner is busy."""

    def __init__(self, *, timeout_s: float) -> None:
        """`timeout_s`: how long a broadcast may take for a member of the group, including its wait for the others."""
        self._timeout_s = timeout_s
        self._name = uuid.uuid4().hex[:8]
        self._generations = count(1)
        self._last: _Version | None = None
        self._lasting: _Lasting | None = None
        self._bases = Bases()

    async def publish(self, learner: PublishingLearner) -> BroadcastStats:
        """Errors of the learner's packing pass through."""
        started = time.monotonic()
        manifest, packed = await learner.pack()
        before = asdict(self._last.packed) if self._last else {}
        found: Packed = await fetched(packed, within_s=self._timeout_s, before=before)
        self._last = _Version(learner, manifest, found)
        return stats_of(asdict(found), (), (), started=started)

    async def deliver(self, workers: Sequence[ActorHandle]) -> BroadcastStats:
        """Sends from the learner's memory while it learns. Raises WeightsError if nothing was published yet."""
        return await self._deliver(workers, joins=False)

    async def catch_up(self, workers: Sequence[ActorHandle]) -> BroadcastStats:
        """As `deliver`."""
        return await self._deliver(workers, joins=True)

    async def _deliver(self, workers: Sequence[ActorHandle], *, joins: bool) -> BroadcastStats:
        started = time.monotonic()
        version = self._last
        if version is None:
            raise WeightsError("nothing was published yet: publish once before workers load")
        packed = version.packed
        try:
            sent = await self._sent(version, workers, joins=joins)
        except _LEARNER_LOST as error:
            lost = f"policy version {packed.policy_version} is not with the learner any more: {error}"
            sent = [(LostError(lost, actor=error.actor or "learner"), 0) for _ in workers]
        results, sizes = [result for result, _ in sent], [size for _, size in sent]
        return stats_of(asdict(packed), workers, results, started=started, sizes=sizes)

    async def _sent(self, version: _Version, workers: Sequence[ActorHandle], *, joins: bool) -> list[_Sent]:
        """Results in the workers' order. Raises the learner's own failure."""
        sent: dict[str, _Sent] = {}
        num_vain = 0
        while waiting := [worker for worker in workers if worker.name not in sent]:
            failure, found = await self._round(version, waiting, joins=joins)
            ended = {name: each for name, each in found.items() if not isinstance(each[0], BroadcastError)}
            sent |= ended
            if len(ended) == len(found):
                break
            _refuse_lost_learner(failure)
            num_vain = 0 if ended else num_vain + 1
            if num_vain == _VAIN_ROUNDS:
                alone = await asyncio.gather(*(self._alone(version, worker) for worker in waiting))
                sent |= zip((worker.name for worker in waiting), alone, strict=True)
        return [sent[worker.name] for worker in workers]

    async def _alone(self, version: _Version, worker: ActorHandle) -> _Sent:
        failure, found = await self._round(version, [worker], joins=True)
        _refuse_lost_learner(failure)
        result, size = found[worker.name]
        if isinstance(result, BroadcastError):
            message = f"{worker.name} does not get the weights: {result}"
            result = WorkerError(message, actor=worker.name, stage="receive")
        return result, size

    async def _round(
        self, version: _Version, workers: Sequence[ActorHandle], *, joins: bool
    ) -> tuple[TreadwheelError | None, dict[str, _Sent]]:
        """The learner's error, None if it sent to all, and the results by worker. After a failure the rest of the group gives up."""
        learner, packed = version.learner, version.packed
        group, published = self._group(packed, workers, joins=joins), asdict(packed)
        size = sum(packed.delta["sizes_bytes"]) if packed.delta and group.base_digest else packed.total_bytes
        has_given_up = False

        async def watched(call: Awaitable[Any]) -> Any:
            nonlocal has_given_up
            is_whole = False
            try:
                result = await call
                is_whole = not isinstance(result, TreadwheelError)
            except TreadwheelError as error:
                result = error
            finally:
                if not is_whole and not has_given_up:
                    has_given_up = True
                    self._lasting = self._lasting if joins else None
                    await learner.give_up(group)
            return result

        receiving = (
            proof_of(
                worker,
                "receive",
                version.manifest,
                group,
                1 + number * packed.receivers_per_worker,
                published=published,
                deadline_s=self._timeout_s + _GRACE_S,
            )
            for number, worker in enumerate(workers)
        )
        failure, *results = await asyncio.gather(*map(watched, (learner.send(group), *receiving)))
        for worker, result in zip(workers, results, strict=True):
            self._bases.note(worker, result)
        return failure, {worker.name: (result, size) for worker, result in zip(workers, results, strict=True)}

    def _group(self, packed: Packed, workers: Sequence[ActorHandle], *, joins: bool) -> RankGroup:
        """The fleet's lasting group, or a new one. Joining workers get a gloo group: NCCL kernels would compete with a learning rank's."""
        delta = packed.delta if all(self._bases.has(worker, packed.delta) for worker in workers) else None
        brings = {"digest": packed.digest, "base_digest": delta["base_digest"] if delta else None}
        if not joins and self._lasting and self._lasting.serves(packed, workers):
            return replace(self._lasting.group, **brings)
        group = RankGroup(
            name=f"{self._name}-{next(self._generations)}",
            size=1 + len(workers) * packed.receivers_per_worker,
            sender=packed.sender,
            address=packed.address,
            backend="gloo" if joins else packed.backend,
            timeout_s=self._timeout_s,
            lasts=not joins,
            **brings,
        )
        if not joins:
            self._lasting = _Lasting(group, list(workers))
        return group


def _refuse_lost_learner(failure: TreadwheelError | None) -> None:
    """Raises the failure if it is the learner's own and not a receiver's."""
    if failure is not None and not isinstance(failure, BroadcastError):
        raise failure


collective = CollectiveTransport
"""The name in `weights.transport`."""
