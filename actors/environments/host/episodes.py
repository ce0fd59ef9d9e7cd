"""The two kinds of episode passed to environments. They differ in the thread that runs blocking tools."""

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
"""Name of a thread whose tool still runs although its call was given up."""


class HostedEpisode(Conversation):
    """For an environment that shares the event loop. Each call of a blocking tool runs in a thread of its own."""

    def __init__(self, task: EpisodeTask, config: EpisodesConfig, *, send: Send, endpoint: Opens) -> None:
        super().__init__(task, config, send=send, endpoint=endpoint, run_blocking=_run_in_thread)

    ask = Conversation.converse


class BlockingHostedEpisode(Conversation):
    """For an environment with a thread of its own. Blocking tools run in that thread while it asks."""

    def __init__(self, task: EpisodeTask, config: EpisodesConfig, *, send: Send, endpoint: Opens) -> None:
        super().__init__(task, config, send=send, endpoint=endpoint, run_blocking=self._run_in_asking_thread)
        self._loop = asyncio.get_running_loop()
        self._pid = os.getpid()
        self._is_free = threading.Lock()
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        """Calls for the asking thread. None: the ask is answered."""

    def ask(self, messages: Messages = None, **how: Any) -> Said:
        """As `converse`, called from the environment's thread."""
        if os.getpid() != self._pid:  # a forked child of the environment: only the parent asks
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
    """Result of a call in another thread. Every exception passes, also those that a future refuses."""

    def __init__(self) -> None:
        self._future: concurrent.futures.Future[tuple[Any, BaseException | None]] = concurrent.futures.Future()

    def of(self, call: Callable[[], Any]) -> None:
        """Makes the call, unless it was cancelled before."""
        if not self._future.set_running_or_notify_cancel():
            return
        try:
            self._future.set_result((call(), None))
        except BaseException as error:  # noqa: BLE001 - `get` raises it
            self._future.set_result((None, error))

    async def get(self) -> Any:
        value, error = await asyncio.wrap_future(self._future)
        if error is not None:
            raise error
        return value
