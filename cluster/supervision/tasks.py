"""Work that goes on beside other work and must not die unseen: heartbeats, steering."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Coroutine


@contextlib.asynccontextmanager
async def beside(work: Coroutine[None, None, None]) -> AsyncIterator[None]:
    """Runs `work` while the block runs, and ends it with the block. Should `work` fail, the block is cancelled and raises its error."""
    block = asyncio.current_task()
    assert block is not None, "an asynchronous context manager runs in a task"
    task = asyncio.ensure_future(work)

    def ended(_: object) -> None:
        if _error_of(task) is not None:
            block.cancel()

    task.add_done_callback(ended)
    try:
        yield
    except asyncio.CancelledError:
        if (error := _error_of(task)) is None:
            raise
        block.uncancel()
        raise error from None
    finally:
        task.remove_done_callback(ended)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def _error_of(task: asyncio.Future[None]) -> BaseException | None:
    return task.exception() if task.done() and not task.cancelled() else None
