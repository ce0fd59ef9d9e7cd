"""The two kinds of episode that an environment is given, and where each runs tools that block."""

import asyncio
import concurrent.futures
import contextvars
import os
import queue
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

from actors.environments.host.conversation import Conversation, Endpoint, Messages, asks_at_once
from cluster.contracts.environment_config import EpisodesConfig
from cluster.contracts.episodes import EpisodeTask, Said

Send = Callable[[str, Any], None]
Opens = Callable[[Conversation], Endpoint]
STRAY = "stray tool"
"""The name of a thread that still runs a tool for which nobody waits."""


class HostedEpisode(Conversation):
    """The environment shares the event loop: its tools that block run in threads of their own."""

    def __init__(self, task: EpisodeTask, config: EpisodesConfig, *, send: Send, endpoint: Opens) -> None:
        super().__init__(task, config, send=send, endpoint=endpoint, run_blocking=_run_in_thread)

    ask = Conversation.converse


class BlockingHostedEpisode(Conversation):
    """The environment has its thread to itself: its tools that block run there too, while it asks."""

    def __init__(self, task: EpisodeTask, config: EpisodesConfig, *, send: Send, endpoint: Opens) -> None:
        super().__init__(task, config, send=send, endpoint=endpoint, run_blocking=self._run_in_asking_thread)
        self._loop = asyncio.get_running_loop()
        self._pid = os.getpid()
        self._is_free = threading.Lock()
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        """For the thread that asks; None: the ask is answered."""

    def ask(self, messages: Messages = None, **how: Any) -> Said:
        """As `converse`, from the environment's thread."""
        if os.getpid() != self._pid:  # a fork of the environment: the parent asks
            os._exit(0)
        if not self._is_free.acquire(blocking=False):
            raise asks_at_once(self.id)
        try:
            answer = asyncio.run_coroutine_threadsafe(self.converse(messages, **how), self._loop)
            answer.add_done_callback(lambda _: self._calls.put(None))
            while (call := self._calls.get()) is not None:
                call()
            return answer.result()
        except concurrent.futures.CancelledError:
            raise asyncio.CancelledError from None
        finally:
            self._is_free.release()

    async def _run_in_asking_thread(self, call: Callable[[], Any]) -> Any:
        result = _Result()
        self._calls.put(partial(result.of, call))
        return await result.get()


async def _run_in_thread(call: Callable[[], Any]) -> Any:
    result = _Result()
    call = partial(contextvars.copy_context().run, call)
    thread = threading.Thread(target=result.of, args=(call,), daemon=True)
    thread.start()
    try:
        return await result.get()
    except asyncio.CancelledError:
        thread.name = STRAY
        raise


class _Result:
    """Of a call in another thread. Any exception comes through, also those that a future does not take."""

    def __init__(self) -> None:
        self._future: concurrent.futures.Future[tuple[Any, BaseException | None]] = concurrent.futures.Future()

    def of(self, call: Callable[[], Any]) -> None:
        """Calls, unless nobody waits any more."""
        if not self._future.set_running_or_notify_cancel():
            return
        try:
            self._future.set_result((call(), None))
        except BaseException as error:  # noqa: BLE001 - it is raised where it is awaited
            self._future.set_result((None, error))

    async def get(self) -> Any:
        value, error = await asyncio.wrap_future(self._future)
        if error is not None:
            raise error
        return value
