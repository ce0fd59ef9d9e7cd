"""Puts a run together and runs it: cluster, actors, loop, and an orderly end. The command line calls this; so may you."""

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import ray
from ray.util.placement_group import placement_group, remove_placement_group

from cluster.broadcast import Weights
from cluster.buffer import Buffer
from cluster.contracts.config import RunConfig
from cluster.contracts.errors import WorkerError
from cluster.contracts.plugins import resolve
from cluster.contracts.protocols import PromptSource
from cluster.contracts.types import GroupSummary, SamplingParams
from cluster.controller import Evaluator, train as run_loop
from cluster.learner_group import LearnerGroup
from cluster.ledger import Ledger
from cluster.metrics import MetricLog
from cluster.placement import ClusterResources, PlacementPlan, plan
from cluster.pool import Pool
from cluster.remote import ActorSpec, RemoteActor
from cluster.run_directory import RunDirectory
from cluster.supervised import SupervisedActor, Supervisor, heartbeats
from cluster.supervision import ActorKind
from cluster.tickets import TicketOffice
from deploy.configuration import resolved_yaml
from deploy.summary import Summary, summarize


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """The actors of one run, up and proven."""

    pool: Pool
    learner: LearnerGroup
    weights: Weights
    supervisor: Supervisor


def train(config: RunConfig, *, address: str | None = None) -> Summary:
    """Runs `config` to its last step, from wherever its run directory stands. Starts a local Ray if there is no `address`.

    Raises our own errors; KeyboardInterrupt and SIGTERM end it cleanly, and the same call goes on later.
    """
    began = time.time()
    run_dir = RunDirectory(config.run_dir)
    run_dir.claim(resolved_yaml(config))
    try:
        with MetricLog.open(config, run_dir) as log:
            asyncio.run(_until_interrupted(_train(config, run_dir, log, address=address)))
            return summarize(config, run_dir, began=began)
    finally:
        run_dir.release()


async def _train(config: RunConfig, run_dir: RunDirectory, log: MetricLog, *, address: str | None) -> None:
    source = prompt_source(config)
    evaluator = make_evaluator(config)
    ledger = Ledger(run_dir)
    if ledger.num_cut:
        log.event("ledger_cut", lines=ledger.num_cut, policy_version=ledger.version)
    async with connected(address), actors(config, run_dir, ledger, log) as cluster:
        buffer = Buffer(
            groups_per_step=config.buffer.groups_per_step,
            max_off_policy_steps=config.buffer.max_off_policy_steps,
            num_steps=config.num_steps,
            max_size_bytes=config.buffer.max_size_bytes,
            in_waves=config.deterministic,
            version=cluster.learner.version,
            next_index=ledger.next_index,
        )
        office = TicketOffice(
            source=source,
            seed=config.seed,
            trajectories_per_group=config.buffer.trajectories_per_group,
            sampling=sampling_params(config),
        )
        await run_loop(
            config,
            pool=cluster.pool,
            office=office,
            learner=cluster.learner,
            buffer=buffer,
            weights=cluster.weights,
            log=log,
            evaluator=evaluator,
        )


@contextlib.asynccontextmanager
async def actors(config: RunConfig, run_dir: RunDirectory, ledger: Ledger, log: MetricLog) -> AsyncIterator[Cluster]:
    """All actors up, the learner restored, its weights on the workers and attested. Kills them all at the end."""
    placement = plan(config, _available())
    group = await _reserve(placement, deadline_s=config.supervision.start_s)

    async def start(spec: ActorSpec) -> RemoteActor:
        return await RemoteActor.start(spec, placement_group=group, deadline_s=config.supervision.start_s)

    async def spawn(spec: ActorSpec) -> RemoteActor:
        return await RemoteActor.spawn(spec, placement_group=group, deadline_s=config.supervision.start_s)

    specs = ActorSpecs(config, placement, run_dir)
    supervisor = Supervisor(config.supervision, log)
    recorder = SupervisedActor(specs.recorder(), start=start, supervisor=supervisor)
    learner = LearnerGroup(
        config,
        ranks=specs.learner_ranks(),
        spawn=spawn,
        supervisor=supervisor,
        recorder=recorder,
        ledger=ledger,
        checkpoints=run_dir.path("checkpoints"),
    )
    weights = Weights(config.weights, learner=learner)
    pool = Pool(
        config,
        workers=specs.rollout_workers(),
        reward=specs.reward_service(),
        reference=specs.reference_scorer(),
        start=start,
        supervisor=supervisor,
        join=weights.join,
        keep=keep_rule(config),
    )

    def everyone() -> list[RemoteActor]:
        return [*pool.actors(), *learner.actors(), *([recorder.actor] if recorder.actor else [])]

    async def learn_and_publish() -> None:
        await recorder.ready()
        await learner.start()
        for stats in await learner.restore():
            log.step(stats.policy_version, stats.metrics)
        await weights.publish()

    try:
        await _together(learn_and_publish(), pool.start())
        log.event("started", policy_version=learner.version, actors={actor.name: actor.pid for actor in everyone()})
        async with heartbeats(everyone, supervisor):
            yield Cluster(pool=pool, learner=learner, weights=weights, supervisor=supervisor)
    finally:
        await asyncio.gather(pool.stop(), learner.stop(), recorder.stop(), return_exceptions=True)
        remove_placement_group(group)


