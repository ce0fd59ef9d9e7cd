"""Who samples what: gives every group that may start to a worker, and follows it to the buffer. The pool runs it.

A group's way is worker -> reward -> reference -> buffer, and only references pass through here. A dead actor's unfinished groups
start again, under the same tickets. What the buffer has cut is stopped wherever it is, and forgotten.
"""

import asyncio
import contextlib
import math
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from cluster.contracts.config import RunConfig
from cluster.contracts.errors import DataError, DeadlineError, LostError, TreadwheelError, WorkerError
from cluster.contracts.types import Group, GroupSummary, Refusal, Ticket
from cluster.remote.actor import RemoteActor
from cluster.rollouts.buffer import Buffer
from cluster.rollouts.failed_rewards import FailedRewards, describe
from cluster.rollouts.quarantine import Suspects
from cluster.rollouts.scoring import Scorers
from cluster.rollouts.tickets import TicketOffice
from cluster.supervision.supervisor import Events, SupervisedActor

_ABORT_S = 30.0
"""Deadline for a worker to hear that groups are given up. Missing it costs capacity, nothing else."""

Keep = Callable[[GroupSummary], bool]
"""Which finished groups are worth training on."""


class Worker:
    """A rollout worker's place, and the groups it has under way."""

    def __init__(self, place: SupervisedActor) -> None:
        self.place = place
        self.under_way: dict[int, Ticket] = {}
        self.is_draining = False
        self.is_idle = asyncio.Event()
        self.is_idle.set()
        self._num_streams = 0

    def take(self, tickets: Sequence[Ticket]) -> None:
        self.under_way.update((ticket.index, ticket) for ticket in tickets)
        self.is_idle.clear()

    def finish(self, indices: Iterable[int]) -> None:
        for index in indices:
            self.under_way.pop(index, None)
        if not self.under_way and not self._num_streams:
            self.is_idle.set()

    @contextlib.contextmanager
    def streaming(self) -> Iterator[None]:
        """While this is open the worker is not idle: Ray takes back what it made when it ends before its stream does."""
        self._num_streams += 1
        try:
            yield
        finally:
            self._num_streams -= 1
            self.finish(())

    @property
    def is_serving(self) -> bool:
        return self.place.actor is not None and not self.is_draining


