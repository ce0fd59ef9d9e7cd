"""A whole run in virtual time: real controller, dispatcher, fleet, buffer, broadcast and supervisor; actors that fail at random.

Everything random comes from one seed, so a schedule that breaks something breaks it again.
"""

import asyncio
import random
from collections import Counter
from collections.abc import Sequence
from typing import Any

from cluster.contracts.config import SupervisionConfig
from cluster.contracts.errors import ConfigError, DeadlineError, LostError, TreadwheelError, WeightsError, WorkerError
from cluster.contracts.sampling_config import SamplingConfig
from cluster.contracts.types import ActorKind, Ticket
from cluster.controller import Evaluator, train
from cluster.rollouts.buffer import Buffer
from cluster.rollouts.destinations import HeldOutGroups
from cluster.rollouts.mixture import Mixture
from cluster.rollouts.production import Production
from cluster.rollouts.tickets import TicketOffice
from cluster.rollouts.worker_pool import WorkerPool
from cluster.supervision.supervisor import Supervisor
from cluster.supervision.tasks import background
from cluster.supervision.timesheet import Timesheet
from cluster.weights.broadcast import Weights
from cluster.weights.object_store import ObjectStoreTransport
from tests.fakes import ListedEvents, actor_spec, run_config
from tests.unit.cluster.nature import NUM_HELD_OUT, PER_GROUP, Nature
from tests.unit.cluster.simulated_actors import Actor, Learner, Prompts, Ref, RewardService, SlowThread, Worker
from tests.unit.cluster.wired import wired

SAMPLING = SamplingConfig(max_tokens=4)
_SAMPLING_DEADLINE_S = 300.0
"""Longer than any group takes."""
_LOOK_S = 2.0
"""How often the world looks whether a group starves."""


class Evaluations:
    """A production whose evaluations are kept."""

    def __init__(self, production: Production) -> None:
        self._production = production
        self.generating = production.generating
        self.sample_again = production.sample_again
        self.drain_stats = production.drain_stats
        self.waits_for_nodes = production.waits_for_nodes
        self.describe = production.describe
        self.kept: list[HeldOutGroups] = []

    async def evaluate(self, tickets: Sequence[Ticket], *, stall_s: float) -> HeldOutGroups:
        self.kept.append(await self._production.evaluate(tickets, stall_s=stall_s))
        return self.kept[-1]


