"""Workers that can stand in for each other: started, replaced, scaled. Wanted against actual, every tick.

A run has two pools, its rollout workers (the fleet) and its reward services.

A worker that fails is replaced in its place. A worker that cannot join is tried again later; a worker that leaves finishes what it
has first. The run ends when no worker is left that serves or may come.
"""

import asyncio
import contextlib
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Sequence
from statistics import median_low

from cluster.contracts.errors import FailureKind, TreadwheelError, WorkerError, headline
from cluster.remote.actor import ActorSpec, RemoteActor, found_no_room
from cluster.supervision.supervisor import Start, SupervisedActor, Supervisor, may_start_again

_TICK_S = 1.0
_MAX_BACKOFF_S = 60.0
_NUM_JOINS = 5


class Member:
    """A worker's place in the pool, whichever actor fills it now."""

    def __init__(self, place: SupervisedActor) -> None:
        self.place = place
        self.is_leaving = False
        self.num_groups = 0
        """Under way on a rollout worker, as its lane says."""
        self._num_users = 0
        self._is_idle = asyncio.Event()
        self._is_idle.set()

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
        return max(self.num_groups, self._num_users)

    @contextlib.contextmanager
    def in_use(self) -> Iterator[None]:
        """While this is open the worker does not leave: what it has not told yet would go with it."""
        self._num_users += 1
        self._is_idle.clear()
        try:
            yield
        finally:
            self._num_users -= 1
            if not self._num_users:
                self._is_idle.set()

    async def idle(self) -> None:
        """Returns when nothing uses the worker."""
        await self._is_idle.wait()


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
        """`specs` are the workers to start with; `joining` makes the spec of worker number n, beyond them.

        `join` brings a new actor what it must know before it serves, as the current weights; `left` hears of a worker whose place is
        empty for good. `is_on_spot` says which workers are on cheap nodes. A deterministic pool keeps exactly its first workers.
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
        """Seconds that the last workers beyond the first ones took."""
        self._num_failed_joins = 0
        """Since a worker came, or came back."""
        self._backoff_s = supervisor.config.backoff_s
        self._not_before = 0.0
        self._now = asyncio.get_running_loop().time
        self._listeners: list[Callable[[], None]] = []
        self._changed = asyncio.Event()

    async def start(self) -> None:
        """The first worker serves when this returns; in a deterministic pool, all of them. The pool is kept at its size from now on."""
        for member in self._members:
            self._tasks.create_task(self._bring_up(member))
        if not self._is_deterministic:
            self._tasks.create_task(self._keep_size())
        await self.some_serving()
        while self._is_deterministic and not self.is_complete:
            await self._arrival()

    def subscribe(self, listener: Callable[[], None]) -> None:
        """`listener` is called when a worker comes, or comes back. It must return at once."""
        self._listeners.append(listener)

    # Who is there

    def serving(self) -> list[Member]:
        return [member for member in self._members if member.is_serving]

    async def some_serving(self) -> list[Member]:
        """Those that serve; waits for the first where none does."""
        while not (serving := self.serving()):
            await self._arrival()
        return serving

    def workers(self) -> list[RemoteActor]:
        """All living workers, leaving ones among them: they take new weights too."""
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
        """Wanted workers that do not serve yet, or not again."""
        return max(self._num_wanted - len(self.serving()), 0)

    @property
    def join_seconds(self) -> float | None:
        """From asking for a worker until it served: the median of the last few, one of which may have waited for hours. None while there
        are only first workers."""
        return median_low(self._joins) if self._joins else None

    # Who should be there

    def want(self, num_workers: int) -> None:
        """More workers start beside the others; fewer finish what they have and leave. Returns at once."""
        self._num_wanted = num_workers
        self.reconcile()

    def drain(self, name: str) -> None:
        """The worker gets nothing more, finishes what it has, and leaves. The next tick starts another one."""
        for member in self._members:
            if member.name == name and not member.is_leaving:
                member.is_leaving = True
                self._tasks.create_task(self._retire(member))

    def reconcile(self) -> None:
        """Starts workers that are missing, unless the last joins failed a moment ago; sends home those that are too many."""
        staying = [member for member in self._members if not member.is_leaving]
        if self._now() >= self._not_before:
            for _ in range(len(staying), self._num_wanted):
                self._add()
        if len(staying) > self._num_wanted:
            staying.sort(key=self._worth, reverse=True)
            for member in staying[self._num_wanted :]:
                self.drain(member.name)

    def _worth(self, member: Member) -> tuple[bool, bool, bool, int]:
        """The least leaves first, and the newest of equals: a worker that waits for a node, or for its successor; then one that joined in
        mid-run, whose node is free without it, where a first worker's place stays reserved; then one on a node that costs the full price;
        then the one with least to finish."""
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
        member.place.give_up(actor, error)
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
        """Waits for room as long as it takes. A failure is an event while other workers serve or may come."""
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
        """The place is empty again; `reconcile` fills it later. Raises `error` when that would be no use."""
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
        """Whether a join that failed with `error` leaves nobody who serves or may come."""
        is_wrong_setting = error.kind is FailureKind.REFUSAL and not self._has_served
        if is_wrong_setting or self._is_deterministic:  # a deterministic run has no other worker for the place
            return True
        # A worker that served is healed within its own budget, or finishes what it has; a first one has not failed yet.
        if any(member.place.has_served or member in self._first for member in self._members):
            return False
        num_spare = self._supervisor.config.max_restarts if self._has_served else 0
        return self._num_failed_joins >= self._num_wanted + num_spare

    async def _heal(self, member: Member, actor: RemoteActor, error: TreadwheelError) -> None:
        """Another actor in the place of one that failed, unless the worker was to leave anyway."""
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
        """A worker came, or came back: the next that fails to join is the first again."""
        self._has_served = True
        self._num_failed_joins = 0
        self._backoff_s = self._supervisor.config.backoff_s
        self._changed.set()
        for listener in self._listeners:
            listener()
