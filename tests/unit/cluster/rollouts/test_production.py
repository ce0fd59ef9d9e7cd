"""No group is lost and none comes twice, whatever dies on its way."""

import asyncio
import contextlib

import pytest

from cluster.contracts.config import RunConfig
from cluster.contracts.errors import (
    ConfigError,
    DataError,
    DeadlineError,
    FailureKind,
    LostError,
    WeightsError,
    WorkerError,
)
from cluster.contracts.types import ActorKind, Refusal, RewardFailure, SamplingParams
from cluster.rollouts.buffer import Buffer
from cluster.rollouts.tickets import TicketOffice, evaluation_tickets
from cluster.rollouts.worker_pool import WorkerPool
from cluster.supervision.supervisor import Supervisor
from cluster.supervision.tasks import background
from tests.fakes import (
    InlineExecutor,
    ListedEvents,
    NumberedPrompts,
    ScriptedScorer,
    ScriptedWorker,
    actor_spec,
    death,
    group_summary,
)
from tests.unit.cluster.simulated_time import simulated
from tests.unit.cluster.wired import wired

SAMPLING = SamplingParams(max_tokens=4)


def worker_spec(number):
    return actor_spec(f"rollout-{number}")


class Scene:
    """The rollouts of a run, with scripted actors."""

    def __init__(
        self,
        *,
        script=lambda ticket: None,
        score=lambda index: group_summary(index, rewards=(1.0, 0.0)),
        num_workers=1,
        prompts=None,
        keep=lambda summary: True,
        make_worker=ScriptedWorker,
        make_scorer=ScriptedScorer,
        extra_trajectories=0,
        supervision=None,
        max_concurrent_sequences=256,
        deterministic=False,
    ):
        config = RunConfig.model_validate(
            {"model": {"path": "none"}, "prompts": "none", "supervision": supervision or {}}
        )
        self.events = ListedEvents()
        self.supervisor = Supervisor(config.supervision, self.events)
        self.workers: list[ScriptedWorker] = []
        self.coming = asyncio.Event()
        self.coming.set()
        self.judging = asyncio.Event()
        self.judging.set()
        self.num_coming = 0
        self.start_error = lambda name: None
        self.held: dict[str, asyncio.Event] = {}
        """By worker: what its start waits for."""
        self.office = TicketOffice(
            source=prompts or NumberedPrompts(),
            seed=0,
            trajectories_per_group=2,
            extra_trajectories=extra_trajectories,
            sampling=SAMPLING,
            thread=InlineExecutor(),
        )
        self._make_worker, self._make_scorer = make_worker, make_scorer
        self._script, self._score, self._keep = script, score, keep
        self._num_workers = num_workers
        self._sequences_per_group = 2 + extra_trajectories
        self._max_sequences = max_concurrent_sequences
        self._deterministic = deterministic

    @contextlib.asynccontextmanager
    async def running(self):
        """Everything up."""
        async with asyncio.timeout(3600), background() as tasks:
            self.fleet = WorkerPool(
                [worker_spec(number) for number in range(self._num_workers)],
                joining=worker_spec,
                start=self._start,
                supervisor=self.supervisor,
                join=lambda actor: asyncio.sleep(0),
                tasks=tasks,
                is_deterministic=self._deterministic,
            )
            self.production = wired(
                self.fleet,
                self.office,
                start=self._start,
                supervisor=self.supervisor,
                events=self.events,
                tasks=tasks,
                max_sequences=self._max_sequences,
                sequences_per_group=self._sequences_per_group,
                keep=self._keep,
                is_deterministic=self._deterministic,
            )
            await self.production.start()
            self.production.run(tasks)
            self.events.events.clear()
            yield

    @contextlib.asynccontextmanager
    async def generating(self, buffer):
        async with self.running(), self.production.generating(into=buffer):
            yield

    async def take(self, num_steps=1, **buffer_settings):
        """Indices of the groups that the learner gets."""
        buffer = Buffer(groups_per_step=4, **buffer_settings)
        taken = []
        async with self.generating(buffer):
            for step in range(num_steps):
                taken += [index for index, _ in await buffer.take(4)]
                if step + 1 < num_steps:
                    buffer.advance(step + 1)
            await settled()
        return taken

    async def evaluate(self, num_prompts, *, stall_s=600.0):
        tickets = evaluation_tickets(
            NumberedPrompts(), num_prompts=num_prompts, num_samples=1, seed=0, sampling=SAMPLING, policy_version=0
        )
        return await self.production.evaluate(tickets, stall_s=stall_s)

    async def _start(self, spec):
        self.num_coming += 1
        try:
            await self.coming.wait()
        finally:
            self.num_coming -= 1
        if spec.kind is not ActorKind.ROLLOUT_WORKER:
            return self._make_scorer(spec, self._score, gate=self.judging)
        if spec.name in self.held:
            await self.held[spec.name].wait()
        if error := self.start_error(spec.name):
            raise error
        self.workers.append(self._make_worker(spec, self._script))
        return self.workers[-1]


