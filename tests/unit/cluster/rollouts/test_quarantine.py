"""Who is blamed for a death, and for how long."""

import asyncio
from unittest.mock import Mock

import pytest

from cluster.contracts.errors import DeadlineError, EngineError, UnreachableError, WeightsError, WorkerError
from cluster.contracts.sampling_config import SamplingConfig
from cluster.contracts.types import Prompt, Ticket
from cluster.rollouts.buffer import Buffer
from cluster.rollouts.lanes import ByIndex, Job, Lane, ToFreePlaces
from cluster.rollouts.quarantine import Suspects, may_be_their_doing
from tests.fakes import ListedEvents, NumberedPrompts, ScriptedWorker, death
from tests.unit.cluster.rollouts.scene import EachTwice, Scene, settled
from tests.unit.cluster.simulated_time import simulated


def ticket(name: str, index: int = 0) -> Ticket:
    return Ticket(
        index=index,
        prompt=Prompt(prompt_id=name, text=name),
        num_trajectories=2,
        seed=0,
        policy_version=0,
        sampling=SamplingConfig(max_tokens=1),
    )


def suspects(max_failures: int = 3) -> Suspects:
    return Suspects(max_failures=max_failures, events=ListedEvents())


def test_a_prompt_is_a_suspect_after_two_deaths_and_guilty_when_the_third_is_its_own():
    watched = suspects()
    a, b = ticket("a"), ticket("b")
    watched.blame([a, b], death("w"), alone=False)
    assert not watched.has(a)
    watched.blame([a, b], death("w"), alone=False)
    assert watched.has(a) and watched.has(b) and not watched.is_guilty(a)
    watched.blame([a], death("w"), alone=True)
    assert watched.is_guilty(ticket("a", index=7)), "in a later epoch too"
    assert not watched.is_guilty(b)


def test_a_held_out_prompt_of_the_same_id_is_another():
    watched = suspects(max_failures=1)
    watched.blame([ticket("a")], death("w"), alone=True)
    assert watched.is_guilty(ticket("a", index=7)) and not watched.is_guilty(ticket("a", index=-1))
    watched.blame([ticket("a", index=-1)], death("w"), alone=True)
    assert watched.is_guilty(ticket("a", index=-3))


def test_deaths_in_company_prove_nothing_however_many():
    watched = suspects()
    for _ in range(10):
        watched.blame([ticket("a")], death("w"), alone=False)
    assert not watched.is_guilty(ticket("a"))


def test_one_death_counts_once_for_a_prompt_that_was_sampled_twice():
    watched = suspects()
    watched.blame([ticket("a", index=0), ticket("a", index=1)], death("w"), alone=False)
    assert not watched.has(ticket("a"))


def test_a_finished_group_clears_its_prompt():
    watched = suspects()
    for _ in range(2):
        watched.blame([ticket("a")], death("w"), alone=False)
    watched.absolve(ticket("a"))
    assert not watched.has(ticket("a"))


def test_a_prompt_that_was_never_blamed_is_no_suspect_even_where_one_failure_is_proof():
    watched = suspects(max_failures=1)
    assert not watched.has(ticket("a"))
    watched.blame([ticket("a"), ticket("b")], death("w"), alone=False)
    assert watched.has(ticket("a")) and not watched.is_guilty(ticket("a"))


def test_failures_are_counted_for_the_ten_thousand_prompts_blamed_last():
    """A prompt that is blamed and then dropped is never absolved: in a long run these would pile up."""
    watched = suspects()
    for name in ("old", "new"):
        watched.blame([ticket(name)], death("w"), alone=False)
    watched.blame([ticket(str(number)) for number in range(9_998)], death("w"), alone=False)
    watched.blame([ticket("new")], death("w"), alone=False)
    assert watched.has(ticket("new"))
    watched.blame([ticket("one more")], death("w"), alone=False)
    watched.blame([ticket("old")], death("w"), alone=False)
    assert not watched.has(ticket("old")), "its first failure is forgotten"
    assert watched.has(ticket("new"))


