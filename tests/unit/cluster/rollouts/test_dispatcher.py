"""Tickets go to free places, and what a worker did not finish is dealt again."""

import asyncio
import weakref
from functools import partial

import pytest

from cluster.contracts.errors import DataError, DeadlineError, LostError
from cluster.rollouts.buffer import Buffer
from cluster.rollouts.dispatcher import Dispatcher
from cluster.rollouts.lanes import ByIndex, ToFreePlaces
from cluster.rollouts.quarantine import Suspects
from tests.fakes import ScriptedScorer, ScriptedWorker, death
from tests.unit.cluster.rollouts.scene import Scene, refusal, settled, worker_spec
from tests.unit.cluster.simulated_time import pass_time, simulated


@simulated
async def test_a_dead_workers_unfinished_groups_start_again():
    deaths = iter([death("rollout-0")])
    scene = Scene(script=lambda ticket: next(deaths, None) if ticket.index == 2 else None)
    assert await scene.take() == [0, 1, 2, 3]
    assert scene.workers[0].calls == [[0, 1, 2, 3]] and scene.workers[1].calls == [[2, 3]]
    assert scene.events.kinds() == ["failure", "recovery"]


@simulated
async def test_one_refused_prompt_of_a_call_costs_one_group_and_the_others_go_on():
    scene = Scene(script=lambda ticket: refusal(ticket) if ticket.index == 1 else None)
    assert await scene.take() == [0, 2, 3, 4]
    assert scene.workers[0].calls == [[0, 1, 2, 3], [4]], "nothing was sampled twice, nothing ran alone"
    quarantine, drop = scene.events.events
    assert (drop["kind"], drop["reason"]) == ("drop", "refused")
    assert (quarantine["kind"], quarantine["group_id"], quarantine["reason"]) == ("quarantine", "00000001", "too long")


@simulated
async def test_an_evaluation_survives_a_death():
    deaths = iter([death("rollout-0")])
    scene = Scene(script=lambda ticket: next(deaths, None) if ticket.index == -2 else None, num_workers=2)
    async with scene.running():
        held_out = await scene.evaluate(5)
    assert sorted(int(summary.group_id) for summary in held_out.summaries) == [-5, -4, -3, -2, -1]


@simulated
async def test_an_evaluation_is_no_part_of_a_steps_sampling():
    """Seen before: its time, its tokens and the worker that idled at its end were the next step's, and elastic scaling weighed them.

    A group of 10 tokens is under way for 20 s before an evaluation of 100 s, and for 10 s after it."""
    done, evaluated = asyncio.Event(), asyncio.Event()
    scene = Scene(script=lambda ticket: evaluated if ticket.index < 0 else done, num_workers=2)
    async with scene.running(), scene.production.generating(into=Buffer(groups_per_step=1)):
        await asyncio.sleep(20)
        asyncio.get_running_loop().call_later(100, evaluated.set)
        await scene.evaluate(1)
        await asyncio.sleep(10)
        done.set()
        await settled()
        stats = scene.production.drain_stats()
    names = ("time/sampling_s", "speed/sampling_tokens_per_s", "rollout/idle_share")
    assert [stats[name] for name in names] == pytest.approx([30.0, 10 / 30, 0.5], rel=0.01)


@simulated
async def test_a_steps_sampling_is_its_seconds_its_tokens_and_the_workers_that_idle():
    """One group of 10 tokens takes 20 s; the other one of two workers has nothing to do."""
    done = asyncio.Event()
    scene = Scene(script=lambda ticket: done, num_workers=2)
    buffer = Buffer(groups_per_step=1)
    async with scene.generating(buffer):
        asyncio.get_running_loop().call_later(20, done.set)
        await buffer.take(1)
        stats = scene.production.drain_stats()
    names = ("time/sampling_s", "speed/sampling_tokens_per_s", "rollout/idle_share")
    assert [stats[name] for name in names] == pytest.approx([20.0, 0.5, 0.5], rel=0.01)


