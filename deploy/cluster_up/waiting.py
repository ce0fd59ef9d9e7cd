"""Waits for the nodes that a run starts with, and for the node of a later actor. Meanwhile each wait reports what is missing."""

import asyncio
import contextlib
import re
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import ray

from cluster.contracts.config import ElasticConfig
from cluster.contracts.errors import DeadlineError, TreadwheelError, WorkerError
from cluster.contracts.protocols import Events
from cluster.remote.actor import ActorSpec
from cluster.remote.autoscaler import AutoscalerReport, autoscaler_report
from cluster.remote.nodes import SharedAnswer, announced_ends, draining_nodes
from cluster.supervision.asked_nodes import autoscaler_in_words, what_is_missing
from cluster.supervision.placement import ClusterResources, Node, PlacementPlan, SeatGroup, without_room
from cluster.supervision.supervisor import note_waiting

_LOOK_S = 2.0
_SAY_AGAIN_S = 60.0
"""Seconds until an unchanged report of missing nodes is repeated."""
_NEWS_S = 10.0
"""Seconds between two questions of a waiting actor to the autoscaler. An actor whose node is up has started by then."""
_SECONDS = re.compile(r" for \d+ s\b")


class _NodesComing:
    """How long nodes have been coming, from successive reports."""

    def __init__(self) -> None:
        self._since: dict[str, float] = {}

    def seconds(self, report: AutoscalerReport | None) -> dict[str, float]:
        """By type of node."""
        now = asyncio.get_running_loop().time()
        self._since = {kind: self._since.get(kind, now) for kind in (report.coming if report else ())}
        return {kind: now - since for kind, since in self._since.items()}


class AwaitedNodes:
    """One wait for all groups of a plan. Its time begins now."""

    def __init__(self, placement: PlacementPlan, *, elastic: ElasticConfig, wait_s: float, events: Events) -> None:
        self._placement = placement
        self._there = SharedAnswer(partial(available, elastic))
        self._wait_s = wait_s
        self._events = events
        self._loop = asyncio.get_running_loop()
        self._began = self._loop.time()
        self._found: set[int] = set()
        """Reserved seats."""
        self._coming = _NodesComing()
        self._said, self._said_at = "", 0.0

    async def reserved(self, group: Any, asked: SeatGroup) -> None:
        """Returns when Ray has reserved `group`. Raises WorkerError after the time limit."""
        placed = asyncio.ensure_future(_placed(group))
        has_waited = False
        try:
            while not (await asyncio.wait({placed}, timeout=max(0.0, min(_LOOK_S, self._left_s()))))[0]:
                missing = await self._missing(group.id.hex())
                if self._left_s() <= 0:
                    raise WorkerError(
                        f"elastic.wait_for_nodes_s={self._wait_s:g} is over: {missing}; start nodes that have room, raise the limits of "
                        "the autoscaler's groups or the quota, wait longer, or ask for less"
                    )
                self._report(missing)
                has_waited = True
            placed.result()
        finally:
            placed.cancel()
        self._found.update(asked.seats)
        num_seats = len(self._placement.bundles)
        if has_waited or (self._said and len(self._found) == num_seats):
            self._report(f"{len(self._found)} of {num_seats} seats are reserved")

    def _left_s(self) -> float:
        return self._began + self._wait_s - self._loop.time()

    async def _missing(self, group_id: str) -> str:
        """Describes the missing nodes. `group_id`: of the group that waits now."""
        try:
            there = await self._there.newer()
            report = await autoscaler_report()
        except TreadwheelError as error:
            return f"Ray's head node does not say what is missing: {error}"
        bundles, staying = self._placement.bundles, there.staying
        left = without_room(bundles, staying, staying_first=bool(self._placement.off_spot))
        found = {bundles[seat] for seat in self._found}
        said = what_is_missing(
            [each for each in left if each not in found],
            num_seats=len(bundles),
            num_nodes=len(staying.nodes),
            report=report,
            coming_for_s=self._coming.seconds(report),
            is_impossible=report is not None and group_id in report.impossible,
        )
        return said if staying == there else said + await leaving_nodes()

    def _report(self, text: str) -> None:
        now, essence = self._loop.time(), _SECONDS.sub("", text)
        if essence == self._said and now < self._said_at + _SAY_AGAIN_S:
            return
        self._said, self._said_at = essence, now
        waited_s = now - self._began
        message = f"{waited_s:.0f} of {self._wait_s:g} s: {text}"
        self._events.event("waiting_for_nodes", waited_s=waited_s, message=message)


class AwaitedNode:
    """One actor's wait for a node, over all attempts to start it."""

    def __init__(self, spec: ActorSpec, *, events: Events) -> None:
        self._spec = spec
        self._events = events
        self._coming = _NodesComing()
        self._essence: object = None
        self._heard = ""

    async def news(self, waits: Callable[[], Awaitable[bool]], *, group: Callable[[], Any]) -> None:
        """While the actor `waits`, reports the autoscaler's answer, first after `_NEWS_S` and then when it changes. Never returns.

        `group` returns the placement group of the actor's present seat; None: it has none.
        """
        while True:
            await asyncio.sleep(_NEWS_S)
            with contextlib.suppress(TreadwheelError):  # Ray's head node does not answer: the next look asks again
                if await waits():
                    self._hear(await autoscaler_report(), group=group())

    def said_with(self, reason: str) -> str:
        """`reason`, and the autoscaler's last report if there is one."""
        return f"{reason}; {self._heard}" if self._heard else reason

    def too_late(self, error: DeadlineError) -> DeadlineError:
        return DeadlineError(self.said_with(str(error)), actor=error.actor, stage=error.stage)

    def _hear(self, report: AutoscalerReport | None, *, group: Any) -> None:
        size = (self._spec.num_cpus, self._spec.num_gpus)
        is_impossible = report is not None and (
            size in report.impossible_sizes if group is None else group.id.hex() in report.impossible
        )
        lacking = self._spec.name if is_impossible else None
        self._heard = autoscaler_in_words(report, self._coming.seconds(report), lacking=lacking)
        essence = report and (report.coming.keys(), report.failed, is_impossible)
        if essence != self._essence:
            self._essence = essence
            note_waiting(self._events, self._spec, reason=self._heard)


async def leaving_nodes() -> str:
    """`; node 1a2b3c4d goes away`, for all nodes that announced their end. Empty if there are none, or if Ray's head does not answer."""
    try:
        leaving = await draining_nodes()
    except TreadwheelError:
        return ""
    return "".join(f"; node {node_id[:8]} goes away" for node_id in leaving)


async def _placed(group: Any) -> None:
    await group.ready()


def available(config: ElasticConfig) -> ClusterResources:
    """Resources of the connected cluster's living nodes."""
    leaving = announced_ends()
    return ClusterResources(
        nodes=tuple(
            Node(
                cpus=node["Resources"].get("CPU", 0.0),
                gpus=node["Resources"].get("GPU", 0.0),
                is_spot=config.is_spot(node["Labels"]),
                is_leaving=node["NodeID"] in leaving,
            )
            for node in ray.nodes()
            if node["Alive"]
        )
    )
