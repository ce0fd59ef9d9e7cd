"""A whole run in virtual time: real controller, dispatcher, fleet, buffer, broadcast and supervisor; actors that fail at random.

Everything random comes from one seed, so a schedule that breaks something breaks it again.
"""

import asyncio
import random
from collections.abc import AsyncIterator, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

from cluster.contracts.config import EvaluationConfig, SupervisionConfig
from cluster.contracts.errors import ConfigError, DeadlineError, FailureKind, LostError, WeightsError, WorkerError
from cluster.contracts.types import (
    ActorKind,
    Group,
    GroupSummary,
    Prompt,
    Refusal,
    SamplingParams,
    StepStats,
    Ticket,
)
from cluster.controller import Evaluator, Plan, train
from cluster.rollouts.buffer import Buffer
from cluster.rollouts.tickets import TicketOffice
from cluster.rollouts.worker_pool import WorkerPool
from cluster.supervision.supervisor import Supervisor
from cluster.supervision.tasks import background
from cluster.weights.broadcast import Weights
from cluster.weights.object_store import ObjectStoreTransport
from tests.fakes import InlineExecutor, ListedEvents, actor_spec, attestation, death, group_summary
from tests.unit.cluster.wired import wired

SAMPLING = SamplingParams(max_tokens=4)
PER_GROUP = 2


