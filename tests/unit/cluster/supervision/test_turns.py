"""Learner and engines have their GPUs in turn: what is awake when, and who waits for whom."""

import asyncio
from typing import Any

import pytest

from cluster.contracts.errors import TreadwheelError
from cluster.contracts.types import BroadcastStats
from cluster.supervision.turns import GpuTurns
from tests.fakes import actor_spec, death


class Scene:
    """Workers whose calls are written down. A call for which there is an event waits for it."""

    def __init__(self, *, loads_whole: bool = True) -> None:
        self.log: list[str] = []
        self.waits: dict[str, asyncio.Event] = {}
        self.failing: set[str] = set()
        self.turns = GpuTurns(loads_whole=loads_whole, deadline_s=1.0, lose=self._lose)
        self.start = self.turns.starting(self._start)

    async def _start(self, spec: Any) -> Any:
        await self.note(f"start {spec.name}")
        return Worker(self, spec.name)

    async def _lose(self, worker: Any, error: TreadwheelError) -> None:
        self.log.append(f"lost {worker.name}")

    async def note(self, what: str) -> None:
        if what in self.waits:
            await self.waits[what].wait()
        self.log.append(what)
        if what in self.failing:
            raise death(what.split()[1])

    async def worker(self, name: str) -> Any:
        return await self.start(actor_spec(name))

    async def learners(self, *, ends_with_broadcast: bool = True) -> None:
        await self.turns.begin_learners(ends_with_broadcast=ends_with_broadcast)
        self.log.append("learner")

    def drain(self) -> list[str]:
        drained, self.log = self.log, []
        return drained


class Worker:
    def __init__(self, scene: Scene, name: str) -> None:
        self.name = name
        self._scene = scene

    async def call(self, method: str, *args: Any, deadline_s: float) -> None:
        await self._scene.note(" ".join([method, self.name, *("keeps" if each else "discards" for each in args)]))


class Transport:
    """Loads on each worker."""

    async def publish(self, learner: Any) -> BroadcastStats:
        return await learner.publish()

    async def deliver(self, workers: Any) -> Any:
        for worker in workers:
            await worker.call("load", deadline_s=1.0)

    catch_up = deliver


@pytest.fixture
async def scene() -> Scene:
    return Scene()


async def settled() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


async def test_the_learner_has_the_gpus_first_and_an_engine_starts_when_it_rests(scene: Scene):
    starting = asyncio.create_task(scene.worker("w0"))
    await settled()
    assert scene.drain() == [], "before the learner has begun"
    await scene.learners()
    await settled()
    assert scene.drain() == ["learner"]
    await scene.turns.end_learners()
    await starting
    assert scene.drain() == ["start w0"]


async def test_engines_discard_their_weights_for_a_step_and_sleep_until_they_load(scene: Scene):
    await scene.turns.end_learners()
    workers = [await scene.worker(name) for name in ("w0", "w1")]
    scene.drain()
    await scene.learners()
    assert scene.drain() == ["sleep w0 discards", "sleep w1 discards", "learner"]
    delivering = asyncio.create_task(scene.turns.delivering(Transport()).deliver(workers))
    await settled()
    assert scene.drain() == [], "the learner has the GPUs"
    await scene.turns.end_learners()
    await delivering
    assert scene.drain() == ["load w0", "load w1"]
    await scene.learners()
    assert scene.drain() == ["sleep w0 discards", "sleep w1 discards", "learner"], "a load wakes"


async def test_engines_keep_their_weights_while_the_learner_saves_and_wake_by_themselves(scene: Scene):
    await scene.turns.end_learners()
    await scene.worker("w0")
    await scene.learners(ends_with_broadcast=False)
    await scene.turns.end_learners()
    assert scene.drain() == ["start w0", "sleep w0 keeps", "learner", "wake w0"]
    await scene.learners()
    assert scene.drain() == ["sleep w0 discards", "learner"]


async def test_engines_keep_what_adapters_are_put_on():
    scene = Scene(loads_whole=False)
    await scene.turns.end_learners()
    await scene.worker("w0")
    await scene.learners(ends_with_broadcast=True)
    await scene.turns.end_learners()
    assert scene.drain() == ["start w0", "sleep w0 keeps", "learner", "wake w0"]


