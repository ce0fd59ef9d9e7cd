"""No worker serves a version that was published over, however a broadcast and a joining worker meet; and whose fault a failed proof is."""

import asyncio
from typing import Any

import pytest

from cluster.contracts.config import WeightsConfig
from cluster.contracts.errors import ConfigError, LostError, TreadwheelError, WeightsError, WorkerError
from cluster.contracts.types import BroadcastStats
from cluster.weights.broadcast import Weights, verdict
from tests.fakes import ListedEvents, attestation, death
from tests.unit.cluster.simulated_time import simulated


class ScriptedWorker:
    def __init__(self, name: str) -> None:
        self.name = name
        self.version = -1


class ScriptedTransport:
    """Publishes version 0, then one more each time. `loading` lets a test hold every load; `errors` fail by worker's name, in turn."""

    def __init__(self, errors: dict[str, list[TreadwheelError]] | None = None) -> None:
        self.version = -1
        self.loading = asyncio.Event()
        self.loading.set()
        self.errors = errors or {}
        self.found: dict[str, Any] = {}
        """Facts of every attestation."""
        self.found_by: dict[str, dict[str, Any]] = {}
        """Facts of the attestations of one worker."""
        self.sent: dict[str, Any] = {}
        """Facts of every broadcast."""

    async def publish(self, learner: Any) -> BroadcastStats:
        self.version += 1
        return self._stats(self.version, (), ())

    async def deliver(self, workers: Any) -> BroadcastStats:
        return await self._load(workers)

    async def catch_up(self, workers: Any) -> BroadcastStats:
        return await self._load(workers)

    async def _load(self, workers: Any) -> BroadcastStats:
        version = self.version
        await self.loading.wait()
        failures, proofs = [], []
        for worker in workers:
            if errors := self.errors.get(worker.name):
                failures.append((worker.name, errors.pop(0)))
            else:
                worker.version = version
                proofs.append(attestation(worker.name, version, **self.found | self.found_by.get(worker.name, {})))
        return self._stats(version, proofs, failures)

    def _stats(self, version: int, proofs: Any, failures: Any) -> BroadcastStats:
        return BroadcastStats(
            policy_version=version,
            digest=str(version),
            size_bytes=1,
            seconds=1.0,
            attestations=tuple(proofs),
            failures=tuple(failures),
            **self.sent,
        )


class Fleet:
    def __init__(self, *names: str) -> None:
        self._workers = [ScriptedWorker(name) for name in names]
        self.replaced: list[tuple[str, BaseException]] = []

    def workers(self) -> list[Any]:
        return self._workers

    def replace(self, actor: Any, error: BaseException) -> None:
        self.replaced.append((actor.name, error))


async def broadcast(weights: Weights, fleet: Fleet) -> BroadcastStats:
    return await weights.finish_broadcast(fleet, await weights.begin_broadcast())


def weights_over(transport: ScriptedTransport, *, num_workers: int = 1, events: ListedEvents | None = None) -> Weights:
    return Weights(transport, learner=None, num_workers=num_workers, events=events or ListedEvents())


async def test_a_worker_that_joins_during_a_broadcast_serves_the_new_version():
    transport = ScriptedTransport()
    weights = weights_over(transport)
    await weights.publish()
    fleet, new = Fleet("old"), ScriptedWorker("new")
    transport.loading.clear()
    joining = asyncio.create_task(weights.join(new))  # begins to load version 0 ...
    await asyncio.sleep(0)
    sending = asyncio.create_task(broadcast(weights, fleet))  # ... while version 1 goes to the others
    await asyncio.sleep(0)
    transport.loading.set()
    await asyncio.gather(joining, sending)
    assert (fleet.workers()[0].version, new.version) == (1, 1)


class SlowTransport(ScriptedTransport):
    """A joining worker loads for 10 s, or as long as `load_s` says by its name; those of the fleet at once. To publish takes 1 s."""

    num_catching_up = 0

    def __init__(self, load_s: dict[str, float] | None = None) -> None:
        super().__init__()
        self._load_s = load_s or {}

    async def publish(self, learner: Any) -> BroadcastStats:
        published = await super().publish(learner)
        await asyncio.sleep(1.0)
        return published

    async def catch_up(self, workers: Any) -> BroadcastStats:
        self.num_catching_up += 1
        sent = await self._load(workers)
        await asyncio.sleep(self._load_s.get(workers[0].name, 10.0))
        return sent