class Dispatcher:
    """Keeps every startable group under way."""

    def __init__(
        self,
        config: RunConfig,
        *,
        workers: Sequence[Worker],
        scorers: Scorers,
        suspects: Suspects,
        events: Events,
        keep: Keep,
        heal: Callable[[Worker, RemoteActor, TreadwheelError], Awaitable[None]],
        spawn: Callable[[Awaitable[None]], None],
    ) -> None:
        """`workers` is the pool's own list: who joins or leaves shows in it. `spawn` runs what goes on beside everything else."""
        self._config = config
        self._workers = workers
        self._scorers = scorers
        self._suspects = suspects
        self._events = events
        self._failed_rewards = FailedRewards(events)
        self._keep = keep
        self._heal = heal
        self._spawn = spawn
        self._retries: list[Ticket] = []
        self._alone: int | None = None
        """Index of the suspect that runs now: nothing starts beside it."""
        self._wake = asyncio.Event()
        self._num_sampled_tokens = 0
        self._num_cut = 0
        self._sampling_seconds = 0.0
        self._sampling_since: float | None = None

    def wake(self) -> None:
        """A worker came, or came free."""
        self._wake.set()

    def retry(self, tickets: Sequence[Ticket]) -> None:
        """These groups start again, before any new one."""
        self._retries = sorted([*self._retries, *tickets], key=lambda ticket: ticket.index)
        self._wake.set()

    def stats(self) -> dict[str, float]:
        """Sampling since the last call: seconds with a group under way, tokens, and trajectories that groups did without."""
        self._note_sampling()
        tokens, seconds, num_cut = self._num_sampled_tokens, self._sampling_seconds, self._num_cut
        self._num_sampled_tokens, self._sampling_seconds, self._num_cut = 0, 0.0, 0
        return {
            "time/sampling_s": seconds,
            "speed/sampling_tokens_per_s": tokens / seconds if seconds else 0.0,
            "rollout/num_cut": float(num_cut),
        }

    async def run(self, buffer: Buffer, office: TicketOffice) -> None:
        """Never returns."""
        self._spawn(self._stop_what_is_cut(buffer, office))
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
            self.retry(tickets)  # whoever was free died while the buffer let nothing start
            return
        if self._config.deterministic:
            dealt = [[t for t in tickets if t.index % len(serving) == place] for place in range(len(serving))]
        else:
            serving.sort(key=lambda worker: len(worker.under_way))
            dealt = shares(tickets, len(serving))
        for worker, share in zip(serving, dealt, strict=True):
            # The actor of this moment: should it die before the task begins, its call fails and another one takes over.
            if share and (actor := worker.place.actor):
                worker.take(share)
                self._spawn(self._generate(worker, actor, share, buffer))
        self._note_sampling()

    def _free_groups(self) -> int:
        """Groups that the serving workers can take now; suspects of killing a worker run alone."""
        serving = [worker for worker in self._workers if worker.is_serving]
        if not serving or self._alone is not None:
            return 0
        if self._config.deterministic and len(serving) < len(self._workers):
            return 0  # who samples what is fixed: a missing worker is waited for
        if self._retries and self._suspects.has(self._retries[0]):
            return int(not any(worker.under_way for worker in serving))
        if self._config.deterministic:
            return 2**31
        rollout = self._config.rollout
        num_sampled = self._config.buffer.trajectories_per_group + rollout.extra_trajectories
        capacity = math.ceil(rollout.max_concurrent_sequences / num_sampled)
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
        while _left(worker, tickets, buffer):
            try:
                await self._sample(worker, actor, tickets, buffer)
            except (WorkerError, DeadlineError, DataError) as error:
                left = _left(worker, tickets, buffer)
                alone = len(tickets) == 1
                guilty = self._suspects.blame(left, error, alone=alone)
                for ticket in guilty:
                    await buffer.drop(ticket.index)
                again = [ticket for ticket in _left(worker, tickets, buffer) if ticket not in guilty]
                if self._config.deterministic and not guilty and not any(self._suspects.has(t) for t in again):
                    # What is sampled together must not depend on when a worker died: the whole call is made again.
                    await self._heal(worker, actor, error)
                    actor = await worker.place.ready()
                    continue
                worker.finish(ticket.index for ticket in left)
                self._note_sampling()
                self.retry(again)
                if not isinstance(error, DataError):
                    await self._heal(worker, actor, error)
                return
            if len(tickets) == 1 and not buffer.is_cut(tickets[0].index):
                self._suspects.absolve(tickets[0])

    async def _sample(self, worker: Worker, actor: RemoteActor, tickets: list[Ticket], buffer: Buffer) -> None:
        """Passes the finished groups on, as they come."""
        with worker.streaming():
            async for summary, reference in actor.stream_batches(
                "generate", tickets, deadline_s=self._config.rollout.timeout_s
            ):
                ticket = worker.under_way.get(int(summary.group_id))
                if ticket is None:  # made again beside those that a dead worker had left, or cut
                    continue
                worker.finish([ticket.index])
                if isinstance(summary, Refusal):
                    self._suspects.refuse(summary)
                    await buffer.drop(ticket.index)
                    continue
                self._num_sampled_tokens += summary.num_tokens
                self._num_cut += ticket.num_extra_trajectories
                self._note_sampling()
                self._wake.set()
                if buffer.is_cut(ticket.index):
                    continue
                buffer.hold(ticket.index, summary.size_bytes)
                self._spawn(self._score(ticket, reference, buffer))

    async def _score(self, ticket: Ticket, reference: Any, buffer: Buffer) -> None:
        try:
            await self._finish(ticket, reference, buffer)
        except LostError as error:
            self._events.event("groups_lost", groups=[ticket.index], reason=str(error))
            if buffer.is_cut(ticket.index):
                await buffer.drop(ticket.index)
            else:
                self.retry([ticket])
        self._wake.set()

    async def _finish(self, ticket: Ticket, reference: Any, buffer: Buffer) -> None:
        judged = await self._scorers.judge(ticket, reference)
        if judged is None or buffer.is_cut(ticket.index):
            await buffer.drop(ticket.index)
            return
        summary, reference = judged
        self._failed_rewards.note(summary)
        num_failed = summary.num_failed_rewards
        most = self._config.buffer.max_failed_share * summary.num_trajectories
        # One trajectory that is left of several has nothing to be compared with: no group advantage is defined for it.
        num_left = summary.num_trajectories - num_failed
        if num_failed > most or num_left == 0 or (num_failed and num_left < 2):
            self._say_dropped(ticket, "rewards failed")
            await buffer.drop(ticket.index, why=describe(summary))
        elif not self._keep(summary):
            await self._drop(ticket, "filtered", buffer)
        else:
            summary, reference = await self._scorers.refer(reference) or judged
            summary = replace(summary, num_cut=ticket.num_extra_trajectories)
            await buffer.add(ticket.index, Group(object_ref=reference, summary=summary))

    async def _drop(self, ticket: Ticket, why: str, buffer: Buffer) -> None:
        self._say_dropped(ticket, why)
        await buffer.drop(ticket.index, why=why)

    def _say_dropped(self, ticket: Ticket, why: str) -> None:
        self._events.event("drop", group_id=ticket.group_id, prompt_id=ticket.prompt.prompt_id, reason=why)

    async def _stop_what_is_cut(self, buffer: Buffer, office: TicketOffice) -> None:
        """Never returns. What is being scored is left to its end: its bytes count for so long."""
        while True:
            cut = await buffer.newly_cut()
            for index in cut:
                self._say_dropped(office.ticket(index, policy_version=buffer.version), "cut")
            self._retries = [ticket for ticket in self._retries if ticket.index not in cut]
            self._wake.set()
            for worker in self._workers:
                if tickets := [worker.under_way[index] for index in cut if index in worker.under_way]:
                    self._spawn(self._stop(worker, tickets))

    async def _stop(self, worker: Worker, tickets: Sequence[Ticket]) -> None:
        # A worker that cannot hear it is dead or hangs: whoever waits for its groups finds out.
        with contextlib.suppress(WorkerError, DeadlineError):
            if actor := worker.place.actor:
                await actor.call("abort", [ticket.group_id for ticket in tickets], deadline_s=_ABORT_S)
        worker.finish(ticket.index for ticket in tickets)
        self._note_sampling()
        self._wake.set()

    def _note_sampling(self) -> None:
        """Wall-clock seconds in which at least one group was under way."""
        now = time.monotonic()
        if self._sampling_since is not None:
            self._sampling_seconds += now - self._sampling_since
        self._sampling_since = now if any(worker.under_way for worker in self._workers) else None


def _left(worker: Worker, tickets: Sequence[Ticket], buffer: Buffer) -> list[Ticket]:
    """Those that the worker is still to finish."""
    return [ticket for ticket in tickets if ticket.index in worker.under_way and not buffer.is_cut(ticket.index)]


def shares(tickets: list[Ticket], count: int) -> list[list[Ticket]]:
    """The tickets dealt to `count` workers in turn."""
    return [tickets[place::count] for place in range(count)]