async def test_an_engine_that_sleeps_already_is_not_asked_again(scene: Scene):
    """A save inside a step's turn, or a second publishing after a death."""
    await scene.turns.end_learners()
    await scene.worker("w0")
    await scene.learners()
    await scene.learners(ends_with_broadcast=False)
    await scene.turns.end_learners()
    assert scene.drain() == ["start w0", "sleep w0 discards", "learner", "learner"], "it has no weights to wake with"


@pytest.mark.parametrize("under_way", ["start w1", "load w0"])
async def test_the_learner_waits_for_a_start_or_a_load_under_way_and_no_other_begins(scene: Scene, under_way: str):
    await scene.turns.end_learners()
    first = await scene.worker("w0")
    scene.waits[under_way] = asyncio.Event()
    transport = scene.turns.delivering(Transport())
    begun = asyncio.create_task(scene.worker("w1") if under_way == "start w1" else transport.catch_up([first]))
    await settled()
    learner = asyncio.create_task(scene.learners())
    await settled()
    late = asyncio.create_task(scene.worker("w2"))
    await settled()
    assert scene.drain() == ["start w0"]
    scene.waits[under_way].set()
    await asyncio.gather(begun, learner)
    slept = ["sleep w0 discards", *(["sleep w1 discards"] if under_way == "start w1" else [])]
    assert scene.drain() == [under_way, *slept, "learner"]
    await scene.turns.end_learners()
    await late
    assert scene.drain() == ["start w2"]


async def test_the_learner_waits_for_all_starts_under_way(scene: Scene):
    await scene.turns.end_learners()
    scene.waits |= {"start w0": asyncio.Event(), "start w1": asyncio.Event()}
    begun = [asyncio.create_task(scene.worker(name)) for name in ("w0", "w1")]
    await settled()
    learner = asyncio.create_task(scene.learners())
    scene.waits["start w0"].set()
    await settled()
    assert scene.drain() == ["start w0"]
    scene.waits["start w1"].set()
    await asyncio.gather(*begun, learner)
    assert scene.drain() == ["start w1", "sleep w0 discards", "sleep w1 discards", "learner"]


async def test_a_joining_engine_that_fell_asleep_before_its_first_load_is_woken_by_that_load_alone(scene: Scene):
    await scene.turns.end_learners()
    joiner = await scene.worker("w0")
    await scene.learners(ends_with_broadcast=False)
    loading = asyncio.create_task(scene.turns.delivering(Transport()).catch_up([joiner]))
    await settled()
    await scene.turns.end_learners()
    await loading
    assert scene.drain() == ["start w0", "sleep w0 keeps", "learner", "load w0"]


@pytest.mark.parametrize("method", ["sleep w0 keeps", "wake w0"])
async def test_a_worker_that_fails_to_sleep_or_to_wake_is_lost_and_the_others_go_on(scene: Scene, method: str):
    await scene.turns.end_learners()
    for name in ("w0", "w1"):
        await scene.worker(name)
    scene.failing.add(method)
    await scene.learners(ends_with_broadcast=False)
    await scene.turns.end_learners()
    told = scene.drain()
    assert told.count("lost w0") == 1 and "lost w1" not in told
    assert told.index("lost w0") < told.index("learner") or method == "wake w0", "its memory is free before"
    assert "wake w1" in told and ("wake w0" in told) == (method == "wake w0")


async def test_a_turn_that_is_cancelled_while_engines_fall_asleep_is_begun_again(scene: Scene):
    await scene.turns.end_learners()
    await scene.worker("w0")
    scene.waits["sleep w0 discards"] = asyncio.Event()
    turn = asyncio.create_task(scene.learners())
    await settled()
    turn.cancel()
    await asyncio.gather(turn, return_exceptions=True)
    scene.waits.clear()
    assert scene.turns.is_learners
    await scene.learners(ends_with_broadcast=False)
    assert scene.drain() == ["start w0", "sleep w0 keeps", "learner"]


async def test_publishing_does_not_wait_for_the_engines_turn(scene: Scene):
    class Learner:
        async def publish(self) -> str:
            return "published"

    learner: Any = Learner()
    assert await scene.turns.delivering(Transport()).publish(learner) == "published"
