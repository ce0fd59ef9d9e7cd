"""Brings the learner's weights to every worker, and to each one that comes later. Nobody samples under weights unproven."""

import asyncio
import time
from typing import Any

from cluster.contracts.config import WeightsConfig
from cluster.contracts.types import Attestation
from cluster.learner_group import LearnerGroup
from cluster.pool import Pool
from cluster.remote import RemoteActor


class Weights:
    """The published version, by reference."""

    def __init__(self, config: WeightsConfig, *, learner: LearnerGroup) -> None:
        self._config = config
        self._learner = learner
        self._references: list[Any] = []
        self._is_published = asyncio.Event()
        self._stats: dict[str, float] = {}

    async def publish(self) -> None:
        """Takes the learner's weights into the object store."""
        self._references = await self._learner.publish()
        self._is_published.set()

    async def join(self, worker: RemoteActor) -> None:
        """Loads on a worker that is not in the pool yet: again if a newer version was published meanwhile.

        Between the last check and the worker's joining nothing else runs, so that no broadcast can miss it.
        """
        await self._is_published.wait()
        loaded: list[Any] | None = None
        while loaded is not self._references:
            loaded = self._references
            await self.load(worker)

    async def load(self, worker: RemoteActor) -> Attestation:
        """The published version on one worker, attested. Raises WeightsError when it cannot prove it."""
        return await worker.call("load", *self._references, deadline_s=self._config.timeout_s)

    async def broadcast(self, pool: Pool) -> list[Attestation]:
        """Publishes, and loads on every living worker; returns when all of them have proven the version."""
        began = time.monotonic()
        await self.publish()
        published = time.monotonic()
        attestations: list[Attestation] = await pool.each_worker(self.load)
        done = time.monotonic()
        self._stats = {
            "time/publish_s": published - began,
            "time/load_s": done - published,
            "time/broadcast_s": done - began,
            "weights/num_workers": float(len(attestations)),
        }
        if attestations:
            self._stats["weights/canary_max_error"] = max(a.canary_max_error for a in attestations)
            self._stats["weights/pause_s"] = max(a.pause_seconds for a in attestations)
        return attestations

    def stats(self) -> dict[str, float]:
        return self._stats
