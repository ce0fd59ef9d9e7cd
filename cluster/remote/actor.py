"""Ray's edge, driver side: starts, calls and kills one hosted actor. Every wait has a deadline, and errors name the actor."""

import asyncio
import contextlib
import functools
import itertools
import math
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

import ray
from ray.exceptions import ActorAlreadyExistsError, RayError
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from cluster.contracts.errors import DeadlineError, TreadwheelError
from cluster.contracts.phases import Phase, cut
from cluster.contracts.types import ActorKind, GroupSummary, Progress, Refusal
from cluster.remote.failures import answer_of
from cluster.remote.host import Host, PackedArguments
from cluster.remote.nodes import Seat, ask_in_thread, is_seat_lost, kill_on_node

T = TypeVar("T")

_STARTING = "start"
"""Stage in which Ray looks for a node and starts a process there."""
_ADDRESS_S = 10.0
"""Deadline for an address from a process that runs already."""
_SEAT_CHECK_S = 2.0
"""How often an actor that waits for its seat asks whether the seat still exists."""
_MOST_BATCHES = 8
"""Most batches of one answer."""
_GENERATIONS: defaultdict[str, Iterator[int]] = defaultdict(lambda: itertools.count(1))
"""Generation numbers by actor title. Ray reserves a name as long as its actor lives, and an actor that was given up may still live."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ActorSpec:
    """How to build an actor, now or again after its death."""

    name: str
    kind: ActorKind
    factory: str
    """Import path of a function that returns the plain object to host."""
    arguments: Mapping[str, Any]
    num_cpus: float = 0.0
    num_gpus: float = 0.0
    bundle: int | None = None
    """Index among the seats of the run; None leaves the place to Ray."""
    node_labels: Mapping[str, str] = field(default_factory=dict[str, str])
    """Ray's label selector of the nodes where it may be without a seat. Empty: any node."""
    keeps_to_seat: bool = False
    """When its seat is lost, the actor waits until Ray places the seat on another node or the seat is given back. Elsewhere it would be in
    the way of others, as nodes come and go. An actor with a GPU waits in any case."""
    env: Mapping[str, str] = field(default_factory=dict[str, str])
    run: str = ""
    """Name of its run, which Ray's dashboard shows before the actor's."""

    @property
    def title(self) -> str:
        return f"{self.run}/{self.name}" if self.run else self.name


