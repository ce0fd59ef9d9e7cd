"""No group is lost and none comes twice, whatever dies on its way."""

import asyncio

import pytest

from cluster.contracts.config import RunConfig
from cluster.contracts.errors import DataError, DeadlineError, LostError, WeightsError, WorkerError
from cluster.contracts.types import ActorKind, Refusal, RewardFailure, SamplingParams
from cluster.rollouts.buffer import Buffer
from cluster.rollouts.tickets import TicketOffice, evaluation_tickets
from cluster.rollouts.worker_pool import Pool
from cluster.supervision.supervisor import Supervisor
from tests.fakes import ListedEvents, NumberedPrompts, ScriptedScorer, ScriptedWorker, actor_spec, death, group_summary

SAMPLING = SamplingParams(max_tokens=4)


def refusal(ticket):
    return Refusal(group_id=ticket.group_id, prompt_id=ticket.prompt.prompt_id, reason="too long")


class Scene:
    """A pool of scripted actors."""

    def __init__(
        self,
        *,
        script=lambda ticket: None,
        score=None,
        num_workers=1,
        keep=lambda summary: True,
        make_worker=ScriptedWorker,
        make_scorer=ScriptedScorer,
        extra_trajectories=0,
        **config,
    ):
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

        self.coming = asyncio.Event()
        self.coming.set()
        self.judging = asyncio.Event()
        self.judging.set()
        self.supervisor = Supervisor(self.config.supervision, self.events)

        self.num_coming = 0
        self.start_error = lambda: None

        async def start(spec):
            self.num_coming += 1
            try:
                await self.coming.wait()
            finally:
                self.num_coming -= 1
            if error := self.start_error():
                raise error
            if spec.kind is ActorKind.ROLLOUT_WORKER:
                self.workers.append(make_worker(spec, script))
                return self.workers[-1]
            return make_scorer(spec, score, gate=self.judging)

        async def join(actor):
            await asyncio.sleep(0)

        self.pool = Pool(
            self.config,
            workers=[actor_spec(f"rollout-{i}") for i in range(num_workers)],
            reward=actor_spec("reward", ActorKind.REWARD_SERVICE),
            reference=None,
            start=start,
            supervisor=self.supervisor,
            join=join,
            keep=keep,
        )
        self.office = TicketOffice(
            source=NumberedPrompts(),
            seed=0,
            trajectories_per_group=2,
            extra_trajectories=extra_trajectories,
            sampling=SAMPLING,
        )

    async def take(self, num_steps=1, **buffer_settings):
        buffer = Buffer(groups_per_step=4, **buffer_settings)
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
    deaths = iter([death("rollout-0")])
    scene = Scene(script=lambda ticket: next(deaths, None) if ticket.index == 2 else None)
    assert await scene.take() == [0, 1, 2, 3]
    assert scene.workers[0].calls == [[0, 1, 2, 3]] and scene.workers[1].calls == [[2, 3]]
    assert scene.events.kinds() == ["failure", "recovery"]


async def test_a_prompt_that_always_kills_is_quarantined_and_replaced_by_another():
    scene = Scene(script=lambda t: death("rollout-0") if t.index == 1 else None)
    assert await scene.take() == [0, 2, 3, 4]
    quarantined = [event for event in scene.events.events if event["kind"] == "quarantine"]
    assert [event["group_id"] for event in quarantined] == ["00000001"]


async def test_one_refused_prompt_of_a_call_costs_one_group_and_the_others_go_on():
    scene = Scene(script=lambda ticket: refusal(ticket) if ticket.index == 1 else None)
    assert await scene.take() == [0, 2, 3, 4]
    assert scene.workers[0].calls == [[0, 1, 2, 3], [4]], "nothing was sampled twice, nothing ran alone"
    (quarantine,) = scene.events.events
    assert (quarantine["kind"], quarantine["group_id"], quarantine["reason"]) == ("quarantine", "00000001", "too long")


