"""Batched requests: items of concurrent calls wait a short time for one another and are sent together."""

import asyncio
import contextvars
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from actors.http import HttpError
from cluster.contracts.errors import UnavailableError

_Waiting = asyncio.Future[Any]


class Batches:
    """A batch is sent when it has `size` items, or `wait_s` after its first item."""

    def __init__(self, send: Callable[[Sequence[Any]], Awaitable[Sequence[Any]]], *, size: int, wait_s: float) -> None:
        """`send` returns one result per item, in order. It runs under the deadline of the batch's first item, the earliest one."""
        self._send = send
        self._size = size
        self._wait_s = wait_s
        self._open: list[tuple[Any, _Waiting]] = []
        self._alone = set[int]()
        """Hashes of items whose batch met an unavailable server. Each stays here until it has an answer."""
        self._context: contextvars.Context
        self._timer: asyncio.TimerHandle

    async def result(self, item: Any) -> Any:
        """Errors of `send` pass through. When the server refuses a batch, each of its items is sent again alone, so one bad item does not
        fail the others. When the server was unavailable, each item of the batch is sent alone the next time: one of them may be the cause.
        A rate limit does not count as unavailable."""
        loop = asyncio.get_running_loop()
        waiting: _Waiting = loop.create_future()
        if self._alone and hash(repr(item)) in self._alone:
            self._send_off([(item, waiting)], contextvars.copy_context())
            return await waiting
        self._open.append((item, waiting))
        if len(self._open) == 1:
            self._context = contextvars.copy_context()
            self._timer = loop.call_later(self._wait_s, self._go)
        if len(self._open) == self._size:
            self._go()
        return await waiting

    def _go(self) -> None:
        self._timer.cancel()
        # Callers whose deadline passed while they waited need no answer.
        batch = [each for each in self._open if not each[1].done()]
        self._open = []
        self._send_off(batch, self._context)

    def _send_off(self, batch: Sequence[tuple[Any, _Waiting]], context: contextvars.Context) -> None:
        answering = asyncio.get_running_loop().create_task(self._answered(batch), context=context)
        for _, waiting in batch:
            waiting.add_done_callback(lambda _: all(each.done() for _, each in batch) and answering.cancel())

    async def _answered(self, batch: Sequence[tuple[Any, _Waiting]]) -> None:
        try:
            results: Sequence[Any] = await self._send([item for item, _ in batch]) if batch else []
        except HttpError as error:
            if len(batch) > 1:
                await asyncio.gather(*(self._answered([each]) for each in batch))
                return
            results = [error]
        except Exception as error:  # noqa: BLE001 - the waiting calls raise it
            results = [error] * len(batch)
            if isinstance(error, UnavailableError) and error.retry_after_s is None and len(batch) > 1:
                self._alone |= {hash(repr(item)) for item, _ in batch}
        else:
            if self._alone:
                self._alone -= {hash(repr(item)) for item, _ in batch}
        for (_, waiting), result in zip(batch, results, strict=True):
            if not waiting.done():
                waiting.set_exception(result) if isinstance(result, Exception) else waiting.set_result(result)
