import asyncio
from collections.abc import AsyncIterator

import pytest

from cluster.contracts.errors import DeadlineError, WeightsError, WorkerError
from cluster.contracts.types import Attestation
from cluster.weights.object_store import ObjectStoreTransport

MANIFEST = {"policy_version": 3, "digest": "d3", "total_bytes": 100}


def reference_to(value: object) -> asyncio.Future:
    found = asyncio.get_running_loop().create_future()
    found.set_result(value)
    return found


class FakeLearner:
    def __init__(self, *objects: object):
        self.objects = objects
        self.num_published = 0

    async def publish(self) -> AsyncIterator[asyncio.Future]:
        self.num_published += 1
        for value in self.objects:
            yield reference_to(value)


class StuckLearner:
    async def publish(self) -> AsyncIterator[asyncio.Future]:
        yield asyncio.get_running_loop().create_future()


class FakeWorker:
    def __init__(self, name: str, *, error: BaseException | None = None, digest: str = "d3"):
        self.name = name
        self.error = error
        self.digest = digest
        self.loaded: list[object] = []

    async def load(self, manifest, *buckets) -> Attestation:
        if self.error:
            raise self.error
        self.loaded = [await manifest, *[await bucket for bucket in buckets]]
        return Attestation(
            worker=self.name,
            policy_version=3,
            digest=self.digest,
            canary_max_error=0.0,
            seconds=0.0,
            pause_seconds=0.0,
        )


class StuckWorker(FakeWorker):
    async def load(self, manifest, *buckets) -> Attestation:
        return await asyncio.get_running_loop().create_future()


async def test_every_worker_gets_manifest_and_buckets():
    workers = [FakeWorker("w0"), FakeWorker("w1")]
    stats = await ObjectStoreTransport(timeout_s=5).broadcast(FakeLearner(b"one", b"two", MANIFEST), workers)
    assert [worker.loaded for worker in workers] == [[MANIFEST, b"one", b"two"]] * 2
    assert (stats.policy_version, stats.digest, stats.size_bytes) == (3, "d3", 100)
    assert [attestation.worker for attestation in stats.attestations] == ["w0", "w1"]


async def test_a_late_worker_catches_up_without_the_learner():
    learner, late = FakeLearner(b"one", MANIFEST), FakeWorker("late")
    transport = ObjectStoreTransport(timeout_s=5)
    await transport.broadcast(learner, [])
    await transport.catch_up([late])
    assert late.loaded == [MANIFEST, b"one"]
    assert learner.num_published == 1


async def test_catching_up_before_any_broadcast_is_an_error():
    with pytest.raises(WeightsError, match="nothing was published"):
        await ObjectStoreTransport(timeout_s=5).catch_up([FakeWorker("late")])


async def test_a_dead_worker_is_reported_and_the_others_are_served():
    dead = FakeWorker("dead", error=WorkerError("gone"))
    stats = await ObjectStoreTransport(timeout_s=5).broadcast(FakeLearner(MANIFEST), [dead, FakeWorker("w1")])
    assert [(name, str(error)) for name, error in stats.failures] == [("dead", "gone")]
    assert [attestation.worker for attestation in stats.attestations] == ["w1"]


async def test_a_stuck_worker_is_reported_with_version_and_deadline():
    stats = await ObjectStoreTransport(timeout_s=0.01).broadcast(FakeLearner(MANIFEST), [StuckWorker("stuck")])
    ((name, error),) = stats.failures
    assert name == "stuck"
    assert "loading policy version 3" in str(error)


async def test_a_worker_that_computes_something_else_stops_the_broadcast():
    wrong = FakeWorker("wrong", error=WeightsError("canary"))
    with pytest.raises(WeightsError, match="canary"):
        await ObjectStoreTransport(timeout_s=5).broadcast(FakeLearner(MANIFEST), [FakeWorker("w0"), wrong])


async def test_an_attestation_of_other_weights_is_refused():
    with pytest.raises(WeightsError, match="w0 attests policy version 3"):
        await ObjectStoreTransport(timeout_s=5).broadcast(FakeLearner(MANIFEST), [FakeWorker("w0", digest="old")])


async def test_a_learner_that_does_not_publish_meets_the_deadline():
    with pytest.raises(DeadlineError, match="publishing weights"):
        await ObjectStoreTransport(timeout_s=0.01).broadcast(StuckLearner(), [])


async def test_a_learner_that_publishes_nothing_is_an_error():
    with pytest.raises(WeightsError, match="published nothing"):
        await ObjectStoreTransport(timeout_s=5).broadcast(FakeLearner(), [])
