"""Ray's knowledge of nodes and seats. Raises our errors when its head node does not answer."""

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import cache, lru_cache, partial
from typing import Any, Generic, NamedTuple, TypeVar

import psutil
import ray
from ray.util.placement_group import placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from cluster.remote.failures import answer_of

T = TypeVar("T")

_ANSWER_S = 30.0
"""Deadline of a question about the cluster, whose answer the head node has at hand."""

_MAX_AGE_S = 3.0
"""Age up to which an answer is given again: each of hundreds of actors that wait for their seats asks every few seconds."""

_EXIT_S = 1.0
"""Time for a process to end by itself after it was told to."""

_SLACK_S = 5.0
"""How far a node's clock may be set meanwhile."""

_THREADS = ThreadPoolExecutor(8, thread_name_prefix="ray-head")
"""Wait for the head node, for minutes when it is gone. The event loop's own threads stay free for records and saves."""
_KILLING_THREADS = ThreadPoolExecutor(4, thread_name_prefix="kill")
"""Not the same: a kill must not wait behind questions that the head node does not answer."""


class Seat(NamedTuple):
    """An actor's place in a placement group."""

    group: Any
    index: int


class _Asked(Generic[T]):
    """A question that was asked at `at`, by the event loop's clock."""

    def __init__(self, question: Callable[[], T], *, at: float) -> None:
        self.at = at
        self._call = _THREADS.submit(question)
        self.answer = asyncio.wrap_future(self._call)
        # Reads the error, so that asyncio does not log it when all waiters have left.
        self.answer.add_done_callback(lambda answer: answer.cancelled() or answer.exception())
        self._num_waiting = 0

    @property
    def is_withdrawn(self) -> bool:
        return self._call.cancelled()

    async def waited_for(self) -> T:
        self._num_waiting += 1
        try:
            return await asyncio.shield(self.answer)  # a waiter that is cancelled does not cancel the others
        finally:
            self._num_waiting -= 1
            if not self._num_waiting:
                # Leaves the queue, if no thread has begun it: after the run's end, Ray would start a cluster of its own to answer.
                self._call.cancel()


class SharedAnswer(Generic[T]):
    """A question to Ray's head node, asked once for all callers within `_MAX_AGE_S`.

    It is not asked again before it is answered, which may take minutes: later callers wait for the same answer.
    """

    def __init__(self, question: Callable[[], T]) -> None:
        """`question` is asked in a thread."""
        self._question = question
        self._asked: _Asked[T] | None = None

    async def get(self) -> T:
        """Raises DeadlineError when the head node does not answer this caller within `_ANSWER_S`: Ray itself waits long for a head node
        that is gone."""
        if (asked := self._asked) is None or not self._is_good(asked):
            asked = self._asked = _Asked(self._question, at=asyncio.get_running_loop().time())
        waiting = asked.waited_for()
        return await answer_of(waiting, actor="Ray's head node", stage="describe nodes", deadline_s=_ANSWER_S)

    async def newer(self) -> T:
        """As `get`, but newer than the answers that calls have returned already."""
        if self._asked and self._asked.answer.done():
            self._asked = None
        return await self.get()

    def _is_good(self, asked: _Asked[T]) -> bool:
        """Whether its answer is still to come, or young."""
        loop = asyncio.get_running_loop()
        if asked.answer.get_loop() is not loop or asked.is_withdrawn:
            return False
        return not asked.answer.done() or loop.time() - asked.at <= _MAX_AGE_S


def ask_in_thread(question: Callable[[], T]) -> asyncio.Future[T]:
    """Starts a call that waits for Ray's head node. A cancel ends the wait, and not the thread."""
    return asyncio.get_running_loop().run_in_executor(_THREADS, question)


async def draining_nodes() -> dict[str, float | None]:
    """Nodes that announced their end (spot termination, scale-down), with its Unix seconds; None: unknown."""
    ends_ms = await _DRAINING.newer()
    return {node_id: end_ms / 1000 if end_ms else None for node_id, end_ms in ends_ms.items()}


def drivers_node() -> str:
    """Id of the node that this process is on."""
    return ray.get_runtime_context().get_node_id()


async def is_seat_lost(seat: Seat) -> bool:
    """Whether the seat's node is dead or draining: Ray starts no actor there, and has not placed the seat anew yet.

    The answer may be `_MAX_AGE_S` old.
    """
    node_id = (await _node_ids_of(seat.group).get()).get(seat.index)
    if not node_id:
        return True
    nodes = await _NODES.get()
    if node_id not in nodes.known:  # it came after they were asked for
        nodes = await _NODES.newer()
    return node_id not in nodes.staying


