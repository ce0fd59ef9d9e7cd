"""Starts a run's actors, restores the learner and has its weights attested, and ends the actors again."""

import asyncio
import contextlib
import os
import time
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from dataclasses import asdict
from functools import partial

from cluster.contracts.config import RunConfig
from cluster.contracts.errors import ConfigError, StorageError, TreadwheelError
from cluster.contracts.protocols import Events
from cluster.contracts.provenance import Provenance, unknown
from cluster.contracts.types import Progress
from cluster.controller import Log
from cluster.learner_group import LearnerGroup
from cluster.metrics import step_metrics
from cluster.record.ledger import Ledger
from cluster.record.run_directory import PASSPORT, STATUS, RunDirectory
from cluster.record.verdicts import Verdicts
from cluster.remote.actor import RemoteActor
from cluster.rollouts.mixture import Mixture
from cluster.rollouts.production import Production
from cluster.rollouts.tickets import TicketOffice
from cluster.saving import SavingRules
from cluster.supervision.asked_nodes import plan_asked
from cluster.supervision.placement import PlacementPlan, plan, plan_learning
from cluster.supervision.supervisor import SupervisedActor, Supervisor, heartbeats
from cluster.supervision.tasks import background, together
from cluster.supervision.timesheet import Timesheet
from deploy.cluster_up.actor_specs import ActorSpecs
from deploy.cluster_up.notices import ended_by_notices
from deploy.cluster_up.seats import seats
from deploy.cluster_up.waiting import AwaitedNodes, available
from deploy.cluster_up.wiring import Cluster, timesheet_of, wire
from deploy.named_files import refuse_other_files
from deploy.reports.passport import write_passport

_LAST_WORDS_S = 0.5
_SILENT_S = 30.0
"""After so many seconds, a write to the run directory that has not returned is reported."""


@contextlib.asynccontextmanager
async def cluster(
    config: RunConfig,
    run_dir: RunDirectory,
    ledger: Ledger,
    log: Log,
    *,
    office: TicketOffice | None = None,
    wait_for_nodes_s: float | None = None,
    provenance: Callable[[int], Provenance] = unknown,
    saved: Callable[[LearnerGroup], contextlib.AbstractAsyncContextManager[None]] | None = None,
) -> AsyncIterator[Cluster]:
    """In the block all actors are up, the learner is restored, and the workers have attested its weights. Its end ends all actors.

    A failure outside the block that no restart heals cancels the block and is raised as itself. `office` hands out the groups to train
    on; without it the cluster only evaluates. `wait_for_nodes_s` is the setting, for a cluster that nodes can join. `provenance` as for
    the `LearnerGroup`. `saved` is for a run that can be resumed: it surrounds the start of one that has recorded steps, which are learned
    again there. Such a start also raises PreemptedError when the node of the driver or of a learner rank announces its end.
    """
    if wait_for_nodes_s is None:
        placement, reserved = placement_of(config), None
    else:
        placement = plan_asked(config, needs=_needs(config))
        reserved = AwaitedNodes(placement, elastic=config.elastic, wait_s=wait_for_nodes_s, events=log).reserved
    for note in placement.notes():
        log.event("placement", message=note)

    def noticed(ranks: Callable[[], Sequence[RemoteActor]]) -> contextlib.AbstractAsyncContextManager[None]:
        return ended_by_notices(ranks, log=log) if saved else contextlib.nullcontext()

    async with contextlib.AsyncExitStack() as at_the_end:
        async with noticed(list):
            reserving = seats(placement, start_s=config.supervision.start_s, events=log, reserved=reserved)
            taken = await at_the_end.enter_async_context(reserving)
        async with background() as tasks:
            made = wire(
                config,
                seats=taken,
                specs=ActorSpecs(config, placement, run_dir),
                run_dir=run_dir,
                ledger=ledger,
                verdicts=await asyncio.to_thread(Verdicts, run_dir),
                log=log,
                tasks=tasks,
                office=office,
                provenance=provenance,
            )
            at_the_end.push_async_callback(made.stop)  # after the tasks, which would replace ended actors
            restoring = saved(made.learner) if saved and ledger.version else contextlib.nullcontext()
            async with restoring, noticed(made.learner.actors):
                await _start(config, made, run_dir, log, office, in_turn=placement.is_time_shared, tasks=tasks)
            made.production.run(tasks)
            living = lambda: _living(made.learner, made.places())
            pids = {actor.name: actor.pid for actor in living()}
            log.event("started", policy_version=made.learner.version, actors=pids)
            async with _told_to_the_end(living, made.timesheet):
                yield made


