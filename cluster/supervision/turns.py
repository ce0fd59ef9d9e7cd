"""Turns of the learner and its rollout workers on the same GPUs (`rollout.colocated`): while one side computes, the other sleeps.

The learner's turn is first. All engines sleep before its ranks compute. Engines start, load and sample while the ranks rest. On CPUs the
turns are the same, and no memory moves.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence

from cluster.contracts.errors import TreadwheelError
from cluster.contracts.protocols import ActorHandle, PublishingLearner, Transport
from cluster.contracts.types import BroadcastStats
from cluster.contracts.usage import Uses
from cluster.remote.actor import ActorSpec, RemoteActor
from cluster.supervision.supervisor import Start

Lose = Callable[[ActorHandle, TreadwheelError], Awaitable[None]]
"""Called for a worker that failed with this error. On return the worker holds no GPU memory and is being replaced."""


class GpuTurns:
    """Whose turn it is. Calls of the learner's side must come one after another."""

    def __init__(self, *, loads_whole: bool, deadline_s: float, lose: Lose) -> None:
        """`loads_whole`: a broadcast brings all weights, so engines need not keep theirs. `deadline_s`: for a worker to sleep or wake."""
        self._loads_whole = loads_whole
        self._deadline_s = deadline_s
        self._lose = lose
        self.is_learners = True
        """The learner has the GPUs, or is about to."""
        self._is_engines = asyncio.Event()
        self._engines_uses = Uses()
        self._awake: dict[ActorHandle, None] = {}
        self._dozing: dict[ActorHandle, None] = {}
        """Workers asleep with their weights: they need no broadcast to wake."""

    async def begin_learners(self, *, ends_with_broadcast: bool) -> None:
        """Begins the learner's turn. Returns when all engines sleep. Starts and loads under way have ended then, and no other begins.

        `ends_with_broadcast`: all workers get new weights after the turn. May be called again.
        """
        self.is_learners = True
        self._is_engines.clear()
        await self._engines_uses.none()
        keeps_weights = not (ends_with_broadcast and self._loads_whole)
        await asyncio.gather(*(self._put_to_sleep(worker, keeps_weights=keeps_weights) for worker in [*self._awake]))

    async def end_learners(self) -> None:
        """Ends the learner's turn. Returns when engines that kept their weights are awake; the others wake with their next load."""
        self.is_learners = False
        self._is_engines.set()
        async with self.engines():
            await asyncio.gather(*(self._wake(worker) for worker in [*self._dozing]))

    @contextlib.asynccontextmanager
    async def engines(self) -> AsyncIterator[None]:
        """Waits for the engines' turn. The learner's does not begin while this is open."""
        while self.is_learners:
            await self._is_engines.wait()
        with self._engines_uses.one():
            yield

    def starting(self, start: Start) -> Start:
        """`start` for workers, in the engines' turn: a new engine takes its memory when the learner rests."""

        async def in_turn(spec: ActorSpec) -> RemoteActor:
            async with self.engines():
                worker = await start(spec)
                self._awake[worker] = None
                return worker

        return in_turn

    def delivering(self, transport: Transport) -> Transport:
        """`transport`, whose loads come in the engines' turn."""
        return _InTurn(transport, self)

    @contextlib.asynccontextmanager
    async def loading(self, workers: Sequence[ActorHandle]) -> AsyncIterator[None]:
        """As `engines`; a load wakes these workers."""
        async with self.engines():
            for worker in workers:
                self._dozing.pop(worker, None)
                self._awake[worker] = None
            yield

    async def _put_to_sleep(self, worker: ActorHandle, *, keeps_weights: bool) -> None:
        try:
            await worker.call("sleep", keeps_weights, deadline_s=self._deadline_s)
        except TreadwheelError as error:
            await self._lose(worker, error)
        else:
            if keeps_weights:
                self._dozing[worker] = None
        self._awake.pop(worker, None)

    async def _wake(self, worker: ActorHandle) -> None:
        if worker not in self._dozing:
            return  # its load, which waited for this turn, wakes it
        del self._dozing[worker]
        self._awake[worker] = None
        try:
            await worker.call("wake", deadline_s=self._deadline_s)
        except TreadwheelError as error:
            await self._lose(worker, error)


class _InTurn:
    """A transport that loads in the engines' turn. The learner takes its own turn where it publishes."""

    def __init__(self, transport: Transport, turns: GpuTurns) -> None:
        self._transport, self._turns = transport, turns

    async def publish(self, learner: PublishingLearner) -> BroadcastStats:
        return await self._transport.publish(learner)

    async def deliver(self, workers: Sequence[ActorHandle]) -> BroadcastStats:
        async with self._turns.loading(workers):
            return await self._transport.deliver(workers)

    async def catch_up(self, workers: Sequence[ActorHandle]) -> BroadcastStats:
        async with self._turns.loading(workers):
            return await self._transport.catch_up(workers)