@simulated
async def test_an_evaluation_ends_without_a_prompt_that_always_kills_though_no_worker_comes_after_it(monkeypatch):
    """A look at the fleet takes 0.5 ms: the prompt is dropped by the next one, 25 ms after the evaluation has heard of the death."""
    deaths, deal = [], ToFreePlaces.deal

    def slow_look(self, queue, lanes, *, num_fetching):
        pass_time(0.0005)
        return deal(self, queue, lanes, num_fetching=num_fetching)

    def script(ticket):
        if ticket.index != -2:
            return None
        deaths.append(death("rollout-0"))
        if len(deaths) == 3:
            scene.coming.clear()
        return deaths[-1]

    monkeypatch.setattr(ToFreePlaces, "deal", slow_look)
    scene = Scene(script=script)
    async with scene.running():
        held_out = await scene.evaluate(2)
    assert [int(summary.group_id) for summary in held_out.summaries] == [-1] and held_out.num_dropped == 1


@simulated
async def test_groups_wait_and_can_be_moved_while_they_are_judged_and_until_they_are_taken():
    """Their bytes, 100 of each, count for as long."""
    scene = Scene()
    scene.judging.clear()
    buffer = Buffer(groups_per_step=2)
    async with scene.generating(buffer):
        dispatcher = scene.production._dispatcher
        await settled()
        assert sorted(dispatcher.waiting()) == [0, 1] and buffer.size_bytes == 200
        assert dispatcher.move(0, {0: "copy of 0"})
        scene.judging.set()
        await settled()
        assert sorted(dispatcher.waiting()) == [0, 1] and buffer.size_bytes == 200
        assert dispatcher.move(1, {1: "copy of 1"})
        assert [group.pieces[0] for _, group in await buffer.take(2)] == ["copy of 0", "copy of 1"]
        assert not dispatcher.waiting() and not dispatcher.move(1, {1: "copy of 1"}) and buffer.size_bytes == 0


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
@pytest.mark.parametrize("error", [LostError("rollout-0, 'generate': its owner has died"), death("rollout-0")])
async def test_a_deterministic_call_that_breaks_off_behind_its_last_group_is_not_made_again(error):
    errors = [error]

    class Worker(ScriptedWorker):
        async def call(self, method, group_ids, *, deadline_s): ...

        async def stream_batches(self, method, tickets, **options):
            async for each in super().stream_batches(method, tickets, **options):
                yield each
            if errors:
                raise errors.pop()

    scene = Scene(make_worker=Worker, deterministic=True)
    assert await scene.take() == [0, 1, 2, 3]
    assert not errors and [call for worker in scene.workers for call in worker.calls] == [[0, 1, 2, 3]]


@simulated
async def test_the_surplus_of_a_group_is_counted():
    scene = Scene(extra_trajectories=3)
    buffer = Buffer(groups_per_step=4)
    async with scene.generating(buffer):
        await buffer.take(4)
        assert [scene.production.drain_stats()["rollout/num_aborted"] for _ in range(2)] == [12, 0]


@simulated
async def test_a_group_that_is_taken_is_let_go_while_its_worker_samples_on():
    """What a variable holds takes room in the object store."""

    class Piece:
        def __init__(self, index):
            self.index = index

    class Worker(ScriptedWorker):
        async def stream_batches(self, method, tickets, **options):
            async for summary, index in super().stream_batches(method, tickets, **options):
                refs.append(weakref.ref(piece := Piece(index)))
                yield summary, piece
                del piece

    class Scorer(ScriptedScorer):
        async def score_one(self, method, piece, *args, deadline_s):
            return self.columns(piece.index)

    gate, refs = asyncio.Event(), []
    scene = Scene(make_worker=Worker, make_scorer=Scorer, script=lambda ticket: gate if ticket.index == 4 else None)
    buffer = Buffer(groups_per_step=4, max_off_policy_steps=1)
    async with scene.generating(buffer):
        await buffer.take(4)
        await settled()
        assert scene.workers[0].calls[0][:5] == [0, 1, 2, 3, 4], "one call"
        assert [ref() for ref in refs] == [None] * 4
        gate.set()