class Ref:
    """Stands for an object in the cluster's store."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __await__(self) -> Any:
        yield from asyncio.sleep(0).__await__()
        return self.value


@dataclass(frozen=True, slots=True, kw_only=True)
class Nature:
    """How bad this world is."""

    seed: int
    num_steps: int = 5
    num_workers: int = 3
    groups_per_step: int = 4
    bound: int = 1
    max_sequences: int = 8
    patience_s: float | None = None
    num_accidents: int = 0
    bad_prompts: frozenset[str] = frozenset()
    """Refused by the engine."""
    killer_prompts: frozenset[str] = frozenset()
    """Each kills its worker."""

    @classmethod
    def of(cls, seed: int) -> "Nature":
        dice = random.Random(seed)
        bound = dice.randint(0, 3)
        prompts = [f"{source}{number}" for number in range(_NUM_PROMPTS) for source in ("p", "held-out-")]
        return cls(
            seed=seed,
            num_steps=dice.randint(2, 6),
            num_workers=dice.randint(1, 5),
            groups_per_step=dice.randint(1, 6),
            bound=bound,
            max_sequences=PER_GROUP * dice.randint(1, 5),
            patience_s=dice.choice([None, 30.0]) if bound else None,
            num_accidents=dice.randint(0, 5),
            bad_prompts=frozenset(dice.sample(prompts, dice.choice([0, 1, 3]))),
            killer_prompts=frozenset(dice.sample(prompts, dice.choice([0, 0, 1]))),
        )


_NUM_PROMPTS = 40


class Prompts:
    def __init__(self, prefix: str = "p") -> None:
        self._prefix = prefix

    def __len__(self) -> int:
        return _NUM_PROMPTS

    def __getitem__(self, index: int) -> Prompt:
        return Prompt(prompt_id=f"{self._prefix}{index}", text=str(index))


@dataclass(slots=True)
class Seen:
    """What the simulated actors saw."""

    most_sequences: int = 0
    """On one worker at the same time."""
    killed_by: dict[str, int] = field(default_factory=dict[str, int])


class Actor:
    """Answers while it lives."""

    def __init__(self, world: "World", spec: Any, node_id: str) -> None:
        self.world = world
        self.spec = spec
        self.pid = 1
        self.node_id = node_id
        self.is_hung = False
        self.last_progress = None
        self._death = asyncio.Event()

    @property
    def name(self) -> str:
        return self.spec.name

    @property
    def is_dead(self) -> bool:
        return self._death.is_set()

    async def kill(self) -> None:
        self._death.set()

    async def work(self, seconds: float, *, stage: str, until: asyncio.Event | None = None) -> None:
        """Takes its time, at most until the event; raises the death that comes meanwhile."""
        if not self.is_dead:
            ends = [asyncio.sleep(seconds), self._death.wait(), *([until.wait()] if until else [])]
            waits = {asyncio.create_task(end) for end in ends}
            _, waiting = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            for each in waiting:
                each.cancel()
        if self.is_dead:
            raise death(self.name, stage)


class Worker(Actor):
    """A rollout worker: samples under the version that it loaded."""

    def __init__(self, world: "World", spec: Any, node_id: str) -> None:
        super().__init__(world, spec, node_id)
        self.version = -1
        self._num_sequences = 0
        self._sampling: dict[str, asyncio.Event] = {}
        """Set when the group is aborted."""

    async def call(self, method: str, *args: Any, deadline_s: float) -> Any:
        await self.work(self.world.dice.uniform(0.1, 2.0), stage=method)
        if method == "abort":
            for group_id in args[0]:
                if group_id in self._sampling:
                    self._sampling[group_id].set()
            await asyncio.sleep(0.01)  # the engine has forgotten them when this returns
            return None
        manifest = args[0].value
        self.world.may_fail_its_canary(manifest["policy_version"])
        self.version = manifest["policy_version"]
        return attestation(self.name, self.version, digest=manifest["digest"])

    async def stream_batches(
        self, method: str, tickets: Sequence[Ticket], *, deadline_s: float
    ) -> AsyncIterator[tuple[GroupSummary | Refusal, Any]]:
        self._num_sequences += sum(ticket.num_trajectories for ticket in tickets)
        self._sampling |= {ticket.group_id: asyncio.Event() for ticket in tickets}
        self.world.seen.most_sequences = max(self.world.seen.most_sequences, self._num_sequences)
        sampling = [asyncio.create_task(self._sample(ticket)) for ticket in tickets]
        try:
            for each in asyncio.as_completed(sampling):
                summary = await each
                self._num_sequences -= PER_GROUP if summary.group_id[0] != "-" else 1
                if not self._sampling.pop(summary.group_id).is_set():
                    yield summary, int(summary.group_id)
        finally:
            for each in sampling:
                each.cancel()

    async def _sample(self, ticket: Ticket) -> GroupSummary | Refusal:
        nature, prompt_id = self.world.nature, ticket.prompt.prompt_id
        if prompt_id in nature.bad_prompts:
            await self.work(0.0, stage="generate")
            return Refusal(group_id=ticket.group_id, prompt_id=prompt_id, reason="too long")
        version = self.version
        seconds = self.world.dice.choice([1.0, 2.0, 5.0, 200.0])
        if prompt_id in nature.killer_prompts:
            await self.work(min(seconds, 5.0), stage="generate")
            self.world.seen.killed_by[prompt_id] = self.world.seen.killed_by.get(prompt_id, 0) + 1
            await self.kill()
        await self.work(seconds, stage="generate", until=self._sampling[ticket.group_id])
        self.world.note_version(ticket.index, version)
        return group_summary(ticket.index, version=version, prompt_id=prompt_id, group_id=ticket.group_id)


class RewardService(Actor):
    async def call_for_batch(self, method: str, object_ref: int, *, deadline_s: float) -> tuple[GroupSummary, int]:
        await self.work(self.world.dice.choice([0.1, 1.0, 10.0]), stage=method)
        if self.world.dice.random() < self.world.loss_share:
            raise LostError("its node is gone")
        return self.world.judged(object_ref), object_ref


class Learner:
    """Counts, and loses a group now and then."""

    def __init__(self, world: "World") -> None:
        self._world = world
        self._lost: set[int] = set()
        self.version = 0
        self.learned: list[int] = []

    async def update(self, groups: Sequence[tuple[int, Group]]) -> StepStats:
        await asyncio.sleep(self._world.dice.uniform(0.5, 10.0))
        if self._world.dice.random() < self._world.loss_share:
            self._lost = {index for index, _ in groups if self._world.dice.random() < 0.5}
            raise LostError("a node took groups with it")
        self.learned += [index for index, _ in groups]
        self.version += 1
        return StepStats(policy_version=self.version, metrics={}, num_trajectories=1, num_trained_tokens=1, seconds=1.0)

    async def lost(self, groups: Sequence[tuple[int, Group]]) -> set[int]:
        return self._lost

    async def publish(self) -> list[Any]:
        await asyncio.sleep(self._world.dice.uniform(0.1, 3.0))
        manifest = {"policy_version": self.version, "digest": f"d{self.version}", "total_bytes": 1}
        return [Ref("bucket"), Ref(manifest)]

    def is_save_due(self) -> bool:
        return False

    async def save(self, metric: float | None) -> None: ...


class World:
    """One run, and what happens to it."""

    def __init__(self, nature: Nature) -> None:
        self.nature = nature
        self.dice = random.Random(nature.seed + 1)
        self.loss_share = 0.05 if nature.num_accidents else 0.0
        self.seen = Seen()
        self.events = ListedEvents()
        self.learner = Learner(self)
        self.workers: list[Worker] = []
        self._versions: dict[int, int] = {}
        self._refused: set[int] = set()
        self._num_failing_starts = 0
        self.buffer = Buffer(
            groups_per_step=nature.groups_per_step,
            max_off_policy_steps=nature.bound,
            num_steps=nature.num_steps,
            max_head_of_line_s=nature.patience_s,
        )

    async def run(self) -> None:
        """To the last step, then until the fleet is whole again."""
        nature = self.nature
        supervisor = Supervisor(SupervisionConfig(), self.events)
        weights = Weights(
            ObjectStoreTransport(timeout_s=60.0),
            learner=self.learner,
            num_workers=nature.num_workers,
            events=self.events,
        )
        async with asyncio.timeout(10**6), background() as tasks:
            self.fleet = WorkerPool(
                [actor_spec(f"rollout-{number}") for number in range(nature.num_workers)],
                joining=lambda number: actor_spec(f"rollout-{number}"),
                start=self._start,
                supervisor=supervisor,
                join=weights.join,
                tasks=tasks,
            )
            office = TicketOffice(
                source=Prompts(),
                seed=nature.seed,
                trajectories_per_group=PER_GROUP,
                sampling=SAMPLING,
                num_ahead=3,
                thread=InlineExecutor(),
            )
            production = wired(
                self.fleet,
                office,
                start=self._start,
                supervisor=supervisor,
                events=self.events,
                tasks=tasks,
                max_sequences=nature.max_sequences,
                sequences_per_group=PER_GROUP,
                sampling_deadline_s=10**5,
                judging_deadline_s=10**5,
            )
            await weights.publish()
            await production.start()
            production.run(tasks)
            tasks.create_task(self._accidents())
            await train(
                Plan(
                    num_steps=nature.num_steps,
                    groups_per_step=nature.groups_per_step,
                    max_off_policy_steps=nature.bound,
                    stall_s=50_000.0,
                    evaluate_every_steps=2,
                ),
                rollouts=production,
                fleet=self.fleet,
                learner=self.learner,
                buffer=self.buffer,
                weights=weights,
                log=self.events,
                evaluator=Evaluator(
                    config=EvaluationConfig(num_prompts=5),
                    source=Prompts("held-out-"),
                    sampling=SAMPLING,
                    seed=nature.seed,
                    stall_s=50_000.0,
                    thread=InlineExecutor(),
                ),
            )
            await asyncio.sleep(400.0)

    def may_fail_its_canary(self, version: int) -> None:
        """Now and then one worker of several does not compute a version."""
        if version not in self._refused and len(self.fleet.serving()) > 2 and self.dice.random() < self.loss_share:
            self._refused.add(version)
            raise WeightsError(f"off by 3 nats at version {version}")

    def note_version(self, index: int, version: int) -> None:
        """Of the oldest token of a group."""
        self._versions[index] = version

    def judged(self, index: int) -> GroupSummary:
        """As the reward service returns it; the oldest token keeps the version that the worker sampled it with."""
        return group_summary(index, version=self._versions.get(index, 0), rewards=(1.0, 0.0))

    async def _start(self, spec: Any) -> Actor:
        await asyncio.sleep(self.dice.uniform(1.0, 60.0))
        node_id = f"node-{self.dice.randint(0, 1)}"
        if spec.kind is ActorKind.REWARD_SERVICE:
            return RewardService(self, spec, node_id)
        if self._num_failing_starts:
            self._num_failing_starts -= 1
            raise self.dice.choice(
                [
                    WorkerError(f"{spec.name} failed in 'build': no memory", kind=FailureKind.ERROR, actor=spec.name),
                    ConfigError("the hub does not answer", actor=spec.name, stage="build"),
                    DeadlineError("no node in time", actor=spec.name, stage="start"),
                    DeadlineError("loading takes too long", actor=spec.name, stage="build"),
                ]
            )
        self.workers.append(Worker(self, spec, node_id))
        return self.workers[-1]

    async def _accidents(self) -> None:
        for _ in range(self.nature.num_accidents):
            await asyncio.sleep(self.dice.expovariate(1 / 40.0))
            living = [worker for worker in self.workers if not worker.is_dead]
            match self.dice.choice(["death", "node", "drain", "scale", "starts"]):
                case "death" if living:
                    await self.dice.choice(living).kill()
                case "node" if living:
                    await self._lose(self.dice.choice(living).node_id)
                case "drain" if living:
                    self.fleet.drain(self.dice.choice(living).name)
                case "scale":
                    self.fleet.want(self.dice.randint(1, self.nature.num_workers + 2))
                case _:
                    self._num_failing_starts += 1

    async def _lose(self, node_id: str) -> None:
        for worker in self.workers:
            if worker.node_id == node_id:
                await worker.kill()


def fates(world: World) -> tuple[Collection[int], list[int]]:
    """(indices that were learned, indices that were dropped) of training groups."""
    dropped = [int(event["group_id"]) for event in world.events.events if event["kind"] == "drop"]
    return world.learner.learned, dropped
