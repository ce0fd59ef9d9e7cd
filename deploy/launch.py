"""Puts a run together and runs it: cluster, actors, loop, and an orderly end. The command line calls this; so may you."""

import asyncio
import contextlib
import math
import os
import signal
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import psutil
import ray
from ray.util.placement_group import placement_group, remove_placement_group

from cluster.broadcast import Weights
from cluster.buffer import Buffer
from cluster.contracts.config import RunConfig
from cluster.contracts.errors import WorkerError
from cluster.contracts.plugins import resolve
from cluster.contracts.protocols import PromptSource
from cluster.contracts.types import GroupSummary, SamplingParams
from cluster.controller import Evaluator, step_metrics
from cluster.controller import train as run_loop
from cluster.learner_group import LearnerGroup
from cluster.ledger import Ledger
from cluster.metrics import MetricLog, open_log
from cluster.placement import Bundle, ClusterResources, Node, PlacementPlan, plan
from cluster.pool import Pool
from cluster.remote import ActorSpec, RemoteActor
from cluster.run_directory import RunDirectory
from cluster.supervised import SupervisedActor, Supervisor, heartbeats
from cluster.supervision import ActorKind
from cluster.tickets import TicketOffice
from deploy.configuration import resolved_yaml
from deploy.summary import Summary, summarize


STATUS = "status.json"


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
    run_dir = RunDirectory(config.run_dir)
    run_dir.claim(resolved_yaml(config))
    try:
        log = open_log(config.metrics, directory=run_dir, num_steps=config.num_steps)
        with contextlib.closing(log):
            log.event("launched", started_at=psutil.Process().create_time())
            asyncio.run(_until_interrupted(_train(config, run_dir, log, address=address)))
        return summarize(run_dir)
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
    transport = resolve(config.weights.transport, home="cluster.weights", field="weights.transport", given=("timeout_s",))
    timeout_s = config.weights.timeout_s
    weights = Weights(transport(timeout_s=timeout_s), learner=learner, timeout_s=timeout_s)
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
        for stats, summaries in await learner.restore():
            log.step(stats.policy_version, step_metrics(summaries, stats))
        await weights.publish()

    try:
        await _together(learn_and_publish(), pool.start())
        log.event("started", policy_version=learner.version, actors={actor.name: actor.pid for actor in everyone()})
        async with heartbeats(everyone, supervisor, report=lambda living: write_status(run_dir, living)):
            yield Cluster(pool=pool, learner=learner, weights=weights, supervisor=supervisor)
    finally:
        await asyncio.gather(pool.stop(), learner.stop(), recorder.stop(), return_exceptions=True)
        remove_placement_group(group)


def write_status(run_dir: RunDirectory, living: Sequence[RemoteActor]) -> None:
    """status.json: what everyone is doing and since when, for `treadwheel info` on a live run."""
    known = [asdict(actor.last_progress) for actor in living if actor.last_progress]
    run_dir.write_json(STATUS, {"time": time.time(), "driver_pid": os.getpid(), "actors": known})


class ActorSpecs:
    """What each actor is made of and where it goes."""

    def __init__(self, config: RunConfig, placement: PlacementPlan, run_dir: RunDirectory) -> None:
        self._config = config
        self._placement = placement
        self._run_dir = run_dir

    def learner_ranks(self) -> list[ActorSpec]:
        return [
            self._seated(bundle, f"learner-{bundle.index}", "learner_rank", rank=bundle.index, run_dir=self._run_dir.path())
            for bundle in self._placement.of(ActorKind.LEARNER)
        ]

    def rollout_workers(self) -> list[ActorSpec]:
        return [self._rollout_worker(bundle) for bundle in self._placement.of(ActorKind.ROLLOUT_WORKER)]

    def reward_service(self) -> ActorSpec:
        return self._seated(self._placement.of(ActorKind.REWARD_SERVICE)[0], "reward", "reward_service")

    def reference_scorer(self) -> ActorSpec | None:
        """None when nothing in the mathematics needs reference log-probs."""
        bundles = self._placement.of(ActorKind.REFERENCE_SCORER)
        return self._seated(bundles[0], "reference", "reference_scorer") if bundles else None

    def recorder(self) -> ActorSpec:
        return ActorSpec(
            name="recorder",
            kind=ActorKind.RECORDER,
            factory="deploy.factories:recorder",
            arguments={"run_dir": self._run_dir.path()},
        )

    def joining_worker(self, number: int) -> ActorSpec:
        """A worker beyond the plan: Ray finds its place, or its autoscaler a node."""
        config = self._config.rollout
        num_threads = config.num_threads or math.ceil(config.cpus_per_worker)
        bundle = Bundle(
            kind=ActorKind.ROLLOUT_WORKER,
            index=number,
            cpus=config.cpus_per_worker,
            gpus=config.gpus_per_worker,
            num_threads=num_threads,
        )
        return replace(self._rollout_worker(bundle), bundle=None)

    def _rollout_worker(self, bundle: Bundle) -> ActorSpec:
        name = f"rollout-{bundle.index}"
        return self._seated(bundle, name, "rollout_worker", name=name, run_id=os.path.basename(self._run_dir.path()))

    def _seated(self, bundle: Bundle, actor_name: str, factory: str, **arguments: Any) -> ActorSpec:
        seats = self._placement.bundles
        return ActorSpec(
            name=actor_name,
            kind=bundle.kind,
            factory=f"deploy.factories:{factory}",
            arguments={"config": self._config, "num_threads": bundle.num_threads, **arguments},
            num_cpus=bundle.cpus,
            num_gpus=bundle.gpus,
            bundle=seats.index(bundle) if bundle in seats else None,
            env={"OMP_NUM_THREADS": str(bundle.num_threads)},
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
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    return ClusterResources(nodes=tuple(Node(cpus=each.get("CPU", 0.0), gpus=each.get("GPU", 0.0)) for each in nodes))


async def _reserve(placement: PlacementPlan, *, deadline_s: float) -> Any:
    group = placement_group(placement.resources(), strategy=placement.strategy)
    ready, _ = await asyncio.to_thread(ray.wait, [group.ready()], timeout=deadline_s)
    if not ready:
        remove_placement_group(group)
        raise WorkerError(
            f"the cluster did not free {placement.resources()} within {deadline_s:g} s; others hold its resources: wait, or ask for less"
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