async def broadcasting(weights: Weights, fleet: Fleet, *, num_steps: int) -> list[float]:
    """Steps of 5 s; when each of their broadcasts was over."""
    ended: list[float] = []
    for _ in range(num_steps):
        await asyncio.sleep(5.0)
        await broadcast(weights, fleet)
        ended.append(asyncio.get_running_loop().time())
    return ended


@simulated
@pytest.mark.parametrize(
    ("load_s", "joins", "ends"),
    [
        # Both load from second 1 to 11 and again to 21. The broadcast from 6 to 7 overtakes them. The next one, due at 12, waits for them.
        (10.0, [21.0, 21.0], [7.0, 22.0, 28.0, 34.0]),
        # The other one loads from second 1 to 16 and again to 31.
        (15.0, [21.0, 31.0], [7.0, 32.0, 38.0, 44.0]),
    ],
)
async def test_workers_that_load_for_longer_than_a_step_join_at_their_second_load(load_s, joins, ends):
    """Seen before: each load was overtaken by the next broadcast, and no worker ever joined."""
    transport = SlowTransport({"b": load_s})
    weights = weights_over(transport, num_workers=3)
    await weights.publish()  # until second 1
    fleet, new = Fleet("old"), [ScriptedWorker("a"), ScriptedWorker("b")]

    async def join(worker: ScriptedWorker) -> float:
        await weights.join(worker)
        fleet.workers().append(worker)
        return asyncio.get_running_loop().time()

    *joined, ended = await asyncio.gather(*map(join, new), broadcasting(weights, fleet, num_steps=4))
    assert (joined, ended, transport.num_catching_up) == (joins, ends, 4)
    assert [worker.version for worker in fleet.workers()] == [4, 4, 4]


@simulated
async def test_a_worker_that_dies_at_its_second_load_holds_no_broadcast_any_longer():
    transport = SlowTransport()
    weights = weights_over(transport, num_workers=2)
    await weights.publish()

    async def die_at_the_second_load() -> None:
        joining = asyncio.create_task(weights.join(ScriptedWorker("new")))
        await asyncio.sleep(1.0)
        transport.errors["new"] = [death("new", "load")]
        with pytest.raises(WorkerError, match="died"):
            await joining

    _, ended = await asyncio.gather(die_at_the_second_load(), broadcasting(weights, Fleet("old"), num_steps=3))
    assert transport.num_catching_up == 2
    assert ended == [7.0, 22.0, 28.0], "the second load ends at second 21"


class SharedGpus(SlowTransport):
    """A load waits while the learner has the GPUs, which it gives back when it publishes."""

    def __init__(self) -> None:
        super().__init__()
        self.are_engines = asyncio.Event()

    async def publish(self, learner: Any) -> BroadcastStats:
        published = await super().publish(learner)
        self.are_engines.set()
        return published

    async def catch_up(self, workers: Any) -> BroadcastStats:
        await self.are_engines.wait()
        return await super().catch_up(workers)


@simulated
async def test_where_the_learner_and_engines_take_turns_no_broadcast_waits_for_a_worker_whose_turn_comes_with_it():
    transport, new = SharedGpus(), ScriptedWorker("new")
    weights = Weights(transport, learner=None, num_workers=2, events=ListedEvents(), waits_for_joins=False)
    await weights.publish()  # until second 1

    async def learn() -> None:
        await asyncio.sleep(9.0)
        transport.are_engines.clear()

    async with asyncio.timeout(60.0):
        _, ended, _ = await asyncio.gather(weights.join(new), broadcasting(weights, Fleet("old"), num_steps=2), learn())
    # The broadcast from 6 to 7 overtakes the first load, from 1 to 11. The learner's turn is from 10 to 13.
    assert ended == [7.0, 13.0] and new.version == 2
    assert asyncio.get_running_loop().time() == 23.0


async def test_a_worker_that_joins_while_the_learner_learns_on_waits_until_the_fleet_has_its_weights():
    transport = ScriptedTransport()
    weights, fleet, new = weights_over(transport), Fleet("old"), ScriptedWorker("new")
    await weights.publish()
    published = await weights.begin_broadcast()
    joining = asyncio.create_task(weights.join(new))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert not joining.done() and new.version == -1
    await weights.finish_broadcast(fleet, published)
    await joining
    assert (fleet.workers()[0].version, new.version) == (1, 1)


