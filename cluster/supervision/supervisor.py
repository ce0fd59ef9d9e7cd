"""Replaces actors that die. Only this module executes the decisions of `supervision.decide`."""

import asyncio
import contextlib
import copy
import os
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from cluster.contracts.config import SupervisionConfig
from cluster.contracts.errors import (
    OF_ITS_MACHINE,
    DeadlineError,
    FailureKind,
    TreadwheelError,
    UnreachableError,
    WorkerError,
    failure_of_its_actor,
    headline,
)
from cluster.contracts.protocols import Events
from cluster.contracts.types import Progress
from cluster.remote.actor import ActorSpec, RemoteActor, found_no_room
from cluster.supervision.policy import Abort, Failure, History, Restart, decide, unit_of

Start = Callable[[ActorSpec], Awaitable[RemoteActor]]


def may_start_again(spec: ActorSpec, error: TreadwheelError) -> bool:
    """Whether another start of the actor may succeed, perhaps on another machine.

    False after a verdict on the weights, after a failure of another actor that this one waited for, and after an error of the driver
    itself, which names no actor: its own disk may be full.
    """
    if isinstance(error, OF_ITS_MACHINE):
        return error.actor == spec.name
    return isinstance(error, (WorkerError, DeadlineError)) and error.actor in (None, spec.name)


def note_waiting(events: Events, spec: ActorSpec, *, reason: str) -> None:
    """Logs that the actor waits for a node. That is no failure."""
    asked = f"{spec.num_cpus:g} CPUs and {spec.num_gpus:g} GPUs"
    message = f"{spec.name} waits for a node with {asked} free: {reason}"
    events.event("worker_waits", actor=spec.name, reason=reason, message=message)


class Supervisor:
    """The run's failures, and the restarts after them."""

    def __init__(self, config: SupervisionConfig, events: Events) -> None:
        self.config = config
        self.history = History()
        self._num_restarts: Counter[FailureKind] = Counter()
        self.events = events

    async def handle(self, spec: ActorSpec, error: TreadwheelError, *, actor: RemoteActor | None) -> None:
        """Records the failure of `actor` (None: it never came up) and waits out the back-off: then it may start again.

        Raises WorkerError, or a deliberate `error` itself, when the run must stop.
        """
        kind = FailureKind.HANG if actor and actor.is_hung else error.kind
        is_lost_node = isinstance(error, UnreachableError)
        failure = _failure(spec, kind, reason=headline(error), actor=actor, is_lost_node=is_lost_node)
        decision = decide(failure, self.history, self.config)
        self.history.add(failure, window_s=self.config.window_s)
        self._tell(failure, actor, decision=type(decision).__name__.lower(), details=error.details)
        match decision:
            case Abort(reason=reason):
                if kind is FailureKind.REFUSAL:
                    raise error
                raise WorkerError(reason, kind=kind, actor=spec.name, details=error.details) from error
            case Restart(delay_s=delay_s):
                self._num_restarts[kind] += 1
                await asyncio.sleep(delay_s)

    def note_success(self, spec: ActorSpec) -> None:
        """The learner made a step that it had not made before, or another actor finished a group: earlier restarts were not futile."""
        self.history.note_success(unit_of(spec.name, spec.kind))

    def waits_for_room(self, spec: ActorSpec, error: TreadwheelError) -> None:
        """No node has room for the actor yet."""
        note_waiting(self.events, spec, reason=headline(error))

    def drain_stats(self) -> dict[str, float]:
        """Restarts since the last call, and why."""
        drained, self._num_restarts = self._num_restarts, Counter()
        return {
            "supervision/num_restarts": float(drained.total()),
            "supervision/num_deaths": float(drained[FailureKind.DEATH]),
            "supervision/num_hangs": float(drained[FailureKind.HANG]),
            "supervision/num_errors": float(drained[FailureKind.ERROR]),
        }

    def note_leaving(self, actor: RemoteActor) -> None:
        """Logs that the actor's node announced its end. That is no failure."""
        reason = f"node {actor.node_id} goes away"
        self._tell(_failure(actor.spec, FailureKind.TERMINATION, reason=reason, actor=actor), actor, decision="drain")

    def _tell(self, failure: Failure, actor: RemoteActor | None, *, decision: str, details: str | None = None) -> None:
        self.events.event(
            "failure",
            actor=failure.actor,
            actor_kind=str(failure.actor_kind),
            failure=str(failure.kind),
            reason=failure.reason,
            actor_pid=actor.pid if actor else None,
            node_id=failure.node_id,
            actor_policy_version=actor.last_progress.policy_version if actor and actor.last_progress else None,
            decision=decision,
            **({} if details is None else {"details": details}),
        )