@simulated
async def test_a_slow_worker_gets_no_more_than_it_has_places_for():
    """The even deal of before gave 19 groups to a worker with 8 places."""
    gate = asyncio.Event()

    class Slow(ScriptedWorker):
        async def stream_batches(self, method, tickets, **options):
            if self.name == "rollout-0":
                self.calls.append([ticket.index for ticket in tickets])
                await gate.wait()
                self.calls.pop()
            async for each in super().stream_batches(method, tickets, **options):
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
async def test_a_place_is_taken_again_while_its_group_is_judged_and_its_call_goes_on():
    never = asyncio.Event()
    scene = Scene(script=lambda ticket: never if ticket.index else None, max_concurrent_sequences=4)
    scene.judging.clear()
    async with scene.generating(Buffer(groups_per_step=8)):
        await asyncio.sleep(60)
        assert scene.workers[0].calls == [[0, 1], [2]]


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
async def test_the_work_that_groups_are_at_is_noted():
    done, noted = asyncio.Event(), []
    scene = Scene(script=lambda ticket: done)
    scene.judging.clear()
    async with scene.running():
        scene.production._dispatcher._note_work = lambda *works: noted.append(works)
        async with scene.production.generating(into=Buffer(groups_per_step=1)):
            for event in (done, scene.judging):
                await asyncio.sleep(60)
                event.set()
            await asyncio.sleep(60)
    assert [works for works, before in zip(noted, [None, *noted], strict=False) if works != before] == [
        ("fetching",),
        ("sampling",),
        ("judging",),
        (),
    ]


@simulated
async def test_an_evaluation_goes_before_groups_that_wait_already():
    """Groups 0 and 1 wait for the worker that takes the place of a dead one."""
    deaths = iter([death("rollout-0")])
    scene = Scene(script=lambda ticket: next(deaths, None), max_concurrent_sequences=4)
    async with scene.generating(Buffer(groups_per_step=2)):
        scene.coming.clear()
        await settled()
        evaluating = asyncio.create_task(scene.evaluate(3))
        await settled()
        scene.coming.set()
        await evaluating
        await settled()
    dead, successor = [[index for call in worker.calls for index in call] for worker in scene.workers]
    assert (dead, successor) == ([0, 1], [-1, -2, -3, 0, 1])


@simulated
async def test_in_a_deterministic_run_the_index_alone_decides_the_worker():
    """Groups 1 to 4, in their order: the second worker has the first of them."""
    scene = Scene(num_workers=2, deterministic=True)
    buffer = Buffer(groups_per_step=4, in_waves=True, next_index=1)
    async with scene.generating(buffer):
        assert [index for index, _ in await buffer.take(4)] == [1, 2, 3, 4]
    assert {worker.name: worker.calls for worker in scene.workers} == {"rollout-0": [[2, 4]], "rollout-1": [[1, 3]]}


