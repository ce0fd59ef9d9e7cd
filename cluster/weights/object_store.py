"""Weights through the cluster's object store: the learner puts each bucket in once, and each worker's node fetches it once.

`Learner.publish` puts buckets, `RolloutWorker.load` takes them; the driver between them holds object refs and the manifest, never a bucket.
With `weights.deltas` the learner also puts the changes. Workers that proved the version before take these by `RolloutWorker.load_changes`;
all others take the whole weights.
"""

import asyncio
import time
from collections.abc import Sequence
from typing import Any

from cluster.contracts.errors import WeightsError
from cluster.contracts.protocols import ActorHandle, PublishingLearner
from cluster.contracts.types import BroadcastStats
from cluster.weights.delivery import Bases, fetched, proof_of, stats_of


class ObjectStoreTransport:
    """Works on every machine. Keeps the last version's object refs, so that a worker may join while the learner is busy."""

    def __init__(self, *, timeout_s: float) -> None:
        """`timeout_s` bounds each load."""
        self._timeout_s = timeout_s
        self._whole: list[Any] = []
        """Object refs of the last version's buckets."""
        self._changes: list[Any] = []
        """Object refs of each bucket's changes; empty without a delta."""
        self._manifest_ref: Any = None
        self._manifest: dict[str, Any] = {}
        self._bases = Bases()

    async def publish(self, learner: PublishingLearner) -> BroadcastStats:
        """Raises DeadlineError if the manifest cannot be fetched in time. Errors of the learner pass through."""
        started = time.monotonic()
        self._changes = []  # frees their memory for the next ones
        *parts, manifest = await learner.publish()
        self._manifest = await fetched(manifest, within_s=self._timeout_s, before=self._manifest)
        num_buckets = len(self._manifest["bucket_digests"])
        self._whole, self._changes = parts[:num_buckets], parts[num_buckets:]
        self._manifest_ref = manifest
        return stats_of(self._manifest, (), (), started=started)

    async def deliver(self, workers: Sequence[ActorHandle]) -> BroadcastStats:
        """Raises WeightsError if nothing was published yet."""
        if not self._whole:
            raise WeightsError("nothing was published yet: publish once before workers load")
        started, manifest = time.monotonic(), self._manifest
        delta = manifest["delta"] if self._changes else None
        takes_changes = [self._bases.has(worker, delta) for worker in workers]
        calls = [("load_changes", self._changes) if takes else ("load", self._whole) for takes in takes_changes]
        loads = (
            proof_of(worker, method, self._manifest_ref, *parts, published=manifest, deadline_s=self._timeout_s)
            for worker, (method, parts) in zip(workers, calls, strict=True)
        )
        results = await asyncio.gather(*loads)
        for worker, result in zip(workers, results, strict=True):
            self._bases.note(worker, result)
        sizes = [sum(manifest["delta"]["sizes_bytes"]) if takes else manifest["total_bytes"] for takes in takes_changes]
        return stats_of(manifest, workers, results, started=started, sizes=sizes)

    catch_up = deliver


object_store = ObjectStoreTransport
"""The name in `weights.transport`."""