async def test_a_refused_prompt_is_left_out_of_an_evaluation():
    scene = Scene(script=lambda ticket: refusal(ticket) if ticket.index == -2 else None)
    await scene.pool.start()
    tickets = evaluation_tickets(
        NumberedPrompts(3), num_prompts=3, num_samples=2, seed=0, sampling=SAMPLING, policy_version=0
    )
    assert len(await scene.pool.evaluate(tickets)) == 2
    assert scene.events.kinds() == ["quarantine"]


async def test_weights_that_fail_attestation_end_the_run_with_their_own_error():
    with pytest.raises(WeightsError, match="stale head"):
        await Scene(script=lambda ticket: WeightsError("stale head")).take()


async def test_a_worker_that_dies_for_ever_spends_the_budget():
    scene = Scene(script=lambda t: death("rollout-0"), supervision={"max_restarts": 2, "backoff_s": 0})
    with pytest.raises(WorkerError, match="restart budget is spent"):
        await scene.take()


async def test_a_run_outlives_the_death_of_all_sixteen_workers_with_the_default_budget():
    dead: set[str] = set()

    class DiesOnce(ScriptedWorker):
        def __init__(self, spec, script):
            super().__init__(spec, script)
            self.is_dead = spec.name not in dead
            dead.add(spec.name)

    scene = Scene(num_workers=16, make_worker=DiesOnce, supervision={})
    await scene.pool.start()
    buffer = Buffer(groups_per_step=64)
    async with scene.pool.generating(into=buffer, office=scene.office):
        taken = await asyncio.wait_for(buffer.take(64), 30)
    assert [index for index, _ in taken] == list(range(64))
    assert scene.events.kinds().count("recovery") == 16


async def test_failed_rewards_are_dropped_never_zero():
    def score(index):
        if index == 0:
            return group_summary(index, rewards=(None, None), num_reward_errors=1, num_reward_timeouts=1)
        return group_summary(index, rewards=(1.0, 0.0))

    scene = Scene(score=score)
    assert await scene.take() == [1, 2, 3, 4]
    assert scene.events.kinds() == ["reward_failure", "drop"]


async def test_some_failed_rewards_train_with_the_others():
    rewards = (1.0, None, 0.0, 1.0)
    scene = Scene(score=lambda i: group_summary(i, num_trajectories=4, rewards=rewards, num_reward_errors=1))
    assert await scene.take() == [0, 1, 2, 3]


async def test_a_reward_that_is_left_alone_is_dropped():
    def score(index):
        if index == 0:
            return group_summary(index, rewards=(1.0, None), num_reward_errors=1)
        return group_summary(index, rewards=(1.0, 0.0))

    assert await Scene(score=score).take() == [1, 2, 3, 4]


async def test_a_reward_that_always_fails_ends_the_run_and_says_so():
    typo = RewardFailure(kind="KeyError", message="KeyError: 'anser'", count=2)
    scene = Scene(score=lambda i: group_summary(i, rewards=(None, None), num_reward_errors=2, reward_failures=(typo,)))
    with pytest.raises(DataError, match="last one because: 2 of 2 rewards failed: KeyError: 'anser'"):
        await scene.take()
    failures = [event for event in scene.events.events if event["kind"] == "reward_failure"]
    assert failures[0]["failures"] == [{"kind": "KeyError", "message": "KeyError: 'anser'", "count": 2}]
    shown = [event["message"] for event in failures if "message" in event]
    assert shown == ["prompt 'p0': 2 of 2 rewards failed: KeyError: 'anser'"], "each kind once a run on the console"


async def test_groups_without_variance_are_sampled_again():
    keep = lambda summary: len(set(summary.rewards)) > 1
    scene = Scene(score=lambda i: group_summary(i, rewards=(1.0, float(i % 2))), keep=keep)
    assert await scene.take() == [0, 2, 4, 6]