@simulated
async def test_in_a_deterministic_run_suspects_are_tried_one_by_one_on_the_worker_of_their_index():
    """Group 3 kills its company twice. Its call is made again whole, then its groups are tried."""
    deaths = iter([death("rollout-1")] * 2)
    scene = Scene(
        num_workers=2, script=lambda ticket: next(deaths, None) if ticket.index == 3 else None, deterministic=True
    )
    assert await scene.take() == [0, 1, 2, 3]
    assert [worker.calls for worker in scene.workers if worker.name == "rollout-0"] == [[[0, 2]]]
    assert [worker.calls for worker in scene.workers if worker.name == "rollout-1"] == [
        [[1, 3]],
        [[1, 3]],
        [[3]],
    ], "group 1 was finished at the first attempt"


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
@pytest.mark.parametrize(("is_deterministic", "again"), [(False, [2, 3]), (True, [0, 1, 2, 3])])
async def test_a_stream_that_is_lost_with_its_node_blames_nobody_and_its_groups_start_again(is_deterministic, again):
    """In a deterministic run with all groups of its call."""
    lost = iter([LostError("rollout-0, 'generate': its owner has died")])
    aborted = []

    class Worker(ScriptedWorker):
        async def call(self, method, group_ids, *, deadline_s):
            aborted.append((method, group_ids))

    scene = Scene(
        make_worker=Worker,
        script=lambda ticket: next(lost, None) if ticket.index == 2 else None,
        deterministic=is_deterministic,
    )
    assert await scene.take() == [0, 1, 2, 3]
    assert scene.workers[0].calls == [[0, 1, 2, 3], again] and len(scene.workers) == 1
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
        async def score_one(self, method, object_ref, *args, deadline_s):
            await asyncio.sleep(-18 * object_ref)  # of the groups -1, -2 and -3
            return await super().score_one(method, object_ref, *args, deadline_s=deadline_s)

    scene = Scene(make_scorer=Slow)
    async with scene.running():
        assert len((await scene.evaluate(3, stall_s=30.0)).summaries) == 3


class Leaving(ScriptedWorker):
    """Ends no group on `rollout-0`, where it has half of group 2 and nothing of the others. Notes what it is given."""

    def __init__(self, spec, script) -> None:
        super().__init__(spec, script)
        self.given: dict[int, object] = {}
        self.has_given_up = asyncio.Event()

    async def call_for_object_refs(self, method, group_ids, *, deadline_s):
        if self.has_given_up.is_set():
            raise death(self.name, method)
        self.has_given_up.set()
        return ["half" if group_id == "00000002" else None for group_id in group_ids]

    async def stream_batches(self, method, tickets, *sampled, **options):
        self.given |= {ticket.index: each for ticket, each in zip(tickets, sampled, strict=False)}
        if self.name == "rollout-0":
            self.calls.append([ticket.index for ticket in tickets])
            await self.has_given_up.wait()
            return
        async for each in super().stream_batches(method, tickets, **options):
            yield each


async def at_home(ref, *, deadline_s):
    return ref and f"{ref} at home"


async def lost(ref, *, deadline_s):
    raise LostError("its node went")


@simulated
@pytest.mark.parametrize(("copy", "handed_over", "given"), [(at_home, [2], "half at home"), (lost, [], None)])
async def test_another_worker_goes_on_with_what_a_leaving_one_had_and_begins_the_rest_anew(copy, handed_over, given):
    scene = Scene(num_workers=2, make_worker=Leaving, max_concurrent_sequences=8)
    buffer = Buffer(groups_per_step=8)
    async with scene.generating(buffer):
        await settled()
        (leaving,) = (worker for worker in scene.workers if worker.name == "rollout-0")
        assert leaving.calls == [[0, 2, 4, 6]]
        scene.fleet.drain("rollout-0")
        scene.production._dispatcher.wake()
        await asyncio.sleep(1)
        hand_over = partial(scene.production._dispatcher.hand_over, copy=copy, deadline_s=9.0)
        assert await hand_over(Leaving(worker_spec(9), None)) == [], "it has none"
        assert await hand_over(leaving) == handed_over
        assert [index for index, _ in await buffer.take(8)] == [*range(8)]
        assert await hand_over(leaving) == [], "it has none any more"
        others = [worker for worker in scene.workers if worker is not leaving]
        assert {index: each for worker in others for index, each in worker.given.items() if each} == (
            {2: given} if given else {}
        )
        assert sorted(index for worker in others for call in worker.calls for index in call) == [*range(8)]


