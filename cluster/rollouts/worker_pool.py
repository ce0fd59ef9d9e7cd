"""The actors that make trajectories: rollout workers, reward service, reference scorer. Start, replace, scale.

While `generating(into=buffer)` is open, the dispatcher keeps every startable group under way on them.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Sequence
from typing import Any

from cluster.contracts.config import RunConfig
from cluster.contracts.errors import DeadlineError, LostError, TreadwheelError, WorkerError, headline
from cluster.contracts.types import GroupSummary, Refusal, Ticket
from cluster.remote.actor import ActorSpec, RemoteActor, describe
from cluster.rollouts.buffer import Buffer
from cluster.rollouts.dispatcher import Dispatcher, Keep, Worker, shares
from cluster.rollouts.quarantine import Suspects
from cluster.rollouts.scoring import Scorers
from cluster.rollouts.tickets import TicketOffice
from cluster.supervision.supervisor import Start, SupervisedActor, Supervisor


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
        self._workers = [self._worker(spec) for spec in workers]
        self._suspects = suspects = Suspects(supervisor)
        self._scorers = Scorers(
            config, reward=reward, reference=reference, start=start, supervisor=supervisor, suspects=suspects
        )
        self._dispatcher = Dispatcher(
            config,
            workers=self._workers,
            scorers=self._scorers,
            suspects=suspects,
            events=supervisor.events,
            keep=keep,
            heal=self._heal,
            spawn=self._spawn,
        )
        self._buffer: Buffer | None = None
        self._office: TicketOffice | None = None
        self._error: BaseException | None = None
        self._next_number = len(workers)
        self._tasks: set[asyncio.Task[None]] = set()

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
        self._spawn(self._dispatcher.run(into, office))
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
        self._dispatcher.retry([self._office.ticket(index, policy_version=version) for index in indices])

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
                    if isinstance(summary, Refusal):
                        self._suspects.refuse(summary)
                        del left[int(summary.group_id)]
                        continue
                    judging.append(asyncio.create_task(judge(left[int(summary.group_id)], reference)))
            except (WorkerError, DeadlineError) as error:
                await worker.place.replace(actor, error)
            finally:
                await asyncio.gather(*judging)

        while left:
            serving = [worker for worker in self._workers if worker.is_serving] or self._workers[:1]
            dealt = shares(list(left.values()), len(serving))
            await asyncio.gather(*(sample(w, share) for w, share in zip(serving, dealt, strict=True) if share))
        return summaries

    def stats(self) -> dict[str, float]:
        """Sampling since the last call: seconds with a group under way, tokens, and how many workers serve."""
        num_workers = float(sum(worker.is_serving for worker in self._workers))
        return {**self._dispatcher.stats(), "rollout/num_workers": num_workers}

    async def stop(self) -> None:
        await asyncio.gather(*(place.stop() for place in self.places()))

    @property
    def num_workers(self) -> int:
        """Workers that are serving or coming up."""
        return sum(not worker.is_draining for worker in self._workers)

    @property
    def num_coming(self) -> int:
        """Of those, the ones that do not serve yet, or not again."""
        return sum(not worker.is_draining and worker.place.actor is None for worker in self._workers)

    def scale(self, num_workers: int, *, spec: Callable[[int], ActorSpec]) -> None:
        """More workers start beside the others; fewer finish what they have and leave. Returns at once."""
        # Those that serve stay: who waits for a node, or for its successor, goes first.
        active = sorted((w for w in self._workers if not w.is_draining), key=lambda worker: not worker.is_serving)
        for _ in range(len(active), num_workers):
            worker = self._worker(spec(self._next_number))
            self._next_number += 1
            self._workers.append(worker)
            self._spawn(self._announce(worker, asyncio.create_task(worker.place.ready())))
        for worker in active[num_workers:]:
            self.drain(worker.place.spec.name)

    def drain(self, name: str) -> None:
        """The worker gets nothing more, finishes what it has, and leaves."""
        for worker in self._workers:
            if worker.place.spec.name == name and not worker.is_draining:
                worker.is_draining = True
                self._spawn(self._retire(worker))

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
        self._dispatcher.wake()

    async def _announce(self, worker: Worker, starting: asyncio.Task[RemoteActor]) -> None:
        """A worker that joins later waits for room as long as it takes; one that fails is an event, not the end of the run."""
        events = self._supervisor.events
        while True:
            try:
                actor = await starting
                break
            except DeadlineError as error:
                events.event("worker_waits", actor=worker.place.spec.name, reason=headline(error))
                starting = asyncio.create_task(worker.place.ready())
            except WorkerError as error:
                if worker in self._workers:
                    self._workers.remove(worker)
                events.event("worker_not_joined", actor=worker.place.spec.name, reason=headline(error))
                return
        events.event("worker_joined", actor=actor.name, actor_pid=actor.pid)
        self._dispatcher.wake()

    async def _retire(self, worker: Worker) -> None:
        await worker.is_idle.wait()
        self._workers.remove(worker)
        await worker.place.stop()
        self._supervisor.events.event("worker_left", actor=worker.place.spec.name)

    # Bookkeeping

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
