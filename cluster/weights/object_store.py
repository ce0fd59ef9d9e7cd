"""Weights through the cluster's object store: the learner puts buckets in once, each worker's node fetches them once.

Both ends: `Learner.publish` supplies, `RolloutWorker.load` takes, and the driver between them holds object refs and the manifest,
never a bucket.
"""

import asyncio
import time
from collections.abc import Sequence
from typing import Any

from cluster.contracts.errors import DeadlineError, TreadwheelError, WeightsError
from cluster.contracts.protocols import ActorHandle, PublishingLearner
from cluster.contracts.types import Attestation, BroadcastStats


class ObjectStoreTransport:
    """Works everywhere. Keeps the last version's object refs, so that a worker may join while the learner is busy."""

    def __init__(self, *, timeout_s: float) -> None:
        """`timeout_s` bounds each load."""
        self._timeout_s = timeout_s
        self._object_refs: list[Any] = []
        """Of the manifest, then of its buckets."""
        self._manifest: dict[str, Any] = {}

    async def broadcast(self, learner: PublishingLearner, workers: Sequence[ActorHandle]) -> BroadcastStats:
        """Raises what the learner raises, and DeadlineError when its manifest cannot be fetched."""
        started = time.monotonic()
        *buckets, manifest = await learner.publish()
        self._manifest = await self._fetched(manifest)
        self._object_refs = [manifest, *buckets]
        return await self._deliver(workers, started=started, publish_seconds=time.monotonic() - started)

    async def catch_up(self, workers: Sequence[ActorHandle]) -> BroadcastStats:
        """Raises WeightsError when nothing was published yet."""
        if not self._object_refs:
            raise WeightsError("nothing was published yet: broadcast once before workers catch up")
        return await self._deliver(workers, started=time.monotonic(), publish_seconds=0.0)

    async def _fetched(self, manifest: Any) -> dict[str, Any]:
        try:
            async with asyncio.timeout(self._timeout_s):
                return await manifest
        except TimeoutError as error:
            raise DeadlineError(
                f"driver, fetching the manifest of the learner's weights: not there after {self._timeout_s:g} s "
                f"(weights.timeout_s); last published policy version: {self._manifest.get('policy_version', 'none')}"
            ) from error

    async def _deliver(
        self, workers: Sequence[ActorHandle], *, started: float, publish_seconds: float
    ) -> BroadcastStats:
        manifest, object_refs = self._manifest, self._object_refs
        results = await asyncio.gather(*(self._load(worker, manifest, object_refs) for worker in workers))
        return BroadcastStats(
            policy_version=manifest["policy_version"],
            digest=manifest["digest"],
            size_bytes=manifest["total_bytes"],
            seconds=time.monotonic() - started,
            publish_seconds=publish_seconds,
            attestations=tuple(result for result in results if isinstance(result, Attestation)),
            failures=tuple(
                (worker.name, result)
                for worker, result in zip(workers, results, strict=True)
                if not isinstance(result, Attestation)
            ),
        )

    async def _load(
        self, worker: ActorHandle, manifest: dict[str, Any], object_refs: Sequence[Any]
    ) -> Attestation | TreadwheelError:
        try:
            proof: Attestation = await worker.call("load", *object_refs, deadline_s=self._timeout_s)
        except TreadwheelError as error:
            return error
        if (proof.policy_version, proof.digest) == (manifest["policy_version"], manifest["digest"]):
            return proof
        return WeightsError(
            f"{worker.name} attests policy version {proof.policy_version} (digest {proof.digest[:16]}…), but version "
            f"{manifest['policy_version']} (digest {manifest['digest'][:16]}…) was published"
        )


object_store = ObjectStoreTransport
"""The name in `weights.transport`."""