def refusal(ticket):
    return Refusal(group_id=ticket.group_id, prompt_id=ticket.prompt.prompt_id, reason="too long")


@simulated
async def test_every_group_comes_once_and_in_order():
    assert await Scene(num_workers=3).take(num_steps=3) == list(range(12))


@simulated
async def test_a_dead_workers_unfinished_groups_start_again():
    deaths = iter([death("rollout-0")])
    scene = Scene(script=lambda ticket: next(deaths, None) if ticket.index == 2 else None)
    assert await scene.take() == [0, 1, 2, 3]
    assert scene.workers[0].calls == [[0, 1, 2, 3]] and scene.workers[1].calls == [[2, 3]]
    assert scene.events.kinds() == ["failure", "recovery"]


@simulated
async def test_a_prompt_that_always_kills_is_quarantined_and_replaced_by_another():
    scene = Scene(script=lambda t: death("rollout-0") if t.index == 1 else None)
    assert await scene.take() == [0, 2, 3, 4]
    quarantined = [event for event in scene.events.events if event["kind"] == "quarantine"]
    assert [event["group_id"] for event in quarantined] == ["00000001"]


@simulated
async def test_one_refused_prompt_of_a_call_costs_one_group_and_the_others_go_on():
    scene = Scene(script=lambda ticket: refusal(ticket) if ticket.index == 1 else None)
    assert await scene.take() == [0, 2, 3, 4]
    assert scene.workers[0].calls == [[0, 1, 2, 3], [4]], "nothing was sampled twice, nothing ran alone"
    quarantine, drop = scene.events.events
    assert (drop["kind"], drop["reason"]) == ("drop", "refused")
    assert (quarantine["kind"], quarantine["group_id"], quarantine["reason"]) == ("quarantine", "00000001", "too long")


@simulated
async def test_a_refused_prompt_is_left_out_of_an_evaluation():
    scene = Scene(script=lambda ticket: refusal(ticket) if ticket.index == -2 else None)
    async with scene.running():
        held_out = await scene.evaluate(3)
    assert len(held_out.summaries) == 2 and held_out.num_dropped == 1
    assert scene.events.kinds() == ["quarantine"]


@simulated
async def test_a_worker_that_refuses_to_serve_is_replaced_and_no_prompt_is_blamed():
    refusals = iter([WeightsError("nothing is served: the last load failed")] * 2)
    scene = Scene(script=lambda ticket: next(refusals, None))
    assert await scene.take() == [0, 1, 2, 3]
    assert scene.workers[2].calls == [[0, 1, 2, 3]], "together: nothing runs alone"


@simulated
async def test_a_worker_that_dies_for_ever_spends_the_budget():
    scene = Scene(script=lambda t: death("rollout-0"), supervision={"max_restarts": 2, "backoff_s": 0})
    with pytest.raises(WorkerError, match="restart budget is spent"):
        await scene.take()


@simulated
async def test_a_run_outlives_the_death_of_all_sixteen_workers_with_the_default_budget():
    dead: set[str] = set()

    class DiesOnce(ScriptedWorker):
        def __init__(self, spec, script):
            super().__init__(spec, script)
            if spec.name not in dead:
                self._death.set()
            dead.add(spec.name)

    scene = Scene(num_workers=16, make_worker=DiesOnce, supervision={})
    buffer = Buffer(groups_per_step=64)
    async with scene.generating(buffer):
        taken = await buffer.take(64)
    assert [index for index, _ in taken] == list(range(64))
    assert scene.events.kinds().count("recovery") == 16


@simulated
async def test_failed_rewards_are_dropped_never_zero():
    def score(index):
        if index == 0:
            return group_summary(index, rewards=(None, None), num_reward_errors=1, num_reward_timeouts=1)
        return group_summary(index, rewards=(1.0, 0.0))

    scene = Scene(score=score)
    assert await scene.take() == [1, 2, 3, 4]
    assert scene.events.kinds() == ["reward_failure", "drop"]


@simulated
async def test_some_failed_rewards_train_with_the_others():
    rewards = (1.0, None, 0.0, 1.0)
    scene = Scene(score=lambda i: group_summary(i, num_trajectories=4, rewards=rewards, num_reward_errors=1))
    assert await scene.take() == [0, 1, 2, 3]


@simulated
async def test_a_reward_that_is_left_alone_is_dropped():
    def score(index):
        if index == 0:
            return group_summary(index, rewards=(1.0, None), num_reward_errors=1)
        return group_summary(index, rewards=(1.0, 0.0))

    assert await Scene(score=score).take() == [1, 2, 3, 4]


