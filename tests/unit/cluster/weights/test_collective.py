"""Who is in which group, and that a broadcast ends whoever is lost: the driver's end, against scripted learners and workers."""

import asyncio
from typing import Any

import pytest

from cluster.contracts.errors import BroadcastError, DeadlineError, LostError, TreadwheelError, WorkerError
from cluster.contracts.types import Attestation, BroadcastStats, Packed, RankGroup
from cluster.weights.collective import CollectiveTransport
from tests.fakes import attestation, death


class Learner:
    """Its groups wait until all members have come, or until it is told to give up. `sends` fail in turn; None sends."""

    def __init__(self, *sends: TreadwheelError | None, receivers_per_worker: int = 1, backend: str = "gloo") -> None:
        self.generation = 1
        self.version = 0
        self.sends = list(sends)
        self.groups: list[RankGroup] = []
        self.delta: dict[str, Any] | None = None
        self._receivers_per_worker, self._backend = receivers_per_worker, backend
        self._come: dict[str, int] = {}
        self._changed = asyncio.Condition()
        self._given_up: set[str] = set()

    async def publish(self) -> list[Any]:
        raise NotImplementedError

    async def pack(self) -> list[asyncio.Future[Any]]:
        packed = Packed(
            policy_version=self.version,
            digest=str(self.version),
            total_bytes=8,
            sender=f"learner {self.generation}",
            address="here:1",
            backend=self._backend,
            receivers_per_worker=self._receivers_per_worker,
            delta=self.delta,
        )
        objects: list[asyncio.Future[Any]] = [asyncio.Future(), asyncio.Future()]
        for place, value in zip(objects, (self.version, packed), strict=True):
            place.set_result(value)
        return objects

    async def send(self, group: RankGroup) -> None:
        self.groups.append(group)
        if self.sends and (error := self.sends.pop(0)):
            self.generation += 1
            raise error
        await self.joined(group, 1)

    async def joined(self, group: RankGroup, num_members: int) -> None:
        async with self._changed:
            self._come[group.name] = self._come.get(group.name, 0) + num_members
            self._changed.notify_all()
            await self._changed.wait_for(
                lambda: group.name in self._given_up or self._come[group.name] % group.size == 0
            )
            if group.name in self._given_up:
                raise BroadcastError("given up")

    async def give_up(self, group: RankGroup) -> None:
        async with self._changed:
            self._given_up.add(group.name)
            self._changed.notify_all()


class Worker:
    """Fails in turn; None takes the weights."""

    def __init__(self, name: str, learner: Learner, *outcomes: TreadwheelError | None) -> None:
        self.name = name
        self.first_ranks: list[int] = []
        self._learner = learner
        self._outcomes = list(outcomes)

    async def call(self, method: str, *args: Any, deadline_s: float) -> Attestation:
        manifest, group, first_rank = args
        assert method == "receive" and deadline_s > group.timeout_s == 600, "a silent member costs itself alone"
        self.first_ranks.append(first_rank)
        if self._outcomes and (error := self._outcomes.pop(0)):
            raise error
        await self._learner.joined(group, self._learner._receivers_per_worker)
        return attestation(self.name, await manifest)


async def broadcast(transport: CollectiveTransport, learner: Learner, workers: list[Worker]) -> BroadcastStats:
    await transport.publish(learner)
    return await transport.deliver(workers)


@pytest.fixture
def transport() -> CollectiveTransport:
    return CollectiveTransport(timeout_s=600)


async def test_the_processes_of_all_engines_follow_the_learner_in_one_group_for_many_broadcasts(transport):
    learner = Learner(receivers_per_worker=2)
    workers = [Worker("w0", learner), Worker("w1", learner)]
    for learner.version in range(3):
        stats = await broadcast(transport, learner, workers)
        assert len(stats.attestations) == 2 and stats.policy_version == learner.version
    assert [worker.first_ranks for worker in workers] == [[1, 1, 1], [3, 3, 3]]
    assert len({group.name for group in learner.groups}) == 1 and learner.groups[0].size == 5


async def test_a_manifest_that_never_comes_meets_the_deadline():
    class Gone(Learner):
        async def pack(self) -> list[asyncio.Future[Any]]:
            return [asyncio.Future(), asyncio.Future()]

    transport = CollectiveTransport(timeout_s=0.01)
    await transport.publish(Learner())
    with pytest.raises(DeadlineError, match="last published policy version: 0"):
        await transport.publish(Gone())