@simulated
async def test_a_worker_whose_weights_went_while_a_later_version_travels_joins_with_that_one():
    """Seen in review: the learner published for it meanwhile, it loaded again for ever, and the next broadcast waited for it."""

    class Transport(ScriptedTransport):
        async def deliver(self, workers: Any) -> BroadcastStats:
            sent = await self._load(workers)
            await asyncio.sleep(60.0)
            return sent

        async def catch_up(self, workers: Any) -> BroadcastStats:
            sent = await self._load(workers)
            await asyncio.sleep(5.0)
            return sent

    transport = Transport({"new": [LostError("its node is gone")]})
    weights, fleet, new = weights_over(transport), Fleet("old"), ScriptedWorker("new")
    await weights.publish()
    joining = asyncio.create_task(weights.join(new))
    await asyncio.sleep(1.0)
    published = await weights.begin_broadcast()
    await weights.finish_broadcast(fleet, published)
    async with asyncio.timeout(60.0):
        await joining
    assert (fleet.workers()[0].version, new.version) == (1, 1)
    await broadcast(weights, fleet)
    assert fleet.workers()[0].version == 2


async def test_a_worker_that_cannot_prove_the_version_before_is_not_counted_among_those_of_the_next():
    """It joined under version 0 and is refused when version 1 is published already, and on its way to the one worker of the fleet."""
    transport = ScriptedTransport({"new": [WeightsError("off by 3 nats")]})
    weights, fleet = weights_over(transport), Fleet("old")
    await broadcast(weights, fleet)
    transport.loading.clear()
    joining = asyncio.create_task(weights.join(ScriptedWorker("new")))
    await asyncio.sleep(0)
    published = await weights.begin_broadcast()
    transport.loading.set()
    with pytest.raises(WorkerError, match="new cannot serve: off by 3 nats"):
        await joining
    assert (await weights.finish_broadcast(fleet, published)).policy_version == 1


async def test_a_worker_that_could_not_prove_the_version_before_says_nothing_of_the_next():
    """Of three workers one proves version 1 and two are lost. Two that join cannot prove version 0, which they were sent before."""
    transport, fleet = ScriptedTransport({"new": [WeightsError("off")], "newer": [WeightsError("off")]}), Fleet(*"abc")
    weights = weights_over(transport, num_workers=3)
    await weights.publish()
    transport.loading.clear()
    joining = [asyncio.create_task(weights.join(ScriptedWorker(name))) for name in ("new", "newer")]
    await asyncio.sleep(0)
    held, transport.loading = transport.loading, asyncio.Event()
    transport.loading.set()
    transport.errors |= {name: [death(name, "load")] for name in "bc"}
    await broadcast(weights, fleet)
    held.set()
    for each in joining:
        with pytest.raises(WorkerError, match="cannot serve: off"):
            await each


async def test_a_worker_that_joins_before_anything_is_published_waits_for_it():
    weights, new = weights_over(ScriptedTransport()), ScriptedWorker("new")
    joining = asyncio.create_task(weights.join(new))
    for _ in range(5):
        await asyncio.sleep(0)
    assert not joining.done()
    await weights.publish()
    await joining
    assert new.version == 0


async def test_weights_that_cannot_be_published_keep_no_worker_from_joining():
    transport, new = ScriptedTransport(), ScriptedWorker("new")
    weights = weights_over(transport)
    await weights.publish()

    async def fails(learner: Any) -> BroadcastStats:
        raise WorkerError("learner-0 died")

    transport.publish = fails
    with pytest.raises(WorkerError, match="learner-0"):
        await weights.begin_broadcast()
    await weights.join(new)
    assert new.version == 0


async def test_a_broadcast_takes_as_long_as_its_two_halves():
    weights = weights_over(ScriptedTransport())
    sent = await broadcast(weights, Fleet("a"))
    assert (sent.seconds, sent.publish_seconds) == (2.0, 1.0)
    assert (weights.stats()["time/broadcast_s"], weights.stats()["time/publish_s"]) == (2.0, 1.0)