@simulated
async def test_a_reward_that_always_fails_ends_the_run_and_says_so():
    typo = RewardFailure(kind="KeyError", message="KeyError: 'anser'", count=2)
    scene = Scene(score=lambda i: group_summary(i, rewards=(None, None), num_reward_errors=2, reward_failures=(typo,)))
    with pytest.raises(DataError, match="last one because: 2 of 2 rewards failed: KeyError: 'anser'"):
        await scene.take()
    failures = [event for event in scene.events.events if event["kind"] == "reward_failure"]
    assert failures[0]["failures"] == [{"kind": "KeyError", "message": "KeyError: 'anser'", "count": 2}]
    shown = [event["message"] for event in failures if "message" in event]
    assert shown == ["prompt 'p0': 2 of 2 rewards failed: KeyError: 'anser'"], "each kind once a run on the console"


@simulated
async def test_groups_without_variance_are_sampled_again():
    keep = lambda summary: len(set(summary.rewards)) > 1
    scene = Scene(score=lambda i: group_summary(i, rewards=(1.0, float(i % 2))), keep=keep)
    assert await scene.take() == [0, 2, 4, 6]


@simulated
async def test_an_evaluation_survives_a_death():
    deaths = iter([death("rollout-0")])
    scene = Scene(script=lambda ticket: next(deaths, None) if ticket.index == -2 else None, num_workers=2)
    async with scene.running():
        held_out = await scene.evaluate(5)
    assert sorted(int(summary.group_id) for summary in held_out.summaries) == [-5, -4, -3, -2, -1]


@simulated
async def test_groups_that_may_start_while_every_worker_is_away_are_not_forgotten():
    scene = Scene()
    buffer = Buffer(groups_per_step=4)
    async with scene.generating(buffer):
        await buffer.take(4)  # now the dispatcher waits for the next version
        scene.coming.clear()
        scene.fleet.replace(scene.workers[0], death("rollout-0", "load"))
        await asyncio.sleep(0)
        buffer.advance(1)
        for _ in range(10):
            await asyncio.sleep(0)
        scene.coming.set()
        assert [index for index, _ in await buffer.take(4)] == [4, 5, 6, 7]


@simulated
async def test_a_deterministic_call_is_made_again_whole_after_a_death():
    deaths = iter([death("rollout-0")])
    scene = Scene(script=lambda ticket: next(deaths, None) if ticket.index == 2 else None, deterministic=True)
    assert await scene.take() == [0, 1, 2, 3]
    assert [worker.calls for worker in scene.workers] == [[[0, 1, 2, 3]], [[0, 1, 2, 3]]]


@simulated
async def test_a_suspect_runs_alone_and_is_absolved_when_nothing_dies():
    deaths = iter([death("rollout-0")] * 2)
    scene = Scene(script=lambda ticket: next(deaths, None) if ticket.index == 0 else None)
    assert await scene.take(num_steps=2) == list(range(8))
    assert scene.workers[2].calls == [[0], [1], [2], [3], [4, 5, 6, 7]]


@simulated
async def test_a_group_that_kills_the_reward_service_again_and_again_is_quarantined():
    def score(index):
        if index == 1:
            raise death("reward", "score")
        return group_summary(index, rewards=(1.0, 0.0))

    scene = Scene(score=score)
    assert await scene.take() == [0, 2, 3, 4]
    assert [event["group_id"] for event in scene.events.events if event["kind"] == "quarantine"] == ["00000001"]


@simulated
async def test_a_group_that_went_with_its_node_is_sampled_again():
    lost = iter([LostError("reward, 'score': its node is gone")])

    def score(index):
        if index == 1 and (error := next(lost, None)):
            raise error
        return group_summary(index, rewards=(1.0, 0.0))

    scene = Scene(score=score)
    assert await scene.take() == [0, 1, 2, 3]
    assert scene.workers[0].calls == [[0, 1, 2, 3], [1]] and scene.events.kinds() == ["groups_lost"]


@simulated
async def test_slow_rewards_slow_sampling_and_nothing_grows():
    scene = Scene(num_workers=3, score=lambda i: group_summary(i, rewards=(1.0, 0.0), size_bytes=100))
    buffer = Buffer(groups_per_step=4, max_off_policy_steps=1)
    scene.judging.clear()
    async with scene.generating(buffer):
        for _ in range(100):
            await asyncio.sleep(0)
        sampled = sum(len(call) for worker in scene.workers for call in worker.calls)
        assert sampled == 8, "the window of two steps, and not one group more"
        assert buffer.size_bytes == 8 * 100, "what waits for its reward counts"
        scene.judging.set()
        await buffer.take(4)


@simulated
async def test_a_worker_told_to_leave_while_it_waits_for_a_node_asks_for_none_any_more():
    scene = Scene()
    async with scene.running():
        scene.coming.clear()
        scene.fleet.want(2)
        await settled()
        assert scene.num_coming == 1
        scene.fleet.want(1)
        await settled()
        assert scene.num_coming == 0 and len(scene.fleet.places()) == 1
    assert scene.events.kinds() == ["worker_left"]


