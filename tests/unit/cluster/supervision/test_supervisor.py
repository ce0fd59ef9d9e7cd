"""What was decided is done: a failure waits out its back-off or ends the run; an actor whose node leaves is let go."""

import asyncio
import contextlib
import itertools
import time
from dataclasses import replace

import pytest

from cluster.contracts.config import SupervisionConfig
from cluster.contracts.errors import (
    ConfigError,
    DeadlineError,
    StorageError,
    TreadwheelError,
    UnreachableError,
    WeightsError,
    WorkerError,
)
from cluster.contracts.types import ActorKind
from cluster.remote.actor import RemoteActor
from cluster.supervision.supervisor import SupervisedActor, Supervisor, heartbeats, may_start_again
from tests.fakes import ListedEvents, ScriptedScorer, ScriptedWorker, actor_spec, beside, death
from tests.unit.cluster.simulated_time import simulated

DEATH = death("rollout-0")


@pytest.fixture
def supervisor() -> Supervisor:
    return Supervisor(SupervisionConfig(max_restarts=1, backoff_s=0), ListedEvents())


async def test_a_death_may_be_healed_until_the_budget_is_spent(supervisor):
    await supervisor.handle(actor_spec("rollout-0"), DEATH, actor=None)
    with pytest.raises(WorkerError, match="restart budget is spent"):
        await supervisor.handle(actor_spec("rollout-0"), DEATH, actor=None)
    assert [event["decision"] for event in supervisor.events.events] == ["restart", "abort"]


@simulated
async def test_only_lost_nodes_never_spend_the_budget_of_a_worker_that_finishes_no_group(supervisor):
    lost = UnreachableError("rollout-0 died in 'build': its node has died", actor="rollout-0", stage="build")
    for error in (*[lost] * 5, DEATH, lost):
        await supervisor.handle(actor_spec("rollout-0"), error, actor=None)
        await asyncio.sleep(1000)
    with pytest.raises(WorkerError, match="1 restarts of rollout-0 without a finished group"):
        await supervisor.handle(actor_spec("rollout-0"), DEATH, actor=None)


@simulated
async def test_a_call_that_succeeds_gives_a_scorer_its_budget_back(supervisor):
    calls = itertools.count()

    class DiesAtEachSecondCall(ScriptedScorer):
        async def call(self, *args, deadline_s):
            await asyncio.sleep(1000)
            if next(calls) % 2:
                raise death("reference")

    async def start(spec):
        return DiesAtEachSecondCall(spec, lambda index: None)

    spec = actor_spec("reference", ActorKind.REFERENCE_SCORER)
    where = SupervisedActor(spec, start=start, supervisor=supervisor)
    for _ in range(4):
        await where.call("score", deadline_s=60)
    assert supervisor.events.kinds() == ["failure", "recovery"] * 3


@simulated
async def test_a_restart_waits_out_its_back_off_and_is_counted_by_what_was_healed():
    """The second failure within `window_s` waits for 2 s, the third for 4."""
    supervisor, at = Supervisor(SupervisionConfig(backoff_s=2.0), ListedEvents()), []
    hung = RemoteActor(actor_spec("rollout-0"), None, 7, "node-1")
    hung.is_hung = True
    for error, actor in ((DEATH, None), (DEATH, hung), (WorkerError("a bug", actor="rollout-0"), None)):
        await supervisor.handle(actor_spec("rollout-0"), error, actor=actor)
        at.append(asyncio.get_running_loop().time())
    assert at == [0.0, 2.0, 6.0]
    told = [(event["failure"], event["actor_pid"], event["node_id"]) for event in supervisor.events.events]
    assert told == [("death", None, None), ("hang", 7, "node-1"), ("error", None, None)]
    names = ("num_restarts", "num_deaths", "num_hangs", "num_errors")
    assert supervisor.drain_stats() == dict(zip((f"supervision/{name}" for name in names), (3, 1, 1, 1), strict=True))


async def test_a_refusal_is_raised_as_it_is(supervisor):
    refusal = WeightsError("stale head")
    with pytest.raises(WeightsError) as caught:
        await supervisor.handle(actor_spec("rollout-0"), refusal, actor=None)
    assert caught.value is refusal


async def test_an_actor_whose_node_leaves_is_let_go_and_costs_no_restart(supervisor):
    actor = RemoteActor(actor_spec("rollout-0"), None, 7, "node-1")
    supervisor.note_leaving(actor)
    (event,) = supervisor.events.events
    assert (event["failure"], event["decision"], event["reason"]) == ("termination", "drain", "node node-1 goes away")
    await supervisor.handle(actor_spec("rollout-0"), DEATH, actor=None)


