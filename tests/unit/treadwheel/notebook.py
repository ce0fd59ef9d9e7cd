"""A notebook's cell in the test's thread, and its Ctrl-C."""

import asyncio
import os
import signal
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def in_a_cell(call: Callable[[], T]) -> T:
    """The result of a call below a running event loop. Unlike `asyncio.run`, a notebook leaves Ctrl-C as it is."""

    async def cell() -> T:
        return call()

    loop = asyncio.new_event_loop()
    try:
        return loop.run_until_complete(cell())
    finally:
        loop.close()


def press_ctrl_c() -> None:
    """From any thread."""
    os.kill(os.getpid(), signal.SIGINT)
