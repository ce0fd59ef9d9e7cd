"""What was decided is done: a failure waits out its back-off or ends the run; an actor whose node leaves is let go."""

import asyncio

import pytest

from cluster.contracts.config import SupervisionConfig
from cluster.contracts.errors import WeightsError, WorkerError
from cluster.remote.actor import RemoteActor
from cluster.supervision.supervisor import Supervisor, heartbeats
from tests.fakes import ListedEvents, actor_spec, death

DEATH = death("rollout-0")


@pytest.fixture
def supervisor() -> Supervisor:
    return Supervisor(SupervisionConfig(max_restarts=1, backoff_s=0), ListedEvents())


async def test_a_death_may_be_healed_until_the_budget_is_spent(supervisor):
    await supervisor.handle(actor_spec("rollout-0"), DEATH, actor=None)
    with pytest.raises(WorkerError, match="restart budget is spent"):
        await supervisor.handle(actor_spec("rollout-0"), DEATH, actor=None)
    assert [event["decision"] for event in supervisor.events.events] == ["restart", "abort"]


async def test_a_refusal_is_raised_as_it_is(supervisor):
    refusal = WeightsError("stale head")
    with pytest.raises(WeightsError) as caught:
        await supervisor.handle(actor_spec("rollout-0"), refusal, actor=None)
    assert caught.value is refusal


async def test_an_actor_whose_node_leaves_is_let_go_and_costs_no_restart(supervisor):
    actor = RemoteActor(actor_spec("rollout-0"), None, 7, "node-1")
    assert supervisor.leaves(actor)
    (event,) = supervisor.events.events
    assert (event["failure"], event["decision"], event["reason"]) == ("termination", "drain", "node node-1 goes away")
    await supervisor.handle(actor_spec("rollout-0"), DEATH, actor=None)


async def test_heartbeats_that_fail_end_what_they_watch_over(supervisor):
    def report() -> None:
        raise OSError("no status")

    with pytest.raises(OSError, match="no status"):
        async with heartbeats(lambda: [], supervisor, heal=lambda actor, error: None, report=report):
            await asyncio.Event().wait()
