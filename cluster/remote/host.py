"""Ray's edge, actor side: one class hosts any plain object, which does not know that Ray exists.

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
"""Variable with the driver's search path for modules, which is searched after an actor's own: a user's rewards are found there."""
_END = object()

_Told = tuple[list[GroupSummary | Refusal], int | None]
"""Of a stream of batches: items in words, none after the last; and the number by which the driver asks for the next, None where none
comes."""


class Host:
    """Holds one object and forwards calls to it."""

    def __init__(self, name: str, env: Mapping[str, str] | None = None, *, title: str = "") -> None:
        """`env` is set before anything that reads it is imported, but for what a fork server has imported. `title` is the actor's name in
        Ray, for people.

        Ray's own way, a runtime environment, would keep it from being forked.
        """
        os.environ.update(env or {})
        if (torch := sys.modules.get("torch")) and "OMP_NUM_THREADS" in (env or {}):  # read already
            torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
        sys.path += [
            path for path in os.environ.get(SEARCH_PATH, "").split(os.pathsep) if path and path not in sys.path
        ]
        self._name = name
        self._title = title or name
        self._timeline = self._told = Timeline("starting")
        """What the methods say; and what the driver is told, by an object that has a timeline of its own."""
        self._object: Any = None
        self._listener: socket.socket | None = None
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix=name)
        self._streams: dict[int, BatchStream] = {}
        self._numbers = itertools.count()

    def __repr__(self) -> str:
        """What Ray's dashboard and logs call the actor."""
        return self._title

    async def build(self, factory: str, arguments: dict[str, Any]) -> None:
        """Makes the object with a factory's import path (`package.module:function`), in the object's own thread.

        An object with a `warm_up` then runs it, in the event loop: its first call need not wait for what that does. The factory gets the
        socket of `reserve_address`, if that was called, as `listener`.

        Not in `__init__`, where an error of ours would reach the driver as an actor's death without its cause.
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
            self._told = own

    async def reserve_address(self) -> str:
        """host:port on this node of a socket that is for the object that is built next, to listen with."""
        self._listener, address = bound(ray.util.get_node_ip_address())
        return address

    async def free_address(self) -> str:
        """This node's address and a port that is free now, and may be another process's a moment later."""
        listener, address = bound(ray.util.get_node_ip_address())
        listener.close()
        return address

    async def call(self, method: str, given: "Given", *resolved: Any) -> Any:
        """What the method returns; the other arguments are `given.packed` with its object refs resolved."""
        return await self._run(getattr(self._object, method), *given.with_resolved(resolved))

    async def stream(self, method: str, *args: Any) -> AsyncIterator[Any]:
        """Each item that the method returns, as an object of its own; then None, which proves that the stream is complete."""
        items = iter(await self._run(getattr(self._object, method), *args) or ())
        # A generator computes when it is asked for an item: that belongs into the object's thread too.
        while (item := await self._run(next, items, _END)) is not _END:
            yield item
        yield None

    async def first_batches(self, most: int, method: str, *args: Any) -> tuple[Any, ...]:
        """The first items of an asynchronous generator: `most` objects, and what the driver reads of them (`_Told`). An object is a batch,
        None where no group was sampled, or no more are ready. The driver owns what a call returns: it outlives this actor."""
        return await self._taken(next(self._numbers), BatchStream(getattr(self._object, method)(*args)), most)

    async def next_batches(self, most: int, number: int) -> tuple[Any, ...]:
        """The next items of the stream with this number. Raises what the generator raises."""
        return await self._taken(number, self._streams.pop(number), most)

    async def _taken(self, number: int, stream: "BatchStream", most: int) -> tuple[Any, ...]:
        items = await stream.take(most)
        rest = None if await stream.is_over() else number
        if rest is not None:
            self._streams[rest] = stream
        batches = [item if isinstance(item, pa.RecordBatch) else None for item in items]
        told: _Told = [summarize(item) if isinstance(item, pa.RecordBatch) else item for item in items], rest
        return *batches, *[None] * (most - len(batches)), told

    async def tell(self, told: float) -> tuple[Progress, tuple[Phase, ...]]:
        """`progress`, and the phases since `told`, which is the end of the last one that the driver has."""
        return await self.progress(), self._told.after(told)

    async def progress(self) -> Progress:
        """What the object is doing, by its own account or as the method that runs; answered even while it computes."""
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
        """(pid, node id, labels of the node). The first two are what it takes to kill this process when it no longer answers."""
        here = ray.get_runtime_context()
        labels: Any = here.get_node_labels()  # one text each, whatever Ray's annotation says
        return os.getpid(), here.get_node_id(), labels

    def _in_phase(self, function: Callable[..., Any], *args: Any) -> Any:
        """In the object's thread, which does one thing at a time."""
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
class Given:
    """Arguments of a call but for its object refs, as one: Ray takes half a millisecond for each argument that is a value."""

    values: list[Any]
    places: list[int]
    """Of the object refs, among all arguments."""

    @classmethod
    def packed(cls, args: Sequence[Any]) -> "tuple[Given, *tuple[Any, ...]]":
        """With the object refs, which Ray resolves where they are arguments of their own."""
        refs = {place: arg for place, arg in enumerate(args) if isinstance(arg, ray.ObjectRef)}
        values = [arg for place, arg in enumerate(args) if place not in refs]
        return cls(values, [*refs]), *refs.values()

    def with_resolved(self, resolved: Sequence[Any]) -> list[Any]:
        args = list(self.values)
        for place, each in zip(self.places, resolved, strict=True):
            args.insert(place, each)
        return args


class BatchStream:
    """An asynchronous generator that goes on while nobody asks for its items."""

    def __init__(self, items: AsyncIterator[Any]) -> None:
        self._ready = deque[Any]()
        self._moved = asyncio.Event()
        self._reading = asyncio.create_task(self._read(items))

    async def take(self, most: int) -> list[Any]:
        """All that are ready, up to `most`. It waits for one; there is none after the last. Raises what the generator raises."""
        while not (self._ready or self._reading.done()):
            self._moved.clear()
            await self._moved.wait()
        if not self._ready:
            self._reading.result()
        return [self._ready.popleft() for _ in range(min(most, len(self._ready)))]

    async def is_over(self) -> bool:
        """Whether the items taken are known to be the last: a generator that waits for nothing ends at once."""
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