async def test_an_evaluation_survives_a_death():
    deaths = iter([death("rollout-0")])
    scene = Scene(script=lambda ticket: next(deaths, None) if ticket.index == -2 else None, num_workers=2)
    await scene.pool.start()
    tickets = evaluation_tickets(
        NumberedPrompts(), num_prompts=5, num_samples=1, seed=0, sampling=SAMPLING, policy_version=0
    )
    summaries = await asyncio.wait_for(scene.pool.evaluate(tickets), 10)
    assert sorted(int(summary.group_id) for summary in summaries) == [-5, -4, -3, -2, -1]


async def test_groups_that_may_start_while_every_worker_is_away_are_not_forgotten():
    scene = Scene()
    buffer = Buffer(groups_per_step=4)
    await scene.pool.start()
    async with scene.pool.generating(into=buffer, office=scene.office):
        await asyncio.wait_for(buffer.take(4), 10)  # now the dispatcher waits for the next version
        scene.coming.clear()
        scene.pool.replace(scene.workers[0], death("rollout-0", "load"))
        await asyncio.sleep(0)
        await buffer.advance(1)
        for _ in range(10):
            await asyncio.sleep(0)
        scene.coming.set()
        assert [index for index, _ in await asyncio.wait_for(buffer.take(4), 10)] == [4, 5, 6, 7]


async def test_a_deterministic_call_is_made_again_whole_after_a_death():
    deaths = iter([death("rollout-0")])
    scene = Scene(script=lambda ticket: next(deaths, None) if ticket.index == 2 else None, deterministic=True)
    assert await scene.take() == [0, 1, 2, 3]
    assert [worker.calls for worker in scene.workers] == [[[0, 1, 2, 3]], [[0, 1, 2, 3]]]


async def test_a_suspect_runs_alone_and_is_absolved_when_nothing_dies():
    deaths = iter([death("rollout-0")] * 2)
    scene = Scene(script=lambda ticket: next(deaths, None) if ticket.index == 0 else None)
    assert await scene.take(num_steps=2) == list(range(8))
    assert scene.workers[2].calls[:4] == [[0], [1], [2], [3]]
    assert scene.supervisor.history.prompt_failures == {}


async def test_a_group_that_kills_the_reward_service_again_and_again_is_quarantined():
    def score(index):
        if index == 1:
            raise death("reward", "score")
        return group_summary(index, rewards=(1.0, 0.0))

    scene = Scene(score=score)
    assert await scene.take() == [0, 2, 3, 4]
    assert [event["group_id"] for event in scene.events.events if event["kind"] == "quarantine"] == ["00000001"]


async def test_a_group_that_went_with_its_node_is_sampled_again():
    lost = iter([LostError("reward, 'score': its node is gone")])

    def score(index):
        if index == 1 and (error := next(lost, None)):
            raise error
        return group_summary(index, rewards=(1.0, 0.0))

    scene = Scene(score=score)
    assert await scene.take() == [0, 1, 2, 3]
    assert scene.workers[0].calls == [[0, 1, 2, 3], [1]] and scene.events.kinds() == ["groups_lost"]


async def test_slow_rewards_slow_sampling_and_nothing_grows():
    scene = Scene(num_workers=3, score=lambda i: group_summary(i, rewards=(1.0, 0.0), size_bytes=100))
    buffer = Buffer(groups_per_step=4, max_off_policy_steps=1)
    await scene.pool.start()
    scene.judging.clear()
    async with scene.pool.generating(into=buffer, office=scene.office):
        for _ in range(100):
            await asyncio.sleep(0)
        sampled = sum(len(call) for worker in scene.workers for call in worker.calls)
        assert sampled == 8, "the window of two steps, and not one group more"
        assert buffer.size_bytes == 8 * 100, "what waits for its reward counts"
        scene.judging.set()
        await asyncio.wait_for(buffer.take(4), 10)