@simulated
async def test_a_worker_that_finds_no_room_within_its_deadline_goes_on_waiting():
    scene = Scene()
    async with scene.running():
        too_late = iter([DeadlineError("rollout-1 did not finish 'start' within 300 s", stage="start")])
        scene.start_error = lambda name: next(too_late, None)
        scene.fleet.want(2)
        await settled()
        assert scene.events.kinds() == ["worker_waits", "worker_joined"]
        assert len(scene.fleet.workers()) == 2


@simulated
async def test_a_leaving_worker_ends_when_its_stream_has_and_not_with_its_last_group():
    end = asyncio.Event()

    class Lingering(ScriptedWorker):
        async def stream_batches(self, *args, **options):
            async for each in super().stream_batches(*args, **options):
                yield each
            await end.wait()

    scene = Scene(num_workers=2, make_worker=Lingering)
    buffer = Buffer(groups_per_step=4)
    await settled()
    async with scene.generating(buffer):
        await buffer.take(4)
        scene.fleet.drain("rollout-1")
        await settled()
        assert not scene.workers[1].is_dead
        end.set()
        await settled()
        assert scene.workers[1].is_dead and not scene.workers[0].is_dead


@simulated
async def test_a_worker_that_is_not_there_yet_is_given_back_before_those_that_serve():
    scene = Scene(num_workers=2)
    async with scene.running():
        await settled()
        scene.coming.clear()
        scene.fleet.replace(scene.fleet.workers()[0], death("rollout-0"))
        await settled()
        scene.fleet.want(1)
        await settled()
        assert [worker.name for worker in scene.fleet.workers()] == ["rollout-1"]


async def settled():
    """Whatever can go on has gone on."""
    for _ in range(30):
        await asyncio.sleep(0)


@simulated
async def test_a_long_wait_names_what_every_actor_does():
    scene = Scene(script=lambda ticket: None)
    scene.judging.clear()
    buffer = Buffer(groups_per_step=2)
    async with scene.generating(buffer):
        with pytest.raises(
            DeadlineError, match="waits for 2 groups at policy version 0 and has 0; nothing moved for 5 s"
        ):
            await buffer.take(2, stall_s=5.0)
        assert "rollout-0 never reported progress" in scene.production.describe()


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
@simulated
async def test_a_straggler_is_dropped_and_replaced_and_never_seen_again(make_worker):
    judged = []

    def score(index):
        judged.append(index)
        return group_summary(index, rewards=(1.0, 0.0))

    scene = Scene(make_worker=make_worker, score=score)
    taken = await scene.take(num_steps=3, max_off_policy_steps=1, max_head_of_line_s=0.0)
    assert taken == [1, 2, 3, 4, 5, 6, 7, 8, 9, 11, 12, 13]
    drops = [event for event in scene.events.events if event["kind"] == "drop"]
    assert [(event["group_id"], event["reason"]) for event in drops[:2]] == [
        ("00000000", "straggler"),
        ("00000010", "straggler"),
    ]
    sampled = [index for worker in scene.workers for call in worker.calls for index in call]
    assert sampled.count(0) == sampled.count(10) == 1 and 0 not in judged


@simulated
async def test_a_dropped_straggler_frees_its_place_in_the_worker():
    """Room for two groups: with group 0 still there, group 10 would hold the last place, and nothing could go on."""
    scene = Scene(make_worker=StragglingWorker, max_concurrent_sequences=4)
    buffer = Buffer(groups_per_step=1, max_off_policy_steps=1, max_head_of_line_s=0.0)
    taken = []
    async with scene.generating(buffer):
        for version in range(1, 13):
            taken += [index for index, _ in await buffer.take(1)]
            buffer.advance(version)
    assert taken == [1, 2, 3, 4, 5, 6, 7, 8, 9, 11, 12, 13]


@simulated
async def test_a_worker_that_hangs_is_given_no_group_in_the_place_of_a_straggler():
    """Seen in the simulator: its places were free as soon as it had not heard of the straggler within 30 s."""

    class Hangs(ScriptedWorker):
        async def call(self, method, group_ids, *, deadline_s):
            await asyncio.sleep(deadline_s)
            raise DeadlineError(f"{self.name} did not finish {method!r}", actor=self.name, stage=method)

    never = asyncio.Event()
    scene = Scene(
        num_workers=2, make_worker=Hangs, script=lambda t: None if t.index else never, max_concurrent_sequences=2
    )
    buffer = Buffer(groups_per_step=1, max_off_policy_steps=1, max_head_of_line_s=0.0)
    async with scene.running():
        await settled()
        async with scene.production.generating(into=buffer):
            for version in range(1, 4):
                await buffer.take(1)
                await asyncio.sleep(60)
                buffer.advance(version)
            hanging, other = [[index for call in worker.calls for index in call] for worker in scene.workers]
            assert hanging == [0] and set(other) >= {1, 2, 3}


