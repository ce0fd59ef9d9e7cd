"""Every weight transport keeps the protocol's promises: real bytes go from a learner to workers, without Ray and engines."""

import asyncio
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch

from cluster.contracts.errors import DeadlineError, TreadwheelError, WeightsError, WorkerError
from cluster.contracts.plugins import TRANSPORTS, Plugin, names, resolve
from cluster.contracts.protocols import Transport
from cluster.contracts.types import Attestation, BroadcastStats, Packed, RankGroup
from cluster.weights.delta import LoadedCopy, PublishedCopy
from cluster.weights.manifest import Canary, WeightManifest, owned, packing, unpack
from cluster.weights.process_group import Incoming, Receiver, Sender
from tests.fakes import attestation

CPU = torch.device("cpu")
CANARY = Canary(token_ids=(1, 2), logprobs=(-1.0,), starting_logprobs=(-1.0,))
Tensors = dict[str, torch.Tensor]


class Learner:
    """Its weights are of three types and sizes, and lie in several buckets; every version has its own numbers."""

    def __init__(self, *, deltas: bool) -> None:
        self.weights: Tensors = {
            "embedding": torch.arange(300, dtype=torch.bfloat16).view(100, 3),
            "norm": torch.full((7,), 0.5),
            "steps": torch.tensor(0),
        }
        self.num_published = 0
        self.publishes_changes = deltas
        self._copy = PublishedCopy()
        self._sender = Sender("127.0.0.1", device=CPU)

    @property
    def version(self) -> int:
        return int(self.weights["steps"])

    def learn(self) -> None:
        """A step, in place as an optimizer makes it. Of the largest tensor, 600 bytes, it changes 10 elements of 2."""
        place = 10 * self.version
        self.weights["embedding"].view(-1)[place : place + 10] += 1
        for name in ("norm", "steps"):
            self.weights[name] += 1

    def packing(self) -> Iterator[Any]:
        self.num_published += 1
        parts = packing(self.weights.items(), policy_version=self.version, bucket_bytes=600, canary=lambda: CANARY)
        return self._copy.compared(parts) if self.publishes_changes else parts

    async def publish(self) -> list[asyncio.Future[Any]]:
        *arrays, manifest = self.packing()
        return [_object_ref(value) for value in (*map(owned, arrays), manifest.model_dump())]

    async def pack(self) -> list[asyncio.Future[Any]]:
        manifest = self._sender.keep(self.packing())
        packed = Packed(
            policy_version=manifest.policy_version,
            digest=manifest.digest,
            total_bytes=manifest.total_bytes,
            sender=self._sender.id,
            address=self._sender.address,
            backend="gloo",
            receivers_per_worker=1,
            delta=manifest.delta and manifest.delta.model_dump(exclude={"num_changed"}),
        )
        return [_object_ref(value) for value in (manifest.model_dump(), packed)]

    async def send(self, group: RankGroup) -> None:
        await asyncio.to_thread(self._sender.send, group)

    async def give_up(self, group: RankGroup) -> None:
        await asyncio.to_thread(self._sender.give_up, group)

    def close(self) -> None:
        self._sender.close()


class Worker:
    """Takes weights as a rollout worker's engine would; `error` is raised instead."""

    def __init__(self, name: str, *, error: Exception | None = None, proves: str | None = None) -> None:
        self.name = name
        self.served: Tensors = {}
        self._error = error
        self._proves = proves
        self._receiver = Receiver()
        self._copy = LoadedCopy()

    async def call(self, method: str, *args: Any, deadline_s: float) -> Attestation:
        if self._error:
            raise self._error
        manifest, tensors = await (self._receive(*args) if method == "receive" else self._load(method, *args))
        self.served = {name: tensor.clone() for name, tensor in tensors.items()}  # as an engine copies them
        return attestation(self.name, manifest.policy_version, digest=self._proves or manifest.digest)

    async def _load(self, method: str, *object_refs: Any) -> tuple[WeightManifest, Tensors]:
        found, *arrays = [await ref for ref in object_refs]
        manifest = WeightManifest.model_validate(found)
        {"load": self._copy.take_whole, "load_changes": self._copy.take_changes}[method](manifest, arrays)
        return manifest, dict(unpack(manifest, self._copy.buckets))

    async def _receive(self, object_ref: Any, group: RankGroup, first_rank: int) -> tuple[WeightManifest, Tensors]:
        manifest = WeightManifest.model_validate(await object_ref)
        incoming = Incoming(group=group, first_rank=first_rank, manifest=manifest, keeps=True)
        return manifest, await asyncio.to_thread(lambda: dict(self._receiver.tensors(incoming, place=0, device=CPU)))

    def close(self) -> None:
        self._receiver.leave()