NOT_IN_TIME = DeadlineError("w did not finish 'load' within 600 s", actor="w", stage="load")
SILENT = DeadlineError("w did not finish 'progress' within 60 s", actor="w", stage="progress")
BUG = WorkerError("w failed in 'generate': TypeError", actor="w", stage="generate")
NO_ENGINE = EngineError("w: the engine ended: CUDA error", actor="w", stage="generate")
NODE_GONE = UnreachableError("w died in 'generate': its node has died", actor="w", stage="generate")
UNATTESTED = WeightsError("nothing is served: the last load failed")


@pytest.mark.parametrize(
    ("ended_by", "given_up", "is_theirs"),
    [
        (death("w"), None, True),
        (BUG, None, True),
        (UNATTESTED, None, False),
        (death("w"), death("w"), True),
        (death("w"), SILENT, True),
        (death("w"), NO_ENGINE, True),
        (death("w"), NOT_IN_TIME, False),
        (death("w"), BUG, False),
        (BUG, BUG, True),
        (NODE_GONE, None, False),
        (NODE_GONE, NODE_GONE, False),
        (NODE_GONE, death("w"), True),
        (death("w"), NODE_GONE, False),
    ],
)
def test_a_call_that_dies_because_the_driver_killed_its_actor_or_its_node_went_blames_nobody(
    ended_by, given_up, is_theirs
):
    assert may_be_their_doing(ended_by, given_up=given_up) is is_theirs


@simulated
@pytest.mark.parametrize("deterministic", [False, True])
async def test_a_prompt_that_always_kills_is_quarantined_and_replaced_by_another(deterministic):
    scene = Scene(script=lambda t: death("rollout-0") if t.index == 1 else None, deterministic=deterministic)
    assert await scene.take() == [0, 2, 3, 4]
    assert len(scene.workers) == 1 + 3
    quarantined = [event for event in scene.events.events if event["kind"] == "quarantine"]
    assert [event["group_id"] for event in quarantined] == ["00000001"]


@simulated
async def test_prompts_that_were_under_way_on_machines_that_went_are_never_taken_for_guilty():
    """Seen before: one that was tried alone was under way again when the next machine went, and was not trained on."""
    gone = iter([UnreachableError("rollout-0 died in 'generate': its node has died", actor="rollout-0")] * 6)
    scene = Scene(script=lambda ticket: next(gone, None) if ticket.index == 1 else None)
    assert await scene.take() == [0, 1, 2, 3]


@simulated
async def test_a_worker_that_refuses_to_serve_is_replaced_and_no_prompt_is_blamed():
    refusals = iter([WeightsError("nothing is served: the last load failed")] * 2)
    scene = Scene(script=lambda ticket: next(refusals, None))
    assert await scene.take() == [0, 1, 2, 3]
    assert scene.workers[2].calls == [[0, 1, 2, 3]], "together: nothing runs alone"


@simulated
async def test_a_suspect_runs_alone_and_is_absolved_when_nothing_dies():
    """The second step has the same four prompts."""
    deaths = iter([death("rollout-0")] * 2)
    scene = Scene(script=lambda ticket: next(deaths, None) if ticket.index == 0 else None, prompts=NumberedPrompts(4))
    assert await scene.take(num_steps=2) == list(range(8))
    assert scene.workers[2].calls == [[0], [1], [2], [3], [4, 5, 6, 7]]


@simulated
async def test_groups_that_were_finished_before_a_death_are_not_blamed_for_it():
    """One failure makes a suspect. The second step has the same four prompts."""
    deaths = iter([death("rollout-0")])
    scene = Scene(
        script=lambda ticket: next(deaths, None) if ticket.index == 2 else None,
        prompts=NumberedPrompts(4),
        supervision={"max_prompt_failures": 2},
    )
    assert await scene.take(num_steps=2) == list(range(8))
    assert scene.workers[1].calls == [[2], [3], [4, 5, 6, 7]]


@simulated
async def test_a_suspect_runs_on_one_worker_while_the_others_go_on():
    """Two workers: the prompt of group 0 kills twice, then waits for its trial; the other worker never pauses."""
    deaths = iter([death("rollout-0")] * 2)
    trial = asyncio.Event()
    on_trial = []

    class Patient(ScriptedWorker):
        async def stream_batches(self, method, tickets, **options):
            if [ticket.index for ticket in tickets] == [0] and deaths_are_over:
                on_trial.append(self.name)
                await trial.wait()
            async for each in super().stream_batches(method, tickets, **options):
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


