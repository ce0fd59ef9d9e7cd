"""Weights through the cluster's object store: the learner puts buckets in once, each worker's node fetches them once.

Both ends: `Learner.publish` supplies, `RolloutWorker.load` takes, and the driver between them holds object refs and the manifest,
never a bucket. With `weights.deltas` the learner supplies what changed as well. The workers that proved the version before take that, by
`RolloutWorker.load_changes`, and all others the whole weights.
"""

import asyncio
import time
from collections.abc import Mapping, Sequence
from typing import Any

from cluster.contracts.errors import WeightsError
from cluster.contracts.protocols import ActorHandle, PublishingLearner
from cluster.contracts.types import Attestation, BroadcastStats
from cluster.weights.delivery import fetched, proof_of, stats_of

_Version = tuple[int, str]
"""A policy version and its digest."""


class ObjectStoreTransport:
    """Works everywhere. Keeps the last version's object refs, so that a worker may join while the learner is busy."""

    def __init__(self, *, timeout_s: float) -> None:
        """`timeout_s` bounds each load."""
        self._timeout_s = timeout_s
        self._object_refs: list[Any] = []
        """Of the manifest, then of its buckets."""
        self._changes: list[Any] = []
        """Of the manifest, then of each bucket's changes; none once the fleet was brought to the version."""
        self._manifest: dict[str, Any] = {}
        self._served: dict[str, tuple[ActorHandle, _Version]] = {}
        """By worker: what it proved last."""

    async def publish(self, learner: PublishingLearner) -> BroadcastStats:
        """Raises what the learner raises, and DeadlineError when its manifest cannot be fetched."""
        started = time.monotonic()
        *parts, manifest = await learner.publish()
        before = _version_of(self._manifest) if self._manifest else None
        self._manifest = await fetched(manifest, within_s=self._timeout_s, before=self._manifest)
        num_buckets = len(self._manifest["bucket_digests"])
        self._object_refs = [manifest, *parts[:num_buckets]]
        self._changes = [manifest, *parts[num_buckets:]] if self._manifest["delta"] else []
        self._served = {name: served for name, served in self._served.items() if served[1] == before}
        return stats_of(self._manifest, (), (), started=started)

    async def deliver(self, workers: Sequence[ActorHandle]) -> BroadcastStats:
        """Raises WeightsError when nothing was published yet."""
        stats = await self._load(workers, changes=self._changes)
        self._changes = []
        return stats

    async def catch_up(self, workers: Sequence[ActorHandle]) -> BroadcastStats:
        """As `deliver`; they get the whole weights."""
        return await self._load(workers, changes=())

    async def _load(self, workers: Sequence[ActorHandle], *, changes: Sequence[Any]) -> BroadcastStats:
        if not self._object_refs:
            raise WeightsError("nothing was published yet: publish once before workers load")
        started, manifest, whole = time.monotonic(), self._manifest, self._object_refs
        takes_changes = [bool(changes) and self._serves_base(worker, manifest["delta"]) for worker in workers]
        calls = [("load_changes", *changes) if takes else ("load", *whole) for takes in takes_changes]
        loads = (
            proof_of(worker, *call, published=manifest, deadline_s=self._timeout_s)
            for worker, call in zip(workers, calls, strict=True)
        )
        results = await asyncio.gather(*loads)
        for worker, result in zip(workers, results, strict=True):
            self._served.pop(worker.name, None)
            if isinstance(result, Attestation):
                self._served[worker.name] = worker, (result.policy_version, result.digest)
        sizes = [manifest["delta"]["size_bytes"] if takes else manifest["total_bytes"] for takes in takes_changes]
        return stats_of(manifest, workers, results, started=started, sizes=sizes)

    def _serves_base(self, worker: ActorHandle, delta: Mapping[str, Any]) -> bool:
        """Whether this very process proved the version that the changes are added to."""
        served = self._served.get(worker.name)
        return served is not None and served[0] is worker and served[1] == (delta["base_version"], delta["base_digest"])


def _version_of(manifest: Mapping[str, Any]) -> _Version:
    return manifest["policy_version"], manifest["digest"]


object_store = ObjectStoreTransport
"""The name in `weights.transport`."""