async def test_the_bytes_sent_are_the_whole_for_each_worker_unless_the_transport_says_how_many():
    """In 2 s to two workers: 1 byte each, or 3 bytes of changes together, which are a share of 0.25."""
    transport = ScriptedTransport()
    weights, fleet = weights_over(transport), Fleet("a", "b")
    await broadcast(weights, fleet)
    whole = weights.stats()
    assert (whole["weights/sent_bytes"], whole["weights/bytes_per_s"]) == (2.0, 1.0)
    assert "weights/changed_share" not in whole
    transport.sent = {"sent_bytes": 3, "changed_share": 0.25}
    await broadcast(weights, fleet)
    changes = weights.stats()
    assert (changes["weights/sent_bytes"], changes["weights/bytes_per_s"]) == (3.0, 1.5)
    assert (changes["weights/size_bytes"], changes["weights/changed_share"]) == (1.0, 0.25)
    transport.sent = {"sent_bytes": 0, "changed_share": 0.0}
    await broadcast(weights, fleet)
    assert weights.stats()["weights/sent_bytes"] == 0.0, "nothing changed"


async def test_a_fleet_whose_weights_went_with_the_learner_gets_those_that_it_publishes_next():
    lost = LostError("policy version 0 went with the learner")
    transport, fleet = ScriptedTransport({"a": [lost], "b": [lost]}), Fleet("a", "b")
    sent = await broadcast(weights_over(transport, num_workers=2), fleet)
    assert sent.policy_version == 1 and [worker.version for worker in fleet.workers()] == [1, 1]
    assert fleet.replaced == [], "no worker is to blame"


async def test_no_worker_is_to_blame_for_a_learner_that_never_sends():
    """More often than a worker of its own may lose them."""
    lost = [LostError("learner-0 failed in 'send': OutOfMemoryError", actor="learner-0")] * 9
    fleet = Fleet("a", "b")
    sent = await broadcast(weights_over(ScriptedTransport({"a": [*lost], "b": [*lost]}), num_workers=2), fleet)
    assert sent.policy_version == 9 and fleet.replaced == []


async def test_dead_workers_are_handed_to_the_fleet_and_not_waited_for():
    died = death("a", "load")
    fleet = Fleet("a", "b")
    stats = await broadcast(weights_over(ScriptedTransport({"a": [died]})), fleet)
    assert fleet.replaced == [("a", died)] and stats.policy_version == 0


class ForgetfulTransport(ScriptedTransport):
    """Says nothing of the worker "b"."""

    async def _load(self, workers: Any) -> BroadcastStats:
        return await super()._load([worker for worker in workers if worker.name != "b"])


async def test_a_worker_of_which_a_transport_says_nothing_serves_nothing():
    """Such a worker would go on with the version before, unproven. A transport may be a user's own."""
    weights, fleet = weights_over(ForgetfulTransport(), num_workers=2), Fleet("a", "b")
    await broadcast(weights, fleet)
    ((name, error),) = fleet.replaced
    assert (name, str(error)) == ("b", "b: weights.transport returned neither its proof nor its failure")
    with pytest.raises(WorkerError, match="neither its proof nor its failure"):
        await weights.join(ScriptedWorker("b"))


@pytest.mark.parametrize("part", ["publish", "deliver", "catch_up"])
async def test_a_transport_that_returns_nothing_is_told_so(part):
    async def nothing(of: Any) -> None: ...

    transport = ScriptedTransport()
    setattr(transport, part, nothing)
    weights = weights_over(transport)
    with pytest.raises(WeightsError, match=r"the transport of weights\.transport returned None, not BroadcastStats"):
        await broadcast(weights, Fleet("a"))
        await weights.join(ScriptedWorker("a"))


async def test_one_worker_that_fails_its_canary_is_replaced_and_counted():
    fleet = Fleet("a", "b")
    weights = weights_over(ScriptedTransport({"a": [WeightsError("off by 3 nats")]}))
    await broadcast(weights, fleet)
    ((name, error),) = fleet.replaced
    assert name == "a" and isinstance(error, WorkerError) and "off by 3 nats" in str(error)
    assert weights.stats()["weights/num_refused"] == 1.0
    await broadcast(weights, Fleet("a", "b"))
    assert weights.stats()["weights/num_refused"] == 1.0


async def test_the_run_stops_when_most_workers_fail_a_version():
    errors = {name: [WeightsError("off by 3 nats")] for name in ("a", "b")}
    fleet = Fleet("a", "b", "c")
    with pytest.raises(WeightsError, match="2 of 3 workers: off by 3 nats"):
        await broadcast(weights_over(ScriptedTransport(errors)), fleet)
    assert fleet.replaced == []


