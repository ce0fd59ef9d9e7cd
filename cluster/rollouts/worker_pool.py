"""A pool of interchangeable workers: starts, replaces and scales them. Each tick compares the wanted number with the actual one.

A run has two pools, its rollout workers (the fleet) and its reward services.

A worker that fails is replaced in its place. A worker that cannot join is tried again later. A worker that leaves finishes its groups
first. The run ends when no worker is left that serves or may come.
"""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractContextManager
from statistics import median_low

from cluster.contracts.errors import FailureKind, TreadwheelError, WorkerError, headline
from cluster.contracts.usage import Uses
from cluster.remote.actor import ActorSpec, RemoteActor, found_no_room
from cluster.supervision.supervisor import Start, SupervisedActor, Supervisor, may_start_again

_TICK_S = 1.0
_MAX_BACKOFF_S = 60.0
_NUM_JOINS = 5


class Member:
    """A place in the pool, and the actor that fills it now."""

    def __init__(self, place: SupervisedActor) -> None:
        self.place = place
        self.is_leaving = False
        self.num_groups = 0
        """Groups under way on a rollout worker. Its lane sets this."""
        self._uses = Uses()

    @property
    def name(self) -> str:
        return self.place.spec.name

    @property
    def actor(self) -> RemoteActor | None:
        return self.place.actor

    @property
    def is_serving(self) -> bool:
        actor = self.actor
        return actor is not None and self.place.failure_of(actor) is None and not self.is_leaving

    @property
    def num_in_flight(self) -> int:
        """Groups under way; a reward service judges one in each call."""
        return max(self.num_groups, self._uses.number)

    def in_use(self) -> AbstractContextManager[None]:
        """Keeps the worker from leaving while it is open: results that it has not returned yet would be lost."""
        return self._uses.one()

    async def idle(self) -> None:
        """Returns when nothing uses the worker."""
        await self._uses.none()


