"""The seats of a run: a placement group on the connected cluster, and actors that take their places in it."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import ray
from ray.util.placement_group import placement_group, remove_placement_group

from cluster.contracts.errors import WorkerError
from cluster.remote.actor import ActorSpec, RemoteActor
from cluster.supervision.placement import ClusterResources, Node, PlacementPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class Seats:
    """A placement group that is ours."""

    group: Any
    start_s: float
    """Deadline for an actor to come up."""

    async def start(self, spec: ActorSpec) -> RemoteActor:
        """A running actor whose object is built."""
        return await RemoteActor.start(spec, placement_group=self.group, deadline_s=self.start_s)

    async def spawn(self, spec: ActorSpec) -> RemoteActor:
        """A process with nothing in it yet."""
        return await RemoteActor.spawn(spec, placement_group=self.group, deadline_s=self.start_s)


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
        yield Seats(group=group, start_s=start_s)
    finally:
        remove_placement_group(group)


def available() -> ClusterResources:
    """What the connected cluster's living nodes have."""
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    return ClusterResources(nodes=tuple(Node(cpus=each.get("CPU", 0.0), gpus=each.get("GPU", 0.0)) for each in nodes))