def place(*failures: TreadwheelError) -> tuple[SupervisedActor, ListedEvents]:
    """A place where an actor serves, with the default budget; its next starts fail so."""
    return place_of_starts(None, *failures)


def place_of_starts(*failures: TreadwheelError | None) -> tuple[SupervisedActor, ListedEvents]:
    """A place whose first starts fail so, or succeed where None stands; those after them succeed. Each takes 30 s."""
    left = [*failures]
    events = ListedEvents()

    async def start(spec):
        await asyncio.sleep(30)
        if error := left.pop(0) if left else None:
            raise error
        return ScriptedWorker(spec, lambda ticket: None)

    spec = replace(actor_spec("rollout-0"), num_cpus=2.0, num_gpus=1.0)
    return SupervisedActor(spec, start=start, supervisor=Supervisor(SupervisionConfig(), events)), events


@simulated
async def test_waiting_for_a_node_spends_no_restart():
    """Seen before: nine deadlines within `window_s` ended the run."""
    late = DeadlineError("rollout-0 did not finish 'start' within 60 s", actor="rollout-0", stage="start")
    where, events = place(*[late] * 10)
    await where.replace(await where.ready(), DEATH)
    assert where.actor is not None
    assert events.kinds() == ["failure", *["worker_waits"] * 10, "recovery"]
    assert events.events[1]["message"] == (
        "rollout-0 waits for a node with 2 CPUs and 1 GPUs free: rollout-0 did not finish 'start' within 60 s"
    )


@simulated
async def test_an_actor_that_is_replaced_is_ended_and_the_event_says_how_long_it_took(monkeypatch):
    """It may hang, or hold a GPU: nothing else ends it."""
    monkeypatch.setattr(time, "monotonic", asyncio.get_running_loop().time)
    where, events = place()
    old = await where.ready()
    assert where.failure_of(old) is None
    await where.replace(old, DEATH)
    new = await where.ready()
    assert old.is_dead and not new.is_dead
    assert str(where.failure_of(old)) == str(DEATH) and where.failure_of(new) is None
    assert (events.kinds(), events.events[1]["seconds"]) == (["failure", "recovery"], 30.0)
    await where.replace(old, WorkerError("somebody else's call ended too", actor="rollout-0"))
    assert await where.ready() is new and not new.is_dead and len(events.events) == 2
    assert str(where.failure_of(old)) == str(DEATH), "what came first"


@simulated
async def test_what_died_before_it_ever_came_up_is_started_again():
    where, events = place_of_starts(DEATH)
    assert where.progress().phase == "starting"
    assert (await where.ready()) is where.actor
    assert events.kinds() == ["failure"]
    where.actor.last_progress = "what it said last"
    assert where.progress() == "what it said last"


@simulated
async def test_what_never_came_up_for_another_reason_than_a_death_is_not_tried_again():
    where, events = place_of_starts(
        ConfigError("model.path='/mnt/model' does not load", actor="rollout-0", stage="build")
    )
    with pytest.raises(ConfigError, match="does not load"):
        await where.ready()
    assert events.events == []


@pytest.mark.parametrize(("details", "told"), [("a trace", {"details": "a trace"}), (None, {})])
async def test_a_failure_is_told_with_what_is_known_of_it(details, told, supervisor):
    error = WorkerError("rollout-0 died", actor="rollout-0", details=details)
    await supervisor.handle(actor_spec("rollout-0"), error, actor=None)
    (event,) = supervisor.events.events
    assert {name: value for name, value in event.items() if name == "details"} == told


async def test_a_place_that_was_given_back_starts_nothing(supervisor):
    async def start(spec):
        raise AssertionError("nobody wants it")

    where = SupervisedActor(actor_spec("rollout-0"), start=start, supervisor=supervisor)
    await where.stop()
    with pytest.raises(WorkerError, match="not wanted any more"):
        await where.ready()


@pytest.mark.parametrize(
    ("error", "may_start"),
    [
        (WorkerError("it died", actor="rollout-0"), True),
        (WorkerError("it died"), True),
        (WorkerError("it died", actor="learner-0"), False),
        (DeadlineError("too late"), True),
        (ConfigError("no such model", actor="rollout-0"), True),
        (ConfigError("no such model"), False),
        (WeightsError("off by 3 nats", actor="rollout-0"), False),
    ],
)
def test_what_another_actor_the_driver_or_the_weights_failed_by_is_not_tried_again(error, may_start):
    assert may_start_again(actor_spec("rollout-0"), error) is may_start