async def test_the_only_worker_is_most_of_them_while_it_joins_too():
    weights = weights_over(ScriptedTransport({"a": [WeightsError("off by 3 nats")]}))
    await weights.publish()
    with pytest.raises(WeightsError, match=r"^off by 3 nats"):
        await weights.join(ScriptedWorker("a"))


async def test_the_only_worker_is_most_of_them_though_it_is_being_replaced_when_a_version_is_broadcast():
    weights = weights_over(ScriptedTransport({"a": [WeightsError("off by 3 nats")]}))
    await broadcast(weights, Fleet())
    with pytest.raises(WeightsError, match=r"^off by 3 nats"):
        await weights.join(ScriptedWorker("a"))


async def test_a_worker_that_fails_while_others_are_still_to_come_is_that_workers_fault():
    weights = weights_over(ScriptedTransport({"a": [WeightsError("off")], "b": [WeightsError("off")]}), num_workers=3)
    await weights.publish()
    with pytest.raises(WorkerError, match="a cannot serve: off"):
        await weights.join(ScriptedWorker("a"))
    with pytest.raises(WeightsError, match="2 of 3 workers"):
        await weights.join(ScriptedWorker("b"))


async def test_a_bad_machine_that_joins_a_healthy_fleet_does_not_stop_the_run():
    weights = weights_over(ScriptedTransport({"b": [WeightsError("off")] * 5}))
    await broadcast(weights, Fleet("a"))
    for _ in range(5):  # however often it is tried: its restart budget ends that
        with pytest.raises(WorkerError):
            await weights.join(ScriptedWorker("b"))


@pytest.mark.parametrize(
    ("num_refused", "num_proved", "num_workers", "stops"),
    [
        (1, 0, 1, True),
        (1, 0, 2, False),
        (1, 1, 1, False),
        (2, 1, 3, True),
        (2, 0, 128, False),
        (50, 4, 4, False),
        (3, 1, 4, True),
    ],
)
def test_most_is_more_than_half_of_all_workers(num_refused, num_proved, num_workers, stops):
    proofs = {f"bad{i}": WeightsError("off") for i in range(num_refused)} | {
        f"good{i}": None for i in range(num_proved)
    }
    assert (verdict(proofs, num_workers=num_workers) is not None) is stops


async def test_a_new_version_is_judged_afresh():
    errors = {"a": [WeightsError("off")], "b": [WeightsError("off")]}
    transport = ScriptedTransport({"a": errors["a"]})
    weights = weights_over(transport)
    await broadcast(weights, Fleet("a", "b", "c"))
    transport.errors = {"b": errors["b"]}
    await broadcast(weights, Fleet("b", "c", "d"))  # d in the place of a
    assert weights.stats()["weights/num_refused"] == 2.0
    transport.errors = {name: [WeightsError("off")] for name in "ef"}
    with pytest.raises(WeightsError, match="2 of 3 workers"):
        await broadcast(weights, Fleet("d", "e", "f"))


async def test_weights_that_went_with_a_node_are_published_again():
    weights = weights_over(ScriptedTransport({"late": [LostError("gone")]}))
    await weights.publish()
    worker = ScriptedWorker("late")
    await weights.join(worker)
    assert worker.version == 1


async def test_weights_that_are_lost_to_one_worker_again_and_again_are_that_workers_failure():
    """Seen before: all workers loaded anew for ever, since one node could not fetch what the others had."""
    transport = ScriptedTransport({"a": [LostError("fetch timed out", actor="a")] * 99})
    weights, fleet = weights_over(transport, num_workers=2), Fleet("a", "b")
    sent = await broadcast(weights, fleet)
    ((name, error),) = fleet.replaced
    assert name == "a" and isinstance(error, WorkerError) and error.actor == "a"
    assert "a did not get the weights, which were published 3 times more: fetch timed out" in str(error)
    assert sent.policy_version == 3 and [proof.worker for proof in sent.attestations] == ["b"]


async def test_a_worker_to_which_weights_are_lost_again_and_again_while_it_joins_holds_no_broadcast_for_ever():
    transport = ScriptedTransport({"new": [LostError("fetch timed out")] * 99})
    weights, fleet = weights_over(transport), Fleet("old")
    await weights.publish()
    with pytest.raises(WorkerError, match="published 3 times more"):
        await weights.join(ScriptedWorker("new"))
    assert transport.version == 3
    assert (await broadcast(weights, fleet)).policy_version == 4


