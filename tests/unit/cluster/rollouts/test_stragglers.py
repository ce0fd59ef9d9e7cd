"""Groups that a step does not wait for are given up once, and their places are free when their worker has heard of it."""

import asyncio

import pytest

from cluster.contracts.errors import DeadlineError, LostError
from cluster.rollouts.buffer import Buffer
from tests.fakes import ScriptedScorer, ScriptedWorker, death, group_summary
from tests.unit.cluster.rollouts.scene import Scene, refusal, settled
from tests.unit.cluster.simulated_time import pass_time, simulated


class StragglingWorker(ScriptedWorker):
    """Finishes its groups at once, but for every tenth: those run until they are given up."""

    def __init__(self, spec, script):
        super().__init__(spec, script)
        self.aborted = []
        self._changed = asyncio.Event()

    async def stream_batches(self, method, tickets, **options):
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


class Counting(Buffer):
    """Knows how often each group was reported as dropped."""

    def __init__(self, **settings):
        super().__init__(**settings)
        self.reported = []

    def drop(self, index, *, reason, why=""):
        self.reported.append(index)
        super().drop(index, reason=reason, why=why)


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
    buffer = Counting(groups_per_step=4, max_off_policy_steps=1, max_head_of_line_s=0.0)
    taken = []
    async with scene.generating(buffer):
        for version in range(1, 4):
            taken += [index for index, _ in await buffer.take(4)]
            await settled()
            if version < 3:
                buffer.advance(version)
    assert taken == [1, 2, 3, 4, 5, 6, 7, 8, 9, 11, 12, 13]
    assert buffer.reported == [0, 10]
    drops = [event for event in scene.events.events if event["kind"] == "drop"]
    assert [(event["group_id"], event["reason"]) for event in drops[:2]] == [
        ("00000000", "straggler"),
        ("00000010", "straggler"),
    ]
    sampled = [index for worker in scene.workers for call in worker.calls for index in call]
    assert sampled.count(0) == sampled.count(10) == 1 and 0 not in judged


@simulated
async def test_a_straggler_that_waits_for_a_worker_is_dropped_and_does_not_start_again():
    """Its worker died, and the next one comes when the step has gone on without it."""
    scene = Scene(make_worker=StragglingWorker)
    buffer = Counting(groups_per_step=4, max_off_policy_steps=1, max_head_of_line_s=60.0)
    async with scene.generating(buffer):
        await settled()
        scene.coming.clear()
        await scene.workers[0].kill()
        assert [index for index, _ in await buffer.take(4)] == [1, 2, 3, 4]
        assert buffer.reported == [0]
        scene.coming.set()
        buffer.advance(1)
        assert [index for index, _ in await buffer.take(4)] == [5, 6, 7, 8]
    assert 0 not in scene.workers[1].calls[0]


@simulated
async def test_a_dropped_straggler_frees_its_place_in_the_worker():
    """Room for two groups: with group 0 still there, group 10 would hold the last place, and nothing could go on. That its call has
    ended is not waited for."""
    end = asyncio.Event()

    class Lingering(StragglingWorker):
        async def stream_batches(self, *args, **options):
            async for each in super().stream_batches(*args, **options):
                yield each
            await end.wait()

    scene = Scene(make_worker=Lingering, max_concurrent_sequences=4)
    buffer = Counting(groups_per_step=1, max_off_policy_steps=1, max_head_of_line_s=0.0)
    taken = []
    async with scene.generating(buffer):
        for version in range(1, 13):
            taken += [index for index, _ in await buffer.take(1)]
            buffer.advance(version)
        end.set()
    assert buffer.reported == [0, 10]
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
        async def score_one(self, method, object_ref, *args, deadline_s):
            if object_ref == 0:
                await lost.wait()
                raise LostError("reward, 'score': its node is gone")
            return await super().score_one(method, object_ref, *args, deadline_s=deadline_s)

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


@pytest.mark.parametrize("num_ticks", range(6))
@simulated
async def test_a_group_that_is_refused_in_the_moment_in_which_it_becomes_a_straggler_is_one_event(num_ticks):
    """Group 1 waits for group 0 for 5 s. The refusal comes some turns of the loop later."""

    class Refusing(StragglingWorker):
        async def stream_batches(self, method, tickets, **options):
            for ticket in tickets[1:]:
                yield group_summary(ticket.index), ticket.index
            if tickets[0].index == 0:
                await asyncio.sleep(4.0)
                pass_time(1.0)
                for _ in range(num_ticks):
                    await asyncio.sleep(0)
                yield refusal(tickets[0]), None

    scene = Scene(make_worker=Refusing)
    buffer = Buffer(groups_per_step=1, max_off_policy_steps=1, max_head_of_line_s=5.0)
    async with scene.generating(buffer):
        assert [index for index, _ in await buffer.take(1)] == [1]
        await settled()
        drops = [event["group_id"] for event in scene.events.events if event["kind"] == "drop"]
    assert drops == ["00000000"]
