import asyncio
from typing import Any

import pytest

from cluster.contracts.errors import DeadlineError, WeightsError, WorkerError
from cluster.contracts.types import Attestation
from cluster.weights.object_store import ObjectStoreTransport
from tests.fakes import attestation

MANIFEST = {"policy_version": 3, "digest": "d3", "total_bytes": 100}


def object_ref(value: object) -> asyncio.Future:
    found = asyncio.get_running_loop().create_future()
    found.set_result(value)
    return found


class FakeLearner:
    def __init__(self, *objects: object):
        self.objects = objects
        self.num_published = 0

    async def publish(self) -> list[asyncio.Future]:
        self.num_published += 1
        return [object_ref(value) for value in self.objects]


class LearnerWhoseNodeIsGone:
    async def publish(self) -> list[asyncio.Future]:
        return [asyncio.get_running_loop().create_future()]


class FakeWorker:
    def __init__(self, name: str, *, error: BaseException | None = None, digest: str = "d3"):
        self.name = name
        self.error = error
        self.digest = digest
        self.loaded: list[object] = []

    async def call(self, method: str, manifest: Any, *buckets: Any, deadline_s: float) -> Attestation:
        assert (method, deadline_s) == ("load", 5)
        if self.error:
            raise self.error
        self.loaded = [await manifest, *[await bucket for bucket in buckets]]
        return attestation(self.name, 3, digest=self.digest)


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


@pytest.mark.parametrize("error", [WorkerError("gone"), DeadlineError("silent"), WeightsError("canary")])
async def test_a_worker_that_fails_is_reported_and_the_others_are_served(error):
    failed = FakeWorker("failed", error=error)
    stats = await ObjectStoreTransport(timeout_s=5).broadcast(FakeLearner(MANIFEST), [failed, FakeWorker("w1")])
    assert stats.failures == (("failed", error),)
    assert [attestation.worker for attestation in stats.attestations] == ["w1"]


async def test_a_bug_in_a_worker_is_no_failure_to_be_healed():
    with pytest.raises(ZeroDivisionError):
        await ObjectStoreTransport(timeout_s=5).broadcast(
            FakeLearner(MANIFEST), [FakeWorker("w0", error=ZeroDivisionError())]
        )


async def test_an_attestation_of_other_weights_is_a_failure():
    stats = await ObjectStoreTransport(timeout_s=5).broadcast(FakeLearner(MANIFEST), [FakeWorker("w0", digest="old")])
    ((name, error),) = stats.failures
    assert name == "w0" and isinstance(error, WeightsError)
    assert "w0 attests policy version 3 (digest old" in str(error)


async def test_a_manifest_that_never_comes_meets_the_deadline():
    with pytest.raises(DeadlineError, match="fetching the manifest"):
        await ObjectStoreTransport(timeout_s=0.01).broadcast(LearnerWhoseNodeIsGone(), [])
