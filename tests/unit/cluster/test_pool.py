"""No group is lost and none comes twice, whatever dies on its way."""

import asyncio

import pytest

from cluster.buffer import Buffer
from cluster.contracts.config import RunConfig
from cluster.contracts.errors import DataError, WeightsError, WorkerError
from cluster.contracts.types import SamplingParams
from cluster.pool import Pool
from cluster.supervised import Supervisor
from cluster.supervision import ActorKind
from cluster.tickets import TicketOffice, evaluation_tickets
from tests.fakes import ListedEvents, NumberedPrompts, ScriptedScorer, ScriptedWorker, actor_spec, group_summary

SAMPLING = SamplingParams(max_tokens=4)


class Scene:
    """A pool of scripted actors."""

    def __init__(self, *, script=lambda ticket: None, score=None, num_workers=1, keep=lambda summary: True, **config):
        self.config = RunConfig.model_validate(
            {
                "model": {"path": "none"},
                "prompts": "none",
                "buffer": {"groups_per_step": 4, "trajectories_per_group": 2},
                "supervision": {"backoff_s": 0},
                **config,
            }
        )
        self.events = ListedEvents()
        self.workers: list[ScriptedWorker] = []
        score = score or (lambda index: group_summary(index, rewards=(1.0, 0.0)))

        async def start(spec):
            if spec.kind is ActorKind.ROLLOUT_WORKER:
                self.workers.append(ScriptedWorker(spec, script))
                return self.workers[-1]
            return ScriptedScorer(spec, score)

        async def join(actor):
            await asyncio.sleep(0)

        self.pool = Pool(
            self.config,
            workers=[actor_spec(f"rollout-{i}") for i in range(num_workers)],
            reward=actor_spec("reward", ActorKind.REWARD_SERVICE),
            reference=None,
            start=start,
            supervisor=Supervisor(self.config.supervision, self.events),
            join=join,
            keep=keep,
        )
        self.office = TicketOffice(source=NumberedPrompts(), seed=0, trajectories_per_group=2, sampling=SAMPLING)

    async def take(self, num_steps=1):
        buffer = Buffer(groups_per_step=4)
        taken = []
        await self.pool.start()
        async with self.pool.generating(into=buffer, office=self.office):
            for step in range(num_steps):
                taken += [index for index, _ in await asyncio.wait_for(buffer.take(4), 10)]
                await buffer.advance(step + 1)
        return taken


async def test_every_group_comes_once_and_in_order():
    assert await Scene(num_workers=3).take(num_steps=3) == list(range(12))


async def test_a_dead_workers_unfinished_groups_start_again():
    deaths = iter([WorkerError("rollout-0 died in 'generate': killed")])
    scene = Scene(script=lambda ticket: next(deaths, None) if ticket.index == 2 else None)
    assert await scene.take() == [0, 1, 2, 3]
    assert scene.workers[0].calls == [[0, 1, 2, 3]] and scene.workers[1].calls == [[2, 3]]
    assert scene.events.kinds() == ["failure", "recovery"]


async def test_a_prompt_that_always_kills_is_quarantined_and_replaced_by_another():
    scene = Scene(script=lambda t: WorkerError("rollout-0 died in 'generate'") if t.index == 1 else None)
    assert await scene.take() == [0, 2, 3, 4]
    quarantined = [event for event in scene.events.events if event["kind"] == "quarantine"]
    assert [event["group_id"] for event in quarantined] == ["00000001"]


async def test_a_prompt_that_the_engine_refuses_is_found_and_costs_no_worker():
    scene = Scene(script=lambda t: DataError("prompt is too long") if t.index == 3 else None)
    assert await scene.take() == [0, 1, 2, 4]
    assert len(scene.workers) == 1 and scene.events.kinds().count("quarantine") == 1


async def test_weights_that_fail_attestation_end_the_run_with_their_own_error():
    with pytest.raises(WeightsError, match="stale head"):
        await Scene(script=lambda ticket: WeightsError("stale head")).take()


async def test_a_worker_that_dies_for_ever_spends_the_budget():
    scene = Scene(
        script=lambda t: WorkerError("rollout-0 died in 'generate'"), supervision={"max_restarts": 2, "backoff_s": 0}
    )
    with pytest.raises(WorkerError, match="restart budget is spent"):
        await scene.take()


async def test_failed_rewards_are_dropped_never_zero():
    def score(index):
        if index == 0:
            return group_summary(index, rewards=(None, None), num_reward_errors=1, num_reward_timeouts=1)
        return group_summary(index, rewards=(1.0, 0.0))

    scene = Scene(score=score)
    assert await scene.take() == [1, 2, 3, 4]
    assert scene.events.kinds() == ["reward_failure", "drop"]


async def test_half_failed_rewards_train_with_the_other_half():
    scene = Scene(score=lambda i: group_summary(i, rewards=(1.0, None), num_reward_errors=1))
    assert await scene.take() == [0, 1, 2, 3]


async def test_groups_without_variance_are_sampled_again():
    keep = lambda summary: len(set(summary.rewards)) > 1
    scene = Scene(score=lambda i: group_summary(i, rewards=(1.0, float(i % 2))), keep=keep)
    assert await scene.take() == [0, 2, 4, 6]


async def test_an_evaluation_survives_a_death():
    deaths = iter([WorkerError("rollout-0 died in 'generate'")])
    scene = Scene(script=lambda ticket: next(deaths, None) if ticket.index == -2 else None, num_workers=2)
    await scene.pool.start()
    tickets = evaluation_tickets(
        NumberedPrompts(), num_prompts=5, num_samples=1, seed=0, sampling=SAMPLING, policy_version=0
    )
    summaries = await asyncio.wait_for(scene.pool.evaluate(tickets), 10)
    assert sorted(int(summary.group_id) for summary in summaries) == [-5, -4, -3, -2, -1]