class ActorSpecs:
    """What each actor is made of and where it goes."""

    def __init__(self, config: RunConfig, placement: PlacementPlan, run_dir: RunDirectory) -> None:
        self._config = config
        self._placement = placement
        self._run_dir = run_dir

    def learner_ranks(self) -> list[ActorSpec]:
        return [
            self._spec(
                f"learner-{rank}",
                ActorKind.LEARNER,
                "learner_rank",
                {"config": self._config, "rank": rank, "run_dir": self._run_dir.path()},
                place=f"learner-{rank}",
            )
            for rank in range(self._config.learner.num_ranks)
        ]

    def rollout_workers(self) -> list[ActorSpec]:
        return [self.rollout_worker(number) for number in range(self._config.rollout.num_workers)]

    def rollout_worker(self, number: int) -> ActorSpec:
        name = f"rollout-{number}"
        arguments = {"config": self._config, "name": name, "run_id": os.path.basename(self._config.run_dir.rstrip("/"))}
        return self._spec(name, ActorKind.ROLLOUT_WORKER, "rollout_worker", arguments, place=name)

    def reward_service(self) -> ActorSpec:
        return self._spec(
            "reward", ActorKind.REWARD_SERVICE, "reward_service", {"config": self._config}, place="reward"
        )

    def reference_scorer(self) -> ActorSpec | None:
        if not self._placement.has("reference"):
            return None
        arguments = {"config": self._config}
        return self._spec("reference", ActorKind.REFERENCE_SCORER, "reference_scorer", arguments, place="reference")

    def recorder(self) -> ActorSpec:
        arguments = {"run_dir": self._run_dir.path()}
        return self._spec("recorder", ActorKind.RECORDER, "recorder", arguments, place="recorder")

    def _spec(self, name: str, kind: ActorKind, factory: str, arguments: dict[str, Any], *, place: str) -> ActorSpec:
        seat = self._placement.seat(place)
        return ActorSpec(
            name=name,
            kind=kind,
            factory=f"deploy.factories:{factory}",
            arguments=arguments,
            num_cpus=seat.num_cpus,
            num_gpus=seat.num_gpus,
            bundle=seat.bundle,
            env={"OMP_NUM_THREADS": str(seat.num_threads)},
        )


def prompt_source(config: RunConfig) -> PromptSource:
    return resolve(config.prompts, home="actors.prompts", field="prompts")()


def make_evaluator(config: RunConfig) -> Evaluator | None:
    """None when the run has no held-out prompts."""
    if config.evaluation.prompts is None:
        return None
    return Evaluator(
        config=config.evaluation,
        source=resolve(config.evaluation.prompts, home="actors.prompts", field="evaluation.prompts")(),
        sampling=SamplingParams(
            max_tokens=config.sampling.max_tokens, temperature=config.evaluation.temperature, stop=config.sampling.stop
        ),
        seed=config.seed,
    )


def sampling_params(config: RunConfig) -> SamplingParams:
    return SamplingParams(**config.sampling.model_dump())


def keep_rule(config: RunConfig) -> Any:
    """Which finished groups are trained on: with the `zero_variance` filter, only those whose rewards differ (DAPO)."""
    if not any(each.name == "zero_variance" for each in config.algorithm.filters):
        return lambda summary: True

    def differs(summary: GroupSummary) -> bool:
        known = [value for value in summary.rewards if value is not None]
        return max(known) != min(known)

    return differs


@contextlib.asynccontextmanager
async def connected(address: str | None) -> AsyncIterator[None]:
    """A Ray cluster: the one at `address` or RAY_ADDRESS (which `ray job submit` sets), else a local one for this run alone."""
    address = address or os.environ.get("RAY_ADDRESS")
    options: dict[str, Any] = {
        "log_to_driver": False,
        "namespace": "treadwheel",
        "configure_logging": True,
        "logging_level": "warning",
    }
    if address is None:
        options |= {"include_dashboard": False}
    await asyncio.to_thread(lambda: ray.init(address, **options))
    try:
        yield
    finally:
        await asyncio.to_thread(ray.shutdown)


def _available() -> ClusterResources:
    return ClusterResources.of(ray.nodes())


async def _reserve(placement: PlacementPlan, *, deadline_s: float) -> Any:
    group = placement_group(placement.bundles, strategy=placement.strategy)
    ready, _ = await asyncio.to_thread(ray.wait, [group.ready()], timeout=deadline_s)
    if not ready:
        remove_placement_group(group)
        raise WorkerError(
            f"the cluster did not free {placement.bundles} within {deadline_s:g} s; others hold its resources: wait, or ask for less"
        )
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


async def _until_interrupted(work: Any) -> None:
    """Ctrl-C and SIGTERM cancel the work, which then ends its actors; the caller gets KeyboardInterrupt."""
    task = asyncio.ensure_future(work)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, task.cancel)
    try:
        await task
    except asyncio.CancelledError:
        raise KeyboardInterrupt from None
