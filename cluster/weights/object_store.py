"""Weights through the cluster's object store: the learner puts buckets in once, each worker's node fetches them once.

Both ends: `Learner.publish` supplies, `RolloutWorker.load` takes, and the driver between them holds object refs and the manifest,
never a bucket.
"""

import asyncio
import time
from collections.abc import Sequence
from typing import Any

from cluster.contracts.errors import WeightsError
from cluster.contracts.protocols import ActorHandle, PublishingLearner
from cluster.contracts.types import BroadcastStats
from cluster.weights.delivery import fetched, proof_of, stats_of


class ObjectStoreTransport:
    """Works everywhere. Keeps the last version's object refs, so that a worker may join while the learner is busy."""

    def __init__(self, *, timeout_s: float) -> None:
        """`timeout_s` bounds each load."""
        self._timeout_s = timeout_s
        self._object_refs: list[Any] = []
        """Of the manifest, then of its buckets."""
        self._manifest: dict[str, Any] = {}

    async def publish(self, learner: PublishingLearner) -> BroadcastStats:
        """Raises what the learner raises, and DeadlineError when its manifest cannot be fetched."""
        started = time.monotonic()
        *buckets, manifest = await learner.publish()
        self._manifest = await fetched(manifest, within_s=self._timeout_s, before=self._manifest)
        self._object_refs = [manifest, *buckets]
        return stats_of(self._manifest, (), (), started=started)

    async def deliver(self, workers: Sequence[ActorHandle]) -> BroadcastStats:
        """Raises WeightsError when nothing was published yet."""
        if not self._object_refs:
            raise WeightsError("nothing was published yet: publish once before workers load")
        started, manifest, object_refs = time.monotonic(), self._manifest, self._object_refs
        loads = (
            proof_of(worker, "load", *object_refs, published=manifest, deadline_s=self._timeout_s) for worker in workers
        )
        results = await asyncio.gather(*loads)
        return stats_of(manifest, workers, results, started=started)

    catch_up = deliver


object_store = ObjectStoreTransport
"""The name in `weights.transport`."""