async def looking_for_a_node(supervisor):
    """An actor whose node is never there, and the wait for it, which has begun."""
    is_looking = asyncio.Event()

    async def start(spec):
        is_looking.set()
        await asyncio.Event().wait()

    where = SupervisedActor(actor_spec("rollout-0"), start=start, supervisor=supervisor)
    coming = asyncio.create_task(where.ready())
    await is_looking.wait()
    return where, coming


async def test_a_start_that_is_not_wanted_any_more_waits_for_no_node(supervisor):
    where, coming = await looking_for_a_node(supervisor)
    await where.stop()
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert coming.done()
    with pytest.raises(WorkerError, match="not wanted any more"):
        await coming


async def test_a_start_that_is_cancelled_is_no_failure(supervisor):
    _, coming = await looking_for_a_node(supervisor)
    coming.cancel()
    with pytest.raises(asyncio.CancelledError):
        await coming
    assert supervisor.events.events == []


@simulated
async def test_a_machine_without_the_model_is_one_more_failure_of_a_worker_that_served():
    where, events = place(ConfigError("model.path='/mnt/model' does not load", actor="rollout-0", stage="build"))
    await where.replace(await where.ready(), DEATH)
    assert where.actor is not None
    assert [event.get("failure") for event in events.events] == ["death", "error", None]


@simulated
async def test_a_full_disk_of_the_driver_is_no_failure_of_the_worker_that_starts_then():
    """Seen before: an event of the start raised it, the worker was restarted, and the run went on without its events."""
    where, events = place(StorageError("events.jsonl: No space left on device"))
    with pytest.raises(StorageError, match="No space left"):
        await where.replace(await where.ready(), DEATH)
    assert [event.get("failure") for event in events.events] == ["death"]


@pytest.mark.parametrize(
    "fatal",
    [
        WeightsError("2 of 3 workers: off by 3 nats"),
        WorkerError("learner-0: killed; the restart budget is spent", actor="learner-0"),
    ],
)
@simulated
async def test_a_verdict_on_the_weights_and_another_actors_failure_are_not_tried_again(fatal):
    where, _ = place(fatal)
    actor = await where.ready()
    with pytest.raises(type(fatal)) as caught:
        await where.replace(actor, DEATH)
    assert caught.value is fatal


async def test_an_actor_that_is_not_wanted_any_more_is_ended_while_it_is_prepared(supervisor):
    """Seen before: a worker that was scaled down while it loaded kept its GPU, and the next broadcast, until it had loaded."""
    is_loading, started = asyncio.Event(), list[ScriptedWorker]()

    async def start(spec):
        started.append(ScriptedWorker(spec, lambda ticket: None))
        return started[-1]

    async def load(actor):
        is_loading.set()
        await actor._death.wait()
        raise death(actor.name, "load")

    where = SupervisedActor(actor_spec("rollout-0"), start=start, supervisor=supervisor, on_start=load)
    coming = asyncio.create_task(where.ready())
    await is_loading.wait()
    await where.stop()
    assert started[0].is_dead
    with pytest.raises(WorkerError, match="not wanted any more"):
        await coming
    assert len(started) == 1 and supervisor.events.events == []


@pytest.mark.parametrize("error", [DEATH, asyncio.CancelledError()])
async def test_an_actor_that_is_not_prepared_to_the_end_is_ended(error, supervisor):
    """After a death another one takes its place. Otherwise it would hold its GPU."""
    started = list[ScriptedWorker]()

    async def start(spec):
        started.append(ScriptedWorker(spec, lambda ticket: None))
        return started[-1]

    async def load(actor):
        if actor is started[0]:
            raise error

    where = SupervisedActor(actor_spec("rollout-0"), start=start, supervisor=supervisor, on_start=load)
    if error is DEATH:
        assert await where.ready() is started[1] and not started[1].is_dead
    else:
        with pytest.raises(asyncio.CancelledError):
            await where.ready()
    assert started[0].is_dead


async def test_an_actor_that_is_not_wanted_any_more_when_it_has_come_up_is_not_prepared(supervisor):
    started = list[ScriptedWorker]()

    def stop() -> None:
        with contextlib.suppress(StopIteration):
            where.stop().send(None)

    async def start(spec):
        started.append(ScriptedWorker(spec, lambda ticket: None))
        asyncio.get_running_loop().call_soon(stop)  # when this has returned, and before anyone has seen it
        return started[-1]

    async def load(actor):
        raise AssertionError("nobody wants it")

    where = SupervisedActor(actor_spec("rollout-0"), start=start, supervisor=supervisor, on_start=load)
    with pytest.raises(WorkerError, match="not wanted any more"):
        await where.ready()
    assert started[0].is_dead


