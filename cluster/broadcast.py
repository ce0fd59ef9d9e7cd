"""Brings the learner's weights to every worker, and to each one that comes later. Nobody samples under weights unproven.

The transport moves the bytes and checks the proofs; this decides who gets them when, and hands the dead to the pool.
"""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

from cluster.learner_group import LearnerGroup
from cluster.pool import Pool
from cluster.remote import RemoteActor
from cluster.weights.object_store import BroadcastStats, Transport


class Weights:
    """The published version, and who serves it."""

    def __init__(self, transport: Transport, *, learner: LearnerGroup, timeout_s: float) -> None:
        self._transport = transport
        self._learner = _Publisher(learner)
        self._timeout_s = timeout_s
        self._version = -1
        self._is_published = asyncio.Event()
        self._last: BroadcastStats | None = None

    async def publish(self) -> BroadcastStats:
        """Takes the learner's weights to where workers that join can fetch them; asks no worker."""
        return self._note(await self._transport.broadcast(self._learner, ()))

    async def broadcast(self, pool: Pool) -> BroadcastStats:
        """Publishes, and loads on every living worker; returns when all of them have proven the version or are replaced."""
        workers = pool.workers()
        stats = self._note(
            await self._transport.broadcast(self._learner, [_Loader(worker, self._timeout_s) for worker in workers])
        )
        dead = dict(stats.failures)
        await asyncio.gather(*(pool.replace(worker, dead[worker.name]) for worker in workers if worker.name in dead))
        return stats

    async def join(self, worker: RemoteActor) -> None:
        """Loads on a worker that is not in the pool yet: again if a newer version was published meanwhile.

        Between the last check and the worker's joining nothing else runs, so that no broadcast can miss it.
        """
        await self._is_published.wait()
        version = -1
        while version != self._version:
            stats = await self._transport.catch_up([_Loader(worker, self._timeout_s)])
            for _, error in stats.failures:
                raise error
            version = stats.policy_version

    def stats(self) -> dict[str, float]:
        """Metrics of the last broadcast."""
        last = self._last
        if last is None:
            return {}
        stats = {
            "time/publish_s": last.publish_seconds,
            "time/broadcast_s": last.seconds,
            "weights/size_bytes": float(last.size_bytes),
            "weights/bytes_per_s": last.size_bytes * len(last.attestations) / max(last.seconds, 1e-9),
        }
        if last.attestations:
            stats["weights/canary_error"] = max(proof.canary_max_error for proof in last.attestations)
            stats["weights/pause_s"] = max(proof.pause_seconds for proof in last.attestations)
        return stats

    def _note(self, stats: BroadcastStats) -> BroadcastStats:
        self._version = stats.policy_version
        self._last = stats
        self._is_published.set()
        return stats


@dataclass(frozen=True, slots=True)
class _Publisher:
    learner: LearnerGroup

    async def publish(self) -> AsyncIterator[Any]:
        for reference in await self.learner.publish():
            yield reference


@dataclass(frozen=True, slots=True)
class _Loader:
    worker: RemoteActor
    timeout_s: float

    @property
    def name(self) -> str:
        return self.worker.name

    async def load(self, manifest: Any, *buckets: Any) -> Any:
        return await self.worker.call("load", manifest, *buckets, deadline_s=self.timeout_s)