@pytest.fixture(params=names(TRANSPORTS))
def transport(request: Any) -> Transport:
    return resolve(Plugin(name=request.param), home=TRANSPORTS, field="weights.transport")(timeout_s=240.0)


@pytest.fixture(params=[False, True], ids=["whole", "deltas"])
def learner(request: Any) -> Iterator[Learner]:
    learner = Learner(deltas=request.param)
    yield learner
    learner.close()


async def broadcast(transport: Transport, learner: Learner, workers: Sequence[Worker]) -> BroadcastStats:
    await transport.publish(learner)
    return await transport.deliver(workers)


def serves(worker: Worker, wanted: Tensors) -> bool:
    """Whether it has these weights bit for bit, types included."""
    return worker.served.keys() == wanted.keys() and all(
        worker.served[name].dtype == tensor.dtype and torch.equal(worker.served[name], tensor)
        for name, tensor in wanted.items()
    )


async def test_every_worker_gets_every_version_bit_for_bit_and_proves_it(transport, learner):
    """Changes are 10 indices and values of 4 and 2 bytes, each padded to 8 bytes, and two tensors of 28 and 8 bytes that change whole."""
    workers = [Worker("w0"), Worker("w1")]
    for version in range(3):
        stats = await broadcast(transport, learner, workers)
        assert all(serves(worker, learner.weights) for worker in workers)
        assert (stats.policy_version, stats.size_bytes) == (version, 600 + 28 + 8)
        changes = version > 0 and learner.publishes_changes
        assert stats.sent_bytes == 2 * (40 + 24 + 32 + 8 if changes else 600 + 28 + 8)
        assert [(proof.worker, proof.digest) for proof in stats.attestations] == [
            ("w0", stats.digest),
            ("w1", stats.digest),
        ]
        assert stats.failures == ()
        learner.learn()
    for worker in workers:
        worker.close()


async def test_the_learner_learns_on_as_soon_as_it_has_published(transport, learner):
    """Its weights change before a worker asks for them, and while they travel."""
    first, late = Worker("w0"), Worker("late")
    published = await transport.publish(learner)
    before = {name: tensor.clone() for name, tensor in learner.weights.items()}
    learner.learn()
    sent = await transport.deliver([first])
    caught_up = await transport.catch_up([late])
    assert serves(first, before) and serves(late, before) and not serves(first, learner.weights)
    assert published.digest == sent.digest == caught_up.digest and learner.num_published == 1
    for worker in (first, late):
        worker.close()


async def test_a_late_worker_catches_up_without_the_learner_publishing_again(transport, learner):
    await broadcast(transport, learner, [])
    late = Worker("late")
    stats = await transport.catch_up([late])
    assert serves(late, learner.weights) and learner.num_published == 1
    assert [proof.worker for proof in stats.attestations] == ["late"]


async def test_several_workers_catch_up_at_a_time_and_the_next_broadcast_has_them_all(transport, learner):
    workers = [Worker(f"w{number}") for number in range(4)]
    await broadcast(transport, learner, workers[:1])
    await asyncio.gather(*(transport.catch_up([worker]) for worker in workers[1:]))
    assert all(serves(worker, learner.weights) for worker in workers)
    learner.learn()
    await broadcast(transport, learner, workers)
    assert all(serves(worker, learner.weights) for worker in workers)
    for worker in workers:
        worker.close()


async def test_nothing_is_loaded_before_it_was_published(transport):
    for load in (transport.deliver, transport.catch_up):
        with pytest.raises(WeightsError, match="nothing was published"):
            await load([Worker("late")])


@pytest.mark.parametrize("error", [WorkerError("gone"), DeadlineError("silent"), WeightsError("canary")])
async def test_a_worker_that_fails_is_reported_and_the_others_are_served(transport, learner, error: TreadwheelError):
    first, failing, last = Worker("w0"), Worker("w1", error=error), Worker("w2")
    stats = await broadcast(transport, learner, [first, failing, last])
    assert stats.failures == (("w1", error),)
    assert [proof.worker for proof in stats.attestations] == ["w0", "w2"]
    assert serves(first, learner.weights) and serves(last, learner.weights)
    for worker in (first, last):
        worker.close()


async def test_a_bug_in_a_worker_is_no_failure_to_be_healed(transport, learner):
    with pytest.raises(ZeroDivisionError):
        await broadcast(transport, learner, [Worker("w0", error=ZeroDivisionError())])


async def test_an_attestation_of_other_weights_is_a_failure(transport, learner):
    worker = Worker("w0", proves="old")
    ((name, error),) = (await broadcast(transport, learner, [worker])).failures
    assert name == "w0" and isinstance(error, WeightsError)
    assert "w0 attests policy version 0 (digest old" in str(error)
    worker.close()


def _object_ref(value: object) -> asyncio.Future[Any]:
    found = asyncio.get_running_loop().create_future()
    found.set_result(value)
    return found