class WorkerPool:
    """All rollout workers of one run, or all its reward services."""

    def __init__(
        self,
        specs: Sequence[ActorSpec],
        *,
        joining: Callable[[int], ActorSpec],
        start: Start,
        supervisor: Supervisor,
        join: Callable[[RemoteActor], Awaitable[None]],
        tasks: asyncio.TaskGroup,
        left: Callable[[ActorSpec], None] = lambda spec: None,
        is_on_spot: Callable[[RemoteActor], bool] = lambda actor: False,
        is_deterministic: bool = False,
    ) -> None:
        """`specs`: the first workers. `joining` makes the spec of a further worker from its number.

        `join` prepares a new actor before it serves, for example loads the current weights. `left` is called with the spec of each worker
        whose place is given up for good. `is_on_spot`: whether a worker is on a spot node. A deterministic pool keeps exactly its first
        workers.
        """
        self._joining = joining
        self._start = start
        self._supervisor = supervisor
        self._join = join
        self._left = left
        self._is_on_spot = is_on_spot
        self._tasks = tasks
        self._is_deterministic = is_deterministic
        self._members = [self._member(spec) for spec in specs]
        self._first = frozenset(self._members)
        self._num_wanted = len(specs)
        self._next_number = len(specs)
        self._has_served = False
        self._joins = deque[float](maxlen=_NUM_JOINS)
        """Seconds that the last workers took to join, the first workers left out."""
        self._num_failed_joins = 0
        """Since a worker last joined or was replaced."""
        self._backoff_s = supervisor.config.backoff_s
        self._not_before = 0.0
        self._now = asyncio.get_running_loop().time
        self._listeners: list[Callable[[], None]] = []
        self._changed = asyncio.Event()

    async def start(self) -> None:
        """Returns when one worker serves; in a deterministic pool, when all do. The pool is kept at its size from now on."""
        for member in self._members:
            self._tasks.create_task(self._bring_up(member))
        if not self._is_deterministic:
            self._tasks.create_task(self._keep_size())
        await self.some_serving()
        while self._is_deterministic and not self.is_complete:
            await self._arrival()

    def subscribe(self, listener: Callable[[], None]) -> None:
        """`listener` is called when a worker joined or was replaced. It must return at once."""
        self._listeners.append(listener)

    # Present workers

    def serving(self) -> list[Member]:
        return [member for member in self._members if member.is_serving]

    async def some_serving(self) -> list[Member]:
        """Workers that serve. Waits for the first when none does."""
        while not (serving := self.serving()):
            await self._arrival()
        return serving

    def workers(self) -> list[RemoteActor]:
        """All living workers. Leaving ones are among them, because they load new weights too."""
        return [member.actor for member in self._members if member.actor is not None]

    def places(self) -> list[SupervisedActor]:
        return [member.place for member in self._members]

    @property
    def is_fixed(self) -> bool:
        """Whether the pool keeps exactly its first workers."""
        return self._is_deterministic

    @property
    def is_complete(self) -> bool:
        return len(self.serving()) >= self._num_wanted

    @property
    def num_wanted(self) -> int:
        return self._num_wanted

    @property
    def num_coming(self) -> int:
        """Wanted workers that do not serve, because they join or are being replaced."""
        return max(self._num_wanted - len(self.serving()), 0)

    @property
    def join_seconds(self) -> float | None:
        """Median seconds from request to service of the last joins, one of which may have waited for hours. None without a join in
        mid-run."""
        return median_low(self._joins) if self._joins else None

    # Wanted workers

    def want(self, num_workers: int) -> None:
        """Starts missing workers; surplus workers finish their groups and leave. Returns at once."""
        self._num_wanted = num_workers
        self.reconcile()

    def drain(self, name: str) -> None:
        """The worker gets no more groups, finishes its own, and leaves. The next tick starts another one if one is missing."""
        for member in self._members:
            if member.name == name and not member.is_leaving:
                member.is_leaving = True
                self._tasks.create_task(self._retire(member))

    def reconcile(self) -> None:
        """Starts missing workers, unless joins failed a moment ago, and drains surplus ones."""
        staying = [member for member in self._members if not member.is_leaving]
        if self._now() >= self._not_before:
            for _ in range(len(staying), self._num_wanted):
                self._add()
        if len(staying) > self._num_wanted:
            staying.sort(key=self._worth, reverse=True)
            for member in staying[self._num_wanted :]:
                self.drain(member.name)

    def _worth(self, member: Member) -> tuple[bool, bool, bool, int]:
        """Sort key: the lowest leaves first, and the newest of equals. A worker that waits for a node or a successor leaves first. Then one
        that joined in mid-run, because its node becomes free, whereas a first worker's place stays reserved. Then one on a full-price node.
        Then the one with the fewest groups."""
        is_cheap = member.actor is not None and self._is_on_spot(member.actor)
        return member.is_serving, member in self._first, is_cheap, member.num_in_flight

    # Failures

    def replace(self, actor: RemoteActor, error: BaseException) -> None:
        """`actor` failed with `error`: another one starts in its place. Returns at once."""
        if not isinstance(error, TreadwheelError):
            raise error
        for member in self._members:
            if member.actor is actor:
                member.place.give_up(actor, error)
                self._tasks.create_task(self._heal(member, actor, error))

    async def replaced(self, member: Member, actor: RemoteActor, error: TreadwheelError) -> RemoteActor:
        """As `replace`, and waits for the new actor. Raises when the run must stop."""
        await self._heal(member, actor, error)
        return await member.place.ready()

    async def _keep_size(self) -> None:
        while True:
            self.reconcile()
            await asyncio.sleep(_TICK_S)

    def _member(self, spec: ActorSpec) -> Member:
        return Member(SupervisedActor(spec, start=self._start, supervisor=self._supervisor, on_start=self._join))

    def _add(self) -> None:
        member = self._member(self._joining(self._next_number))
        self._next_number += 1
        self._members.append(member)
        self._tasks.create_task(self._bring_up(member))

    async def _bring_up(self, member: Member) -> None:
        """Waits for room without limit. A failure is only an event while other workers serve or may come."""
        asked_at = self._now()
        while True:
            try:
                actor = await member.place.ready()
                break
            except TreadwheelError as error:
                if not may_start_again(member.place.spec, error):
                    raise
                if member.is_leaving:
                    return
                if not found_no_room(error):
                    return self._give_up(member, error)
                self._supervisor.waits_for_room(member.place.spec, error)
        seconds = self._now() - asked_at
        if member not in self._first:
            self._joins.append(seconds)
        self._supervisor.events.event("worker_joined", actor=actor.name, actor_pid=actor.pid, seconds=seconds)
        self._note_arrival()

    def _give_up(self, member: Member, error: TreadwheelError) -> None:
        """Removes the place; `reconcile` adds another later. Raises `error` when that is hopeless."""
        self._members.remove(member)
        self._left(member.place.spec)
        self._supervisor.events.event("worker_not_joined", actor=member.name, reason=headline(error))
        self._num_failed_joins += 1
        if self._is_hopeless(error):
            raise error
        # Several that fail at the same time count once: their cause is most likely the same.
        if self._now() >= self._not_before:
            self._not_before = self._now() + self._backoff_s
            self._backoff_s = min(2 * self._backoff_s, _MAX_BACKOFF_S)

    def _is_hopeless(self, error: TreadwheelError) -> bool:
        """Whether a join that failed with `error` leaves no worker that serves or may come."""
        is_wrong_setting = error.kind is FailureKind.REFUSAL and not self._has_served
        if is_wrong_setting or self._is_deterministic:  # a deterministic run has no other worker for the place
            return True
        # A worker that has served is replaced within its own budget, or finishes its groups. A first one has not failed yet.
        if any(member.place.has_served or member in self._first for member in self._members):
            return False
        num_spare = self._supervisor.config.max_restarts if self._has_served else 0
        return self._num_failed_joins >= self._num_wanted + num_spare

    async def _heal(self, member: Member, actor: RemoteActor, error: TreadwheelError) -> None:
        """Replaces an actor that failed, unless the worker was leaving anyway."""
        if member.is_leaving:
            await member.place.stop()
            return
        try:
            await member.place.replace(actor, error)
        except WorkerError as failure:
            if member.is_leaving and failure.actor == member.name:
                return
            raise
        self._note_arrival()

    async def _retire(self, member: Member) -> None:
        await member.idle()
        self._members.remove(member)
        await member.place.stop()
        self._left(member.place.spec)
        self._supervisor.events.event("worker_left", actor=member.name)

    async def _arrival(self) -> None:
        self._changed.clear()
        await self._changed.wait()

    def _note_arrival(self) -> None:
        """A worker joined or was replaced. Resets the count and the back-off of failed joins."""
        self._has_served = True
        self._num_failed_joins = 0
        self._backoff_s = self._supervisor.config.backoff_s
        self._changed.set()
        for listener in self._listeners:
            listener()
