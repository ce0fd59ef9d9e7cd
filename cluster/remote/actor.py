"""Ray's edge, driver side: start, call, kill one hosted actor. Every wait has a deadline; every error says who, what, how far.

Failures come out as one of four: a deliberate error of ours (raised as it was), `WorkerError` (death or a bug in the actor),
`DeadlineError`, `LostError` (an argument went with its node).
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import psutil
import ray
from ray.exceptions import GetTimeoutError, ObjectLostError, RayActorError, RayError, RayTaskError
from ray.util.placement_group import placement_group_table
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from cluster.contracts.errors import DeadlineError, FailureKind, LostError, TreadwheelError, WorkerError
from cluster.contracts.types import ActorKind, GroupSummary, Progress, Refusal
from cluster.remote.host import Host

_SEAT_CHECK_S = 2.0
"""How often a start that waits asks whether its seat still exists."""

_ANSWER_S = 30.0
"""What a question about the cluster may take: the head node keeps the answers at hand."""

_EXIT_S = 1.0
"""What a process that was told to end gets to do so."""


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
    """Index in the placement group; None leaves the place to Ray."""
    env: Mapping[str, str] = field(default_factory=dict[str, str])


class RemoteActor:
    """One actor. After its death this object is of no use: the pool makes another from the same spec."""

    def __init__(self, spec: ActorSpec, handle: Any, pid: int, node_id: str) -> None:
        self.spec = spec
        self.pid = pid
        self.node_id = node_id
        self._handle = handle
        self.is_hung = False
        """Killed for silence: its callers' errors mean a hang, not a death."""
        self.last_seen = time.monotonic()
        self.last_progress: Progress | None = None

    @property
    def name(self) -> str:
        return self.spec.name

    @classmethod
    async def start(cls, spec: ActorSpec, *, placement_group: Any = None, deadline_s: float) -> "RemoteActor":
        """A running actor whose object is built. Raises the object's own error, WorkerError or DeadlineError."""
        actor = await cls.spawn(spec, placement_group=placement_group, deadline_s=deadline_s)
        try:
            await actor.build(deadline_s=deadline_s)
        except BaseException:
            await actor.kill()
            raise
        return actor

    @classmethod
    async def spawn(cls, spec: ActorSpec, *, placement_group: Any = None, deadline_s: float) -> "RemoteActor":
        """A process with nothing in it yet: for groups whose members must know each other's address to be built.

        An actor whose seat went with its node starts wherever there is room: CPU shares place actors, they do not limit them,
        so it asks for none; a GPU it still waits for.
        """
        if placement_group is not None and await _is_seat_lost(placement_group, spec):
            spec = replace(spec, bundle=None, num_cpus=0.0)
        options: dict[str, Any] = {
            "num_cpus": spec.num_cpus,
            "num_gpus": spec.num_gpus,
            "max_restarts": 0,
            "max_task_retries": 0,
        }
        if placement_group is not None and spec.bundle is not None:
            options["scheduling_strategy"] = PlacementGroupSchedulingStrategy(
                placement_group, placement_group_bundle_index=spec.bundle
            )
        handle: Any = ray.remote(Host).options(**options).remote(spec.name, dict(spec.env))
        waiting = asyncio.ensure_future(
            _wait(handle.identify.remote(), who=spec.name, phase="start", deadline_s=deadline_s)
        )
        try:
            while not (await asyncio.wait({waiting}, timeout=_SEAT_CHECK_S))[0]:
                if placement_group is not None and await _is_seat_lost(placement_group, spec):
                    raise _SeatLost
            pid, node_id = waiting.result()
        except _SeatLost:
            _end(handle)
            return await cls.spawn(spec, placement_group=placement_group, deadline_s=deadline_s)
        except BaseException:
            _end(handle)
            raise
        finally:
            waiting.cancel()
        return cls(spec, handle, pid, node_id)

    async def build(self, *, deadline_s: float, **more: Any) -> None:
        """Makes the hosted object from the spec's arguments and `more`."""
        arguments = {**self.spec.arguments, **more}
        await self._wait(self._handle.build.remote(self.spec.factory, arguments), phase="build", deadline_s=deadline_s)

    async def free_address(self) -> str:
        """host:port on the actor's node that was free a moment ago: where a process group can meet."""
        return await _wait(self._handle.free_address.remote(), who=self.name, phase="free_address", deadline_s=10.0)

    async def call(self, method: str, *args: Any, deadline_s: float) -> Any:
        """What the hosted method returns. Object references among `args` arrive resolved."""
        return await self._wait(self._handle.call.remote(method, *args), phase=method, deadline_s=deadline_s)

    async def call_for_batch(self, method: str, *args: Any, deadline_s: float) -> tuple[Any, Any]:
        """(summary, reference to the batch): the batch itself never comes to the driver."""
        summary, batch = self._handle.call_for_batch.options(num_returns=2).remote(method, *args)
        return await self._wait(summary, phase=method, deadline_s=deadline_s), batch

    async def call_for_references(self, method: str, *args: Any, deadline_s: float) -> list[Any]:
        """References to the items that the method returns, none of which comes to the driver."""
        generator = self._handle.stream.options(num_returns="streaming").remote(method, *args)
        with _translated(self.name, method):
            try:
                async with asyncio.timeout(deadline_s) as limit:
                    references: list[Any] = []
                    while (reference := await _unfetched(generator)) is not None:
                        references.append(reference)
                    await references.pop()  # the mark of a complete stream, or the error that cut it short
            except TimeoutError:
                if not limit.expired():
                    raise
                raise await self._deadline(method, deadline_s) from None
        return references

    async def stream_batches(
        self, method: str, *args: Any, deadline_s: float
    ) -> AsyncIterator[tuple[GroupSummary | Refusal, Any]]:
        """(summary, object ref) of each batch as it comes, (Refusal, None) for a refused prompt; `deadline_s` bounds the wait for each."""
        generator = self._handle.stream_batches.options(num_returns="streaming").remote(method, *args)
        while True:
            with _translated(self.name, method):
                try:
                    async with asyncio.timeout(deadline_s) as limit:
                        coming = await anext(generator, None)
                        if coming is None:
                            return
                        summary, reference = await coming, None
                        if summary is None:  # a batch follows
                            reference = await _unfetched(generator)
                            described = await anext(generator, None)
                            # Without a summary the stream ended early, and the error stands in the batch's place.
                            summary = await (reference if described is None else described)
                except TimeoutError:
                    if not limit.expired():
                        raise
                    raise await self._deadline(method, deadline_s) from None
            yield summary, reference

    async def progress(self, *, deadline_s: float) -> Progress:
        """Asks the actor what it does; remembers the answer and when it came."""
        progress = await _wait(self._handle.progress.remote(), who=self.name, phase="progress", deadline_s=deadline_s)
        self.last_seen = time.monotonic()
        self.last_progress = progress
        return progress

    async def kill(self) -> None:
        """Ends the process, even one that is stopped or deaf: Ray's way first, then SIGKILL by pid on its node."""
        _end(self._handle)
        with contextlib.suppress(RayError, TreadwheelError):
            await _kill_on_node(self.pid, self.node_id)

    async def _wait(self, reference: Any, *, phase: str, deadline_s: float) -> Any:
        try:
            result = await _wait(reference, who=self.name, phase=phase, deadline_s=deadline_s)
        except DeadlineError:
            raise await self._deadline(phase, deadline_s) from None
        self.last_seen = time.monotonic()
        return result

    async def _deadline(self, phase: str, deadline_s: float) -> DeadlineError:
        try:
            progress = await self.progress(deadline_s=1.0)
        except TreadwheelError:
            progress = self.last_progress
        return DeadlineError(
            f"{self.name} did not finish {phase!r} within {deadline_s:g} s; {describe('it', progress)}",
            actor=self.name,
            stage=phase,
        )


