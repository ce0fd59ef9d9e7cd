"""Brings a run's actors up: placed, the learner restored, its weights attested; and takes them down again."""

import asyncio
import contextlib
import os
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import ray
from ray.util.placement_group import placement_group, remove_placement_group

from cluster.contracts.config import RunConfig
from cluster.contracts.errors import StorageError, TreadwheelError, WorkerError
from cluster.contracts.types import Progress
from cluster.controller import Log
from cluster.learner_group import LearnerGroup
from cluster.metrics import step_metrics
from cluster.record.ledger import Ledger
from cluster.record.run_directory import PASSPORT, STATUS, RunDirectory
from cluster.remote.actor import ActorSpec, RemoteActor
from cluster.rollouts.dispatcher import Keep
from cluster.rollouts.worker_pool import Pool
from cluster.supervision.placement import ClusterResources, Node, PlacementPlan, plan
from cluster.supervision.supervisor import SupervisedActor, Supervisor, heartbeats
from cluster.weights.broadcast import Weights
from deploy.cluster_up.seats import ActorSpecs
from deploy.reports.passport import write_passport


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """The actors of one run, up and proven."""

    pool: Pool
    learner: LearnerGroup
    weights: Weights
    supervisor: Supervisor
    specs: ActorSpecs


@contextlib.asynccontextmanager
async def actors(config: RunConfig, run_dir: RunDirectory, ledger: Ledger, log: Log) -> AsyncIterator[Cluster]:
    """All actors up, the learner restored, its weights on the workers and attested. Kills them all at the end."""
    async with _seated(config, run_dir) as seated:
        supervisor = Supervisor(config.supervision, log)
        recorder = seated.recorder(supervisor)
        learner = seated.learner(supervisor, recorder, ledger, checkpoints=run_dir.path("checkpoints"))
        weights = Weights.from_config(config.weights, learner=learner, num_workers=config.rollout.num_workers)
        pool = Pool(
            config,
            workers=seated.specs.rollout_workers(),
            reward=seated.specs.reward_service(),
            reference=seated.specs.reference_scorer(),
            start=seated.start,
            supervisor=supervisor,
            join=weights.join,
            keep=keep_rule(config),
        )

        def everyone() -> list[RemoteActor]:
            return [*pool.actors(), *learner.actors(), *([recorder.actor] if recorder.actor else [])]

        def heal(actor: RemoteActor, error: TreadwheelError) -> None:
            pool.replace(actor, error)
            if actor is recorder.actor:
                pool.watch(recorder.replace(actor, error))
            if actor in learner.actors():
                pool.watch(learner.heal(actor, error))

        def report() -> None:
            places = [place.progress() for place in (*pool.places(), recorder)]
            write_status(run_dir, [*places, *(rank.last_progress for rank in learner.actors())])

        async def learn_and_publish() -> None:
            await _together(recorder.ready(), learner.start())
            for stats, summaries in await learner.restore():
                log.step(stats.policy_version, step_metrics(summaries, stats))
            sent = await weights.publish()
            log.event("published", policy_version=sent.policy_version, digest=sent.digest)
            if not run_dir.exists(PASSPORT):
                formula, described = await learner.formula()
                write_passport(run_dir, config, formula=formula, learner=described, weights_digest=sent.digest)

        try:
            await _together(learn_and_publish(), pool.start())
            pids = {actor.name: actor.pid for actor in everyone()}
            log.event("started", policy_version=learner.version, actors=pids)
            async with heartbeats(everyone, supervisor, heal=heal, report=report):
                yield Cluster(pool=pool, learner=learner, weights=weights, supervisor=supervisor, specs=seated.specs)
        finally:
            await asyncio.gather(pool.stop(), learner.stop(), recorder.stop(), return_exceptions=True)


@contextlib.asynccontextmanager
async def learner_alone(
    config: RunConfig, run_dir: RunDirectory, ledger: Ledger, log: Log, *, checkpoints: str
) -> AsyncIterator[LearnerGroup]:
    """Only what replay needs: the learner on its initial weights, and the recorder to feed it."""
    async with _seated(config, run_dir) as seated:
        supervisor = Supervisor(config.supervision, log)
        recorder = seated.recorder(supervisor)
        learner = seated.learner(supervisor, recorder, ledger, checkpoints=checkpoints)
        try:
            await _together(recorder.ready(), learner.start())
            yield learner
        finally:
            await asyncio.gather(learner.stop(), recorder.stop(), return_exceptions=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Seated:
    """A placement group that is ours, and how to fill it."""

    config: RunConfig
    specs: ActorSpecs
    group: Any

    async def start(self, spec: ActorSpec) -> RemoteActor:
        return await RemoteActor.start(spec, placement_group=self.group, deadline_s=self.config.supervision.start_s)

    async def spawn(self, spec: ActorSpec) -> RemoteActor:
        return await RemoteActor.spawn(spec, placement_group=self.group, deadline_s=self.config.supervision.start_s)

    def recorder(self, supervisor: Supervisor) -> SupervisedActor:
        return SupervisedActor(self.specs.recorder(), start=self.start, supervisor=supervisor)

    def learner(
        self, supervisor: Supervisor, recorder: SupervisedActor, ledger: Ledger, *, checkpoints: str
    ) -> LearnerGroup:
        return LearnerGroup(
            self.config,
            ranks=self.specs.learner_ranks(),
            spawn=self.spawn,
            supervisor=supervisor,
            recorder=recorder,
            ledger=ledger,
            checkpoints=checkpoints,
        )


@contextlib.asynccontextmanager
async def _seated(config: RunConfig, run_dir: RunDirectory) -> AsyncIterator[_Seated]:
    from learner.algorithms.objective import Objective

    placement = plan(config, available(), needs=Objective.from_config(config.algorithm).needs)
    group = await _reserve(placement, deadline_s=config.supervision.start_s)
    try:
        yield _Seated(config=config, specs=ActorSpecs(config, placement, run_dir), group=group)
    finally:
        remove_placement_group(group)


def available() -> ClusterResources:
    """What the connected cluster's living nodes have."""
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    return ClusterResources(nodes=tuple(Node(cpus=each.get("CPU", 0.0), gpus=each.get("GPU", 0.0)) for each in nodes))


def write_status(run_dir: RunDirectory, doing: Sequence[Progress | None]) -> None:
    """status.json: what everyone is doing and since when, for `treadwheel info` on a live run."""
    known = [asdict(each) for each in doing if each]
    with contextlib.suppress(StorageError):  # a full disk must not end the heartbeats; events.jsonl says what happens
        run_dir.write_json(STATUS, {"time": time.time(), "driver_pid": os.getpid(), "actors": known})


def keep_rule(config: RunConfig) -> Keep:
    """Which finished groups are trained on, by what the algorithm's filters say of their rewards."""
    from learner.algorithms.objective import Objective

    objective = Objective.from_config(config.algorithm)
    return lambda summary: objective.keeps(summary.known_rewards)


async def _reserve(placement: PlacementPlan, *, deadline_s: float) -> Any:
    group = placement_group(placement.resources(), strategy=placement.strategy)
    try:
        async with asyncio.timeout(deadline_s):
            await group.ready()
    except TimeoutError:
        remove_placement_group(group)
        raise WorkerError(
            f"the cluster did not free {placement.resources()} within {deadline_s:g} s; "
            "others hold its resources: wait, or ask for less"
        ) from None
    return group


async def _together(*work: Any) -> None:
    """All at once; the first failure cancels the others and is raised as itself."""
    tasks = [asyncio.ensure_future(each) for each in work]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
