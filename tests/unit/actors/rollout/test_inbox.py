"""What the engine's thread says, in order, with one call for all of a step."""

import asyncio
import threading
from collections import deque

from actors.rollout.inbox import Inbox


async def test_the_loop_hears_once_of_what_comes_before_it_looks_and_again_of_what_comes_later(monkeypatch):
    loop, calls = asyncio.get_running_loop(), []
    call = loop.call_soon_threadsafe
    monkeypatch.setattr(loop, "call_soon_threadsafe", lambda *told: (calls.append(told), call(*told)))
    inbox = Inbox(loop)
    inbox.put(1)
    inbox.put(2)
    assert [await inbox.get() for _ in range(2)] == [1, 2] and len(calls) == 1
    inbox.put(3)
    assert await inbox.get() == 3 and len(calls) == 2


async def test_what_comes_just_when_the_loop_has_seen_nothing_more_is_told_too():
    inbox = Inbox(asyncio.get_running_loop())

    class Coming(deque[int]):
        def __bool__(self) -> bool:
            has_more = len(self) > 0
            if not has_more and put == [1]:  # as a thread could, after the loop's look
                put.append(2)
                inbox.put(2)
            return has_more

    inbox._coming, put = Coming(), [1]
    inbox.put(1)
    async with asyncio.timeout(60):
        assert [await inbox.get() for _ in range(2)] == [1, 2]


async def test_nothing_that_a_thread_puts_while_the_loop_looks_is_lost_or_out_of_order():
    inbox = Inbox(asyncio.get_running_loop())
    thread = threading.Thread(target=lambda: [inbox.put(number) for number in range(20_000)])
    thread.start()
    assert [await inbox.get() for _ in range(20_000)] == list(range(20_000))
    thread.join()