def describe(who: str, progress: Progress | None) -> str:
    """What an actor said last that it does, in words."""
    if progress is None:
        return f"{who} never reported progress"
    ago = time.time() - progress.last_progress
    return (
        f"{who} is in phase {progress.phase!r} at policy version {progress.policy_version}, pid {progress.pid}, "
        f"last progress {ago:.0f} s ago{', ' + progress.detail if progress.detail else ''}"
    )


async def _unfetched(generator: Any) -> Any:
    """Reference to the next item of a streaming call, None after the last.

    Ray's `anext` waits for an item by getting it, which brings it to this node: weights and batches have no business here.
    """
    pause_s = 0.0005
    while not generator.next_ready():
        if generator.is_finished():
            return None
        await asyncio.sleep(pause_s)
        pause_s = min(2 * pause_s, 0.02)
    return next(generator, None)


class _SeatLost(Exception):
    """The node of the seat that an actor waits for is gone."""


async def _is_seat_lost(placement_group: Any, spec: ActorSpec) -> bool:
    if spec.bundle is None:
        return False
    table = await _asked(placement_group_table, placement_group)
    alive = {node["NodeID"] for node in await _asked(ray.nodes) if node["Alive"]}
    # On a node that goes away Ray starts nobody any more: an actor with a seat there would wait until the node is gone.
    return table["bundles_to_node_id"].get(spec.bundle) not in alive - await draining_nodes()