class LostGroups:
    """Finds placement groups, of one seat each, whose node is dead and that have no other yet. Asks for the nodes, and for moved groups."""

    def __init__(self, groups: Iterable[Any]) -> None:
        self._node_of = dict.fromkeys(groups, "")
        self._looked = SharedAnswer(self._look)

    async def take(self) -> set[Any]:
        """The groups that are lost now, which are not checked again. Raises DeadlineError when Ray's head does not answer."""
        self._node_of, lost = await self._looked.newer()
        return lost

    def _look(self) -> tuple[dict[Any, str], set[Any]]:
        # A copy, because a look whose answer nobody takes must not take groups away.
        return _looked_up(dict(self._node_of))


def _looked_up(node_of: dict[Any, str]) -> tuple[dict[Any, str], set[Any]]:
    """`node_of` with the present nodes, and the groups that are lost, which are removed from it."""
    living = {node["NodeID"] for node in ray.nodes() if node["Alive"]}
    lost: set[Any] = set()
    for group in [group for group, node_id in node_of.items() if node_id not in living]:
        found = placement_group_table(group)
        if found["state"] == "RESCHEDULING":
            lost.add(group)
            del node_of[group]
        else:
            node_of[group] = found["bundles_to_node_id"][0]
    return node_of, lost


async def give_back(group: Any) -> None:
    """Removes the placement group, and so ends its actors."""
    await _removal_of(group).newer()


@lru_cache(maxsize=1024)  # placement groups of the runs of this process
def _removal_of(placement_group: Any) -> SharedAnswer[None]:
    return SharedAnswer(partial(remove_placement_group, placement_group))


@lru_cache(maxsize=1024)  # placement groups of the runs of this process
def _node_ids_of(placement_group: Any) -> SharedAnswer[dict[int, str]]:
    return SharedAnswer(partial(_node_ids, placement_group))


def _node_ids(placement_group: Any) -> dict[int, str]:
    """Node ids by seat. Missing or empty for a seat that has no node yet."""
    return placement_group_table(placement_group)["bundles_to_node_id"]


class _Nodes(NamedTuple):
    known: frozenset[str]
    """Ids of all nodes, dead ones too."""
    staying: frozenset[str]
    """Ids of living nodes that have not announced their end."""


def _nodes() -> _Nodes:
    nodes = ray.nodes()
    living = frozenset(node["NodeID"] for node in nodes if node["Alive"])
    return _Nodes(frozenset(node["NodeID"] for node in nodes), living - announced_ends().keys())


_NODES = SharedAnswer(_nodes)
"""Shared by all groups, because with spot nodes each worker has a group of its own."""


def announced_ends() -> dict[str, int]:
    """Nodes that announced their end, with its Unix milliseconds; 0: unknown."""
    from ray._private.state import state  # Ray has no public name for it

    return state.get_draining_nodes()


_DRAINING = SharedAnswer(announced_ends)


async def kill_on_node(pid: int, node_id: str, *, known_for_s: float) -> None:
    """Sends SIGKILL if the process is still there after a moment. A younger process has the pid of one that is gone, and is left alone."""
    if node_id == drivers_node():
        await asyncio.to_thread(_kill_process, pid, known_for_s)
        return
    strategy = NodeAffinitySchedulingStrategy(node_id, soft=False)
    task = _killing().options(num_cpus=0, scheduling_strategy=strategy, max_retries=0)

    async def killed() -> None:
        # In a thread, because the head node stores the function before its first call.
        send = partial(task.remote, pid, known_for_s)
        await (await asyncio.get_running_loop().run_in_executor(_KILLING_THREADS, send))

    await answer_of(killed(), actor=f"node {node_id[:8]}", stage="kill", deadline_s=10.0)


@cache
def _killing() -> Any:
    """One remote function for all kills: Ray's head keeps each new one as long as the job lives."""
    return ray.remote(_kill_process)


def _kill_process(pid: int, known_for_s: float) -> None:
    """Waits a moment for a process that was told to end, so that Ray counts its end as intended; then kills it."""
    with contextlib.suppress(psutil.NoSuchProcess):
        process = psutil.Process(pid)
        if time.time() - process.create_time() < known_for_s - _SLACK_S:
            return
        with contextlib.suppress(psutil.TimeoutExpired):
            process.wait(timeout=_EXIT_S)
        process.kill()
