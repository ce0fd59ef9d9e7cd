"""Ray's edge, actor side: one class hosts any plain object, which knows nothing of Ray.

A hosted object's coroutines share the actor's event loop; its synchronous methods run one after another in a thread of their
own, so that the actor answers `progress` while it computes.
"""

import asyncio
import inspect
import itertools
import os
import pkgutil
import socket
import sys
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import ray

from cluster.contracts.phases import Phase, Timeline
from cluster.contracts.schema import summarize
from cluster.contracts.sockets import bound
from cluster.contracts.types import GroupSummary, Progress, Refusal

SEARCH_PATH = "TREADWHEEL_PATH"
"""Environment variable with the driver's module search path. Actors search it after their own, and so find a user's rewards."""
_END = object()

_Answer = tuple[list[GroupSummary | Refusal], int | None]
"""Summaries of a stream's items, empty after the last; and the number with which the driver asks for more, None if there are none."""


class Host:
    """Holds one object and forwards calls to it."""

    def __init__(self, name: str, env: Mapping[str, str] | None = None, *, title: str = "") -> None:
        """`env` is set before the modules that read it are imported, except those that a fork server has imported. `title`: its name in
        Ray.

        Ray's own way to set it, a runtime environment, would prevent forking.
        """
        os.environ.update(env or {})
        if (torch := sys.modules.get("torch")) and "OMP_NUM_THREADS" in (env or {}):  # torch has read it already
            torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
        sys.path += [
            path for path in os.environ.get(SEARCH_PATH, "").split(os.pathsep) if path and path not in sys.path
        ]
        self._name = name
        self._title = title or name
        self._timeline = self._reported = Timeline("starting")
        """Phases by running method, and the timeline that the driver gets: the object's own if it has one."""
        self._object: Any = None
        self._listener: socket.socket | None = None
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix=name)
        self._streams: dict[int, BatchStream] = {}
        self._numbers = itertools.count()

    def __repr__(self) -> str:
        """The actor's name in Ray's dashboard and logs."""
        return self._title

    async def build(self, factory: str, arguments: dict[str, Any]) -> None:
        """Builds the object with a factory, given as an import path (`package.module:function`), in the object's own thread.

        An object with a `warm_up` then runs it, in the event loop, so that its first call need not wait for it. If `reserve_address` was
        called, the factory gets its socket as `listener`.

        Not in `__init__`, whose errors would reach the driver as an actor's death without its cause.
        """
        if self._listener is not None:
            arguments, self._listener = arguments | {"listener": self._listener}, None
        made = await asyncio.get_running_loop().run_in_executor(self._thread, _build, factory, arguments)
        if warm_up := getattr(made, "warm_up", None):
            await warm_up()
        self._object = made
        self._timeline.enter("serving")
        if own := getattr(made, "timeline", None):
            own.lead_with(self._timeline)
            self._reported = own

    async def reserve_address(self) -> str:
        """host:port of a socket on this node, for the object that is built next."""
        self._listener, address = bound(ray.util.get_node_ip_address())
        return address

    async def free_address(self) -> str:
        """host:port of this node. The port is free now, and another process may take it a moment later."""
        listener, address = bound(ray.util.get_node_ip_address())
        listener.close()
        return address

    async def call(self, method: str, packed: "PackedArguments", *resolved: Any) -> Any:
        """Returns the method's result. The other arguments are the packed ones and their object refs, resolved."""
        return await self._run(getattr(self._object, method), *packed.with_resolved(resolved))

    async def stream(self, method: str, *args: Any) -> AsyncIterator[Any]:
        """Yields each item of the method's result as an object of its own; then None, which proves that the stream is complete."""
        items = iter(await self._run(getattr(self._object, method), *args) or ())
        # A generator computes each item when asked for it, so that must run in the object's thread too.
        while (item := await self._run(next, items, _END)) is not _END:
            yield item
        yield None

    async def first_batches(self, most: int, method: str, *args: Any) -> tuple[Any, ...]:
        """The first items of an asynchronous generator: `most` objects, then their `_Answer`. An object is a batch; None for a refusal, or
        when no more are ready. The driver owns the objects that a call returns, so they outlive this actor."""
        return await self._taken(next(self._numbers), BatchStream(getattr(self._object, method)(*args)), most)

    async def next_batches(self, most: int, number: int) -> tuple[Any, ...]:
        """The next items of the stream with this number. Errors of the generator pass through."""
        return await self._taken(number, self._streams.pop(number), most)

    async def _taken(self, number: int, stream: "BatchStream", most: int) -> tuple[Any, ...]:
        items = await stream.take(most)
        rest = None if await stream.is_over() else number
        if rest is not None:
            self._streams[rest] = stream
        batches = [item if isinstance(item, pa.RecordBatch) else None for item in items]
        answer: _Answer = [summarize(item) if isinstance(item, pa.RecordBatch) else item for item in items], rest
        return *batches, *[None] * (most - len(batches)), answer

    async def tell(self, since: float) -> tuple[Progress, tuple[Phase, ...]]:
        """`progress`, and the phases after the moment `since`, the end of the last one that the driver has."""
        return await self.progress(), self._reported.after(since)

    async def progress(self) -> Progress:
        """The object's own progress, or else its running method. Answered even while it computes."""
        own = getattr(self._object, "progress", None)
        if own is not None:
            return own()
        phase, since = self._timeline.phase
        return Progress(
            actor=self._name,
            phase=phase,
            policy_version=0,
            since=since,
            last_progress=since,
            pid=os.getpid(),
        )

    async def identify(self) -> tuple[int, str, dict[str, str]]:
        """(pid, node id, labels of the node). With the first two the driver can kill this process when it no longer answers."""
        here = ray.get_runtime_context()
        labels: Any = here.get_node_labels()  # one text each, whatever Ray's annotation says
        return os.getpid(), here.get_node_id(), labels

    def _in_phase(self, function: Callable[..., Any], *args: Any) -> Any:
        """Runs in the object's thread, which makes one call at a time."""
        self._timeline.enter(function.__name__)
        try:
            return function(*args)
        finally:
            self._timeline.enter("serving")

    async def _run(self, function: Callable[..., Any], *args: Any) -> Any:
        if inspect.iscoroutinefunction(function):
            return await function(*args)
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._in_phase, function, *args)