async def test_a_worker_told_to_leave_while_it_waits_for_a_node_asks_for_none_any_more():
    scene = Scene()
    await scene.pool.start()
    scene.coming.clear()
    scene.pool.scale(2, spec=worker_spec)
    await settled()
    assert scene.num_coming == 1
    scene.pool.scale(1, spec=worker_spec)
    await settled()
    assert scene.num_coming == 0 and scene.pool.num_workers == 1
    assert scene.events.kinds() == ["worker_left", "worker_not_joined"]


async def test_a_worker_that_finds_no_room_within_its_deadline_goes_on_waiting():
    scene = Scene()
    await scene.pool.start()
    too_late = iter([DeadlineError("rollout-1 did not finish 'start' within 300 s")])
    scene.start_error = lambda: next(too_late, None)
    scene.pool.scale(2, spec=worker_spec)
    await settled()
    assert scene.events.kinds() == ["worker_waits", "worker_joined"]
    assert len(scene.pool.workers()) == 2


async def test_a_leaving_worker_ends_when_its_stream_has_and_not_with_its_last_group():
    end = asyncio.Event()

    class Lingering(ScriptedWorker):
        async def stream_batches(self, *args, **options):
            async for each in super().stream_batches(*args, **options):
                yield each
            await end.wait()

    scene = Scene(num_workers=2, make_worker=Lingering)
    buffer = Buffer(groups_per_step=4)
    await scene.pool.start()
    await settled()
    async with scene.pool.generating(into=buffer, office=scene.office):
        await asyncio.wait_for(buffer.take(4), 10)
        scene.pool.drain("rollout-1")
        await settled()
        assert not scene.workers[1].is_dead
        end.set()
        await settled()
        assert scene.workers[1].is_dead and not scene.workers[0].is_dead


async def test_who_is_not_there_yet_is_given_back_before_those_that_serve():
    scene = Scene()
    await scene.pool.start()
    scene.coming.clear()
    await scene.pool.places()[0].stop()
    scene.pool.scale(2, spec=worker_spec)
    scene.coming.set()
    await settled()
    scene.pool.scale(1, spec=worker_spec)
    await settled()
    assert [worker.name for worker in scene.pool.workers()] == ["rollout-1"]


def worker_spec(number):
    return actor_spec(f"rollout-{number}")


async def settled():
    """Whatever can go on has gone on."""
    for _ in range(20):
        await asyncio.sleep(0)


async def test_a_long_wait_names_who_does_what():
    scene = Scene()
    await scene.pool.start()
    buffer = Buffer(groups_per_step=2)
    await buffer.start()
    with pytest.raises(
        DeadlineError,
        match="waits for 2 groups at policy version 0 and has 0; nothing moved for",
    ):
        await buffer.take(2, stall_s=0.01)
    assert "rollout-0 never reported progress" in scene.pool.describe()


class StragglingWorker(ScriptedWorker):
    """Finishes its groups at once, but for every tenth: those run until they are given up."""

    def __init__(self, spec, script):
        super().__init__(spec, script)
        self.aborted = []
        self._changed = asyncio.Event()

    async def stream_batches(self, method, tickets, *, deadline_s):
        self.calls.append([ticket.index for ticket in tickets])
        slow = [ticket for ticket in tickets if ticket.index % 10 == 0]
        for ticket in tickets:
            if ticket not in slow:
                await asyncio.sleep(0)
                yield group_summary(ticket.index), ticket.index
        while any(ticket.group_id not in self.aborted for ticket in slow):
            self._changed.clear()
            await self._changed.wait()
            if self.is_dead:
                raise death(self.name)
        for ticket in slow:
            if self.comes_late(ticket):
                yield group_summary(ticket.index), ticket.index

    def comes_late(self, ticket):
        return False

    async def call(self, method, group_ids, *, deadline_s):
        assert method == "abort"
        self.aborted += group_ids
        self._changed.set()
        for _ in range(10):
            await asyncio.sleep(0)  # `generate` goes on before the answer is there

    async def kill(self):
        await super().kill()
        self._changed.set()