def _failure(
    spec: ActorSpec, kind: FailureKind, *, reason: str, actor: RemoteActor | None, is_lost_node: bool = False
) -> Failure:
    """A failure at this moment."""
    return Failure(
        actor=spec.name,
        actor_kind=spec.kind,
        kind=kind,
        reason=reason,
        at=asyncio.get_running_loop().time(),
        node_id=actor.node_id if actor else None,
        is_lost_node=is_lost_node,
    )


class SupervisedActor:
    """One place in the cluster, and the actor that fills it now. Callers see a pause instead of a death."""

    def __init__(
        self,
        spec: ActorSpec,
        *,
        start: Start,
        supervisor: Supervisor,
        on_start: Callable[[RemoteActor], Awaitable[None]] | None = None,
    ) -> None:
        """`on_start` prepares a new actor before anyone may call it, for example by loading weights."""
        self.spec = spec
        self.actor: RemoteActor | None = None
        self._start = start
        self._on_start = on_start
        self._supervisor = supervisor
        self._healing = asyncio.Lock()
        self._starting_since = time.time()
        self.has_served = False
        """Whether an actor came up here before."""
        self._is_stopped = False
        self._starting: asyncio.Future[RemoteActor] | None = None
        self._preparing: RemoteActor | None = None
        """An actor that has started and may not be called yet."""
        self._given_up: tuple[RemoteActor, TreadwheelError] | None = None

    def give_up(self, actor: RemoteActor, error: TreadwheelError) -> None:
        """`actor` failed with `error` and gets no more calls. Only its first failure counts, because it causes the later ones."""
        if self.failure_of(actor) is None:
            # A copy: the traceback of the error itself would keep the call's objects alive.
            self._given_up = (actor, copy.copy(error))

    def failure_of(self, actor: RemoteActor) -> TreadwheelError | None:
        """Why `actor` was given up; None while it was not."""
        return self._given_up[1] if self._given_up and self._given_up[0] is actor else None

    async def ready(self) -> RemoteActor:
        """The actor, started or replaced if need be."""
        async with self._healing:
            while self.actor is None:
                await self._begin()
            return self.actor

    async def replace(self, actor: RemoteActor, error: TreadwheelError) -> None:
        """`actor` failed with `error`. Does nothing if it was replaced already. Raises when the run must stop."""
        self.give_up(actor, error)
        async with self._healing:
            if self.actor is not actor:
                return
            self.actor = None
            self._starting_since = time.time()
            began = time.monotonic()
            await actor.kill()
            await self._supervisor.handle(self.spec, error, actor=actor)
            while self.actor is None:
                await self._begin()
            self._supervisor.events.event(
                "recovery",
                actor=self.spec.name,
                actor_kind=str(self.spec.kind),
                actor_pid=self.actor.pid,
                seconds=time.monotonic() - began,
            )

    def note_success(self) -> None:
        """The actor finished a group, or answered a call: earlier restarts were not futile."""
        self._supervisor.note_success(self.spec)

    async def call(self, method: str, *args: Any, deadline_s: float) -> Any:
        """As RemoteActor.call, tried again on the replacement of an actor that died."""
        return await self._retry(lambda actor: actor.call(method, *args, deadline_s=deadline_s))

    async def call_for_batches(
        self, method: str, *args: Any, num_batches: int, deadline_s: float
    ) -> tuple[list[Any], Any]:
        """As RemoteActor.call_for_batches, tried again on the replacement of an actor that died."""
        return await self._retry(
            lambda actor: actor.call_for_batches(method, *args, num_batches=num_batches, deadline_s=deadline_s)
        )

    async def call_for_object_refs(self, method: str, *args: Any, deadline_s: float) -> list[Any]:
        """As RemoteActor.call_for_object_refs, tried again on the replacement of an actor that died."""
        return await self._retry(lambda actor: actor.call_for_object_refs(method, *args, deadline_s=deadline_s))

    def progress(self) -> Progress | None:
        """The actor's latest progress, or since when the place waits for an actor."""
        if self.actor is not None:
            return self.actor.last_progress
        since = self._starting_since
        return Progress(
            actor=self.spec.name, phase="starting", policy_version=0, since=since, last_progress=since, pid=0
        )

    async def stop(self) -> None:
        """Ends the actor, or the start of one, so that Ray does not go on looking for its node and callers do not wait for it."""
        self._is_stopped = True
        if self._starting is not None:
            self._starting.cancel()
        if self._preparing is not None:
            await self._preparing.kill()
        if self.actor is not None:
            actor, self.actor = self.actor, None
            await actor.kill()

    async def _retry(self, attempt: Callable[[RemoteActor], Awaitable[Any]]) -> Any:
        while True:
            actor = await self.ready()
            try:
                result = await attempt(actor)
            except (WorkerError, DeadlineError) as error:
                await self.replace(actor, error)
            else:
                self.note_success()
                return result

    async def _begin(self) -> None:
        if self._is_stopped:
            raise self._unwanted()
        actor: RemoteActor | None = None
        try:
            actor = self._preparing = await self._started()
            if self._on_start is not None and not self._is_stopped:
                await self._on_start(actor)
        except TreadwheelError as error:  # a failure of the start is one more failure
            if actor is not None:
                await actor.kill()
            if not may_start_again(self.spec, error):
                raise
            if self._is_stopped:
                raise self._unwanted() from error
            # A first start that failed for another reason than a death is not tried again.
            if not self.has_served and error.kind is not FailureKind.DEATH:
                raise
            if found_no_room(error):
                return self._supervisor.waits_for_room(self.spec, error)
            await self._supervisor.handle(self.spec, failure_of_its_actor(error), actor=actor)
            return
        except BaseException:
            if actor is not None:
                await actor.kill()
            raise
        finally:
            self._preparing = None
        # No other task runs between the return of `on_start` and this line, so no broadcast misses the new actor.
        self.actor, self.has_served = actor, True
        if self._is_stopped:
            await self.stop()
            raise self._unwanted()

    def _unwanted(self) -> WorkerError:
        return WorkerError(f"{self.spec.name} is not wanted any more", actor=self.spec.name)

    async def _started(self) -> RemoteActor:
        self._starting = asyncio.ensure_future(self._start(self.spec))
        try:
            return await self._starting
        except asyncio.CancelledError:
            if self._is_stopped:
                raise self._unwanted() from None
            raise


