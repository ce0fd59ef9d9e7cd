"""A manifest that never comes, and with `weights.deltas` which worker gets what changed and which the whole weights."""

import asyncio
from typing import Any

import pytest
import torch

from cluster.contracts.errors import DeadlineError, WorkerError
from cluster.contracts.types import Attestation, BroadcastStats
from cluster.weights.delta import LoadedCopy, PublishedCopy
from cluster.weights.manifest import Canary, WeightManifest, packing
from cluster.weights.object_store import ObjectStoreTransport
from tests.fakes import attestation

CANARY = Canary(token_ids=(1, 2), logprobs=(-1.0,), starting_logprobs=(-1.0,))
WHOLE, CHANGES = 2 * 400, 2 * 8
"""Bytes of the weights, and of one changed element: an index and a value, padded to 8 bytes each."""


class LearnerWhoseNodeIsGone:
    async def publish(self) -> list[asyncio.Future]:
        return [asyncio.get_running_loop().create_future()]


async def test_a_manifest_that_never_comes_meets_the_deadline():
    with pytest.raises(DeadlineError, match="fetching the manifest"):
        await ObjectStoreTransport(timeout_s=0.01).publish(LearnerWhoseNodeIsGone())


class Learner:
    """Two tensors of 100 elements in a bucket each, of which a step changes one element."""

    def __init__(self) -> None:
        self.weights = {"a": torch.zeros(100), "b": torch.zeros(100)}
        self.version = 0
        self._copy = PublishedCopy()

    def learn(self) -> None:
        self.version += 1
        self.weights["a"][self.version] = 1.0

    def restart(self) -> None:
        """In another process, at the same version."""
        self._copy = PublishedCopy()

    async def publish(self) -> list[Any]:
        parts = packing(self.weights.items(), policy_version=self.version, bucket_bytes=400, canary=lambda: CANARY)
        *arrays, manifest = self._copy.compared(parts)
        assert isinstance(manifest, WeightManifest)
        return [_object_ref(value) for value in (*arrays, manifest.model_dump())]


