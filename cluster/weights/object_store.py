"""Weights through the cluster's object store: the learner puts buckets in once, each worker's node fetches them once.

Both ends in one file: `ObjectStoreTransport` drives, `Learner.publish` supplies, `RolloutWorker.load` takes. The driver holds
references and the manifest, never a bucket. `cluster/rollouts/worker_pool.py` adapts actor handles to the two protocols below.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from cluster.contracts.errors import DeadlineError, WeightsError
from cluster.contracts.types import Attestation

Reference = Awaitable[Any]
"""Of an object in the store: awaiting it fetches the object, passing it on does not."""


class Publishing(Protocol):
    """The learner group as a transport sees it."""

    def publish(self) -> AsyncIterator[Reference]:
        """References of what `Learner.publish` yields on rank 0, one each: every bucket, then the manifest."""
        ...


class Loading(Protocol):
    """A rollout worker as a transport sees it."""

    @property
    def name(self) -> str: ...

    async def load(self, manifest: Reference, *buckets: Reference) -> Attestation: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class BroadcastStats:
    """What one broadcast did."""

    policy_version: int
    digest: str
    size_bytes: int
    """Sent to each worker."""
    seconds: float
    """From asking the learner to the last worker's proof."""
    publish_seconds: float
    """Of these, until the learner had put everything into the store."""
    attestations: tuple[Attestation, ...]
    failures: tuple[tuple[str, BaseException], ...] = ()
    """Workers that died or stalled meanwhile, with why: the supervisor's to replace. They serve nothing."""


class Transport(Protocol):
    """A way for weights to reach workers."""

    async def broadcast(self, learner: Publishing, workers: Sequence[Loading]) -> BroadcastStats:
        """Publishes the learner's weights and returns once every living worker has proved that it serves them."""
        ...

    async def catch_up(self, workers: Sequence[Loading]) -> BroadcastStats:
        """Brings workers that joined late to the version published last, without the learner."""
        ...


class ObjectStoreTransport:
    """Works everywhere. Keeps the last version's references, so that a worker may join while the learner is busy."""

    def __init__(self, *, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._published: tuple[Reference, ...] = ()
        self._manifest: dict[str, Any] = {}

    async def broadcast(self, learner: Publishing, workers: Sequence[Loading]) -> BroadcastStats:
        """Raises WeightsError when a worker cannot prove the version, DeadlineError when the learner does not publish in time."""
        started = time.monotonic()
        try:
            async with asyncio.timeout(self._timeout_s):
                references = [reference async for reference in learner.publish()]
                if not references:
                    raise WeightsError("the learner published nothing: rank 0 must return a manifest and its buckets")
                self._manifest = await references[-1]
        except TimeoutError as error:
            version = self._manifest.get("policy_version", "none")
            raise DeadlineError(
                f"learner, publishing weights: not done after {self._timeout_s:g} s; last published policy version: {version}"
            ) from error
        self._published = (references[-1], *references[:-1])
        return await self._deliver(workers, started=started, publish_seconds=time.monotonic() - started)

    async def catch_up(self, workers: Sequence[Loading]) -> BroadcastStats:
        """Raises WeightsError as `broadcast` does, and when nothing was published yet."""
        if not self._published:
            raise WeightsError("nothing was published yet: broadcast once before workers catch up")
        return await self._deliver(workers, started=time.monotonic(), publish_seconds=0.0)

    async def _deliver(self, workers: Sequence[Loading], *, started: float, publish_seconds: float) -> BroadcastStats:
        manifest, published = self._manifest, self._published
        results = await asyncio.gather(*(self._load(worker, published) for worker in workers), return_exceptions=True)
        failures: list[tuple[str, BaseException]] = []
        attestations: list[Attestation] = []
        for worker, result in zip(workers, results, strict=True):
            # A worker that computes something else is no accident of one machine: the run must not go on.
            if isinstance(result, WeightsError):
                raise result
            if isinstance(result, BaseException):
                failures.append((worker.name, result))
            else:
                attestations.append(_checked(result, manifest))
        return BroadcastStats(
            policy_version=manifest["policy_version"],
            digest=manifest["digest"],
            size_bytes=manifest["total_bytes"],
            seconds=time.monotonic() - started,
            publish_seconds=publish_seconds,
            attestations=tuple(attestations),
            failures=tuple(failures),
        )

    async def _load(self, worker: Loading, published: Sequence[Reference]) -> Attestation:
        try:
            async with asyncio.timeout(self._timeout_s):
                return await worker.load(*published)
        except TimeoutError as error:
            version = self._manifest["policy_version"]
            raise DeadlineError(
                f"{worker.name}, loading policy version {version}: not done after {self._timeout_s:g} s"
            ) from error


def _checked(attestation: Attestation, manifest: dict[str, Any]) -> Attestation:
    if (attestation.policy_version, attestation.digest) == (manifest["policy_version"], manifest["digest"]):
        return attestation
    raise WeightsError(
        f"{attestation.worker} attests policy version {attestation.policy_version} (digest {attestation.digest[:16]}…), but version "
        f"{manifest['policy_version']} (digest {manifest['digest'][:16]}…) was published"
    )


object_store = ObjectStoreTransport
"""The name in `weights.transport`."""
