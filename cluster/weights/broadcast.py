"""Brings the learner's weights to every worker, and to each one that comes later. Nobody samples under weights unproven.

The transport moves the bytes and checks the proofs; this decides who gets them when, and hands the dead to the pool.
"""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

from cluster.contracts.errors import LostError
from cluster.contracts.protocols import ActorHandle, PublishingLearner, WorkerFleet
from cluster.weights.object_store import BroadcastStats, Transport


class Weights:
    """The published version, and who serves it."""

    def __init__(self, transport: Transport, *, learner: PublishingLearner, timeout_s: float) -> None:
        self._transport = transport
        self._learner = _Publisher(learner)
        self._timeout_s = timeout_s
        self._version = -1
        self._is_published = asyncio.Event()
        self._is_sent = asyncio.Event()
        self._is_sent.set()
        self._last: BroadcastStats | None = None

    async def publish(self) -> BroadcastStats:
        """Takes the learner's weights to where workers that join can fetch them; asks no worker."""
        return self._note(await self._transport.broadcast(self._learner, ()))

    async def broadcast(self, pool: WorkerFleet) -> BroadcastStats:
        """Publishes, and loads on every living worker. Those that fail are being replaced when this returns, and serve nothing."""
        self._is_sent.clear()
        try:
            while True:
                workers = {worker.name: worker for worker in pool.workers()}
                loaders = [_Loader(worker, self._timeout_s) for worker in workers.values()]
                stats = self._note(await self._transport.broadcast(self._learner, loaders))
                if not any(isinstance(error, LostError) for _, error in stats.failures):
                    break  # else the buckets went with a node: publish again
        finally:
            self._is_sent.set()
        for name, error in stats.failures:
            pool.replace(workers[name], error)
        return stats

    async def join(self, worker: ActorHandle) -> None:
        """Loads on a worker that is not in the pool yet: again if a newer version was published meanwhile.

        A broadcast under way does not know of this worker, so it waits for its end. Between the last check and the worker's
        joining nothing else runs: no broadcast can miss it.
        """
        await self._is_published.wait()
        version = -1
        while version != self._version or not self._is_sent.is_set():
            await self._is_sent.wait()
            stats = await self._transport.catch_up([_Loader(worker, self._timeout_s)])
            version = stats.policy_version
            for _, error in stats.failures:
                if not isinstance(error, LostError):
                    raise error
                await self.publish()  # the buckets went with a node
                version = -1

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
    learner: PublishingLearner

    async def publish(self) -> AsyncIterator[Any]:
        for reference in await self.learner.publish():
            yield reference


@dataclass(frozen=True, slots=True)
class _Loader:
    worker: ActorHandle
    timeout_s: float

    @property
    def name(self) -> str:
        return self.worker.name

    async def load(self, manifest: Any, *buckets: Any) -> Any:
        return await self.worker.call("load", manifest, *buckets, deadline_s=self.timeout_s)