@simulated
async def test_a_straggler_whose_reward_was_lost_does_not_start_again():
    lost = asyncio.Event()

    class LateScorer(ScriptedScorer):
        async def call_for_batch(self, method, object_ref, *, deadline_s):
            if object_ref == 0:
                await lost.wait()
                raise LostError("reward, 'score': its node is gone")
            return await super().call_for_batch(method, object_ref, deadline_s=deadline_s)

    scene = Scene(make_scorer=LateScorer)
    buffer = Buffer(groups_per_step=4, max_off_policy_steps=1, max_head_of_line_s=0.0)
    async with scene.generating(buffer):
        assert [index for index, _ in await buffer.take(4)] == [1, 2, 3, 4]
        lost.set()
        buffer.advance(1)
        assert [index for index, _ in await buffer.take(4)] == [5, 6, 7, 8]
        scene.fleet.drain("rollout-0")
        await settled()
        assert scene.events.kinds() == ["drop", "groups_lost", "worker_left"], "the worker has nothing more to do"


@simulated
async def test_the_surplus_of_a_group_is_counted():
    scene = Scene(extra_trajectories=3)
    buffer = Buffer(groups_per_step=4)
    async with scene.generating(buffer):
        await buffer.take(4)
        assert scene.production.drain_stats()["rollout/num_aborted"] == 12


@simulated
async def test_a_slow_worker_gets_no_more_than_it_has_places_for():
    """The even deal of before gave 19 groups to a worker with 8 places."""
    gate = asyncio.Event()

    class Slow(ScriptedWorker):
        async def stream_batches(self, method, tickets, *, deadline_s):
            if self.name == "rollout-0":
                self.calls.append([ticket.index for ticket in tickets])
                await gate.wait()
                self.calls.pop()
            async for each in super().stream_batches(method, tickets, deadline_s=deadline_s):
                yield each

    scene = Scene(num_workers=2, make_worker=Slow, max_concurrent_sequences=16)
    buffer = Buffer(groups_per_step=64)
    async with scene.generating(buffer):
        await asyncio.sleep(60)
        given = {worker.name: sum(map(len, worker.calls)) for worker in scene.workers}
        assert given == {"rollout-0": 8, "rollout-1": 56}
        gate.set()
        assert len(await buffer.take(64)) == 64


@simulated
async def test_places_that_queued_groups_leave_are_filled_at_once():
    """Seen in the simulator: three workers with one place each have places for three groups of two, as one place is enough to start
    in. Two were started, and the third worker stood idle until one of them was finished."""
    never = asyncio.Event()
    scene = Scene(num_workers=3, script=lambda ticket: never, max_concurrent_sequences=1)
    async with scene.running():
        await settled()
        async with scene.production.generating(into=Buffer(groups_per_step=8)):
            await asyncio.sleep(60)
            assert sorted(worker.calls for worker in scene.workers) == [[[0]], [[1]], [[2]]]


@simulated
async def test_an_evaluation_waits_for_a_worker_and_does_not_spin():
    scene = Scene()
    async with scene.running():
        scene.coming.clear()
        scene.fleet.replace(scene.workers[0], death("rollout-0"))
        evaluating = asyncio.create_task(scene.evaluate(3))
        await asyncio.sleep(60)
        assert not evaluating.done()
        scene.coming.set()
        assert len((await evaluating).summaries) == 3


@simulated
async def test_a_suspect_runs_on_one_worker_while_the_others_go_on():
    """Two workers: the prompt of group 0 kills twice, then waits for its trial; the other worker never pauses."""
    deaths = iter([death("rollout-0")] * 2)
    trial = asyncio.Event()
    on_trial = []

    class Patient(ScriptedWorker):
        async def stream_batches(self, method, tickets, *, deadline_s):
            if [ticket.index for ticket in tickets] == [0] and deaths_are_over:
                on_trial.append(self.name)
                await trial.wait()
            async for each in super().stream_batches(method, tickets, deadline_s=deadline_s):
                yield each

    deaths_are_over = []

    def script(ticket):
        if ticket.index != 0:
            return None
        error = next(deaths, None)
        deaths_are_over.extend([] if error else [True])
        return error

    scene = Scene(num_workers=2, make_worker=Patient, script=script, max_concurrent_sequences=2)
    buffer = Buffer(groups_per_step=8)
    async with scene.generating(buffer):
        await asyncio.sleep(600)
        assert buffer.drain_stats()["buffer/num_ready"] >= 7, "all but the suspect"
        trial.set()
        assert [index for index, _ in await buffer.take(8)] == list(range(8))


@simulated
async def test_suspects_that_wait_for_their_trial_leave_all_places_of_the_other_workers_in_use():
    """Two workers with places for 8 groups each. Group 0 kills its company of 8 twice: one of the 8 is tried, 7 wait in the queue."""
    deaths, never = iter([death("rollout-0")] * 2), asyncio.Event()
    scene = Scene(
        num_workers=2,
        script=lambda ticket: never if ticket.index else next(deaths, None),
        max_concurrent_sequences=16,
    )
    async with scene.running():
        await settled()
        async with scene.production.generating(into=Buffer(groups_per_step=64)):
            await asyncio.sleep(60)
            company, others, again, successor = [worker.calls for worker in scene.workers]
            assert company == again == [[0, 2, 4, 6, 8, 10, 12, 14]]
            assert others == [[1, 3, 5, 7, 9, 11, 13, 15]], "it is to try the suspects when these are finished"
            assert successor == [[16, 17, 18, 19, 20, 21, 22, 23]]


