"""The fleet is brought back to its size, whatever fails, and says which places are empty for good."""

import asyncio
import contextlib
import itertools
from unittest.mock import Mock

import pytest

from cluster.contracts.config import SupervisionConfig
from cluster.contracts.errors import ConfigError, DeadlineError, FailureKind, WorkerError
from cluster.rollouts.buffer import Buffer
from cluster.rollouts.worker_pool import Member, WorkerPool
from cluster.supervision.supervisor import Supervisor
from cluster.supervision.tasks import background
from tests.fakes import ListedEvents, ScriptedWorker, actor_spec, death, group_summary
from tests.unit.cluster.rollouts.scene import Scene, settled
from tests.unit.cluster.simulated_time import simulated


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


@simulated
async def test_a_worker_that_dies_for_ever_spends_the_budget():
    scene = Scene(script=lambda t: death("rollout-0"), supervision={"max_restarts": 2, "backoff_s": 0})
    with pytest.raises(WorkerError, match="restart budget is spent"):
        await scene.take()


class SlowToStart(Scene):
    """Eight restarts do not fit into `window_s`."""

    async def _start(self, spec):
        await asyncio.sleep(90)
        return await super()._start(spec)


@simulated
@pytest.mark.parametrize("name", ["rollout-0", "reward-0"])
async def test_an_actor_that_starts_slowly_and_always_dies_at_its_work_ends_the_run(name):
    dies = death(name)

    def score(index):
        raise dies

    scene = SlowToStart(score=score) if name == "reward-0" else SlowToStart(script=lambda ticket: dies)
    with pytest.raises(WorkerError, match=f"8 restarts of {name} without a finished group"):
        await scene.take()


@simulated
@pytest.mark.parametrize("name", ["rollout-0", "reward-0"])
async def test_an_actor_that_dies_after_each_finished_group_does_not_end_the_run(name):
    works = itertools.count()

    def work():
        return death(name) if next(works) % 2 else None

    def score(index):
        if error := work():
            raise error
        return group_summary(index, rewards=(1.0, 0.0))

    scene = SlowToStart(score=score) if name == "reward-0" else SlowToStart(script=lambda ticket: work())
    assert len(await scene.take(num_steps=3)) == 12
    assert scene.events.kinds().count("recovery") > 8


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
        await asyncio.sleep(2)
        assert not scene.workers[1].is_dead
        assert [member.name for member in scene.fleet.serving()] == ["rollout-0", "rollout-2"], "its successor is here"
        end.set()
        await settled()
        assert scene.workers[1].is_dead and not scene.workers[0].is_dead


async def test_a_worker_that_two_calls_use_is_idle_when_both_have_ended():
    member = Member(Mock())
    with member.in_use():
        with member.in_use():
            pass
        idle = asyncio.create_task(member.idle())
        await settled()
        assert not idle.done()
    await idle


async def test_groups_and_the_calls_that_sample_them_are_not_counted_twice():
    member = Member(Mock())
    with member.in_use(), member.in_use():
        member.num_groups = 3
        assert member.num_in_flight == 3
        member.num_groups = 1
        assert member.num_in_flight == 2


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


@simulated
async def test_of_workers_that_joined_in_mid_run_the_one_with_least_under_way_leaves_and_first_workers_stay():
    scene = Scene(num_workers=1)
    async with scene.running():
        scene.fleet.want(3)
        await settled()
        for member, num_groups in zip(scene.fleet.serving(), (0, 1, 4), strict=True):
            member.num_groups = num_groups
        scene.fleet.want(2)
        await settled()
        assert [worker.name for worker in scene.fleet.workers()] == ["rollout-0", "rollout-2"]
        scene.fleet.want(1)
        await settled()
        assert [worker.name for worker in scene.fleet.workers()] == ["rollout-0"], "its place stays reserved"


@simulated
async def test_of_services_the_one_that_judges_least_leaves_and_one_that_has_judged_counts_as_idle():
    """In use: one of the first, two at a time of the second, and the third no longer."""
    scene = Scene(num_workers=1)
    async with scene.running():
        scene.fleet.want(4)
        await settled()
        _, *joined = scene.fleet.serving()
        with contextlib.ExitStack() as calls:
            for member in (joined[0], joined[1], joined[1]):
                calls.enter_context(member.in_use())
            with joined[2].in_use():
                pass
            assert [member.num_in_flight for member in joined] == [1, 2, 0]
            scene.fleet.want(2)
            await settled()
            assert [member.name for member in scene.fleet.serving()] == ["rollout-0", "rollout-2"]


