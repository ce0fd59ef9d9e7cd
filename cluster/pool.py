"""The actors that make trajectories: rollout workers, reward service, reference scorer. Start, call, replace.

`generating(into=buffer)` keeps every startable group under way; a group's way is worker -> reward -> reference -> buffer, and
only references pass through here. A dead actor's unfinished groups start again, under the same tickets.
"""

import asyncio
import contextlib
import math
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterable, Sequence
from typing import Any

from cluster.buffer import Buffer, Group
from cluster.contracts.config import RunConfig
from cluster.contracts.errors import DataError, DeadlineError, LostError, TreadwheelError, WorkerError
from cluster.contracts.types import GroupSummary, Ticket
from cluster.remote import ActorSpec, RemoteActor, describe
from cluster.scoring import Scorers
from cluster.supervised import Start, SupervisedActor, Supervisor
from cluster.suspects import Suspects
from cluster.tickets import TicketOffice

Keep = Callable[[GroupSummary], bool]


class Worker:
    """A rollout worker's place, and the groups it has under way."""

    def __init__(self, place: SupervisedActor) -> None:
        self.place = place
        self.under_way: dict[int, Ticket] = {}
        self.is_draining = False
        self.is_idle = asyncio.Event()
        self.is_idle.set()

    def take(self, tickets: Sequence[Ticket]) -> None:
        self.under_way.update((ticket.index, ticket) for ticket in tickets)
        self.is_idle.clear()

    def finish(self, indices: Iterable[int]) -> None:
        for index in indices:
            self.under_way.pop(index, None)
        if not self.under_way:
            self.is_idle.set()

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
        self._suspects = Suspects(supervisor)
        self._scorers = Scorers(
            config, reward=reward, reference=reference, start=start, supervisor=supervisor, suspects=self._suspects
        )
        self._buffer: Buffer | None = None
        self._office: TicketOffice | None = None
        self._error: BaseException | None = None
        self._next_number = len(workers)
        self._tasks: set[asyncio.Task[None]] = set()
        self._retries: list[Ticket] = []
        self._alone: int | None = None
        """Index of the suspect that runs now: nothing starts beside it."""
        self._wake = asyncio.Event()
        self._num_sampled_tokens = 0
        self._sampling_seconds = 0.0
        self._sampling_since: float | None = None

    async def start(self) -> None:
        """Reward, reference and the first worker are up when this returns; deterministic runs wait for all workers."""
        starting = [asyncio.create_task(worker.place.ready()) for worker in self._workers]
        try:
            await asyncio.gather(*(place.ready() for place in self._scorers.places()))
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

    def places(self) -> list[SupervisedActor]:
        """Where actors are, or will be again."""
        return [*(worker.place for worker in self._workers), *self._scorers.places()]

    def actors(self) -> list[RemoteActor]:
        """All living actors, for heartbeats."""
        return [place.actor for place in self.places() if place.actor is not None]

    def workers(self) -> list[RemoteActor]:
        return [worker.place.actor for worker in self._workers if worker.place.actor is not None]

    def describe(self) -> str:
        """What everyone does, for the error of a wait that was too long."""
        return "; ".join(describe(place.spec.name, place.progress()) for place in self.places())

    def replace(self, actor: RemoteActor, error: BaseException) -> None:
        """`actor` failed with `error` at somebody else's call: another one starts. Returns at once."""
        if not isinstance(error, TreadwheelError):
            raise error
        for worker in self._workers:
            if worker.place.actor is actor:
                self._spawn(self._heal(worker, actor, error))
        for place in self._scorers.places():
            if place.actor is actor:
                self._spawn(place.replace(actor, error))

    def watch(self, work: Awaitable[None]) -> None:
        """Goes on beside everything else; should it fail, `generating` ends with its error."""
        self._spawn(work)

    @contextlib.asynccontextmanager
    async def generating(self, *, into: Buffer, office: TicketOffice) -> AsyncIterator[None]:
        """Groups are under way while this is open. Whatever ends their production is raised by `into.take`."""
        self._buffer, self._office = into, office
        if self._error is not None:
            await into.close(self._error)
        self._spawn(self._dispatch(into, office))
        try:
            yield
        finally:
            running = tuple(self._tasks)
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)

    def sample_again(self, indices: Collection[int]) -> None:
        """Groups that went with a node start again, under the weights that serve now."""
        assert self._office is not None and self._buffer is not None, "groups are lost while generating"
        version = self._buffer.version
        self._retry([self._office.ticket(index, policy_version=version) for index in indices])

    async def evaluate(self, tickets: Sequence[Ticket]) -> list[GroupSummary]:
        """Samples and judges tickets that are not trained on. One that a dead worker had is sampled again."""
        left = {ticket.index: ticket for ticket in tickets}
        summaries: list[GroupSummary] = []

        async def judge(ticket: Ticket, reference: Any) -> None:
            with contextlib.suppress(LostError):  # it stays among those left
                judged = await self._scorers.judge(ticket, reference)
                del left[ticket.index]
                summaries.extend([judged[0]] if judged else [])

        async def sample(worker: Worker, share: list[Ticket]) -> None:
            actor = await worker.place.ready()
            judging: list[asyncio.Task[None]] = []
            try:
                deadline_s = self._config.rollout.timeout_s
                async for summary, reference in actor.stream_batches("generate", share, deadline_s=deadline_s):
                    judging.append(asyncio.create_task(judge(left[int(summary.group_id)], reference)))
            except (WorkerError, DeadlineError) as error:
                await worker.place.replace(actor, error)
            finally:
                await asyncio.gather(*judging)

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
        await asyncio.gather(*(place.stop() for place in self.places()))

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
        if not serving or (self._config.deterministic and len(serving) < len(self._workers)):
            self._retry(tickets)  # whoever was free died while the buffer let nothing start
            return
        if self._config.deterministic:
            shares = [[t for t in tickets if t.index % len(serving) == place] for place in range(len(serving))]
        else:
            serving.sort(key=lambda worker: len(worker.under_way))
            shares = _shares(tickets, len(serving))
        for worker, share in zip(serving, shares, strict=True):
            # The actor of this moment: should it die before the task begins, its call fails and another one takes over.
            if share and (actor := worker.place.actor):
                worker.take(share)
                self._spawn(self._generate(worker, actor, share, buffer))
        self._note_sampling()

    def _free_groups(self) -> int:
        """Groups that the serving workers can take now; suspects of killing a worker run alone."""
        serving = [worker for worker in self._workers if worker.is_serving]
        if not serving:
            return 0
        if self._alone is not None:
            return 0
        if self._config.deterministic and len(serving) < len(self._workers):
            return 0  # who samples what is fixed: a missing worker is waited for
        if self._retries and self._suspects.has(self._retries[0]):
            return int(not any(worker.under_way for worker in serving))
        if self._config.deterministic:
            return 2**31
        capacity = math.ceil(self._config.rollout.max_concurrent_sequences / self._config.buffer.trajectories_per_group)
        return sum(max(0, capacity - len(worker.under_way)) for worker in serving)

    def _take_retries(self, free: int) -> list[Ticket]:
        if self._suspects.has(self._retries[0]):
            self._alone = self._retries[0].index
            return [self._retries.pop(0)]
        count = next((i for i, ticket in enumerate(self._retries) if self._suspects.has(ticket)), len(self._retries))
        tickets, self._retries = self._retries[: min(count, free)], self._retries[min(count, free) :]
        return tickets

    async def _generate(self, worker: Worker, actor: RemoteActor, tickets: list[Ticket], buffer: Buffer) -> None:
        try:
            await self._generate_all(worker, actor, tickets, buffer)
        finally:
            if self._alone in {ticket.index for ticket in tickets}:
                self._alone = None
            self._wake.set()

    async def _generate_all(self, worker: Worker, actor: RemoteActor, tickets: list[Ticket], buffer: Buffer) -> None:
        left = {ticket.index: ticket for ticket in tickets}
        while left:
            try:
                await self._sample(worker, actor, tickets, left, buffer)
            except (WorkerError, DeadlineError, DataError) as error:
                alone = len(tickets) == 1
                guilty = self._suspects.blame([*left.values()], error, alone=alone)
                for ticket in guilty:
                    await buffer.drop(ticket.index)
                again = [ticket for ticket in left.values() if ticket not in guilty]
                if self._config.deterministic and not guilty and not any(self._suspects.has(t) for t in again):
                    # What is sampled together must not depend on when a worker died: the whole call is made again.
                    await self._heal(worker, actor, error)
                    actor = await worker.place.ready()
                    continue
                worker.finish(left)
                self._note_sampling()
                self._retry(again)
                if not isinstance(error, DataError):
                    await self._heal(worker, actor, error)
                return
            if len(tickets) == 1:
                self._suspects.absolve(tickets[0])

    async def _sample(
        self, worker: Worker, actor: RemoteActor, tickets: list[Ticket], left: dict[int, Ticket], buffer: Buffer
    ) -> None:
        """Takes the finished groups out of `left`, as they come."""
        async for summary, reference in actor.stream_batches(
            "generate", tickets, deadline_s=self._config.rollout.timeout_s
        ):
            ticket = left.pop(int(summary.group_id), None)
            if ticket is None:  # made again beside those that a dead worker had left
                continue
            worker.finish([ticket.index])
            buffer.hold(ticket.index, summary.size_bytes)
            self._num_sampled_tokens += summary.num_tokens
            self._note_sampling()
            self._wake.set()
            self._spawn(self._score(ticket, reference, buffer))

    async def _score(self, ticket: Ticket, reference: Any, buffer: Buffer) -> None:
        try:
            await self._finish(ticket, reference, buffer)
        except LostError as error:
            self._supervisor.events.event("groups_lost", groups=[ticket.index], reason=str(error))
            self._retry([ticket])
        self._wake.set()

    async def _finish(self, ticket: Ticket, reference: Any, buffer: Buffer) -> None:
        judged = await self._scorers.judge(ticket, reference)
        if judged is None:
            await buffer.drop(ticket.index)
            return
        summary, reference = judged
        num_failed = summary.num_reward_errors + summary.num_reward_timeouts
        if num_failed:
            self._supervisor.events.event(
                "reward_failure",
                group_id=ticket.group_id,
                prompt_id=ticket.prompt.prompt_id,
                num_errors=summary.num_reward_errors,
                num_timeouts=summary.num_reward_timeouts,
            )
        most = self._config.buffer.max_failed_share * summary.num_trajectories
        # One trajectory that is left of several has nothing to be compared with: no group advantage is defined for it.
        num_left = summary.num_trajectories - num_failed
        if num_failed > most or num_left == 0 or (num_failed and num_left < 2):
            await self._drop(ticket, "rewards failed", buffer)
        elif not self._keep(summary):
            await self._drop(ticket, "filtered", buffer)
        else:
            summary, reference = await self._scorers.refer(reference) or judged
            await buffer.add(ticket.index, Group(reference=reference, summary=summary))

    async def _drop(self, ticket: Ticket, why: str, buffer: Buffer) -> None:
        self._supervisor.events.event("drop", group_id=ticket.group_id, prompt_id=ticket.prompt.prompt_id, reason=why)
        await buffer.drop(ticket.index, why=why)

    def _retry(self, tickets: Sequence[Ticket]) -> None:
        self._retries = sorted([*self._retries, *tickets], key=lambda ticket: ticket.index)
        self._wake.set()

    # Workers

    def _worker(self, spec: ActorSpec) -> Worker:
        return Worker(SupervisedActor(spec, start=self._start, supervisor=self._supervisor, on_start=self._join))

    async def _heal(self, worker: Worker, actor: RemoteActor, error: TreadwheelError) -> None:
        """Another actor in the place of one that failed, unless the worker was to leave anyway."""
        try:
            if worker.is_draining:
                await worker.place.stop()
            else:
                await worker.place.replace(actor, error)
        except WorkerError:
            if not worker.is_draining:
                raise
        self._wake.set()

    async def _bring_up(self, worker: Worker) -> None:
        """A worker that joins later: one that never comes is an event, not the end of the run."""
        await self._announce(worker, asyncio.create_task(worker.place.ready()))

    async def _announce(self, worker: Worker, starting: asyncio.Task[RemoteActor]) -> None:
        events = self._supervisor.events
        try:
            actor = await starting
        except (WorkerError, DeadlineError) as error:
            if worker in self._workers:
                self._workers.remove(worker)
            events.event("worker_not_joined", actor=worker.place.spec.name, reason=str(error).splitlines()[0])
            return
        events.event("worker_joined", actor=actor.name, actor_pid=actor.pid)
        self._wake.set()

    async def _retire(self, worker: Worker) -> None:
        await worker.is_idle.wait()
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
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        """The supervisor's net: no background failure may leave the learner waiting."""
        self._tasks.discard(task)
        if task.cancelled() or (error := task.exception()) is None:
            return
        self._error = self._error or error
        if self._buffer is not None:
            self._spawn(self._buffer.close(error))


def _shares(tickets: list[Ticket], count: int) -> list[list[Ticket]]:
    return [tickets[place::count] for place in range(count)]
