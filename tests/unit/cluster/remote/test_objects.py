"""Copies of objects are optional: one that cannot be made is one of our errors, within its time."""

import asyncio
from collections.abc import Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import ray
from ray.exceptions import ObjectStoreFullError

from cluster.contracts.errors import DeadlineError, WorkerError
from cluster.remote import objects
from cluster.remote.objects import Copier


async def value() -> str:
    return "value"


async def test_a_full_object_store_is_an_error_of_ours(monkeypatch):
    def put(value):
        raise ObjectStoreFullError("full")

    monkeypatch.setattr(ray, "put", put)
    with pytest.raises(WorkerError, match="failed in 'copy': ObjectStoreFullError"):
        await Copier().copy(value(), deadline_s=600.0)


async def test_copies_of_weeks_are_not_remembered_for_ever(monkeypatch):
    copies = iter(f"{number:056x}" for number in range(5))
    monkeypatch.setattr(ray, "put", lambda value: SimpleNamespace(hex=partial(str, next(copies))))
    monkeypatch.setattr(objects, "_MOST_REMEMBERED", 2)
    copier = Copier()
    for _ in range(5):
        await copier.copy(value(), deadline_s=600.0)
    assert [*copier._made] == [f"{number:056x}" for number in (3, 4)]


async def test_putting_a_copy_is_bounded_as_fetching_it_is(monkeypatch):
    async def put_never(function, *args):
        await asyncio.Event().wait()

    monkeypatch.setattr(asyncio, "to_thread", put_never)
    with pytest.raises(DeadlineError, match="did not finish 'copy' within"):
        async with asyncio.timeout(120):
            await Copier().copy(value(), deadline_s=0.01)


class Ref:
    """Of an object that is on these nodes."""

    def __init__(self, value: str | None, *nodes: str) -> None:
        self.value, self.nodes = value, nodes

    def hex(self) -> str:
        return f"{id(self):x}"

    def __await__(self) -> Iterator[Any]:
        yield from asyncio.sleep(0).__await__()
        return self.value


async def test_all_that_is_on_a_node_that_goes_away_is_copied_to_the_drivers_and_the_copies_are_not_copied_again(
    monkeypatch,
):
    monkeypatch.setattr(ray, "ObjectRef", Ref)
    monkeypatch.setattr(ray, "put", lambda value: Ref(value, "head"))
    monkeypatch.setattr(objects, "drivers_node", lambda: "head")
    monkeypatch.setattr(
        objects, "get_local_object_locations", lambda refs: {ref: {"node_ids": ref.nodes} for ref in refs if ref.nodes}
    )
    copier = Copier()
    far, both, head, driver, nothing = (
        Ref("a", "far"), Ref("b", "head", "far"), Ref("c", "head"), Ref("d"), Ref(None, "far")
    )  # fmt: skip
    pieces = [far, [1, 2], both, head, driver]
    assert await copier.copies_of(pieces, leaving={"far", "head"}, deadline_s=600.0) == {}, "the run ends with it"
    copies = await copier.copies_of(pieces, leaving={"far", "farther"}, deadline_s=600.0)
    assert {ref: copy.value for ref, copy in copies.items()} == {far: "a", both: "b"}
    copies[far].nodes = ("head", "far")  # an actor there has fetched it
    assert await copier.copies_of(copies.values(), leaving={"far"}, deadline_s=600.0) == {}
    assert await copier.copy(nothing, deadline_s=600.0) is None


async def test_eight_groups_are_copied_at_a_time(monkeypatch):
    """Each passes through the driver's memory."""
    copied, may_end = list[Any](), asyncio.Event()

    async def copy(ref: Any, *, deadline_s: float) -> Any:
        copied.append(ref)
        await may_end.wait()
        return ref

    monkeypatch.setattr(ray, "ObjectRef", Ref)
    monkeypatch.setattr(objects, "drivers_node", lambda: "head")
    monkeypatch.setattr(
        objects, "get_local_object_locations", lambda refs: {ref: {"node_ids": ref.nodes} for ref in refs}
    )
    copier = Copier()
    monkeypatch.setattr(copier, "copy", copy)
    groups = [[Ref("a", "far"), Ref("b", "far")] for _ in range(10)]
    copying = [asyncio.create_task(copier.copies_of(group, leaving={"far"}, deadline_s=600.0)) for group in groups]
    for _ in range(10):
        await asyncio.sleep(0)
    assert len(copied) == 2 * 8
    may_end.set()
    assert sum(map(len, await asyncio.gather(*copying))) == 2 * 10
