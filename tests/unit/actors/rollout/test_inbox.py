"""What the engine's thread says, in order, with one call for all of a step."""

import asyncio
import threading

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


async def test_nothing_that_a_thread_puts_while_the_loop_looks_is_lost_or_out_of_order():
    inbox = Inbox(asyncio.get_running_loop())
    thread = threading.Thread(target=lambda: [inbox.put(number) for number in range(20_000)])
    thread.start()
    assert [await inbox.get() for _ in range(20_000)] == list(range(20_000))
    thread.join()
