"""The rollouts of a run over scripted actors: what most tests of this folder play in."""

import asyncio
import contextlib

from cluster.contracts.config import RunConfig
from cluster.contracts.reward_config import RewardConfig
from cluster.contracts.sampling_config import SamplingConfig
from cluster.contracts.types import ActorKind, Refusal
from cluster.controller import Evaluator
from cluster.rollouts.buffer import Buffer
from cluster.rollouts.mixture import Mixture
from cluster.rollouts.tickets import TicketOffice
from cluster.rollouts.worker_pool import WorkerPool
from cluster.supervision.supervisor import Supervisor
from cluster.supervision.tasks import background
from tests.fakes import (
    InlineExecutor,
    ListedEvents,
    NumberedPrompts,
    ScriptedScorer,
    ScriptedWorker,
    actor_spec,
    group_summary,
    run_config,
)
from tests.unit.cluster.wired import wired

SAMPLING = SamplingConfig(max_tokens=4)


def worker_spec(number):
    return actor_spec(f"rollout-{number}")


class Scene:
    """The rollouts of a run, with scripted actors."""

    def __init__(
        self,
        *,
        script=lambda ticket: None,
        score=lambda index: group_summary(index, rewards=(1.0, 0.0)),
        num_workers=1,
        prompts=None,
        dropped_by=lambda summary: None,
        choose=None,
        wants_reference=None,
        make_worker=ScriptedWorker,
        make_scorer=ScriptedScorer,
        extra_trajectories=0,
        supervision=None,
        max_concurrent_sequences=256,
        deterministic=False,
        num_services=1,
        reward=None,
        may_wait_for_nodes=False,
        reference_waits_for=None,
    ):
        config = RunConfig.model_validate(
            {"model": {"path": "none"}, "prompts": "none", "supervision": supervision or {}}
        )
        self.events = ListedEvents()
        self.supervisor = Supervisor(config.supervision, self.events)
        self.workers: list[ScriptedWorker] = []
        self.coming = asyncio.Event()
        self.coming.set()
        self.judging = asyncio.Event()
        self.judging.set()
        self.num_coming = 0
        self.start_error = lambda name: None
        self.held: dict[str, asyncio.Event] = {}
        """By worker: what its start waits for."""
        self.office = TicketOffice(
            source=Mixture.of(prompts or NumberedPrompts()),
            seed=0,
            trajectories_per_group=2,
            extra_trajectories=extra_trajectories,
            sampling=SAMPLING,
            thread=InlineExecutor(),
        )
        self._make_worker, self._make_scorer = make_worker, make_scorer
        self._script, self._score, self._dropped_by = script, score, dropped_by
        self._choose, self._wants_reference = choose, wants_reference
        self._num_workers = num_workers
        self._sequences_per_group = 2 + extra_trajectories
        self._max_sequences = max_concurrent_sequences
        self._deterministic = deterministic
        self._may_wait_for_nodes = may_wait_for_nodes
        self._reference_waits_for = reference_waits_for
        self._num_services = num_services
        self._reward = RewardConfig.model_validate(reward or {})

    @contextlib.asynccontextmanager
    async def running(self):
        """Everything up."""
        async with asyncio.timeout(3600), background() as tasks:
            self.fleet = WorkerPool(
                [worker_spec(number) for number in range(self._num_workers)],
                joining=worker_spec,
                start=self._start,
                supervisor=self.supervisor,
                join=lambda actor: asyncio.sleep(0),
                tasks=tasks,
                is_deterministic=self._deterministic,
            )
            self.production = wired(
                self.fleet,
                self.office,
                start=self._start,
                supervisor=self.supervisor,
                events=self.events,
                tasks=tasks,
                max_sequences=self._max_sequences,
                sequences_per_group=self._sequences_per_group,
                dropped_by=self._dropped_by,
                choose=self._choose,
                wants_reference=self._wants_reference,
                is_deterministic=self._deterministic,
                num_services=self._num_services,
                reward=self._reward,
                may_wait_for_nodes=self._may_wait_for_nodes,
            )
            await self.production.start(reference_waits_for=self._reference_waits_for)
            self.production.run(tasks)
            self.events.events.clear()
            yield

    @contextlib.asynccontextmanager
    async def generating(self, buffer):
        async with self.running(), self.production.generating(into=buffer):
            yield

    async def take(self, num_steps=1, **buffer_settings):
        """Indices of the groups that the learner gets."""
        buffer = Buffer(groups_per_step=4, **buffer_settings)
        taken = []
        async with self.generating(buffer):
            for step in range(num_steps):
                taken += [index for index, _ in await buffer.take(4)]
                if step + 1 < num_steps:
                    buffer.advance(step + 1)
            await settled()
        return taken

    async def evaluate(self, num_prompts, *, stall_s=600.0):
        config = run_config(sampling=SAMPLING.model_dump(), evaluation={"num_prompts": num_prompts})
        evaluator = Evaluator(config=config, source=NumberedPrompts())
        return await self.production.evaluate(evaluator.tickets(0), stall_s=stall_s)

    async def _start(self, spec):
        self.num_coming += 1
        try:
            await self.coming.wait()
        finally:
            self.num_coming -= 1
        if spec.kind is not ActorKind.ROLLOUT_WORKER:
            return self._make_scorer(spec, self._score, gate=self.judging)
        if spec.name in self.held:
            await self.held[spec.name].wait()
        if error := self.start_error(spec.name):
            raise error
        self.workers.append(self._make_worker(spec, self._script))
        return self.workers[-1]


def refusal(ticket):
    return Refusal(group_id=ticket.group_id, prompt_id=ticket.prompt.prompt_id, reason="too long")


async def settled():
    """Whatever can go on has gone on."""
    for _ in range(30):
        await asyncio.sleep(0)


class EachTwice(NumberedPrompts):
    """Two rows each are one prompt: with four rows, both of a prompt come in the first step, and again in each epoch."""

    def __getitem__(self, index):
        return super().__getitem__(index // 2)
