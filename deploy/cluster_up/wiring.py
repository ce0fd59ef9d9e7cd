"""Builds the parts of a run, and hands each part to the parts that need it. Starts nothing."""

import asyncio
import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from cluster.contracts.config import RunConfig
from cluster.contracts.errors import StorageError, TreadwheelError
from cluster.contracts.provenance import Provenance
from cluster.controller import Log
from cluster.learner_group import LearnerGroup
from cluster.record.ledger import Ledger
from cluster.record.run_directory import CHECKPOINTS, PHASES, RunDirectory
from cluster.record.verdicts import Verdicts
from cluster.remote.actor import ActorSpec, RemoteActor
from cluster.rollouts.buffer import Buffer
from cluster.rollouts.destinations import TrainingGroups
from cluster.rollouts.dispatcher import Dispatcher
from cluster.rollouts.judge_servers import JudgeServers
from cluster.rollouts.production import Production
from cluster.rollouts.quarantine import Suspects
from cluster.rollouts.scoring import Scorers
from cluster.rollouts.tickets import TicketOffice
from cluster.rollouts.worker_pool import WorkerPool
from cluster.saving import SavingRules
from cluster.supervision.supervisor import Start, SupervisedActor, Supervisor
from cluster.supervision.timesheet import Timesheet
from cluster.supervision.turns import GpuTurns
from cluster.weights.broadcast import Weights
from deploy.cluster_up.actor_specs import ActorSpecs
from deploy.cluster_up.seats import Seats

if TYPE_CHECKING:
    from learner.algorithms.objective import Objective

_TELL_S = 60.0
"""Deadline for a reward service to receive the known verdicts, tens of megabytes at most."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """The parts of one run."""

    production: Production
    learner: LearnerGroup
    recorder: SupervisedActor
    weights: Weights
    supervisor: Supervisor
    timesheet: Timesheet

    def places(self) -> list[SupervisedActor]:
        """Places of all actors except the learner's ranks."""
        return [*self.production.places(), self.recorder]

    async def stop(self) -> None:
        """Ends all actors."""
        await asyncio.gather(self.production.stop(), self.learner.stop(), self.recorder.stop(), return_exceptions=True)


def wire(
    config: RunConfig,
    *,
    seats: Seats,
    specs: ActorSpecs,
    run_dir: RunDirectory,
    ledger: Ledger,
    verdicts: Verdicts,
    log: Log,
    tasks: asyncio.TaskGroup,
    office: TicketOffice | None,
    provenance: Callable[[int], Provenance],
) -> Cluster:
    """`tasks` hold the background work. Without an `office` the cluster only evaluates."""
    supervisor, timesheet = Supervisor(config.supervision, log), timesheet_of(run_dir)

    async def lose(worker: Any, error: TreadwheelError) -> None:
        await worker.kill()
        fleet.replace(worker, error)

    turns = None
    if config.rollout.colocated:
        deadline_s = config.weights.timeout_s
        turns = GpuTurns(loads_whole=config.published_adapter is None, deadline_s=deadline_s, lose=lose)
    recorder = SupervisedActor(specs.recorder(), start=seats.start, supervisor=supervisor)
    learner = LearnerGroup(
        config=config,
        ranks=specs.learner_ranks(),
        spawn=seats.spawn,
        supervisor=supervisor,
        recorder=recorder,
        ledger=ledger,
        checkpoints=run_dir.path(CHECKPOINTS),
        saving=SavingRules(config),
        written=log.written,
        pass_rates=office.pass_rates.of_step if office and office.pass_rates else None,
        provenance=provenance,
        turns=turns,
    )
    weights = Weights.from_config(
        config.weights,
        learner=learner,
        num_workers=config.rollout.num_workers,
        events=log,
        around=turns.delivering if turns else None,
    )
    pool = partial(WorkerPool, left=seats.vacate, supervisor=supervisor, tasks=tasks)
    fleet = pool(
        specs.rollout_workers(),
        start=turns.starting(seats.start) if turns else seats.start,
        joining=specs.joining_worker,
        join=weights.join,
        is_on_spot=lambda worker: config.elastic.is_spot(worker.node_labels),
        is_deterministic=config.keeps_its_workers,
    )

    async def tell(service: RemoteActor) -> None:
        await service.call("remember", verdicts.known, deadline_s=_TELL_S)

    scorers = make_scorers(
        config,
        start=seats.start,
        spawn=seats.spawn,
        services=pool(specs.reward_services(), start=seats.start, joining=specs.joining_service, join=tell),
        models=specs.reward_models(),
        reference=specs.reference_scorer(),
        servers=specs.judge_servers(),
        supervisor=supervisor,
        tasks=tasks,
        keep=verdicts.add,
    )
    rollouts = production(
        config,
        scorers=scorers,
        fleet=fleet,
        supervisor=supervisor,
        tasks=tasks,
        office=office,
        note_work=timesheet.note_work,
    )
    return Cluster(
        production=rollouts,
        learner=learner,
        recorder=recorder,
        weights=weights,
        supervisor=supervisor,
        timesheet=timesheet,
    )