@contextlib.asynccontextmanager
async def learner_alone(
    config: RunConfig,
    run_dir: RunDirectory,
    ledger: Ledger,
    log: Log,
    *,
    checkpoints: str,
    provenance: Callable[[int], Provenance],
    with_reference: bool = True,
) -> AsyncIterator[tuple[LearnerGroup, SupervisedActor | None]]:
    """Only the learner on its initial weights, the recorder that feeds it, and the reference scorer if the objective needs one. The scorer
    starts at its first call. `with_reference=False`: all groups are scored already."""
    placement = placement_of(config, partial(plan_learning, with_reference=with_reference))
    async with (
        seats(placement, start_s=config.supervision.start_s, events=log) as taken,
        contextlib.AsyncExitStack() as at_the_end,
        background() as tasks,
    ):
        specs, supervisor = ActorSpecs(config, placement, run_dir), Supervisor(config.supervision, log)
        recorder = SupervisedActor(specs.recorder(), start=taken.start, supervisor=supervisor)
        learner = LearnerGroup(
            config=config,
            ranks=specs.learner_ranks(),
            spawn=taken.spawn,
            supervisor=supervisor,
            recorder=recorder,
            ledger=ledger,
            checkpoints=checkpoints,
            saving=SavingRules(config),
            written=log.written,
            provenance=provenance,
        )
        spec = specs.reference_scorer()
        reference = SupervisedActor(spec, start=taken.start, supervisor=supervisor) if spec else None
        places = [recorder, *([reference] if reference else [])]
        for each in (*places, learner):
            at_the_end.push_async_callback(each.stop)
        timesheet = timesheet_of(run_dir)
        log.event("starting")
        await together(recorder.ready(), learner.start())
        timesheet.enter("learning")
        tasks.create_task(_watch(run_dir, learner, lambda: places, supervisor, timesheet, tasks=tasks))
        async with _told_to_the_end(lambda: _living(learner, places), timesheet):
            yield learner, reference


def placement_of(config: RunConfig, planned: Callable[..., PlacementPlan] = plan) -> PlacementPlan:
    """Places the actors on the connected cluster, on nodes that go away only if the others are too few. Raises ConfigError if the cluster
    is too small."""
    there, needs = available(config.elastic), _needs(config)
    if there.staying != there:
        with contextlib.suppress(ConfigError):
            return planned(config, there.staying, needs=needs)
    return planned(config, there, needs=needs)


def _needs(config: RunConfig) -> Collection[str]:
    from learner.algorithms.objective import Objective

    return Objective.of_run(config, keeps_inert=True).needs


async def _start(
    config: RunConfig,
    made: Cluster,
    run_dir: RunDirectory,
    log: Log,
    office: TicketOffice | None,
    *,
    in_turn: bool,
    tasks: asyncio.TaskGroup,
) -> None:
    """Starts all actors, the learner and the reference `in_turn`, and restores the learner. When it is up, `tasks` begin to watch the
    actors: a rank that hangs in the restore is found as soon as later."""
    telling = tasks.create_task(_tell_starts(run_dir, made.places, log, every_s=config.supervision.heartbeat_s))
    log.event("starting")
    learner_up = asyncio.Event()

    async def watch() -> None:
        # Not earlier: the start of the learner itself replaces a rank that dies in it.
        await learner_up.wait()
        telling.cancel()
        parts = made.learner, made.places, made.supervisor, made.timesheet
        await _watch(run_dir, *parts, tasks=tasks, production=made.production)

    tasks.create_task(watch())
    # A worker takes longest to start. If actors share cores, learner and reference load their models in turn, to leave it one core.
    waits_for = learner_up if in_turn else None
    await together(
        made.production.start(reference_waits_for=waits_for),
        _learn_and_publish(config, made, run_dir, log, office, learner_up=learner_up),
    )


async def _learn_and_publish(
    config: RunConfig,
    made: Cluster,
    run_dir: RunDirectory,
    log: Log,
    office: TicketOffice | None,
    *,
    learner_up: asyncio.Event,
) -> None:
    learner = made.learner
    await together(made.recorder.ready(), learner.start())
    learner_up.set()
    await restore(config, run_dir, learner, log)
    sent = await made.weights.publish()
    log.event("published", policy_version=sent.policy_version, digest=sent.digest)
    prompts = None if office is None else office.source
    await note_passport(run_dir, config, learner, weights_digest=sent.digest, prompts=prompts)


