"""Nobody serves a version that was published over, however a broadcast and a joining worker meet."""

import asyncio
from typing import Any

import pytest

from cluster.contracts.errors import LostError, WorkerError
from cluster.contracts.types import Attestation
from cluster.weights.broadcast import Weights
from cluster.weights.object_store import BroadcastStats
from tests.fakes import actor_spec, death


class ScriptedWorker:
    def __init__(self, name: str) -> None:
        self.spec = actor_spec(name)
        self.name = name
        self.version = -1


class ScriptedTransport:
    """Version n is published by the n-th broadcast; `loading` lets a test hold every load."""

    def __init__(self) -> None:
        self.version = -1
        self.loading = asyncio.Event()
        self.loading.set()
        self.errors: list[Exception] = []

    async def broadcast(self, learner: Any, workers: Any) -> BroadcastStats:
        self.version += 1
        return await self._deliver(workers)

    async def catch_up(self, workers: Any) -> BroadcastStats:
        return await self._deliver(workers)

    async def _deliver(self, workers: Any) -> BroadcastStats:
        version = self.version
        await self.loading.wait()
        failures = []
        for loader in workers:
            if self.errors:
                failures.append((loader.name, self.errors.pop()))
            else:
                loader.worker.version = version
        return BroadcastStats(
            policy_version=version,
            digest=str(version),
            size_bytes=1,
            seconds=0.0,
            publish_seconds=0.0,
            attestations=tuple[Attestation, ...](),
            failures=tuple(failures),
        )


class Workers:
    def __init__(self, *workers: ScriptedWorker) -> None:
        self._workers = list(workers)
        self.replaced: list[str] = []

    def workers(self) -> list[Any]:
        return self._workers

    def replace(self, worker: Any, error: BaseException) -> None:
        self.replaced.append(worker.name)


async def test_a_worker_that_joins_during_a_broadcast_serves_the_new_version():
    transport = ScriptedTransport()
    weights = Weights(transport, learner=None, timeout_s=1)
    await weights.publish()
    old, new = ScriptedWorker("old"), ScriptedWorker("new")
    transport.loading.clear()
    joining = asyncio.create_task(weights.join(new))  # begins to load version 0 ...
    await asyncio.sleep(0)
    sending = asyncio.create_task(weights.broadcast(Workers(old)))  # ... while version 1 goes to the others
    await asyncio.sleep(0)
    transport.loading.set()
    await asyncio.gather(joining, sending)
    assert (old.version, new.version) == (1, 1)


async def test_dead_workers_are_handed_to_the_pool_and_not_waited_for():
    transport = ScriptedTransport()
    transport.errors = [death("a", "load")]
    workers = Workers(ScriptedWorker("a"), ScriptedWorker("b"))
    stats = await Weights(transport, learner=None, timeout_s=1).broadcast(workers)
    assert workers.replaced == ["a"] and stats.policy_version == 0


async def test_weights_that_went_with_a_node_are_published_again():
    transport = ScriptedTransport()
    weights = Weights(transport, learner=None, timeout_s=1)
    await weights.publish()
    transport.errors = [LostError("gone")]
    worker = ScriptedWorker("late")
    await weights.join(worker)
    assert worker.version == 1


async def test_a_worker_that_dies_while_it_joins_says_so():
    transport = ScriptedTransport()
    weights = Weights(transport, learner=None, timeout_s=1)
    await weights.publish()
    transport.errors = [death("late", "load")]
    with pytest.raises(WorkerError, match="died"):
        await weights.join(ScriptedWorker("late"))
