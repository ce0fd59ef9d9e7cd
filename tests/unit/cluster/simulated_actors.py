"""Actors of a simulated world: they take virtual time, die, hang and refuse."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Executor, Future
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

from cluster.contracts.errors import LostError
from cluster.contracts.types import Group, GroupSummary, Prompt, Refusal, StepStats, Ticket
from cluster.remote.failures import answer_of
from tests.fakes import SharedScoring, attestation, death, group_summary
from tests.unit.cluster.nature import NUM_PROMPTS

if TYPE_CHECKING:
    from tests.unit.cluster.simulation import World


class Ref:
    """Stands for an object in the cluster's store."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __await__(self) -> Any:
        yield from asyncio.sleep(0).__await__()
        return self.value


class Prompts:
    def __init__(self, prefix: str = "p") -> None:
        self._prefix = prefix

    def __len__(self) -> int:
        return NUM_PROMPTS

    def __getitem__(self, index: int) -> Prompt:
        return Prompt(prompt_id=f"{self._prefix}{index}", text=str(index))


class SlowThread(Executor):
    """Makes each of its calls after `seconds` of virtual time, one after another."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._free_at = 0.0

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> "Future[Any]":
        made: Future[Any] = Future()
        loop = asyncio.get_running_loop()

        def make() -> None:
            if made.set_running_or_notify_cancel():
                made.set_result(fn(*args, **kwargs))

        self._free_at = max(self._free_at, loop.time()) + self._seconds
        loop.call_at(self._free_at, make)
        return made


class Actor:
    """Answers while it lives and does not hang."""

    def __init__(self, world: "World", spec: Any, node_id: str) -> None:
        self.world = world
        self.spec = spec
        self.pid = 1
        self.node_id = node_id
        self.is_hung = False
        self.last_progress = None
        self.hangs = False
        """Nothing that it does ends any more."""
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
        if self.hangs:
            await self._death.wait()
        if self.is_dead:
            raise death(self.name, stage)


class Worker(Actor):
    """A rollout worker: samples under the version that it loaded."""

    def __init__(self, world: "World", spec: Any, node_id: str) -> None:
        super().__init__(world, spec, node_id)
        self.version = -1
        self.num_sequences = 0
        """Being sampled."""
        self._sampling: dict[asyncio.Event, str] = {}
        """Group of each attempt that is under way, by the event that aborts it."""
        self._oldest_versions: dict[str, int] = {}
        """By group: of its tokens so far."""

    async def call(self, method: str, *args: Any, deadline_s: float) -> Any:
        work = self._load(*args) if method == "load" else self._abort(*args)
        return await answer_of(work, actor=self.name, stage=method, deadline_s=deadline_s)

    async def stream_batches(
        self, method: str, tickets: Sequence[Ticket], *sampled: Ref | None, num_items: int, deadline_s: float
    ) -> AsyncIterator[tuple[GroupSummary | Refusal, Any]]:
        for ticket, each in zip_longest(tickets, sampled):
            self._oldest_versions[ticket.group_id] = self.version if each is None else min(each.value, self.version)
        self.num_sequences += sum(ticket.num_trajectories for ticket in tickets)
        self.world.note_sequences(self.num_sequences)
        attempts = [(ticket, asyncio.Event()) for ticket in tickets]
        self._sampling |= {abort: ticket.group_id for ticket, abort in attempts}
        sampling = [asyncio.create_task(self._sample(ticket, abort)) for ticket, abort in attempts]
        try:
            for each in asyncio.as_completed(sampling):
                ticket, abort, sampled = await answer_of(each, actor=self.name, stage=method, deadline_s=deadline_s)
                self.num_sequences -= ticket.num_trajectories
                del self._sampling[abort]
                if not abort.is_set():
                    yield sampled, ticket.index
        finally:
            for each in sampling:
                each.cancel()

    async def call_for_object_refs(self, method: str, group_ids: Sequence[str], *, deadline_s: float) -> list[Ref]:
        """What it hands over."""
        await answer_of(self._abort(group_ids), actor=self.name, stage=method, deadline_s=deadline_s)
        return [Ref(self._oldest_versions.get(group_id)) for group_id in group_ids]

    async def _load(self, manifest: Ref, *buckets: Ref) -> Any:
        await self.work(self.world.dice.uniform(*self.world.nature.loading_s), stage="load")
        version = manifest.value["policy_version"]
        self.world.may_fail_its_canary(version)
        self.version = version
        return attestation(self.name, version, digest=manifest.value["digest"])

    async def _abort(self, group_ids: Sequence[str]) -> None:
        await self.work(self.world.dice.uniform(0.1, 2.0), stage="abort")
        for abort, group_id in self._sampling.items():
            if group_id in group_ids:
                abort.set()
        await asyncio.sleep(0.01)  # the engine has forgotten them when this returns

    async def _sample(
        self, ticket: Ticket, abort: asyncio.Event
    ) -> tuple[Ticket, asyncio.Event, GroupSummary | Refusal]:
        nature, prompt_id = self.world.nature, ticket.prompt.prompt_id
        if prompt_id in nature.bad_prompts:
            await self.work(0.0, stage="generate")
            return ticket, abort, Refusal(group_id=ticket.group_id, prompt_id=prompt_id, reason="too long")
        version = self._oldest_versions[ticket.group_id]
        seconds = self.world.dice.choice(nature.sampling_s)
        if prompt_id in nature.killer_prompts:
            await self.work(min(seconds, 5.0), stage="generate", until=abort)
            if not abort.is_set():
                self.world.note_kill(prompt_id, worker=self.name)
                await self.kill()
        await self.work(seconds, stage="generate", until=abort)
        self.world.note_sampled(ticket.index, version=version, worker=self.name)
        sampled = group_summary(ticket.index, version=version, prompt_id=prompt_id, group_id=ticket.group_id)
        return ticket, abort, sampled


class RewardService(SharedScoring, Actor):
    def __init__(self, *args: Any) -> None:
        SharedScoring.__init__(self)
        Actor.__init__(self, *args)

    async def score_one(
        self, method: str, object_ref: int, *inputs: Any, deadline_s: float
    ) -> tuple[str, dict[str, Any]]:
        return await answer_of(self._judge(object_ref), actor=self.name, stage=method, deadline_s=deadline_s)

    async def _judge(self, object_ref: int) -> tuple[str, dict[str, Any]]:
        await self.work(self.world.dice.choice([0.1, 1.0, 10.0]), stage="score")
        if self.world.dice.random() < self.world.loss_share:
            raise LostError("its node is gone")
        return "columns", {**self.world.judged(), "size_bytes": 1}


class Learner:
    """Counts, and loses a group now and then."""

    def __init__(self, world: "World") -> None:
        self._world = world
        self._lost: set[int] = set()
        self.version = 0
        self.learned: list[int] = []

    async def update(self, groups: Sequence[tuple[int, Group]]) -> StepStats:
        await asyncio.sleep(self._world.dice.uniform(*self._world.nature.learning_s))
        if self._world.dice.random() < self._world.loss_share:
            self._lost = {index for index, _ in groups if self._world.dice.random() < 0.5}
            raise LostError("a node took groups with it")
        self.learned += [index for index, _ in groups]
        self.version += 1
        return StepStats(policy_version=self.version, metrics={}, num_trained_tokens=1, seconds=1.0)

    async def lost(self, groups: Sequence[tuple[int, Group]]) -> set[int]:
        return self._lost

    async def publish(self) -> list[Any]:
        await asyncio.sleep(self._world.dice.uniform(0.1, 3.0))
        manifest = {
            "policy_version": self.version,
            "digest": f"d{self.version}",
            "total_bytes": 1,
            "bucket_digests": ["d"],
            "delta": None,
        }
        return [Ref("bucket"), Ref(manifest)]

    def rate(self, metric: float) -> None: ...

    def is_save_due(self) -> bool:
        return False

    async def save(self, metric: float | None) -> None: ...
