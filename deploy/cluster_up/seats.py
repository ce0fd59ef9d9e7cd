"""The seats of a run: a placement group on the connected cluster, and actors that take their places in it."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import ray
from ray.util.placement_group import placement_group, remove_placement_group

from cluster.contracts.errors import WorkerError
from cluster.contracts.types import ActorKind
from cluster.remote.actor import ActorSpec, RemoteActor
from cluster.supervision.placement import ClusterResources, Node, PlacementPlan


class Seats:
    """A placement group that is ours."""

    def __init__(self, group: Any, *, start_s: float) -> None:
        """`start_s` is the deadline for an actor to come up."""
        self._group = group
        self._start_s = start_s
        self._vacant: list[ActorSpec] = []
        self._taken: dict[str, ActorSpec] = {}
        """Seats that were vacant, by the name of the worker that joined."""
        self._outside: dict[tuple[ActorKind, str], asyncio.Task[RemoteActor]] = {}
        """Workers that joined when no seat was vacant, and wait for a node; the first one waits longest."""

    async def start(self, spec: ActorSpec) -> RemoteActor:
        """A running actor whose object is built. Raises the object's own error, WorkerError or DeadlineError."""
        actor = await self.spawn(spec)
        try:
            await actor.build(deadline_s=self._start_s)
        except BaseException:
            await actor.kill()
            raise
        return actor

    async def spawn(self, spec: ActorSpec) -> RemoteActor:
        """A process with nothing in it yet: ranks must know each other's address to be built.

        A joining worker takes a vacant seat of its kind: nothing outside the group can use what it holds. Without one it looks for a
        node outside, until a seat is vacated.
        """
        if spec.bundle is not None:
            return await self._spawn(spec)
        vacant = next((seat for seat in self._vacant if seat.kind is spec.kind), None)
        if vacant and spec.name not in self._taken:
            self._vacant.remove(vacant)
            self._taken[spec.name] = vacant
        if spec.name not in self._taken and (actor := await self._spawn_outside(spec)):
            return actor
        seat = self._taken[spec.name]
        return await self._spawn(replace(spec, bundle=seat.bundle, num_cpus=seat.num_cpus))

    def vacate(self, spec: ActorSpec) -> None:
        """The worker has left for good. Its seat, if it had one, is for the worker that waits longest, or for the next that joins."""
        seat = self._taken.pop(spec.name, spec)
        if seat.bundle is None:
            return
        waiting = (one for one, outside in self._outside.items() if one[0] is seat.kind and not outside.done())
        first = next(waiting, None)
        if first is None:
            self._vacant.append(seat)
            return
        self._taken[first[1]] = seat
        self._outside.pop(first).cancel()

    async def _spawn_outside(self, spec: ActorSpec) -> RemoteActor | None:
        """None when the worker was given a seat before it found a node."""
        outside = self._outside[spec.kind, spec.name] = asyncio.create_task(self._spawn(spec))
        try:
            await asyncio.wait({outside})
        finally:
            self._outside.pop((spec.kind, spec.name), None)
            outside.cancel()
        return None if outside.cancelled() else outside.result()

    async def _spawn(self, spec: ActorSpec) -> RemoteActor:
        return await RemoteActor.spawn(spec, placement_group=self._group, deadline_s=self._start_s)


@contextlib.asynccontextmanager
async def seats(placement: PlacementPlan, *, start_s: float) -> AsyncIterator[Seats]:
    """Reserves what the plan asks for, and gives it back at the end. Raises WorkerError when the cluster does not free it in time."""
    group = placement_group(placement.resources(), strategy=placement.strategy)
    try:
        try:
            async with asyncio.timeout(start_s):
                await group.ready()
        except TimeoutError:
            raise WorkerError(
                f"the cluster did not free {placement.resources()} within {start_s:g} s; "
                "others hold its resources: wait, or ask for less"
            ) from None
        yield Seats(group, start_s=start_s)
    finally:
        remove_placement_group(group)


def available() -> ClusterResources:
    """What the connected cluster's living nodes have."""
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    return ClusterResources(nodes=tuple(Node(cpus=each.get("CPU", 0.0), gpus=each.get("GPU", 0.0)) for each in nodes))
