"""A notebook's cell in the test's thread, and its Ctrl-C."""

import asyncio
import contextlib
import os
import signal
from collections.abc import Callable, Iterator
from typing import TypeVar

T = TypeVar("T")


def in_a_cell(call: Callable[[], T]) -> T:
    """The result of a call below a running event loop. Unlike `asyncio.run`, a notebook leaves Ctrl-C as it is."""

    async def cell() -> T:
        return call()

    loop = asyncio.new_event_loop()
    try:
        with hearing_ctrl_c():
            return loop.run_until_complete(cell())
    finally:
        loop.close()


@contextlib.contextmanager
def hearing_ctrl_c() -> Iterator[None]:
    """As a program begins that nobody has started in the background, where Ctrl-C is ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def press_ctrl_c() -> None:
    """From any thread."""
    os.kill(os.getpid(), signal.SIGINT)