@simulated
async def test_a_load_that_misses_its_deadline_blames_no_prompt():
    """The driver kills the worker for it, and the groups that it was sampling die."""
    gate = asyncio.Event()
    scene = Scene(script=lambda ticket: gate)
    buffer = Buffer(groups_per_step=4)
    async with scene.generating(buffer):
        for _ in range(2):
            await asyncio.sleep(60)
            late = DeadlineError("rollout-0 did not finish 'load' within 600 s", actor="rollout-0", stage="load")
            scene.fleet.replace(scene.workers[-1], late)
        await asyncio.sleep(60)
        gate.set()
        assert [index for index, _ in await buffer.take(4)] == [0, 1, 2, 3]
    assert [worker.calls for worker in scene.workers] == [[[0, 1, 2, 3]]] * 3, "together: nothing runs alone"


@simulated
async def test_an_error_of_one_call_blames_no_group_of_the_workers_other_calls():
    """Group 4 takes the place of group 0 in a call of its own, and raises: groups 1 to 3 die when the worker is replaced."""
    gate = asyncio.Event()
    bug = iter([WorkerError("rollout-0 failed in 'generate': TypeError", actor="rollout-0", stage="generate")])

    def script(ticket):
        return next(bug, None) if ticket.index == 4 else gate if 1 <= ticket.index <= 3 else None

    scene = Scene(script=script, max_concurrent_sequences=8, supervision={"max_prompt_failures": 2})
    buffer = Buffer(groups_per_step=8)
    async with scene.generating(buffer):
        await asyncio.sleep(60)
        gate.set()
        assert [index for index, _ in await buffer.take(8)] == list(range(8))
    assert scene.workers[0].calls == [[0, 1, 2, 3], [4]]
    assert scene.workers[1].calls[:2] == [[4], [1, 2, 3]], "none but group 4 is tried alone"


@simulated
async def test_an_error_of_one_judging_blames_no_group_that_is_judged_beside_it():
    """Judging group 1 fails twice, and the service is replaced under the other three."""
    bugs = iter([WorkerError("reward failed in 'score': TypeError", actor="reward", stage="score")] * 2)
    judged = []

    class Scorer(ScriptedScorer):
        async def call_for_batch(self, method, object_ref, *, deadline_s):
            judged.append(object_ref)
            if object_ref == 1:
                await asyncio.sleep(1)
                if bug := next(bugs, None):
                    raise bug
                return self._score(object_ref), object_ref
            return await super().call_for_batch(method, object_ref, deadline_s=deadline_s)

    scene = Scene(make_scorer=Scorer)
    scene.judging.clear()
    buffer = Buffer(groups_per_step=4)
    async with scene.generating(buffer):
        await asyncio.sleep(60)
        assert judged[8] == 1, "it is tried alone"
        assert sorted(judged[9:]) == [0, 2, 3], "then they are judged side by side"
        scene.judging.set()
        assert [index for index, _ in await buffer.take(4)] == [0, 1, 2, 3]


