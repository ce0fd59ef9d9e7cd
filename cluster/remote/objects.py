"""Copies objects off nodes that go away, to the driver's node."""

import asyncio
from collections.abc import Collection, Iterable
from typing import Any

import ray
from ray.experimental import get_local_object_locations

from cluster.remote.failures import answer_of
from cluster.remote.nodes import drivers_node

_MOST_COPIES = 8
"""Groups that are copied at one time, because each passes through the driver's memory. Handed-over samples are small and do not wait."""
_MOST_REMEMBERED = 2**16
"""Newest copies that are remembered: more than wait at one time. One that is forgotten and still waits may be copied once more."""


class Copier:
    """Copies each object once, through the driver's process. The driver owns all refs, and its own copies need no copy."""

    def __init__(self) -> None:
        self._made: dict[str, None] = {}
        self._places = asyncio.Semaphore(_MOST_COPIES)

    async def copies_of(self, pieces: Iterable[Any], *, leaving: Collection[str], deadline_s: float) -> dict[Any, Any]:
        """A copy on the driver's node of each object in `pieces` that is on one of the `leaving` nodes, by its object ref.

        Empty if the driver's own node leaves. Raises LostError for an object that is lost already, DeadlineError when it takes too long.
        """
        refs = [piece for piece in pieces if isinstance(piece, ray.ObjectRef) and piece.hex() not in self._made]
        if not refs or drivers_node() in leaving:
            return {}
        # A copy elsewhere does not count: Ray may evict it, and the node stays busy for as long as its own object is wanted.
        found = get_local_object_locations(refs)
        wanted = [ref for ref in refs if any(node in leaving for node in found.get(ref, {}).get("node_ids", ()))]
        if not wanted:
            return {}
        async with self._places:
            copies = await asyncio.gather(*(self.copy(ref, deadline_s=deadline_s) for ref in wanted))
        return dict(zip(wanted, copies, strict=True))

    async def copy(self, ref: Any, *, deadline_s: float) -> Any:
        """Object ref of a copy on the driver's node; None for an object that is None. Raises as `copies_of`."""
        copy = await answer_of(_copy(ref), actor="a node that goes away", stage="copy", deadline_s=deadline_s)
        if copy is not None:
            self._made[copy.hex()] = None
            if len(self._made) > _MOST_REMEMBERED:
                del self._made[next(iter(self._made))]
        return copy


async def _copy(ref: Any) -> Any:
    value = await ref
    return None if value is None else await asyncio.to_thread(ray.put, value)
