"""The fleet says which places are empty for good."""

import asyncio

from cluster.contracts.config import SupervisionConfig
from cluster.contracts.errors import WorkerError
from cluster.rollouts.worker_pool import WorkerPool
from cluster.supervision.supervisor import Supervisor
from cluster.supervision.tasks import background
from tests.fakes import ListedEvents, ScriptedWorker, actor_spec


async def test_a_worker_that_left_or_never_joined_is_told_when_its_place_is_empty():
    started: dict[str, ScriptedWorker] = {}
    left: list[str] = []

    async def start(spec):
        if spec.name == "rollout-1":
            raise WorkerError("rollout-1 failed in 'build': no such model")
        started[spec.name] = ScriptedWorker(spec, lambda ticket: None)
        return started[spec.name]

    async def join(actor):
        pass

    def empty(spec):
        assert spec.name not in started or started[spec.name].is_dead, "its seat is free now"
        left.append(spec.name)

    async with background() as tasks:
        fleet = WorkerPool(
            [actor_spec(f"rollout-{number}") for number in range(2)],
            joining=lambda number: actor_spec(f"rollout-{number}"),
            start=start,
            left=empty,
            supervisor=Supervisor(SupervisionConfig(), ListedEvents()),
            join=join,
            tasks=tasks,
        )
        await fleet.start()
        fleet.drain("rollout-0")
        while len(left) < 2:
            await asyncio.sleep(0)
    assert sorted(left) == ["rollout-0", "rollout-1"]