class RemoteActor:
    """One actor. It cannot be used after its death: another one is made from the same spec."""

    def __init__(
        self, spec: ActorSpec, handle: Any, pid: int, node_id: str, node_labels: Mapping[str, str] | None = None
    ) -> None:
        self.spec = spec
        self.pid = pid
        self.node_id = node_id
        self.node_labels = node_labels or {}
        self._handle = handle
        self.is_hung = False
        """Killed for silence: errors of its calls mean a hang, not a death."""
        self.last_seen = self._known_since = time.monotonic()
        self.silent_since = -math.inf
        """Time of the first unanswered question; before `last_seen` if it has answered since."""
        self.last_progress: Progress | None = None
        self._batch_limits: set[asyncio.Timeout] = set()
        """Of the streams that wait for a batch."""
        self._phases: list[Phase] = []
        self._phases_end = 0.0
        """End of the last phase that the actor reported, by its own clock."""

    @property
    def name(self) -> str:
        return self.spec.name

    @classmethod
    async def spawn(cls, spec: ActorSpec, *, seat: Seat | None = None, deadline_s: float | None) -> "RemoteActor":
        """Starts an empty process. `deadline_s` None: waits for a node without end. Raises WorkerError or DeadlineError.

        Ray places a seat that is lost with its node on another node, in the same placement group. An actor with a GPU waits for that: the
        group holds the GPUs of the run, and there may be none outside it. An actor without a GPU needs no seat, because CPU shares place
        actors and do not limit them: it starts on any node, unless it keeps to its seat.
        """
        anywhere = {"label_selector": dict(spec.node_labels)} if spec.node_labels else {}
        if seat is None:
            return await cls._spawn(spec, num_cpus=spec.num_cpus, deadline_s=deadline_s, **anywhere)
        here = PlacementGroupSchedulingStrategy(seat.group, placement_group_bundle_index=seat.index)
        starting = asyncio.create_task(
            cls._spawn(spec, num_cpus=spec.num_cpus, scheduling_strategy=here, deadline_s=deadline_s)
        )
        try:
            stays = spec.keeps_to_seat or spec.num_gpus > 0
            while stays or not await _is_known_lost(seat):
                done, _ = await asyncio.wait({starting}, timeout=_SEAT_CHECK_S)
                if done:
                    return starting.result()
        finally:
            starting.cancel()
            await asyncio.gather(starting, return_exceptions=True)
        return await cls._spawn(spec, num_cpus=0.0, deadline_s=deadline_s, **anywhere)

    @classmethod
    async def _spawn(cls, spec: ActorSpec, *, deadline_s: float | None, **options: Any) -> "RemoteActor":
        options = {"num_gpus": spec.num_gpus, "max_restarts": 0, "max_task_retries": 0, **options}
        made: list[Any] = []
        try:
            identified = _identified(spec, options, made)
            found = await answer_of(identified, actor=spec.name, stage=_STARTING, deadline_s=deadline_s)
        except BaseException:
            for handle in made:
                _end(handle)
            raise
        return cls(spec, made[0], *found)

    async def build(self, *, deadline_s: float, **more: Any) -> None:
        """Builds the hosted object from the spec's arguments and `more`. Raises the object's own error, WorkerError or DeadlineError."""
        arguments = {**self.spec.arguments, **more}
        await self._answer(
            self._handle.build.remote(self.spec.factory, arguments), stage="build", deadline_s=deadline_s
        )

    async def reserve_address(self) -> str:
        """host:port of a bound socket on the actor's node, which `build` passes to the factory as `listener`."""
        return await self._answer(self._handle.reserve_address.remote(), stage="reserve_address", deadline_s=_ADDRESS_S)

    async def free_address(self) -> str:
        """host:port on the actor's node that was free a moment ago, for an external program that opens its socket itself."""
        return await self._answer(self._handle.free_address.remote(), stage="free_address", deadline_s=_ADDRESS_S)

    async def call(self, method: str, *args: Any, deadline_s: float) -> Any:
        """Returns the hosted method's result. Object refs among `args` arrive resolved."""
        answer = self._handle.call.remote(method, *PackedArguments.packed(args))
        return await self._answer(answer, stage=method, deadline_s=deadline_s)

    async def call_for_batches(
        self, method: str, *args: Any, num_batches: int, deadline_s: float
    ) -> tuple[list[Any], Any]:
        """(object refs of the batches, the last value) of a hosted method that returns these. No batch itself comes to the driver."""
        *batches, value = self._handle.call.options(num_returns=num_batches + 1).remote(
            method, *PackedArguments.packed(args)
        )
        return batches, await self._answer(value, stage=method, deadline_s=deadline_s)

    async def call_for_object_refs(self, method: str, *args: Any, deadline_s: float) -> list[Any]:
        """Object refs of the items that the method returns. No item itself comes to the driver."""
        stream = self._handle.stream.options(num_returns="streaming").remote(method, *args)
        return await self._answer(_object_refs(stream), stage=method, deadline_s=deadline_s)

    async def stream_batches(
        self, method: str, *args: Any, num_items: int, deadline_s: float
    ) -> AsyncIterator[tuple[GroupSummary | Refusal, Any]]:
        """(summary, object ref) of each batch as it comes; (Refusal, None) for a refused prompt. At most `num_items` come.

        `deadline_s` bounds the wait for the actor's next batch in any of its streams: a stream may wait until those before it are served.

        An answer brings all batches that are ready: eight groups in one answer cost driver and actor a sixth of eight answers. An item of a
        Ray generator costs the driver twice as much as an answer, because batch and summary come one after the other.
        """
        most = min(num_items, _MOST_BATCHES)
        answer = self._handle.first_batches.options(num_returns=most + 1).remote(most, method, *args)
        while answer:
            *batches, summary = answer
            answer = []  # a ref held here keeps its batch in the object store, even after it is learned
            summaries, rest = await self._next_batches(summary, stage=method, deadline_s=deadline_s)
            num_items -= len(summaries)
            if rest is not None:  # ask for the next ones before these are handled
                most = max(min(num_items, _MOST_BATCHES), 1)
                answer = self._handle.next_batches.options(num_returns=most + 1).remote(most, rest)
            ready = [
                (summary, batch if isinstance(summary, GroupSummary) else None)
                for summary, batch in zip(summaries, batches, strict=False)
            ]
            batches.clear()
            while ready:
                yield ready.pop(0)

    async def progress(self, *, deadline_s: float) -> Progress:
        """Asks for the actor's progress and its phases since the last answer; remembers both, and when they came."""
        asked = self._handle.tell.remote(self._phases_end)
        progress, phases = await answer_of(asked, actor=self.name, stage="progress", deadline_s=deadline_s)
        if new := cut(phases, start=self._phases_end):  # another answer may have come meanwhile
            self._phases += new
            self._phases_end = new[-1].end
        self.last_seen, self.last_progress = time.monotonic(), progress
        return progress

    def drain_phases(self) -> list[Phase]:
        """Phases that the actor reported since the last call."""
        drained, self._phases = self._phases, []
        return drained

    async def kill(self) -> None:
        """Ends the process, even one that is stopped or does not answer: first through Ray, then by SIGKILL on its node."""
        _end(self._handle)
        with contextlib.suppress(RayError, TreadwheelError):
            await kill_on_node(self.pid, self.node_id, known_for_s=time.monotonic() - self._known_since)

    async def _next_batches(self, call: Awaitable[T], *, stage: str, deadline_s: float) -> T:
        """As `_answer`. Puts off the deadlines of the other streams that wait."""
        limit = asyncio.timeout(deadline_s)
        self._batch_limits.add(limit)
        try:
            answer = await self._answer(call, stage=stage, deadline_s=deadline_s, limit=limit)
        finally:
            self._batch_limits.discard(limit)
        for other in self._batch_limits:
            if not other.expired():
                other.reschedule(asyncio.get_running_loop().time() + deadline_s)
        return answer

    async def _answer(
        self, call: Awaitable[T], *, stage: str, deadline_s: float, limit: asyncio.Timeout | None = None
    ) -> T:
        answer = await answer_of(
            call, actor=self.name, stage=stage, deadline_s=deadline_s, when_late=self._describe, limit=limit
        )
        self.last_seen = time.monotonic()
        return answer

    async def _describe(self) -> str:
        with contextlib.suppress(TreadwheelError):
            await self.progress(deadline_s=1.0)
        return describe("it", self.last_progress)