@simulated
@pytest.mark.parametrize(("is_announced", "num_blamed"), [(True, 0), (False, 1)])
async def test_a_death_that_its_node_announced_is_no_prompts_doing(is_announced, num_blamed, monkeypatch):
    held, blamed = iter([asyncio.Event()]), []
    monkeypatch.setattr(Suspects, "blame", lambda suspects, tickets, error, *, alone: blamed.append(tickets))
    scene = Scene(num_workers=2, script=lambda ticket: next(held, None) if ticket.index == 0 else None)
    buffer = Buffer(groups_per_step=4)
    async with scene.generating(buffer):
        await settled()
        (dying,) = (worker for worker in scene.workers if worker.calls[0][0] == 0)
        if is_announced:
            scene.fleet.drain(dying.name)
        await dying.kill()
        assert [index for index, _ in await buffer.take(4)] == [*range(4)]
    assert len(blamed) == num_blamed


@simulated
@pytest.mark.parametrize(
    ("error", "given_again"),
    [
        (death("rollout-1"), "half at home"),
        (None, "half at home"),
        (LostError("it went"), None),
        (DataError("not readable"), None),
    ],
)
async def test_what_was_handed_over_outlives_a_receiver_that_ends_before_it_began(error, given_again):
    given = []

    class Receiving(Leaving):
        async def call(self, method, group_ids, *, deadline_s): ...

        async def stream_batches(self, method, tickets, *sampled, **options):
            given.extend(each for ticket, each in zip(tickets, sampled, strict=False) if ticket.index == 2)
            if given == ["half at home"] and any(sampled):
                if error is None:
                    return
                raise error
            async for each in super().stream_batches(method, tickets, *sampled, **options):
                yield each

    scene = Scene(num_workers=2, make_worker=Receiving, max_concurrent_sequences=8)
    buffer = Buffer(groups_per_step=8)
    async with scene.generating(buffer):
        await settled()
        (leaving,) = (worker for worker in scene.workers if worker.name == "rollout-0")
        scene.fleet.drain("rollout-0")
        await scene.production._dispatcher.hand_over(leaving, copy=at_home, deadline_s=9.0)
        assert [index for index, _ in await buffer.take(8)] == [*range(8)]
    assert given == (["half at home"] * 2 if given_again else ["half at home"])


@simulated
@pytest.mark.parametrize(
    ("dealing", "look_s", "num_looks"), [(ToFreePlaces, 0.0005, 8), (ToFreePlaces, 0.01, 4), (ByIndex, 0.0005, 200)]
)
async def test_what_changes_within_the_pause_after_a_dealing_goes_with_the_next_one(
    dealing, look_s, num_looks, monkeypatch
):
    """200 changes, one a millisecond. 25 ms pass after a look at the fleet that takes 0.5 ms, and 50 ms at most. A deterministic run
    does not pause: what it deals must not depend on how long a look takes."""
    scene = Scene(deterministic=dealing is ByIndex)
    looks, deal = [], dealing.deal

    def slow_look(self, queue, lanes, *, num_fetching):
        looks.append(pass_time(look_s))
        return deal(self, queue, lanes, num_fetching=num_fetching)

    async with scene.running():
        await settled()
        monkeypatch.setattr(dealing, "deal", slow_look)
        for _ in range(200):
            scene.production._dispatcher.wake()
            await asyncio.sleep(0.001)
    assert len(looks) == num_looks


@simulated
async def test_what_a_dealing_changes_itself_needs_no_other_look(monkeypatch):
    """One look lets groups start, whose prompts are fetched; one deals them. Each changes the buffer or the queue."""
    never = asyncio.Event()
    scene = Scene(script=lambda ticket: never)
    looks, serving = [], Dispatcher._serving_lanes
    monkeypatch.setattr(Dispatcher, "_serving_lanes", lambda self: looks.append(1) or serving(self))
    async with scene.running():
        await asyncio.sleep(60)
        looks.clear()
        async with scene.production.generating(into=Buffer(groups_per_step=8)):
            await asyncio.sleep(60)
            assert [worker.calls for worker in scene.workers] == [[[*range(8)]]]
            assert len(looks) == 2
