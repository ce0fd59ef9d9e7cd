"""Groups that come together go through the reference scorer together."""

import asyncio
import gc
import weakref
from dataclasses import replace

import pytest

from cluster.contracts.errors import LostError, WorkerError
from cluster.contracts.types import Group
from cluster.rollouts.reference_calls import ReferenceCalls
from tests.fakes import group_summary
from tests.unit.cluster.rollouts.scene import settled


class Reference:
    """Answers when it may; an object ref is a group's index, and its columns are that as a text."""

    def __init__(self, *, lost: int | None = None) -> None:
        self.calls: list[tuple[int, ...]] = []
        self.deadlines: list[float] = []
        self.may_answer = asyncio.Event()
        self._lost = lost

    async def call_for_batches(self, method, *groups, num_batches, deadline_s):
        assert method == "score" and num_batches == len(groups)
        self.calls.append(groups)
        self.deadlines.append(deadline_s)
        await self.may_answer.wait()
        if self._lost in groups:
            raise LostError("its node is gone")
        return [f"columns of {group}" for group in groups], [{"size_bytes": group} for group in groups]


def group(index: int, *, size_bytes: int = 100) -> Group:
    return Group(pieces=(index,), summary=replace(group_summary(index), size_bytes=size_bytes))


async def scored(reference: Reference, *groups: Group):
    """What becomes of the groups, of which the first one comes alone."""
    calls = ReferenceCalls(reference, timeout_s=10.0)
    waiting = [asyncio.create_task(calls.columns_of(groups[0]))]
    await settled()
    waiting += [asyncio.create_task(calls.columns_of(each)) for each in groups[1:]]
    await settled()
    reference.may_answer.set()
    return await asyncio.gather(*waiting, return_exceptions=True)


async def test_those_that_come_while_a_call_is_under_way_go_together_with_the_next_one_and_each_has_its_time():
    reference = Reference()
    found = await scored(reference, *(group(index) for index in range(4)))
    assert found == [(f"columns of {index}", {"size_bytes": index}) for index in range(4)]
    assert reference.calls == [(0,), (1, 2, 3)]
    assert reference.deadlines == [10.0, 30.0]


async def test_no_more_go_together_than_fill_a_pass():
    """A quarter of a megabyte: two of 128 KiB, and one that is larger goes alone."""
    reference = Reference()
    sizes = (100, 2**17, 2**17, 2**17, 2**20)
    await scored(reference, *(group(index, size_bytes=size) for index, size in enumerate(sizes)))
    assert reference.calls == [(0,), (1, 2), (3,), (4,)]


async def test_a_group_that_is_scored_is_let_go():
    """What is held takes room in the object store."""

    class Piece: ...

    class Forgetful(Reference):
        async def call_for_batches(self, method, *groups, num_batches, deadline_s):
            return ["columns"], [{}]

    calls = ReferenceCalls(Forgetful(), timeout_s=10.0)
    piece = Piece()
    alive = weakref.ref(piece)
    await calls.columns_of(Group(pieces=(piece,), summary=group_summary(0)))
    del piece
    gc.collect()
    assert alive() is None


async def test_of_groups_that_went_together_only_the_lost_one_is_lost():
    reference = Reference(lost=2)
    _, first, lost, last = await scored(reference, *(group(index) for index in range(4)))
    assert (first[0], last[0]) == ("columns of 1", "columns of 3")
    assert isinstance(lost, LostError)
    assert reference.calls == [(0,), (1, 2, 3), (1,), (2,), (3,)]


async def test_what_ends_a_call_ends_all_that_went_with_it():
    class Failing(Reference):
        async def call_for_batches(self, *args, **options):
            await super().call_for_batches(*args, **options)
            raise WorkerError("it failed too often")

    reference = Failing()
    found = await scored(reference, group(0), group(1), group(2))
    assert [type(each) for each in found] == [WorkerError] * 3 and reference.calls == [(0,), (1, 2)]


async def test_a_group_that_is_waited_for_no_more_holds_back_no_other():
    reference = Reference()
    calls = ReferenceCalls(reference, timeout_s=10.0)
    first, second, third = (asyncio.create_task(calls.columns_of(group(index))) for index in range(3))
    await settled()
    first.cancel()
    second.cancel()
    await settled()
    reference.may_answer.set()
    assert await third == ("columns of 2", {"size_bytes": 2})
    with pytest.raises(asyncio.CancelledError):
        await second
