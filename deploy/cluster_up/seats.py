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

    async def start(self, spec: ActorSpec) -> RemoteActor:
        """A running actor whose object is built. A joining worker takes a vacant seat: nothing outside the group can use what it holds."""
        if spec.kind is ActorKind.ROLLOUT_WORKER and spec.bundle is None:
            if self._vacant and spec.name not in self._taken:
                self._taken[spec.name] = self._vacant.pop(0)
            if seat := self._taken.get(spec.name):
                spec = replace(spec, bundle=seat.bundle, num_cpus=seat.num_cpus)
        return await RemoteActor.start(spec, placement_group=self._group, deadline_s=self._start_s)

    def vacate(self, spec: ActorSpec) -> None:
        """The worker has left for good, and its seat, if it had one, is for the next that joins."""
        seat = self._taken.pop(spec.name, spec)
        if seat.bundle is not None:
            self._vacant.append(seat)

    async def spawn(self, spec: ActorSpec) -> RemoteActor:
        """A process with nothing in it yet."""
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