class LosingTransport(ScriptedTransport):
    """What a joining worker loads is lost after 4 s, or there after 5 s. To bring it to a fleet takes 10 s."""

    async def catch_up(self, workers: Any) -> BroadcastStats:
        sent = await self._load(workers)
        await asyncio.sleep(4.0 if sent.failures else 5.0)
        return sent

    async def deliver(self, workers: Any) -> BroadcastStats:
        sent = await self._load(workers)
        await asyncio.sleep(10.0)
        return sent


@simulated
async def test_a_worker_whose_weights_are_lost_while_newer_ones_travel_loads_those():
    """Seen before: it had the learner publish once more under the broadcast, which neither it nor a later broadcast got over."""
    transport = LosingTransport({"new": [LostError("gone")]})
    weights, fleet, new = weights_over(transport), Fleet("old"), ScriptedWorker("new")
    await weights.publish()
    joining = asyncio.create_task(weights.join(new))  # lost at second 4
    await asyncio.sleep(1.0)
    await broadcast(weights, fleet)  # until second 11
    async with asyncio.timeout(60.0):
        await joining
    assert asyncio.get_running_loop().time() == 16.0 and transport.version == new.version == 1


@simulated
async def test_what_is_lost_to_several_workers_that_join_is_published_again_once():
    class Transport(LosingTransport):
        async def publish(self, learner: Any) -> BroadcastStats:
            published = await super().publish(learner)
            await asyncio.sleep(1.0)
            return published

    transport = Transport({name: [LostError("gone")] for name in "ab"})
    weights, new = weights_over(transport), [ScriptedWorker(name) for name in "ab"]
    await weights.publish()
    await asyncio.gather(*map(weights.join, new))
    assert transport.version == 1 and [worker.version for worker in new] == [1, 1]


async def test_a_worker_that_dies_while_it_joins_says_so():
    weights = weights_over(ScriptedTransport({"late": [death("late", "load")]}))
    await weights.publish()
    with pytest.raises(WorkerError, match="died"):
        await weights.join(ScriptedWorker("late"))


async def test_the_noise_floor_of_a_worker_is_an_event_and_a_metric():
    transport, events = ScriptedTransport(), ListedEvents()
    transport.found = {"canary_mean_error": 0.02, "noise_floor": 0.018, "distinguishable": False}
    weights = weights_over(transport, events=events)
    await weights.publish()
    await weights.join(ScriptedWorker("a"))
    assert events.events == [
        {
            "kind": "attested",
            "actor": "a",
            "policy_version": 0,
            "canary_mean_error": 0.02,
            "noise_floor": 0.018,
            "distinguishable": False,
        }
    ]
    transport.found_by = {
        "b": {
            "canary_mean_error": 0.05,
            "canary_max_error": 0.4,
            "noise_floor": 0.01,
            "tolerance": 0.5,
            "pause_seconds": 2.0,
        }
    }
    await broadcast(weights, Fleet("a", "b", "c"))
    stats = weights.stats()
    assert (stats["weights/canary_error"], stats["weights/canary_max_error"]) == (0.05, 0.4)
    assert (stats["weights/noise_floor"], stats["weights/canary_tolerance"]) == (0.018, 0.5)
    assert (stats["weights/num_indistinguishable"], stats["weights/pause_s"]) == (3.0, 2.0)


def own_transport(*, timeout_s: float, window: int) -> Any:
    """A transport by full path, as a user's."""
    return {"timeout_s": timeout_s, "window": window}


def test_the_configured_transport_is_the_one_that_is_used():
    config = WeightsConfig(transport={"name": f"{__name__}:own_transport", "window": 3}, timeout_s=7.0)
    weights = Weights.from_config(config, learner=None, num_workers=1, events=ListedEvents())
    assert weights._transport == {"timeout_s": 7.0, "window": 3} and weights._waits_for_joins
    in_turns = Weights.from_config(
        config, learner=None, num_workers=1, events=ListedEvents(), around=lambda transport: [transport]
    )
    assert in_turns._transport == [weights._transport] and not in_turns._waits_for_joins
    with pytest.raises(ConfigError, match=r"weights\.transport='smoke'"):
        Weights.from_config(WeightsConfig(transport="smoke"), learner=None, num_workers=1, events=ListedEvents())