def found_no_room(error: TreadwheelError) -> bool:
    """Whether no process came up in time, because no node has the actor's resources. Later failures are of another stage."""
    return isinstance(error, DeadlineError) and error.stage == _STARTING


def describe(who: str, progress: Progress | None) -> str:
    """An actor's latest progress as text."""
    if progress is None:
        return f"{who} never reported progress"
    ago = time.time() - progress.last_progress
    return (
        f"{who} is in phase {progress.phase!r} at policy version {progress.policy_version}, pid {progress.pid}, "
        f"last progress {ago:.0f} s ago{', ' + progress.detail if progress.detail else ''}"
    )


async def _is_known_lost(seat: Seat) -> bool:
    """Whether the seat is lost. False while Ray's head node does not answer."""
    with contextlib.suppress(TreadwheelError):
        return await is_seat_lost(seat)
    return False


async def _object_refs(stream: Any) -> list[Any]:
    """Object refs of all items of `Host.stream`, which stay on their node. Raises the error of a stream that ended early."""
    refs: list[Any] = []
    while (ref := await _next_object_ref(stream)) is not None:
        refs.append(ref)
    await refs.pop()  # the mark of a complete stream, or the error in its place
    return refs


async def _next_object_ref(stream: Any) -> Any:
    """None after the last. Ray's own `anext` would bring the item to this node."""
    pause_s = 0.0005
    while not stream.next_ready():
        if stream.is_finished():
            return None
        await asyncio.sleep(pause_s)
        pause_s = min(2 * pause_s, 0.02)
    return next(stream, None)


async def _identified(spec: ActorSpec, options: Mapping[str, Any], made: list[Any]) -> Any:
    """Creates the actor and returns its `Host.identify`. Appends its handle to `made` as soon as there is one."""
    # The head node is asked whether the name is free.
    made.append(await ask_in_thread(functools.partial(_created, spec, options)))
    return await made[0].identify.remote()


@functools.cache
def _host_class() -> Any:
    """One class for all actors: Ray would export each new class to the cluster again."""
    return ray.remote(Host)


def _created(spec: ActorSpec, options: Mapping[str, Any]) -> Any:
    """Creates the actor with the next generation number that no living actor has, of this run or of another run with its name."""
    for generation in _GENERATIONS[spec.title]:
        title = f"{spec.title}#{generation}"
        host = _host_class().options(name=title, **options)
        with contextlib.suppress(ActorAlreadyExistsError):
            return host.remote(spec.name, dict(spec.env), title=title)
    raise AssertionError("generations have no end")


def _end(handle: Any) -> None:
    """Ends the actor through Ray. It may be gone already."""
    with contextlib.suppress(RayError, ValueError):
        ray.kill(handle)