async def restore(config: RunConfig, run_dir: RunDirectory, learner: LearnerGroup, log: Log) -> None:
    """Restores the learner to the last recorded step, and logs the steps that are learned again.

    Raises ConfigError if the ranks loaded other files than the run began with, such as those of a hub's branch that has moved.
    """
    await asyncio.to_thread(refuse_other_files, run_dir, config)
    await learner.restore(lambda stats, summaries: log.step(stats.policy_version, step_metrics(summaries, stats)))
    if learner.owes_a_save():
        await learner.save(None)


async def note_passport(
    run_dir: RunDirectory,
    config: RunConfig,
    learner: LearnerGroup,
    *,
    weights_digest: str,
    prompts: Mixture | None = None,
) -> None:
    """Writes passport.json, unless an earlier driver of the run did. `weights_digest`: of the weights that the run starts from. `prompts`
    as for `write_passport`."""
    if not await asyncio.to_thread(run_dir.exists, PASSPORT):
        await asyncio.to_thread(
            write_passport,
            run_dir,
            config,
            formula=learner.formula,
            learner=learner.chosen,
            weights_digest=weights_digest,
            prompts=prompts,
        )


async def _watch(
    run_dir: RunDirectory,
    learner: LearnerGroup,
    places: Callable[[], Sequence[SupervisedActor]],
    supervisor: Supervisor,
    timesheet: Timesheet,
    *,
    tasks: asyncio.TaskGroup,
    production: Production | None = None,
) -> None:
    """Replaces actors that died or hang, and writes the actors' progress to status.json and phases.jsonl. `production` has the rollout
    workers and reward services among `places`."""

    def heal(actor: RemoteActor, error: TreadwheelError) -> None:
        if production is not None and (pool := production.pool_of(actor.spec.kind)):
            pool.replace(actor, error)
        elif actor in learner.actors():
            tasks.create_task(learner.heal(actor, error))
        else:
            for place in (place for place in places() if place.actor is actor):
                tasks.create_task(place.replace(actor, error))

    def report() -> None:
        if production is not None:
            production.note_progress()
        doing = [*(place.progress() for place in places()), *(rank.last_progress for rank in learner.actors())]
        _write_status(run_dir, doing, supervisor.events)
        timesheet.hear(_living(learner, places()))

    await heartbeats(lambda: _living(learner, places()), supervisor, heal=heal, report=report, early=timesheet.asked)


@contextlib.asynccontextmanager
async def _told_to_the_end(actors: Callable[[], Sequence[RemoteActor]], timesheet: Timesheet) -> AsyncIterator[None]:
    """At the end the timesheet gets the progress since the last heartbeat, from the actors that answer at once."""
    try:
        yield
    finally:
        asked = actors()
        try:
            await asyncio.gather(*(each.progress(deadline_s=_LAST_WORDS_S) for each in asked), return_exceptions=True)
        finally:
            timesheet.hear(asked)
            timesheet.close()


async def _tell_starts(
    run_dir: RunDirectory, places: Callable[[], Sequence[SupervisedActor]], events: Events, *, every_s: float
) -> None:
    """Writes to status.json which places wait for an actor and since when, until the learner is up and actors are asked."""
    while True:
        _write_status(run_dir, [place.progress() for place in places()], events)
        await asyncio.sleep(every_s)


def _living(learner: LearnerGroup, places: Sequence[SupervisedActor]) -> list[RemoteActor]:
    return [*(place.actor for place in places if place.actor), *learner.actors()]


def _write_status(run_dir: RunDirectory, actors: Sequence[Progress | None], events: Events) -> None:
    """Writes the actors' progress for `treadwheel info`, and reports a file system that stands still. Writes nothing to a directory that
    this driver only reads."""
    if not run_dir.is_claimed:
        return
    if silent_s := run_dir.writer.drain_silence(longer_than_s=_SILENT_S):
        message = f"{run_dir.path()} has not answered for {silent_s:.0f} s, and the run waits for it: bring its disk or store back"
        events.event("storage_silent", silent_s=silent_s, message=message)
    status = {"time": time.time(), "driver_pid": os.getpid(), "actors": [asdict(each) for each in actors if each]}

    def write() -> None:
        # A full disk must not end the heartbeats.
        with contextlib.suppress(StorageError):
            run_dir.write_json(STATUS, status)

    run_dir.writer.put_latest(STATUS, write)