@dataclass(frozen=True, slots=True)
class PackedArguments:
    """Arguments of a call without its object refs, packed into one: each value argument costs Ray half a millisecond."""

    values: list[Any]
    places: list[int]
    """Places of the object refs among all arguments."""

    @classmethod
    def packed(cls, args: Sequence[Any]) -> "tuple[PackedArguments, *tuple[Any, ...]]":
        """Followed by the object refs: Ray resolves only those that are arguments of their own."""
        refs = {place: arg for place, arg in enumerate(args) if isinstance(arg, ray.ObjectRef)}
        values = [arg for place, arg in enumerate(args) if place not in refs]
        return cls(values, [*refs]), *refs.values()

    def with_resolved(self, resolved: Sequence[Any]) -> list[Any]:
        args = list(self.values)
        for place, each in zip(self.places, resolved, strict=True):
            args.insert(place, each)
        return args


class BatchStream:
    """Reads an asynchronous generator, even while nobody asks for its items."""

    def __init__(self, items: AsyncIterator[Any]) -> None:
        self._ready = deque[Any]()
        self._moved = asyncio.Event()
        self._reading = asyncio.create_task(self._read(items))

    async def take(self, most: int) -> list[Any]:
        """All items that are ready, up to `most`. Waits for one; empty after the last. Errors of the generator pass through."""
        while not (self._ready or self._reading.done()):
            self._moved.clear()
            await self._moved.wait()
        if not self._ready:
            self._reading.result()
        return [self._ready.popleft() for _ in range(min(most, len(self._ready)))]

    async def is_over(self) -> bool:
        """Whether all items are taken and the generator has ended. Lets it run first, because one that waits for nothing ends at once."""
        await asyncio.sleep(0)
        return not self._ready and self._reading.done() and self._reading.exception() is None

    async def _read(self, items: AsyncIterator[Any]) -> None:
        try:
            async for item in items:
                self._ready.append(item)
                self._moved.set()
        finally:
            self._moved.set()


def _build(factory: str, arguments: dict[str, Any]) -> Any:
    return pkgutil.resolve_name(factory)(**arguments)