class DeafWorker(StragglingWorker):
    """What it is to give up comes all the same."""

    def comes_late(self, ticket):
        return True


class FrailWorker(StragglingWorker):
    """Dies of being told to give something up."""

    async def call(self, method, group_ids, *, deadline_s):
        await self.kill()
        raise death(self.name, "abort")


@pytest.mark.parametrize("make_worker", [StragglingWorker, DeafWorker, FrailWorker])
async def test_a_straggler_is_cut_and_replaced_and_never_seen_again(make_worker):
    judged = []

    def score(index):
        judged.append(index)
        return group_summary(index, rewards=(1.0, 0.0))

    scene = Scene(make_worker=make_worker, score=score)
    taken = await scene.take(num_steps=3, max_off_policy_steps=1, max_head_of_line_s=0.0)
    assert taken == [1, 2, 3, 4, 5, 6, 7, 8, 9, 11, 12, 13]
    drops = [event for event in scene.events.events if event["kind"] == "drop"]
    assert [(event["group_id"], event["reason"]) for event in drops[:2]] == [("00000000", "cut"), ("00000010", "cut")]
    sampled = [index for worker in scene.workers for call in worker.calls for index in call]
    assert sampled.count(0) == sampled.count(10) == 1 and 0 not in judged


async def test_a_cut_straggler_frees_its_place_in_the_worker():
    """Room for two groups: with group 0 still there, group 10 would hold the last place, and nothing could go on."""
    sizes = {"groups_per_step": 1, "trajectories_per_group": 2, "max_off_policy_steps": 1}
    scene = Scene(make_worker=StragglingWorker, buffer=sizes, rollout={"max_concurrent_sequences": 4})
    buffer = Buffer(groups_per_step=1, max_off_policy_steps=1, max_head_of_line_s=0.0)
    await scene.pool.start()
    taken = []
    async with scene.pool.generating(into=buffer, office=scene.office):
        for version in range(1, 13):
            taken += [index for index, _ in await asyncio.wait_for(buffer.take(1), 10)]
            await buffer.advance(version)
    assert taken == [1, 2, 3, 4, 5, 6, 7, 8, 9, 11, 12, 13]


async def test_a_cut_group_whose_reward_was_lost_does_not_start_again():
    lost = asyncio.Event()

    class LateScorer(ScriptedScorer):
        async def call_for_batch(self, method, reference, *, deadline_s):
            if reference == 0:
                await lost.wait()
                raise LostError("reward, 'score': its node is gone")
            return await super().call_for_batch(method, reference, deadline_s=deadline_s)

    scene = Scene(make_scorer=LateScorer)
    buffer = Buffer(groups_per_step=4, max_off_policy_steps=1, max_head_of_line_s=0.0)
    await scene.pool.start()
    async with scene.pool.generating(into=buffer, office=scene.office):
        assert [index for index, _ in await asyncio.wait_for(buffer.take(4), 10)] == [1, 2, 3, 4]
        lost.set()
        await buffer.advance(1)
        assert [index for index, _ in await asyncio.wait_for(buffer.take(4), 10)] == [5, 6, 7, 8]
        scene.pool.drain("rollout-0")
        for _ in range(20):
            await asyncio.sleep(0)
    assert scene.events.kinds() == ["drop", "groups_lost", "worker_left"], "the worker has nothing more to do"


async def test_the_surplus_of_a_group_is_counted():
    scene = Scene(extra_trajectories=3)
    buffer = Buffer(groups_per_step=4)
    await scene.pool.start()
    async with scene.pool.generating(into=buffer, office=scene.office):
        taken = await asyncio.wait_for(buffer.take(4), 10)
    assert [group.summary.num_cut for _, group in taken] == [3] * 4
    assert scene.pool.stats()["rollout/num_cut"] == 12