@simulated
async def test_a_worker_at_full_price_leaves_before_one_on_a_spot_node_that_has_less_to_finish():
    scene = Scene(num_workers=1)
    async with scene.running():
        scene.fleet._is_on_spot = lambda actor: actor.name == "rollout-2"
        scene.fleet.want(4)
        await settled()
        for member, num_groups in zip(scene.fleet.serving(), (0, 5, 1, 5), strict=True):
            member.num_groups = num_groups
        scene.fleet.want(2)
        await settled()
        assert [worker.name for worker in scene.fleet.workers()] == ["rollout-0", "rollout-2"]


@simulated
async def test_of_workers_that_are_alike_the_newest_leaves():
    scene = Scene(num_workers=3)
    async with scene.running():
        await settled()
        scene.fleet.want(2)
        await settled()
        assert [worker.name for worker in scene.fleet.workers()] == ["rollout-0", "rollout-1"]


@simulated
async def test_a_join_is_measured_from_the_moment_in_which_the_worker_is_asked_for():
    scene = Scene()
    async with scene.running():
        assert "time/join_s" not in scene.production.drain_stats(), "the first workers come with the run"
        scene.coming.clear()
        scene.fleet.want(2)
        await asyncio.sleep(40)
        assert scene.production.drain_stats()["rollout/num_coming"] == 1.0
        scene.coming.set()
        await settled()
        stats = scene.production.drain_stats()
    assert (stats["time/join_s"], stats["rollout/num_coming"]) == (pytest.approx(40), 0.0)
    assert [event["seconds"] for event in scene.events.events if event["kind"] == "worker_joined"] == [
        pytest.approx(40)
    ]


@simulated
async def test_one_join_that_took_long_is_not_what_joins_take():
    """Waits of 40, 1500, 50 and 60 s. Of two the shorter one counts."""
    scene, told = Scene(), []
    async with scene.running():
        for number, seconds in enumerate((40, 1500, 50, 60), start=2):
            scene.coming.clear()
            scene.fleet.want(number)
            await asyncio.sleep(seconds)
            scene.coming.set()
            await settled()
            told.append(round(scene.fleet.join_seconds))
    assert told == [40, 40, 50, 50]


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
async def test_a_spare_that_never_joins_does_not_end_the_run_while_a_worker_that_joined_restarts():
    """The first worker has left: only the other one has served."""
    scene = Scene()
    async with scene.running():
        scene.fleet.want(2)
        await settled()
        scene.start_error = lambda name: None if name == "rollout-1" else no_disk(name)
        scene.fleet.drain("rollout-0")
        await asyncio.sleep(600)
        restart = scene.held["rollout-1"] = asyncio.Event()
        scene.fleet.replace(scene.workers[1], death("rollout-1"))
        await asyncio.sleep(120)
        assert scene.events.kinds().count("worker_not_joined") > 10 and scene.fleet.serving() == []
        restart.set()
        await settled()
        assert [member.name for member in scene.fleet.serving()] == ["rollout-1"]


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
        unloadable = ConfigError("model.path='org/model' does not load: the hub does not answer", actor="rollout-1")
        errors = iter([unloadable])
        scene.start_error = lambda name: next(errors, None)
        scene.fleet.want(2)
        await asyncio.sleep(60)
        assert scene.events.kinds() == ["worker_not_joined", "worker_joined"]
        assert len(scene.fleet.serving()) == 2


@simulated
async def test_a_deliberate_error_of_the_first_workers_ends_the_run():
    scene = Scene(num_workers=2)
    scene.held["rollout-0"] = asyncio.Event()
    scene.start_error = lambda name: ConfigError("model.path='org/typo' does not load", actor=name)
    with pytest.raises(ConfigError, match="typo"):
        await scene.take()


@simulated
async def test_a_first_worker_that_fails_is_replaced_while_another_first_one_still_loads():
    """Three fail, and two are wanted."""
    scene = Scene(num_workers=2)
    scene.held["rollout-0"] = asyncio.Event()
    scene.start_error = lambda name: None if name == "rollout-4" else no_disk(name)
    async with scene.running():
        assert [member.name for member in scene.fleet.serving()] == ["rollout-4"]
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
    assert scene.events.kinds().count("worker_not_joined") == 2, "one failure of each, and no restarts"


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