async def test_a_replaced_worker_one_more_and_a_restarted_learner_are_another_group_each(transport):
    learner = Learner()
    first, second = Worker("w0", learner), Worker("w1", learner)
    await broadcast(transport, learner, [first])
    await broadcast(transport, learner, [Worker("w0", learner)])
    await broadcast(transport, learner, [first, second])
    learner.generation += 1
    await broadcast(transport, learner, [first, second])
    assert len({group.name for group in learner.groups}) == 4
    assert [group.size for group in learner.groups] == [2, 2, 3, 3]


async def test_a_worker_that_dies_in_mid_broadcast_costs_itself_alone(transport):
    learner, gone = Learner(), death("w1", "receive")
    workers = [Worker("w0", learner), Worker("w1", learner, gone), Worker("w2", learner)]
    stats = await broadcast(transport, learner, workers)
    assert stats.failures == (("w1", gone),)
    assert [proof.worker for proof in stats.attestations] == ["w0", "w2"]
    assert [group.size for group in learner.groups] == [4, 3]
    assert workers[2].first_ranks == [3, 2]


async def test_workers_that_die_one_after_the_other_leave_the_rest_one_group(transport):
    learner = Learner()
    workers = [Worker(f"w{number}", learner, *[None] * (number - 1), death(f"w{number}")) for number in (1, 2, 3)]
    stats = await broadcast(transport, learner, [Worker("w0", learner), *workers])
    assert [name for name, _ in stats.failures] == ["w1", "w2", "w3"]
    assert [group.size for group in learner.groups] == [5, 4, 3, 2]


async def test_what_all_workers_have_is_not_lost_with_the_learner(transport):
    class Served(Worker):
        async def call(self, method: str, *args: Any, deadline_s: float) -> Attestation:
            return attestation(self.name, await args[0])

    learner = Learner(death("learner-0", "send"))
    stats = await broadcast(transport, learner, [Served("w0", learner)])
    assert [proof.worker for proof in stats.attestations] == ["w0"] and stats.failures == ()


async def test_those_who_have_it_are_not_asked_again(transport):
    learner = Learner(receivers_per_worker=0)  # nobody waits for another: w0 has all of it when w1 is lost
    workers = [Worker("w0", learner), Worker("w1", learner, BroadcastError("broken"), None)]
    stats = await broadcast(transport, learner, workers)
    assert len(stats.attestations) == 2
    assert [len(worker.first_ranks) for worker in workers] == [1, 2]


@pytest.mark.parametrize("error", [death("learner-0", "send"), LostError("restarted")])
async def test_what_a_learner_dies_with_while_it_sends_is_lost_for_all_and_what_it_packs_next_is_another_group(
    transport, error
):
    learner = Learner(error)
    workers = [Worker("w0", learner), Worker("w1", learner)]
    lost = await broadcast(transport, learner, workers)
    assert [(name, type(failure)) for name, failure in lost.failures] == [("w0", LostError), ("w1", LostError)]
    assert "policy version 0 is not with the learner any more" in str(lost.failures[0][1])
    assert {failure.actor for _, failure in lost.failures} == {error.actor or "learner"}, "no worker is to blame"
    stats = await broadcast(transport, learner, workers)
    assert [proof.worker for proof in stats.attestations] == ["w0", "w1"]
    assert [group.sender for group in learner.groups] == ["learner 1", "learner 2"]


async def test_a_worker_that_joins_has_a_group_over_gloo_of_its_own_and_the_fleets_goes_on(transport):
    learner = Learner(backend="nccl")
    fleet = [Worker("w0", learner)]
    await broadcast(transport, learner, fleet)
    await transport.catch_up([Worker("late", learner)])
    await transport.catch_up([Worker("gone", learner, death("gone", "receive"))])
    await broadcast(transport, learner, fleet)
    (one, late, _, two) = learner.groups
    assert one == two and (one.backend, one.lasts) == ("nccl", True)
    assert (late.backend, late.lasts, late.size) == ("gloo", False, 2) and late.name != one.name


async def test_what_went_with_the_learner_cannot_be_caught_up_with(transport):
    learner = Learner(None, death("learner-0", "send"))
    await broadcast(transport, learner, [Worker("w0", learner)])
    ((name, error),) = (await transport.catch_up([Worker("late", learner)])).failures
    assert (
        name == "late"
        and isinstance(error, LostError)
        and "policy version 0 is not with the learner any more" in str(error)
    )