async def _wait(reference: Any, *, who: str, phase: str, deadline_s: float) -> Any:
    limit = asyncio.timeout(deadline_s)
    with _translated(who, phase):
        try:
            async with limit:
                return await reference
        except (TimeoutError, GetTimeoutError):
            if not limit.expired():
                raise
            late = f"{who} did not finish {phase!r} within {deadline_s:g} s"
            raise DeadlineError(late, actor=who, stage=phase) from None


@contextlib.contextmanager
def _translated(who: str, phase: str) -> Any:
    """Ray's errors as ours: one message, the cause kept."""
    try:
        yield
    except ObjectLostError as error:  # before the others: a task whose argument is lost raises both
        raise LostError(f"{who}, {phase!r}: {_in_one_line(error)[:300]}", actor=who, stage=phase) from error
    except RayTaskError as error:
        cause = error.cause
        if isinstance(cause, TreadwheelError):
            cause.actor, cause.stage = cause.actor or who, cause.stage or phase
            raise cause from None
        # Who made an argument died before its stream ended: Ray takes such items back.
        if isinstance(cause, RayActorError):
            raise LostError(f"{who}, {phase!r}: {_in_one_line(cause)[:300]}", actor=who, stage=phase) from error
        what = f"{type(cause).__name__}: {cause}\n{error}"
        raise WorkerError(f"{who} failed in {phase!r}: {what}", actor=who, stage=phase) from error
    except RayActorError as error:
        what = f"{who} died in {phase!r}: {_in_one_line(error)}"
        raise WorkerError(what, kind=FailureKind.DEATH, actor=who, stage=phase) from error
    except RayError as error:
        what = f"{type(error).__name__}: {_in_one_line(error)}"
        raise WorkerError(f"{who} failed in {phase!r}: {what}", actor=who, stage=phase) from error


def _in_one_line(error: Exception) -> str:
    return " ".join(str(error).split())


async def draining_nodes() -> set[str]:
    """Ids of nodes that announced that they go away (spot termination, scale-down). Raises our errors when Ray cannot say."""
    from ray._private.state import state  # Ray has no public name for it

    with _translated("Ray", "draining_nodes"):
        return set(await _asked(state.get_draining_nodes))


async def _asked(question: Callable[..., Any], *args: Any) -> Any:
    """What Ray's head node knows; it may be gone, and Ray itself waits long."""
    limit = asyncio.timeout(_ANSWER_S)
    try:
        async with limit:
            return await asyncio.to_thread(question, *args)
    except TimeoutError:
        if not limit.expired():
            raise
        raise DeadlineError(f"Ray's head node did not answer {question.__name__!r} within {_ANSWER_S:g} s") from None


def _end(handle: Any) -> None:
    """Ray's way, which may find nobody any more."""
    with contextlib.suppress(RayError, ValueError):
        ray.kill(handle)


async def _kill_on_node(pid: int, node_id: str) -> None:
    if node_id == ray.get_runtime_context().get_node_id():
        await asyncio.to_thread(_kill_process, pid)
        return
    strategy = NodeAffinitySchedulingStrategy(node_id, soft=False)
    task = ray.remote(_kill_process).options(num_cpus=0, scheduling_strategy=strategy, max_retries=0)
    await _wait(task.remote(pid), who=f"node {node_id[:8]}", phase="kill", deadline_s=10.0)


def _kill_process(pid: int) -> None:
    """Gives a process that was told to end a moment to do it, which Ray then takes for intended; then kills it."""
    with contextlib.suppress(psutil.NoSuchProcess):
        process = psutil.Process(pid)
        with contextlib.suppress(psutil.TimeoutExpired):
            process.wait(timeout=_EXIT_S)
        process.kill()