def test_the_worker_of_a_trial_that_was_given_up_has_places_again_at_once():
    """Its suspect was dropped as a straggler, and nothing else changes that would make anybody look again."""
    known, group = suspects(max_failures=2), ticket("killer")
    known.blame([group], death("rollout-0"), alone=False)
    dealing, lane = ToFreePlaces(known, sequences_per_group=2), Lane(Mock(), max_sequences=4)
    job = Job(ticket=group, destination=Mock())
    assert dealing.deal([job], [lane], num_fetching=0) == [(lane, [job])]
    lane.take([job])
    assert dealing.num_wanted([], [lane], num_fetching=0) == 0, "it tries a suspect, and nothing beside it"
    lane.pop(job.ticket.index)
    assert [dealing.num_wanted([], [lane], num_fetching=number) for number in (0, 1)] == [2, 1]


def job(index: int) -> Job:
    return Job(ticket=ticket(str(index), index=index), destination=Mock())


def two_lanes() -> list[Lane]:
    return [Lane(Mock(), max_sequences=4) for _ in range(2)]


def test_a_deterministic_run_deals_to_all_workers_at_once_when_all_prompts_are_there():
    dealing, lanes, jobs = ByIndex(suspects(), num_workers=2), two_lanes(), [job(index) for index in range(3)]
    assert dealing.num_wanted([], lanes, num_fetching=0) > 1000
    assert dealing.deal(jobs, lanes, num_fetching=0) == [(lanes[0], [jobs[0], jobs[2]]), (lanes[1], [jobs[1]])]
    for num_lanes, num_fetching in ((1, 0), (2, 1)):
        assert dealing.num_wanted([], lanes[:num_lanes], num_fetching=num_fetching) == 0
        assert dealing.deal(jobs, lanes[:num_lanes], num_fetching=num_fetching) == []


def test_in_a_deterministic_run_nothing_is_sampled_beside_a_suspect():
    known, lanes, (first, killer, last) = suspects(max_failures=2), two_lanes(), [job(index) for index in (1, 2, 3)]
    dealing = ByIndex(known, num_workers=2)
    known.blame([killer.ticket], death("rollout-0"), alone=False)
    assert dealing.num_wanted([killer], lanes, num_fetching=0) == 0
    assert dealing.deal([first, killer, last], lanes, num_fetching=0) == [(lanes[1], [first, last])]
    lanes[1].take([first])
    assert dealing.deal([killer], lanes, num_fetching=0) == []
    lanes[1].pop(1)
    assert dealing.deal([killer, last], lanes, num_fetching=0) == [(lanes[0], [killer])]
    lanes[0].take([killer])
    assert dealing.deal([last], lanes, num_fetching=0) == []


def test_a_suspect_is_tried_on_the_worker_with_the_least_to_do():
    known, killer, (busy, idle) = suspects(max_failures=2), job(0), two_lanes()
    known.blame([killer.ticket], death("rollout-0"), alone=False)
    busy.take([job(1)])
    assert ToFreePlaces(known, sequences_per_group=2).deal([killer], [busy, idle], num_fetching=0) == [(idle, [killer])]


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
    assert scene.workers[1].calls[:2] == [[4], [1, 2, 3, 5]], "none but group 4 is tried alone"


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
async def test_a_guilty_prompt_is_not_tried_again_in_the_next_epoch_and_others_take_its_place():
    deaths = []

    def script(ticket):
        if ticket.prompt.prompt_id != "p1":
            return None
        deaths.append(ticket.index)
        return death("rollout-0")

    # One group at a time: what is dealt is a guilty one alone.
    scene = Scene(script=script, prompts=NumberedPrompts(4), max_concurrent_sequences=2)
    buffer = Buffer(groups_per_step=3)
    async with scene.generating(buffer):
        for step in range(1, 4):
            assert len(await buffer.take(3)) == 3
            buffer.advance(step)
    assert len(deaths) == 3, "in three epochs"