class World:
    """One run, and what happens to it."""

    def __init__(self, nature: Nature) -> None:
        self.nature = nature
        self.config = run_config(
            num_steps=nature.num_steps,
            seed=nature.seed,
            buffer={"groups_per_step": nature.groups_per_step, "max_off_policy_steps": nature.bound},
            sampling=SAMPLING.model_dump(),
            evaluation={"num_prompts": NUM_HELD_OUT, "every_steps": 2},
        )
        self.dice = random.Random(nature.seed + 1)
        self.loss_share = 0.05 if nature.num_accidents else 0.0
        self.events = ListedEvents()
        self.learner = Learner(self)
        self.workers: list[Worker] = []
        self.most_sequences = 0
        """On one worker at the same time."""
        self.num_handed_over = 0
        self.num_killed_by: Counter[str] = Counter()
        """Workers, by the prompt that killed them."""
        self.longest_starved_s = 0.0
        """Seconds in a row in which a group could have started, and did not."""
        self._services: list[RewardService] = []
        self.sampled_by: dict[int, str] = {}
        """The worker that finished a group, by its index."""
        self._versions: dict[int, int] = {}
        self._refused: set[int] = set()
        self._failing_starts: list[type[TreadwheelError]] = []
        self.buffer = Buffer(
            groups_per_step=nature.groups_per_step,
            max_off_policy_steps=nature.bound,
            num_steps=nature.num_steps,
            max_head_of_line_s=nature.patience_s,
            in_waves=nature.is_deterministic,
        )

    async def run(self) -> None:
        """To the last step, then until the fleet is whole again and nothing is under way."""
        nature = self.nature
        async with asyncio.timeout(10**6), background() as tasks:
            # All accidents may fall on one worker.
            max_restarts = max(SupervisionConfig().max_restarts, nature.num_accidents)
            supervisor = Supervisor(SupervisionConfig(max_restarts=max_restarts), self.events)
            weights = Weights(
                ObjectStoreTransport(timeout_s=60.0),
                learner=self.learner,
                num_workers=nature.num_workers,
                events=self.events,
            )
            self.fleet = WorkerPool(
                [actor_spec(f"rollout-{number}") for number in range(nature.num_workers)],
                joining=lambda number: actor_spec(f"rollout-{number}"),
                start=self._start,
                supervisor=supervisor,
                join=weights.join,
                tasks=tasks,
                is_deterministic=nature.is_deterministic,
            )
            self.production = self._produced(supervisor, tasks)
            self.evaluations = Evaluations(self.production)
            await weights.publish()
            await self.production.start()
            self.production.run(tasks)
            tasks.create_task(self._accidents())
            tasks.create_task(self._watch())
            await train(
                self.config,
                rollouts=self.evaluations,
                fleet=self.fleet,
                learner=self.learner,
                buffer=self.buffer,
                weights=weights,
                log=self.events,
                timesheet=Timesheet(lambda lines: None),
                evaluator=Evaluator(
                    config=self.config, source=Prompts("held-out-"), thread=SlowThread(nature.prompt_s)
                ),
            )
            async with asyncio.timeout(self.config.stall_s):
                while self.unfinished() or not (self.fleet.is_complete and self.production.services.is_complete):
                    await asyncio.sleep(10.0)

    def _produced(self, supervisor: Supervisor, tasks: asyncio.TaskGroup) -> Production:
        nature = self.nature
        office = TicketOffice(
            source=Mixture.of(Prompts()),
            seed=nature.seed,
            trajectories_per_group=PER_GROUP,
            sampling=SAMPLING,
            num_ahead=3,
            thread=SlowThread(nature.prompt_s),
        )
        return wired(
            self.fleet,
            office,
            start=self._start,
            supervisor=supervisor,
            events=self.events,
            tasks=tasks,
            max_sequences=nature.max_sequences,
            sequences_per_group=PER_GROUP,
            sampling_deadline_s=_SAMPLING_DEADLINE_S,
            is_deterministic=nature.is_deterministic,
        )

    def unfinished(self) -> dict[str, Any]:
        """What is still under way, or is remembered of it, by the place that holds it."""
        dispatcher = self.production._dispatcher
        held = {
            "queue": dispatcher._queue,
            "judging": dispatcher._judging.groups(),
            "fetching": dispatcher._num_fetching,
            "sampling": [lane.under_way for lane in dispatcher._lanes.values() if lane.under_way],
            "sequences": [lane.num_sequences for lane in dispatcher._lanes.values() if lane.num_sequences],
            "live": self.buffer._live,
            "late": self.buffer._stragglers._late,
            "bytes": self.buffer.size_bytes,
        }
        return {name: holding for name, holding in held.items() if holding}

    def fates(self) -> tuple[list[int], list[int]]:
        """(indices that were learned, indices that were dropped) of training groups."""
        drops = [int(event["group_id"]) for event in self.events.events if event["kind"] == "drop"]
        return self.learner.learned, drops

    # What the actors see and say

    def may_fail_its_canary(self, version: int) -> None:
        """Now and then one worker of several does not compute a version. A deterministic run starts with all its workers or not at all."""
        if self.nature.is_deterministic and version == 0:
            return
        if version not in self._refused and len(self.fleet.serving()) > 2 and self.dice.random() < self.loss_share:
            self._refused.add(version)
            raise WeightsError(f"off by 3 nats at version {version}")

    def note_sequences(self, num_sequences: int) -> None:
        self.most_sequences = max(self.most_sequences, num_sequences)

    def note_kill(self, prompt_id: str, *, worker: str) -> None:
        """The death of a worker that leaves is its node's, whoever did it: no prompt is blamed."""
        if not any(member.name == worker and member.is_leaving for member in self.fleet._members):
            self.num_killed_by[prompt_id] += 1

    def note_sampled(self, index: int, *, version: int, worker: str) -> None:
        """`version` is that of the group's oldest token."""
        self._versions[index] = version
        self.sampled_by[index] = worker

    def judged(self) -> dict[str, Any]:
        """What the reward service's columns tell."""
        if self.dice.random() < self.nature.failed_share:
            return {"rewards": (None, None), "num_reward_errors": PER_GROUP}
        return {"rewards": (1.0, 0.0)}

    # What happens

    async def _start(self, spec: Any) -> Actor:
        await asyncio.sleep(self.dice.uniform(1.0, 60.0))
        if self._failing_starts:
            stage = self.dice.choice(["start", "build"])
            raise self._failing_starts.pop()(f"{spec.name} failed in {stage!r}", actor=spec.name, stage=stage)
        node_id = f"node-{self.dice.randint(0, 1)}"
        if spec.kind is ActorKind.REWARD_SERVICE:
            self._services.append(RewardService(self, spec, node_id))
            return self._services[-1]
        self.workers.append(Worker(self, spec, node_id))
        return self.workers[-1]

    async def _accidents(self) -> None:
        kinds = ["death", "hang", "node", "reward", "services", "starts"]
        if not self.nature.is_deterministic:  # such a run keeps its workers
            kinds += ["drain", "scale"]
        for _ in range(self.nature.num_accidents):
            await asyncio.sleep(self.dice.expovariate(1 / 40.0))
            living = [worker for worker in self.workers if not worker.is_dead]
            services = [service for service in self._services if not service.is_dead]
            match self.dice.choice(kinds):
                case "death" if living:
                    await self.dice.choice(living).kill()
                case "hang" if living:
                    self.dice.choice([*living, *services]).hangs = True
                case "node" if living:
                    await self._lose(self.dice.choice(living).node_id)
                case "reward" if services:
                    await self.dice.choice(services).kill()
                case "services":
                    self.production.services.want(self.dice.randint(1, 3))
                case "drain" if living:
                    await self._leave(self.dice.choice(living))
                case "scale":
                    self.fleet.want(self.dice.randint(1, self.nature.num_workers + 2))
                case _:
                    self._failing_starts.append(self.dice.choice([WorkerError, ConfigError, DeadlineError]))

    async def _leave(self, worker: Worker) -> None:
        self.fleet.drain(worker.name)
        if self.dice.random() < 0.7:
            handed = await self.production._dispatcher.hand_over(worker, copy=self._copy, deadline_s=60.0)
            self.num_handed_over += len(handed)

    async def _copy(self, ref: Ref, *, deadline_s: float) -> Ref | None:
        if self.dice.random() < self.loss_share:
            raise LostError("its node is gone")
        return None if ref.value is None else ref

    async def _lose(self, node_id: str) -> None:
        for actor in (*self.workers, *self._services):
            if actor.node_id == node_id:
                await actor.kill()

    async def _watch(self) -> None:
        """Measures how long groups starve."""
        starved_s = 0.0
        while True:
            starved_s = starved_s + _LOOK_S if self._is_starving() else 0.0
            self.longest_starved_s = max(self.longest_starved_s, starved_s)
            await asyncio.sleep(_LOOK_S)

    def _is_starving(self) -> bool:
        """A group may start, or waits in the queue, while a worker has room that no fetched ticket will take.

        The worker that tries suspects has no room for others. A deterministic run starts its groups in waves.
        """
        dispatcher = self.production._dispatcher
        if self.nature.is_deterministic or dispatcher._training is None:
            return False
        waiting = [job for job in dispatcher._queue if not dispatcher._suspects.has(job.ticket)]
        if not waiting and not self.buffer.num_startable():
            return False
        quarantine = dispatcher._dealing._quarantine
        kept = quarantine.member if quarantine else None
        workers = [member.actor for member in self.fleet.serving() if member is not kept]
        free = [self.nature.max_sequences - worker.num_sequences for worker in workers if not worker.is_dead]
        num_places = -(-sum(places for places in free if places > 0) // PER_GROUP)
        return num_places > dispatcher._num_fetching