def timesheet_of(run_dir: RunDirectory) -> Timesheet:
    """A timesheet that writes phases.jsonl. Writes nothing to a directory that this driver only reads."""

    def write(lines: Sequence[Mapping[str, Any]]) -> None:
        # A full disk must not end the heartbeats.
        with contextlib.suppress(StorageError):
            for line in lines:
                run_dir.append_json(PHASES, line)

    def put(lines: Sequence[Mapping[str, Any]]) -> None:
        if run_dir.is_claimed:
            run_dir.writer.put(partial(write, lines))

    return Timesheet(put)


def make_scorers(
    config: RunConfig,
    *,
    start: Start,
    spawn: Start,
    services: WorkerPool,
    models: Mapping[str, ActorSpec],
    reference: ActorSpec | None,
    servers: Mapping[str, Sequence[ActorSpec]],
    supervisor: Supervisor,
    tasks: asyncio.TaskGroup,
    keep: Callable[[Mapping[str, str]], None],
) -> Scorers:
    """`services` with their models, servers and reference, which `start` and `spawn` start. `keep` as for the `Scorers`."""
    return Scorers(
        services=services,
        models={name: SupervisedActor(spec, start=start, supervisor=supervisor) for name, spec in models.items()},
        reference=SupervisedActor(reference, start=start, supervisor=supervisor) if reference else None,
        servers=JudgeServers(servers, spawn=spawn, supervisor=supervisor),
        suspects=Suspects(max_failures=config.supervision.max_prompt_failures, events=supervisor.events),
        events=supervisor.events,
        tasks=tasks,
        reward=config.reward,
        judging_deadline_s=judging_deadline_s(config),
        reference_timeout_s=config.reference.timeout_s,
        source_column=config.reward.source_column if config.reward.by_source or config.prompts.sources else None,
        keep=keep,
    )


def production(
    config: RunConfig,
    *,
    scorers: Scorers,
    fleet: WorkerPool,
    supervisor: Supervisor,
    tasks: asyncio.TaskGroup,
    office: TicketOffice | None,
    note_work: Callable[..., None],
) -> Production:
    """The production of groups: `fleet` samples them, and `scorers` judge them."""
    from learner.algorithms.objective import Objective  # imports torch

    events = supervisor.events
    dispatcher = Dispatcher(
        fleet=fleet,
        scorers=scorers,
        suspects=Suspects(max_failures=config.supervision.max_prompt_failures, events=events),
        events=events,
        tasks=tasks,
        max_sequences_per_worker=config.max_concurrent_trajectories,
        sequences_per_group=config.buffer.trajectories_per_group + config.rollout.extra_trajectories,
        timeout_s=config.group_deadline_s,
        is_deterministic=config.deterministic,
        note_work=note_work,
    )

    objective = Objective.of_run(config, keeps_inert=True)
    choose = partial(objective.chosen, group_size=config.buffer.trajectories_per_group)

    def destination(buffer: Buffer) -> TrainingGroups:
        return TrainingGroups(
            buffer,
            scorers=scorers,
            dropped_by=objective.dropped_by,
            choose=choose if config.algorithm.selection else None,
            wants_reference=wanting_reference(config, objective),
            max_failed_share=config.buffer.max_failed_share,
            measure=office.pass_rates.measure if office and office.pass_rates else None,
            events=events,
        )

    return Production(
        fleet=fleet,
        scorers=scorers,
        dispatcher=dispatcher,
        office=office,
        supervisor=supervisor,
        destination=destination,
        may_wait_for_nodes=config.elastic.wait_for_nodes_s is not None,
    )


def judging_deadline_s(config: RunConfig) -> float:
    """Deadline for a call of the reward service: time for all trajectories that may be queued before it. The service keeps a deadline per
    trajectory itself.

    The queue holds the groups of all steps inside the bound and an evaluation, and the service may wait out an outage. Only a service
    that answers heartbeats but judges nothing meets this deadline. A dead or silent one is found much sooner.
    """
    evaluation = config.evaluation
    num_queued = config.buffer.most_under_way * config.judged_per_group
    if evaluation.prompts is not None:
        num_queued += evaluation.num_prompts * evaluation.num_samples
    return config.reward.deadline_s * num_queued + config.reward.hold_s + 60.0


def wanting_reference(config: RunConfig, objective: "Objective") -> Callable[[int], bool]:
    """Whether the reference scores a group, by its place in the start order: known when it starts, and the same after a restart.

    The place says in which step the group trains, unless groups before it are dropped.
    """
    return lambda index: objective.wants_reference(index // config.buffer.groups_per_step)
