"""Work beside other work ends with it, and takes it along when it dies."""

import asyncio

import pytest

from cluster.supervision.tasks import beside, together


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
        async with asyncio.timeout(10), beside(dying()):
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
