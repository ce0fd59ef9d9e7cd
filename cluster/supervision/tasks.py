"""Structured concurrency: tasks that run beside a block of code, end with it, and cannot fail unnoticed."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable
from typing import Any, TypeVar

T = TypeVar("T")


class _BlockOver(Exception):
    """Cancels the tasks that still run when the block has ended."""


@contextlib.asynccontextmanager
async def background() -> AsyncIterator[asyncio.TaskGroup]:
    """A TaskGroup whose tasks end with the block. Their first failure cancels the block and the others, and is raised as itself.

    A cancel that comes while the tasks end already is raised after them. Before Python 3.13 a TaskGroup forgets it.
    """
    block = asyncio.current_task()
    assert block is not None, "structured concurrency takes a task"
    num_cancels = block.cancelling()
    try:
        async with asyncio.TaskGroup() as tasks:
            yield tasks
            raise _BlockOver
    except BaseExceptionGroup as group:
        if block.cancelling() > num_cancels:
            raise asyncio.CancelledError from group
        errors = [error for error in group.exceptions if not isinstance(error, _BlockOver)]
        if errors:
            raise errors[0] from errors[0].__cause__


async def together(*work: Coroutine[None, None, Any]) -> list[Any]:
    """Runs all at once and returns their results in the order given. The first failure cancels the others and is raised as itself."""
    async with background() as tasks:
        made = [tasks.create_task(each) for each in work]
        if made:
            await asyncio.wait(made)
    return [each.result() for each in made]


async def all_or_none(starting: Iterable[Awaitable[T]], *, end: Callable[[T], Awaitable[object]]) -> list[T]:
    """Starts all at once and returns them in the order given. If one fails, the others are ended once they have started, and the first
    error is raised."""
    outcomes = await asyncio.gather(*starting, return_exceptions=True)
    started = [each for each in outcomes if not isinstance(each, BaseException)]
    for error in outcomes:
        if isinstance(error, BaseException):
            await asyncio.gather(*map(end, started))
            raise error
    return started
