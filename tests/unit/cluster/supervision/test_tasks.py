"""Work beside other work ends with it, and takes it along when it dies."""

import asyncio
import contextlib

import pytest

from cluster.supervision.tasks import all_or_none, background, together
from tests.fakes import beside


async def forever(seen):
    try:
        await asyncio.Event().wait()
    finally:
        seen.append("ended")


async def dying():
    raise ValueError("no longer")


async def test_it_ends_with_the_block():
    seen = []
    async with beside(forever(seen)):
        await asyncio.sleep(0)
    assert seen == ["ended"]


async def test_its_death_ends_the_block_with_its_error():
    with pytest.raises(ValueError, match="no longer"):
        async with asyncio.timeout(120), beside(dying()):
            await asyncio.Event().wait()
    assert asyncio.current_task().cancelling() == 0


async def test_the_blocks_own_error_comes_out_as_it_is():
    seen = []
    with pytest.raises(KeyError):
        async with beside(forever(seen)):
            await asyncio.sleep(0)
            raise KeyError("own")
    assert seen == ["ended"]


async def test_a_cancelled_block_stays_cancelled():
    async def block():
        async with beside(forever([])):
            await asyncio.Event().wait()

    task = asyncio.create_task(block())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_results_come_in_the_order_of_the_work():
    async def later(value, *, turns):
        for _ in range(turns):
            await asyncio.sleep(0)
        return value

    assert await together(later("slow", turns=3), later("fast", turns=0)) == ["slow", "fast"]


async def test_the_first_failure_ends_the_others_before_it_is_raised():
    seen = []
    with pytest.raises(ValueError, match="no longer"):
        await together(forever(seen), dying(), forever(seen))
    assert seen == ["ended", "ended"]


async def ending_slowly(may_end):
    try:
        await asyncio.Event().wait()
    finally:
        await may_end.wait()


async def cancelled_in_mid_end(work, may_end):
    task = asyncio.create_task(work)
    for _ in range(5):  # the task, its children, the cancel that ends them
        await asyncio.sleep(0)
    task.cancel()
    may_end.set()
    await task


async def test_a_cancel_that_comes_while_the_tasks_of_a_block_end_is_not_lost():
    may_end = asyncio.Event()

    async def work():
        async with background() as tasks:
            tasks.create_task(ending_slowly(may_end))
            await asyncio.sleep(0)

    with pytest.raises(asyncio.CancelledError):
        await cancelled_in_mid_end(work(), may_end)


async def test_a_failure_that_somebody_heals_does_not_hide_a_cancel():
    may_end = asyncio.Event()

    async def work():
        with contextlib.suppress(ValueError):
            await together(ending_slowly(may_end), dying())

    with pytest.raises(asyncio.CancelledError):
        await cancelled_in_mid_end(work(), may_end)


async def test_work_that_failed_together_leaves_no_cancel_behind():
    with pytest.raises(ValueError, match="no longer"):
        await together(dying(), asyncio.Event().wait())
    assert asyncio.current_task().cancelling() == 0
    assert await together() == []


async def test_where_one_does_not_start_the_others_end_also_those_that_start_later():
    async def starting(name, *, turns):
        for _ in range(turns):
            await asyncio.sleep(0)
        return name

    async def end(name):
        ended.append(name)

    ended = []
    assert await all_or_none([starting("slow", turns=3), starting("fast", turns=0)], end=end) == ["slow", "fast"]
    with pytest.raises(ValueError, match="no longer"):
        await all_or_none([starting("fast", turns=0), dying(), starting("slow", turns=3)], end=end)
    assert ended == ["fast", "slow"]