class EachTwice(NumberedPrompts):
    """Two rows each are one prompt: with four rows, both of a prompt come in the first step, and again in each epoch."""

    def __getitem__(self, index):
        return super().__getitem__(index // 2)


@simulated
async def test_a_guilty_prompt_that_waits_to_be_judged_twice_is_not_judged_again():
    kills = []

    def score(index):
        if scene.office.prompt(index).prompt_id == "p1":
            kills.append(index)
            raise death("reward", "score")
        return group_summary(index, rewards=(1.0, 0.0))

    scene = Scene(score=score, prompts=EachTwice(4))
    assert len(await scene.take()) == 4
    assert len(kills) == 2, "once in company, where both of its groups were blamed, and once alone"
    assert scene.events.kinds().count("quarantine") == 1


@simulated
async def test_a_guilty_prompt_that_is_queued_twice_kills_three_workers_and_no_more():
    deaths = []

    def script(ticket):
        if ticket.prompt.prompt_id != "p1":
            return None
        deaths.append(ticket.index)
        return death("rollout-0")

    scene = Scene(script=script, prompts=EachTwice(4))
    assert len(await scene.take()) == 4
    assert len(deaths) == 3
    assert scene.workers[2].calls == [deaths[-1:]], "the third time alone"


@simulated
async def test_a_stream_that_is_lost_with_its_node_blames_nobody_and_its_groups_start_again():
    lost = iter([LostError("rollout-0, 'generate': its owner has died")])
    aborted = []

    class Worker(ScriptedWorker):
        async def call(self, method, group_ids, *, deadline_s):
            aborted.append((method, group_ids))

    scene = Scene(make_worker=Worker, script=lambda ticket: next(lost, None) if ticket.index == 2 else None)
    assert await scene.take() == [0, 1, 2, 3]
    assert scene.workers[0].calls == [[0, 1, 2, 3], [2, 3]] and len(scene.workers) == 1
    assert aborted == [("abort", ["00000002", "00000003"])], "the worker may live: it must not sample them twice"
    assert [(event["kind"], event["groups"]) for event in scene.events.events] == [("groups_lost", [2, 3])]


@simulated
async def test_an_evaluation_that_nothing_moves_meets_its_deadline_and_says_what_every_actor_does():
    scene = Scene()
    async with scene.running():
        scene.coming.clear()
        scene.fleet.replace(scene.workers[0], death("rollout-0"))
        with pytest.raises(
            DeadlineError,
            match="evaluation waits for 3 of 3 groups; nothing moved for 600 s; rollout-0 is in phase 'starting'",
        ):
            await scene.evaluate(3, stall_s=600.0)


@simulated
async def test_an_evaluation_may_take_longer_than_its_deadline_while_groups_move():
    class Slow(ScriptedScorer):
        async def call_for_batch(self, method, object_ref, *, deadline_s):
            await asyncio.sleep(-50 * object_ref)  # of the groups -1, -2 and -3
            return await super().call_for_batch(method, object_ref, deadline_s=deadline_s)

    scene = Scene(make_scorer=Slow)
    async with scene.running():
        assert len((await scene.evaluate(3, stall_s=60.0)).summaries) == 3


@simulated
async def test_a_judge_that_fails_on_held_out_prompts_says_why():
    typo = RewardFailure(kind="KeyError", message="KeyError: 'anser'", count=1)
    failed = {"num_trajectories": 1, "rewards": (None,), "num_reward_errors": 1, "reward_failures": (typo,)}
    scene = Scene(score=lambda index: group_summary(index, **failed))
    async with scene.running():
        held_out = await scene.evaluate(2)
    assert len(held_out.summaries) == 2
    assert scene.events.kinds() == ["reward_failure"] * 2
    assert [event["message"] for event in scene.events.events if "message" in event] == [
        "prompt 'p-1': 1 of 1 rewards failed: KeyError: 'anser'"
    ]


@simulated
async def test_a_straggler_that_is_dropped_while_its_ticket_is_made_is_an_event_too():
    """Group 0 was lost after it was taken: when it is to be sampled again, group 1 is finished behind it."""
    scene = Scene()
    made, make = asyncio.Event(), scene.office.tickets
    buffer = Buffer(groups_per_step=1, max_off_policy_steps=1, max_head_of_line_s=5.0)

    async def make_late(indices, *, policy_version):
        await made.wait()
        return await make(indices, policy_version=policy_version)

    async with scene.generating(buffer):
        taken = await buffer.take(1)
        await settled()
        scene.office.tickets = make_late
        buffer.put_back(taken, lost={0})
        scene.production.sample_again({0})
        assert [index for index, _ in await buffer.take(1)] == [1]
        made.set()
        await settled()
    assert scene.events.events == [
        {"kind": "drop", "group_id": "00000000", "prompt_id": scene.office.prompt(0).prompt_id, "reason": "straggler"}
    ]


@simulated
async def test_joins_that_fail_are_tried_again_until_the_fleet_is_whole():
    """One drained worker and one failed replacement left no worker for ever."""
    scene = Scene()
    async with scene.running():
        failures = iter([WorkerError("no such image", kind=FailureKind.ERROR)] * 3)
        scene.start_error = lambda name: next(failures, None)
        scene.fleet.drain("rollout-0")
        await asyncio.sleep(300)
        assert len(scene.fleet.serving()) == 1
        assert scene.events.kinds().count("worker_not_joined") == 3


@simulated
async def test_a_fleet_of_which_many_fail_to_join_converges():
    """Of 128 wanted workers 30 failed, and the fleet stayed at 98."""
    scene = Scene()
    async with scene.running():
        failures = iter([WorkerError("no such image", kind=FailureKind.ERROR)] * 30)
        scene.start_error = lambda name: next(failures, None)
        scene.fleet.want(128)
        await asyncio.sleep(600)
        assert len(scene.fleet.serving()) == 128


def no_disk(name):
    """Why every worker beyond the first does not start."""
    return None if name == "rollout-0" else WorkerError(f"{name} failed in 'build': no disk", actor=name)


@simulated
async def test_a_spare_that_never_joins_does_not_end_the_run_while_the_only_worker_restarts():
    """Seen before: 10 joins had failed, 2 wanted and 8 restarts, and the next one ended the run in the middle of the restart."""
    scene = Scene()
    scene.start_error = no_disk
    async with scene.running():
        scene.fleet.want(2)
        await asyncio.sleep(600)
        num_failed = scene.events.kinds().count("worker_not_joined")
        assert num_failed > 10
        restart = scene.held["rollout-0"] = asyncio.Event()
        scene.fleet.replace(scene.workers[0], death("rollout-0"))
        await asyncio.sleep(120)
        assert scene.events.kinds().count("worker_not_joined") > num_failed
        assert scene.fleet.serving() == []
        restart.set()
        await settled()
        assert [member.name for member in scene.fleet.serving()] == ["rollout-0"]


@simulated
async def test_after_a_worker_came_back_the_next_that_fails_to_join_is_the_first_again():
    scene = Scene()
    scene.start_error = no_disk
    with pytest.raises(WorkerError, match="no disk"):
        async with scene.running():
            scene.fleet.want(2)
            await asyncio.sleep(600)
            scene.fleet.replace(scene.workers[0], death("rollout-0"))
            await settled()
            scene.fleet.drain("rollout-0")
            num_failed = scene.events.kinds().count("worker_not_joined")
            await asyncio.Event().wait()
    assert scene.events.kinds().count("worker_not_joined") == num_failed + 10, "2 wanted and 8 restarts"


@simulated
async def test_a_deliberate_error_while_a_worker_joins_is_tried_again_once_the_fleet_has_served():
    scene = Scene()
    async with scene.running():
        errors = iter([ConfigError("model.path='org/model' does not load: the hub does not answer")])
        scene.start_error = lambda name: next(errors, None)
        scene.fleet.want(2)
        await asyncio.sleep(60)
        assert scene.events.kinds() == ["worker_not_joined", "worker_joined"]
        assert len(scene.fleet.serving()) == 2


@simulated
async def test_a_deliberate_error_of_the_first_workers_ends_the_run():
    scene = Scene(num_workers=2)
    scene.held["rollout-0"] = asyncio.Event()
    scene.start_error = lambda name: ConfigError("model.path='org/typo' does not load")
    with pytest.raises(ConfigError, match="typo"):
        await scene.take()


@simulated
async def test_a_first_worker_that_fails_is_replaced_while_another_first_one_still_loads():
    scene = Scene(num_workers=2)
    scene.held["rollout-0"] = asyncio.Event()
    failures = iter([WorkerError("rollout-1 failed in 'build': no disk", actor="rollout-1")])
    scene.start_error = lambda name: next(failures, None)
    async with scene.running():
        assert [member.name for member in scene.fleet.serving()] == ["rollout-2"]
        scene.held["rollout-0"].set()
        await settled()
        assert len(scene.fleet.serving()) == 2


@simulated
async def test_a_deterministic_run_that_one_worker_cannot_join_ends_with_its_error():
    """Seen before: it waited for ever, for a worker that nobody started."""
    scene = Scene(num_workers=2, deterministic=True)
    scene.start_error = lambda name: None if name == "rollout-0" else WorkerError("no such model", actor=name)
    with pytest.raises(WorkerError, match="no such model"):
        await scene.take()


@simulated
async def test_a_worker_that_found_a_node_and_loads_for_too_long_has_failed():
    """Seen before: it counted as waiting for a node, for ever."""
    scene = Scene(num_workers=2)
    scene.start_error = lambda name: DeadlineError(
        f"{name} did not finish 'build' within 300 s", actor=name, stage="build"
    )
    with pytest.raises(DeadlineError, match="'build' within 300 s"):
        await scene.take()


@simulated
async def test_the_learners_failure_that_a_joining_worker_meets_ends_the_run():
    """Seen before: it was taken for the worker's, and the next step met a learner without ranks."""
    scene = Scene()
    spent = WorkerError("learner-0: killed; the restart budget is spent", kind=FailureKind.DEATH, actor="learner-0")
    scene.start_error = lambda name: None if name == "rollout-0" else spent
    with pytest.raises(WorkerError, match="learner-0: killed; the restart budget is spent"):
        async with scene.running():
            scene.fleet.want(2)
            await asyncio.Event().wait()
    assert scene.events.kinds() == []


@simulated
async def test_a_run_whose_workers_can_never_start_ends_with_their_error():
    scene = Scene(num_workers=2)
    scene.start_error = lambda name: WorkerError("rollout failed in 'build': no such model", kind=FailureKind.ERROR)
    with pytest.raises(WorkerError, match="no such model"):
        await scene.take()


@simulated
async def test_restarts_are_metrics_with_their_reasons():
    deaths = iter([death("rollout-0")])
    scene = Scene(script=lambda ticket: next(deaths, None))
    buffer = Buffer(groups_per_step=4)
    async with scene.generating(buffer):
        await buffer.take(4)
        stats = scene.production.drain_stats()
        assert (stats["supervision/num_restarts"], stats["supervision/num_deaths"]) == (1, 1)
        assert (stats["rollout/num_workers"], stats["rollout/num_wanted"]) == (1, 1)
        assert scene.production.drain_stats()["supervision/num_restarts"] == 0


@simulated
async def test_prompts_that_are_all_refused_end_the_run_and_blame_no_worker():
    scene = Scene(script=refusal)
    with pytest.raises(DataError, match="80 groups in a row were dropped, the last one because: refused"):
        await scene.take()
    assert "failure" not in scene.events.kinds()