async def test_where_nobody_is_lost_and_nobody_gets_anything_each_is_sent_to_by_itself_and_one_is_to_blame(transport):
    learner = Learner()
    deaf = Worker("w1", learner, *[BroadcastError("no route to host")] * 9)
    stats = await broadcast(transport, learner, [Worker("w0", learner), deaf])
    ((name, error),) = stats.failures
    assert name == "w1" and isinstance(error, WorkerError) and error.actor == "w1" and "no route to host" in str(error)
    assert [proof.worker for proof in stats.attestations] == ["w0"]
    assert [(group.size, group.lasts) for group in learner.groups] == [(3, True), (3, True), (2, False), (2, False)]
    assert len({group.name for group in learner.groups}) == 4, "a group that broke is not used again"


async def test_a_learner_that_dies_while_it_sends_to_each_worker_by_itself_blames_no_worker(transport):
    learner = Learner(None, None, death("learner-0", "send"))
    deaf = Worker("w1", learner, *[BroadcastError("no route to host")] * 9)
    lost = await broadcast(transport, learner, [Worker("w0", learner), deaf])
    assert [(name, type(error), error.actor) for name, error in lost.failures] == [
        ("w0", LostError, "learner-0"),
        ("w1", LostError, "learner-0"),
    ]


def learn(learner: Learner) -> None:
    """A step, of which 2 of 8 bytes are published as changes since the version before."""
    before = {"base_version": learner.version, "base_digest": str(learner.version)}
    learner.version += 1
    learner.delta = {**before, "changed_share": 0.25, "sizes_bytes": (2, 0)}


def bases(learner: Learner) -> list[str | None]:
    """Of all groups: what they were sent the changes since; None where it was the whole."""
    return [group.base_digest for group in learner.groups]


async def test_workers_that_proved_the_version_before_get_what_changed_in_the_same_group(transport):
    learner = Learner()
    workers = [Worker("w0", learner), Worker("w1", learner)]
    first = await broadcast(transport, learner, workers)
    learn(learner)
    second = await broadcast(transport, learner, workers)
    assert bases(learner) == [None, "0"] and len({group.name for group in learner.groups}) == 1
    assert (first.sent_bytes, first.changed_share, second.sent_bytes, second.changed_share) == (16, None, 4, 0.25)


async def test_a_worker_that_joins_gets_the_whole_and_goes_on_with_the_fleet(transport):
    learner = Learner()
    old, new = Worker("old", learner), Worker("new", learner)
    await broadcast(transport, learner, [old])
    learn(learner)
    await broadcast(transport, learner, [old])
    joined = await transport.catch_up([new])
    learn(learner)
    together = await broadcast(transport, learner, [old, new])
    assert bases(learner) == [None, "0", None, "1"]
    assert (joined.sent_bytes, together.sent_bytes) == (8, 4)


async def test_a_worker_that_was_overtaken_while_it_joined_gets_what_changed_in_a_group_of_its_own(transport):
    learner = Learner()
    late = Worker("late", learner)
    await broadcast(transport, learner, [])
    await transport.catch_up([late])
    learn(learner)
    await transport.publish(learner)
    await transport.catch_up([late])
    assert bases(learner) == [None, "0"]


async def test_a_worker_whose_group_broke_while_the_next_version_was_published_is_asked_for_the_version_that_travels(
    transport,
):
    """The next version may have the same weights: the learner sends them, and a proof of the next version would be refused."""

    class Overtaken(Worker):
        async def call(self, method: str, *args: Any, deadline_s: float) -> Attestation:
            if learner.version == 0:
                learner.version = 1
                await transport.publish(learner)
            return await super().call(method, *args, deadline_s=deadline_s)

    learner = Learner()
    late = Overtaken("late", learner, BroadcastError("broken"))
    await transport.publish(learner)
    joined = await transport.catch_up([late])
    assert (joined.failures, joined.policy_version, len(late.first_ranks)) == ((), 0, 2)


async def test_one_worker_without_the_version_before_has_all_of_its_group_get_the_whole_once(transport):
    learner = Learner()
    old, other = Worker("w0", learner), Worker("w0", learner)
    await broadcast(transport, learner, [old])
    for workers in ([old, other], [old, other]):
        learn(learner)
        await broadcast(transport, learner, workers)
    assert bases(learner) == [None, None, "1"]


async def test_those_whose_group_breaks_get_the_whole_and_those_that_have_the_version_keep_what_they_proved(transport):
    """The copies of the others are new in part."""
    learner = Learner(receivers_per_worker=0)  # nobody waits for another: w0 has all of it when w1 is lost
    workers = [Worker("w0", learner), Worker("w1", learner, None, BroadcastError("broken"))]
    await broadcast(transport, learner, workers)
    learn(learner)
    sent = await broadcast(transport, learner, workers)
    learn(learner)
    await broadcast(transport, learner, workers)
    assert bases(learner) == [None, "0", None, "1"] and sent.sent_bytes == 2 + 8