async def test_heartbeats_that_fail_end_what_they_watch_over(supervisor):
    def report() -> None:
        raise OSError("no status")

    with pytest.raises(OSError, match="no status"):
        async with beside(
            heartbeats(lambda: [], supervisor, heal=lambda actor, error: None, report=report, early=asyncio.Event())
        ):
            await asyncio.Event().wait()


@simulated
async def test_an_actor_that_is_found_dead_is_healed_at_the_first_heartbeat():
    class Dead(RemoteActor):
        async def progress(self, *, deadline_s):
            raise DEATH

    supervisor, healed = Supervisor(SupervisionConfig(), ListedEvents()), []
    actors = [Dead(actor_spec("rollout-0"), None, 7, "node-1")]
    heal = lambda actor, error: healed.append((actors.remove(actor), error))
    async with beside(heartbeats(lambda: [*actors], supervisor, heal=heal, report=lambda: None, early=asyncio.Event())):
        await asyncio.sleep(60)
    assert healed == [(None, DEATH)] and supervisor.events.events == []


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now


class Silent(RemoteActor):
    """Lets each question wait for one of `seconds`, unanswered; afterwards it answers at once."""

    def __init__(self, clock: Clock, *seconds: float) -> None:
        super().__init__(actor_spec("rollout-0"), None, 7, "node-1")
        self.clock, self.seconds, self.last_seen, self.num_answers = clock, [*seconds], clock.now, 0

    async def progress(self, *, deadline_s: float) -> None:
        if self.seconds:
            self.clock.now += self.seconds.pop(0)
            raise DeadlineError("no answer")
        self.last_seen, self.num_answers = self.clock.now, self.num_answers + 1

    async def kill(self) -> None: ...


@simulated
async def test_an_actor_that_hangs_is_told_of_and_given_up_once(supervisor, monkeypatch):
    """Somebody replaces it meanwhile; until then it is asked on."""
    monkeypatch.setattr("cluster.supervision.supervisor.time", clock := Clock())
    actor, healed = Silent(clock, *[5.0] * 40), []
    heal = lambda actor, error: healed.append(error)
    async with beside(heartbeats(lambda: [actor], supervisor, heal=heal, report=lambda: None, early=asyncio.Event())):
        while not actor.num_answers:
            await asyncio.sleep(5)
    assert [event["kind"] for event in supervisor.events.events] == ["hang"]
    assert len(healed) == 1


@simulated
async def test_a_heartbeat_that_comes_early_is_one_and_the_next_comes_in_its_time():
    """By default every five seconds."""
    supervisor, early, at = Supervisor(SupervisionConfig(), ListedEvents()), asyncio.Event(), list[float]()
    report = lambda: at.append(asyncio.get_running_loop().time())
    async with beside(heartbeats(lambda: [], supervisor, heal=lambda actor, error: None, report=report, early=early)):
        await asyncio.sleep(7)
        early.set()
        await asyncio.sleep(7)
    assert at == [0, 5, 7, 12]


@pytest.mark.parametrize(
    ("unseen_s", "seconds", "silent_s"),
    [
        (0.0, [5.0] * 12, []),
        (0.0, [5.0] * 13, [65.0]),
        pytest.param(0.0, [5.0, 100.0, 5.0], [], id="the driver itself stood still"),
        pytest.param(100.0, [5.0], [], id="the driver stood still before it asked"),
    ],
)
@simulated
async def test_an_actor_is_hung_that_left_questions_unanswered_for_hang_s(
    unseen_s, seconds, silent_s, supervisor, monkeypatch
):
    monkeypatch.setattr("cluster.supervision.supervisor.time", clock := Clock())
    actor, healed = Silent(clock, *seconds), []
    clock.now += unseen_s
    watching = heartbeats(
        lambda: [actor],
        supervisor,
        heal=lambda actor, error: healed.append(error),
        report=lambda: None,
        early=asyncio.Event(),
    )
    async with beside(watching):
        while not actor.num_answers:
            await asyncio.sleep(5)
    assert [event["silent_s"] for event in supervisor.events.events] == silent_s
    assert len(healed) == len(silent_s)