class Worker:
    """Notes what it was sent; `dies` once."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.calls: list[str] = []
        self.dies = False
        self._copy = LoadedCopy()

    async def call(self, method: str, *object_refs: Any, deadline_s: float) -> Attestation:
        assert deadline_s == 240.0, "the transport's"
        if self.dies:
            self.dies = False
            raise WorkerError("gone", actor=self.name, stage=method)
        self.calls.append(method)
        found, *parts = [await ref for ref in object_refs]
        manifest = WeightManifest.model_validate(found)
        assert len(parts) == len(manifest.bucket_digests)
        {"load": self._copy.take_whole, "load_changes": self._copy.take_changes}[method](manifest, parts)
        return attestation(self.name, manifest.policy_version, digest=manifest.digest)


async def broadcast(transport: ObjectStoreTransport, learner: Learner, *workers: Worker) -> BroadcastStats:
    await transport.publish(learner)
    return await transport.deliver(workers)


async def after_a_step(transport: ObjectStoreTransport, learner: Learner, *workers: Worker) -> BroadcastStats:
    learner.learn()
    return await broadcast(transport, learner, *workers)


@pytest.fixture
def transport() -> ObjectStoreTransport:
    return ObjectStoreTransport(timeout_s=240.0)


async def test_workers_that_proved_the_version_before_get_what_changed(transport):
    learner, workers = Learner(), (Worker("w0"), Worker("w1"))
    first = await broadcast(transport, learner, *workers)
    second = await after_a_step(transport, learner, *workers)
    assert [worker.calls for worker in workers] == 2 * [["load", "load_changes"]]
    assert (first.sent_bytes, first.changed_share) == (2 * WHOLE, None)
    assert (second.sent_bytes, second.changed_share, second.size_bytes) == (2 * CHANGES, 1 / 200, WHOLE)
    learner.restart()
    assert (await broadcast(transport, learner)).digest == second.digest, "of the whole weights, whatever was sent"


async def test_a_worker_that_joins_between_two_deltas_gets_the_whole_and_then_changes(transport):
    learner, old, new = Learner(), Worker("old"), Worker("new")
    await broadcast(transport, learner, old)
    await after_a_step(transport, learner, old)
    joined = await transport.catch_up([new])
    assert joined.sent_bytes == WHOLE
    await after_a_step(transport, learner, old, new)
    assert (old.calls, new.calls) == (["load", "load_changes", "load_changes"], ["load", "load_changes"])


async def test_a_worker_that_joined_while_the_next_version_was_published_gets_what_changed(transport):
    learner, late = Learner(), Worker("late")
    await transport.publish(learner)
    joining = asyncio.create_task(transport.catch_up([late]))
    await asyncio.sleep(0)
    learner.learn()
    await transport.publish(learner)
    await joining
    await transport.deliver([late])
    assert late.calls == ["load", "load_changes"]


async def test_a_worker_that_was_overtaken_by_two_versions_while_it_joined_gets_the_whole(transport):
    learner, late = Learner(), Worker("late")
    await transport.publish(learner)
    joining = asyncio.create_task(transport.catch_up([late]))
    await asyncio.sleep(0)
    for _ in range(2):
        learner.learn()
        await transport.publish(learner)
    await joining
    await transport.deliver([late])
    assert late.calls == ["load", "load"]


async def test_a_worker_that_joins_after_a_publication_broke_off_gets_the_whole_of_the_one_before(transport):
    class Dying(Learner):
        async def publish(self) -> list[Any]:
            raise WorkerError("gone", actor="learner-0", stage="publish")

    learner, late = Learner(), Worker("late")
    await broadcast(transport, learner, late)
    learner.learn()
    await transport.publish(learner)
    with pytest.raises(WorkerError):
        await transport.publish(Dying())
    joined = await transport.catch_up([late])
    assert (late.calls, joined.policy_version, joined.failures) == (["load", "load"], 1, ())


async def test_another_process_of_the_same_name_gets_the_whole(transport):
    learner, old, new = Learner(), Worker("w0"), Worker("w0")
    await broadcast(transport, learner, old)
    await after_a_step(transport, learner, new)
    assert new.calls == ["load"]


async def test_a_worker_that_missed_a_version_gets_the_whole(transport):
    learner, steady, failing = Learner(), Worker("steady"), Worker("failing")
    await broadcast(transport, learner, steady, failing)
    failing.dies = True
    second = await after_a_step(transport, learner, steady, failing)
    assert [name for name, _ in second.failures] == ["failing"] and second.sent_bytes == CHANGES
    third = await after_a_step(transport, learner, steady, failing)
    assert failing.calls == ["load", "load"] and third.sent_bytes == CHANGES + WHOLE


async def test_a_worker_that_was_left_out_of_a_broadcast_gets_the_whole(transport):
    learner, worker = Learner(), Worker("w0")
    await broadcast(transport, learner, worker)
    await after_a_step(transport, learner)
    await after_a_step(transport, learner, worker)
    assert worker.calls == ["load", "load"]


async def test_a_restarted_learner_has_nothing_to_compare_with_and_sends_the_whole_once(transport):
    learner, worker = Learner(), Worker("w0")
    await broadcast(transport, learner, worker)
    await after_a_step(transport, learner, worker)
    learner.restart()
    for _ in range(2):
        await after_a_step(transport, learner, worker)
    assert worker.calls == ["load", "load_changes", "load", "load_changes"]


async def test_weights_of_a_driver_that_has_just_started_go_whole(transport):
    learner, worker = Learner(), Worker("w0")
    await broadcast(ObjectStoreTransport(timeout_s=240.0), learner, worker)
    await after_a_step(transport, learner, worker)
    assert worker.calls == ["load", "load"]


def _object_ref(value: object) -> asyncio.Future[Any]:
    found = asyncio.get_running_loop().create_future()
    found.set_result(value)
    return found
