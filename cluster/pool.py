"""The actors that make trajectories: rollout workers, reward service, reference scorer. Start, call, replace.

`generating(into=buffer)` keeps every startable group under way; a group's way is worker -> reward -> reference -> buffer, and
only references pass through here. A dead actor's unfinished groups start again, under the same tickets.
"""

import asyncio
import contextlib
import math
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any

from cluster.buffer import Buffer, Group
from cluster.contracts.config import RunConfig
from cluster.contracts.errors import DataError, DeadlineError, TreadwheelError, WorkerError
from cluster.contracts.types import GroupSummary, Ticket
from cluster.remote import ActorSpec, RemoteActor
from cluster.supervised import Start, SupervisedActor, Supervisor
from cluster.supervision import is_poison
from cluster.tickets import TicketOffice

Keep = Callable[[GroupSummary], bool]


class Worker:
    """A rollout worker's place, and the groups it has under way."""

    def __init__(self, place: SupervisedActor) -> None:
        self.place = place
        self.under_way: dict[int, Ticket] = {}
        self.is_draining = False

    @property
    def is_serving(self) -> bool:
        return self.place.actor is not None and not self.is_draining


class Pool:
    """Rollout workers and scorers of one run."""

    def __init__(
        self,
        config: RunConfig,
        *,
        workers: Sequence[ActorSpec],
        reward: ActorSpec,
        reference: ActorSpec | None,
        start: Start,
        supervisor: Supervisor,
        join: Callable[[RemoteActor], Awaitable[None]],
        keep: Keep = lambda summary: True,
    ) -> None:
        """`join` brings the current weights to a new worker; `keep` says which finished groups are worth training on."""
        self._config = config
        self._supervisor = supervisor
        self._start = start
        self._join = join
        self._keep = keep
        self._workers = [self._worker(spec) for spec in workers]
        self._reward = SupervisedActor(reward, start=start, supervisor=supervisor)
        self._reference = SupervisedActor(reference, start=start, supervisor=supervisor) if reference else None
        self._next_number = len(workers)
        self._tasks: set[asyncio.Task[None]] = set()
        self._retries: list[Ticket] = []
        self._wake = asyncio.Event()
        self._num_sampled_tokens = 0
        self._sampling_seconds = 0.0
        self._sampling_since: float | None = None

    async def start(self) -> None:
        """Reward, reference and the first worker are up when this returns; deterministic runs wait for all workers."""
        starting = [asyncio.create_task(worker.place.ready()) for worker in self._workers]
        scorers = [place for place in (self._reward, self._reference) if place]
        try:
            await asyncio.gather(*(place.ready() for place in scorers))
            when = asyncio.ALL_COMPLETED if self._config.deterministic else asyncio.FIRST_COMPLETED
            done, _ = await asyncio.wait(starting, return_when=when)
            for task in done:
                task.result()
        except BaseException:
            for task in starting:
                task.cancel()
            raise
        for worker, task in zip(list(self._workers), starting, strict=True):
            if not task.done():
                self._spawn(self._announce(worker, task))

    def actors(self) -> list[RemoteActor]:
        """All living actors, for heartbeats and `info`."""
        places = (
            [worker.place for worker in self._workers] + [self._reward] + ([self._reference] if self._reference else [])
        )
        return [place.actor for place in places if place.actor is not None]

    def workers(self) -> list[RemoteActor]:
        return [worker.place.actor for worker in self._workers if worker.place.actor is not None]

    async def replace(self, actor: RemoteActor, error: BaseException) -> None:
        """`actor`, a rollout worker, failed with `error` at somebody else's call. Raises when the run must stop."""
        if not isinstance(error, TreadwheelError):
            raise error
        for worker in self._workers:
            if worker.place.actor is actor:
                await worker.place.replace(actor, error)

    @contextlib.asynccontextmanager
    async def generating(self, *, into: Buffer, office: TicketOffice) -> AsyncIterator[None]:
        """Groups are under way while this is open. Whatever ends their production is raised by `into.take`."""
        dispatcher = asyncio.create_task(self._guard(self._dispatch(into, office), into))
        try:
            yield
        finally:
            for task in (dispatcher, *self._tasks):
                task.cancel()
            await asyncio.gather(dispatcher, *self._tasks, return_exceptions=True)

    async def evaluate(self, tickets: Sequence[Ticket]) -> list[GroupSummary]:
        """Samples and judges tickets that are not trained on. One that a dead worker had is sampled again."""
        left = {ticket.index: ticket for ticket in tickets}
        summaries: list[GroupSummary] = []

        async def sample(worker: Worker, share: list[Ticket]) -> None:
            actor = await worker.place.ready()
            try:
                deadline_s = self._config.rollout.timeout_s
                async for summary, reference in actor.stream_batches("generate", share, deadline_s=deadline_s):
                    scored, _ = await self._judge(reference)
                    left.pop(int(summary.group_id))
                    summaries.append(scored)
            except (WorkerError, DeadlineError) as error:
                await worker.place.replace(actor, error)

        while left:
            serving = [worker for worker in self._workers if worker.is_serving] or self._workers[:1]
            shares = _shares(list(left.values()), len(serving))
            await asyncio.gather(*(sample(w, share) for w, share in zip(serving, shares, strict=True) if share))
        return summaries

    def stats(self) -> dict[str, float]:
        """Sampling since the last call: seconds with a group under way, tokens, and how many workers serve."""
        self._note_sampling()
        tokens, seconds = self._num_sampled_tokens, self._sampling_seconds
        self._num_sampled_tokens, self._sampling_seconds = 0, 0.0
        return {
            "time/sampling_s": seconds,
            "speed/sampling_tokens_per_s": tokens / seconds if seconds else 0.0,
            "rollout/num_workers": float(sum(worker.is_serving for worker in self._workers)),
        }

    async def stop(self) -> None:
        places = (
            [worker.place for worker in self._workers] + [self._reward] + ([self._reference] if self._reference else [])
        )
        await asyncio.gather(*(place.stop() for place in places))

    @property
    def num_workers(self) -> int:
        """Workers that are serving or coming up."""
        return sum(not worker.is_draining for worker in self._workers)

    def scale(self, num_workers: int, *, spec: Callable[[int], ActorSpec]) -> None:
        """More workers start beside the others; fewer finish what they have and leave. Returns at once."""
        active = [worker for worker in self._workers if not worker.is_draining]
        for _ in range(len(active), num_workers):
            worker = self._worker(spec(self._next_number))
            self._next_number += 1
            self._workers.append(worker)
            self._spawn(self._bring_up(worker))
        for worker in active[num_workers:]:
            self.drain(worker.place.spec.name)

    def drain(self, name: str) -> None:
        """The worker gets nothing more, finishes what it has, and leaves."""
        for worker in self._workers:
            if worker.place.spec.name == name and not worker.is_draining:
                worker.is_draining = True
                self._spawn(self._retire(worker))

    # Dispatch

    async def _dispatch(self, buffer: Buffer, office: TicketOffice) -> None:
        while True:
            while not (free := self._free_groups()):
                self._wake.clear()
                await self._wake.wait()
            if self._retries:
                tickets = self._take_retries(free)
            else:
                started = asyncio.create_task(buffer.start(limit=free))
                woken = asyncio.create_task(self._wake.wait())
                try:
                    await asyncio.wait({started, woken}, return_when=asyncio.FIRST_COMPLETED)
                    if not started.done():
                        self._wake.clear()
                        continue
                    tickets = [office.ticket(index, policy_version=buffer.version) for index in started.result()]
                finally:
                    woken.cancel()
                    started.cancel()
            self._assign(tickets, buffer)

    def _assign(self, tickets: list[Ticket], buffer: Buffer) -> None:
        serving = [worker for worker in self._workers if worker.is_serving]
        if self._config.deterministic:
            shares = [[t for t in tickets if t.index % len(serving) == place] for place in range(len(serving))]
        else:
            serving.sort(key=lambda worker: len(worker.under_way))
            shares = _shares(tickets, len(serving))
        for worker, share in zip(serving, shares, strict=True):
            if share:
                worker.under_way.update((ticket.index, ticket) for ticket in share)
                self._spawn(self._guard(self._generate(worker, share, buffer), buffer))
        self._note_sampling()

    def _free_groups(self) -> int:
        """Groups that the serving workers can take now; suspects of killing a worker run alone."""
        serving = [worker for worker in self._workers if worker.is_serving]
        if not serving:
            return 0
        if self._retries and self._is_suspect(self._retries[0]):
            return int(not any(worker.under_way for worker in serving))
        if self._config.deterministic:
            return 2**31
        capacity = math.ceil(self._config.rollout.max_concurrent_sequences / self._config.buffer.trajectories_per_group)
        return sum(max(0, capacity - len(worker.under_way)) for worker in serving)

    def _take_retries(self, free: int) -> list[Ticket]:
        if self._is_suspect(self._retries[0]):
            return [self._retries.pop(0)]
        count = next((i for i, ticket in enumerate(self._retries) if self._is_suspect(ticket)), len(self._retries))
        tickets, self._retries = self._retries[: min(count, free)], self._retries[min(count, free) :]
        return tickets

    def _is_suspect(self, ticket: Ticket) -> bool:
        failures = self._supervisor.history.prompt_failures.get(ticket.prompt.prompt_id, 0)
        return failures >= self._supervisor.config.max_prompt_failures - 1

    async def _generate(self, worker: Worker, tickets: list[Ticket], buffer: Buffer) -> None:
        actor = worker.place.actor
        assert actor is not None, "groups are assigned to serving workers only"
        deadline_s = self._config.rollout.timeout_s
        left = {ticket.index: ticket for ticket in tickets}
        try:
            async for summary, reference in actor.stream_batches("generate", tickets, deadline_s=deadline_s):
                ticket = left.pop(int(summary.group_id))
                del worker.under_way[ticket.index]
                self._num_sampled_tokens += summary.num_tokens
                self._note_sampling()
                self._wake.set()
                self._spawn(self._guard(self._finish(ticket, summary, reference, buffer), buffer))
        except (WorkerError, DeadlineError, DataError) as error:
            for index in left:
                worker.under_way.pop(index, None)
            self._note_sampling()
            await self._start_again(list(left.values()), error, buffer)
            if not isinstance(error, DataError):
                await worker.place.replace(actor, error)
            self._wake.set()

    async def _start_again(self, tickets: list[Ticket], error: TreadwheelError, buffer: Buffer) -> None:
        history, config = self._supervisor.history, self._supervisor.config
        # A prompt that the engine refuses is to blame alone; a dead worker's prompts are all suspects.
        is_proven = isinstance(error, DataError) and len(tickets) == 1
        for ticket in tickets:
            history.blame([ticket.prompt.prompt_id] * (config.max_prompt_failures if is_proven else 1))
        poison = [t for t in tickets if is_poison(t.prompt.prompt_id, history, config) and len(tickets) == 1]
        for ticket in poison:
            self._supervisor.events.event(
                "quarantine",
                prompt_id=ticket.prompt.prompt_id,
                group_id=ticket.group_id,
                reason=str(error).splitlines()[0],
            )
            await buffer.drop(ticket.index)
        if isinstance(error, DataError) and not is_proven:
            for ticket in tickets:  # find the guilty one by running each alone
                history.prompt_failures[ticket.prompt.prompt_id] = config.max_prompt_failures - 1
        self._retries = sorted([*self._retries, *(t for t in tickets if t not in poison)], key=lambda t: t.index)

    async def _finish(self, ticket: Ticket, sampled: GroupSummary, reference: Any, buffer: Buffer) -> None:
        summary, reference = await self._judge(reference)
        num_failed = summary.num_reward_errors + summary.num_reward_timeouts
        if num_failed:
            self._supervisor.events.event(
                "reward_failure",
                group_id=ticket.group_id,
                prompt_id=ticket.prompt.prompt_id,
                num_errors=summary.num_reward_errors,
                num_timeouts=summary.num_reward_timeouts,
            )
        if (
            num_failed > self._config.buffer.max_failed_share * summary.num_trajectories
            or num_failed == summary.num_trajectories
        ):
            await self._drop(ticket, "rewards failed", buffer)
        elif not self._keep(summary):
            await self._drop(ticket, "filtered", buffer)
        else:
            if self._reference is not None:
                deadline_s = self._config.reference.timeout_s
                summary, reference = await self._reference.call_for_batch("score", reference, deadline_s=deadline_s)
            await buffer.add(ticket.index, Group(reference=reference, summary=summary))
        self._wake.set()

    async def _drop(self, ticket: Ticket, why: str, buffer: Buffer) -> None:
        self._supervisor.events.event("drop", group_id=ticket.group_id, prompt_id=ticket.prompt.prompt_id, reason=why)
        await buffer.drop(ticket.index)

    async def _judge(self, reference: Any) -> tuple[GroupSummary, Any]:
        # The service keeps a deadline per trajectory; this one is for the service itself.
        deadline_s = self._config.reward.timeout_s * 2 + 60.0
        return await self._reward.call_for_batch("score", reference, deadline_s=deadline_s)

    # Workers

    def _worker(self, spec: ActorSpec) -> Worker:
        return Worker(SupervisedActor(spec, start=self._start, supervisor=self._supervisor, on_start=self._join))

    async def _bring_up(self, worker: Worker) -> None:
        """A worker that joins later: one that never comes is an event, not the end of the run."""
        await self._announce(worker, asyncio.create_task(worker.place.ready()))

    async def _announce(self, worker: Worker, starting: asyncio.Task[RemoteActor]) -> None:
        events = self._supervisor.events
        try:
            actor = await starting
        except (WorkerError, DeadlineError) as error:
            self._workers.remove(worker)
            events.event("worker_not_joined", actor=worker.place.spec.name, reason=str(error).splitlines()[0])
            return
        events.event("worker_joined", actor=actor.name, actor_pid=actor.pid)
        self._wake.set()

    async def _retire(self, worker: Worker) -> None:
        while worker.under_way:
            self._wake.clear()
            await self._wake.wait()
        self._workers.remove(worker)
        await worker.place.stop()
        self._supervisor.events.event("worker_left", actor=worker.place.spec.name)

    # Bookkeeping

    def _note_sampling(self) -> None:
        """Wall-clock seconds in which at least one group was under way."""
        now = time.monotonic()
        if self._sampling_since is not None:
            self._sampling_seconds += now - self._sampling_since
        self._sampling_since = now if any(worker.under_way for worker in self._workers) else None

    def _spawn(self, work: Awaitable[None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _guard(self, work: Awaitable[None], buffer: Buffer) -> None:
        """The supervisor's net: no background failure may leave the learner waiting."""
        try:
            await work
        except Exception as error:  # noqa: BLE001 - whatever it is, the learner must learn of it
            await buffer.close(error)


def _shares(tickets: list[Ticket], count: int) -> list[list[Ticket]]:
    return [tickets[place::count] for place in range(count)]