async def heartbeats(
    actors: Callable[[], Sequence[RemoteActor]],
    supervisor: Supervisor,
    *,
    heal: Callable[[RemoteActor, TreadwheelError], None],
    report: Callable[[], None],
    early: asyncio.Event,
) -> None:
    """Asks all actors for their progress every `heartbeat_s`, or as soon as `early` is set, and calls `report`. Calls `heal` for an actor
    that is dead, or that was silent for `hang_s` and was killed therefore.

    Callers notice a death too. The first to notice it replaces the actor.
    """
    while True:
        asked = actors()
        errors = await asyncio.gather(*(_check(actor, supervisor) for actor in asked))
        for actor, error in zip(asked, errors, strict=True):
            if error is not None:
                heal(actor, error)
        report()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(supervisor.config.heartbeat_s):
                await early.wait()
        early.clear()


async def _check(actor: RemoteActor, supervisor: Supervisor) -> TreadwheelError | None:
    """The error for which the actor must be replaced; None when it need not be."""
    config, asked = supervisor.config, time.monotonic()
    try:
        await actor.progress(deadline_s=config.heartbeat_s)
    except TreadwheelError as error:
        if error.kind is FailureKind.DEATH:
            return error
        now = time.monotonic()
        # Time in which the driver itself stood still does not count as the actor's silence.
        stood_still_s = max(now - asked - config.heartbeat_s, 0.0)
        is_new = actor.silent_since < actor.last_seen
        actor.silent_since = (asked if is_new else actor.silent_since) + stood_still_s
        silent_s = now - actor.silent_since
        if silent_s > config.hang_s and not actor.is_hung:
            supervisor.events.event(
                "hang", actor=actor.name, actor_pid=actor.pid, silent_s=silent_s, driver_pid=os.getpid()
            )
            actor.is_hung = True
            await actor.kill()
            return error
    return None
