"""A process that runs episodes of one environment. It imports the environment by name: no code travels, and nothing is pickled.

Episodes of an asynchronous environment share its event loop, whose pauses are watched. A synchronous environment runs in the main thread,
one episode at a time, with the event loop in a second thread. Lines in and out are those of `wire`. The first line in is a brief, the
first line out a `HostFacts` or `{"refused": why}`.
"""

import asyncio
import contextlib
import faulthandler
import inspect
import json
import os
import queue
import sys
import threading
import time
from collections.abc import Callable
from contextvars import ContextVar
from functools import partial
from typing import Any, TextIO, TypeVar

from actors.environments.host.conversation import Conversation, Endpoint
from actors.environments.host.ends import failure, raised, returned
from actors.environments.host.episodes import STRAY, BlockingHostedEpisode, HostedEpisode
from actors.environments.host.wire import END, FACTS, MAX_LINE_BYTES, SAID, TASK, HostFacts
from actors.processes.confinement import limit_cpu, limit_resources
from actors.processes.inside import begin, say
from cluster.contracts.environment_config import EpisodesConfig
from cluster.contracts.episodes import EpisodeEnd
from cluster.contracts.errors import ConfigError, DataError, EpisodeOver, Limit, TooLongError
from cluster.contracts.plugins import ENVIRONMENTS, Plugin, is_async, resolve

_MAX_STRAY_THREADS = 4
"""With more tool threads left over from ended episodes, the process gets no further episode."""

_Kind = TypeVar("_Kind", HostedEpisode, BlockingHostedEpisode)
_tasks: ContextVar[set[asyncio.Task[Any]]] = ContextVar("tasks")
"""Tasks started by the running episode."""


def main() -> None:
    requests, answers, brief = begin()
    config = EpisodesConfig.model_validate(brief["config"])
    limit_resources(max_memory_bytes=config.max_memory_bytes)
    try:
        environment = find_environment(Plugin.model_validate(brief["environment"]), field=brief["field"])
    except ConfigError as error:
        say(answers, {"refused": str(error)})
        return
    is_shared = is_async(environment)
    say(answers, FACTS.dump_python(HostFacts(is_async=is_shared)))
    kind = _SharedHost if is_shared else _OwnHost
    kind(environment, requests, answers, config, blocked_s=brief["blocked_s"]).run()


def find_environment(plugin: Plugin, *, field: str) -> Callable[..., Any]:
    """The environment with its parameters bound. Raises ConfigError for a class, and as `resolve` does."""
    environment = resolve(plugin, home=ENVIRONMENTS, field=field)
    if inspect.isclass(environment.func):  # pyright: ignore[reportFunctionMemberAccess]  resolve binds parameters
        raise ConfigError(f"{field}={plugin.name!r} is a class; an environment is a function of an episode")
    return environment


class _Host:
    """The pipes, and the open episodes by their keys."""

    def __init__(
        self,
        environment: Callable[..., Any],
        requests: TextIO,
        answers: TextIO,
        config: EpisodesConfig,
        *,
        blocked_s: float,
    ) -> None:
        self._environment = environment
        self._requests, self._answers = requests, answers
        self._config, self._blocked_s = config, blocked_s
        self._episodes: dict[str, Any] = {}
        self._gateway: Any = None
        self._is_opening = threading.Lock()
        self._loop: asyncio.AbstractEventLoop

    async def _serve(self) -> None:
        """Runs until the process ends. If the loop is blocked, the stacks of all threads go to stderr, even while C code holds the GIL."""
        self._loop = asyncio.get_running_loop()
        threading.Thread(target=self._listen, daemon=True).start()
        while True:
            faulthandler.dump_traceback_later(self._blocked_s, file=2)
            slept_at = time.monotonic()
            await asyncio.sleep(self._blocked_s / 5)
            if (blocked_s := time.monotonic() - slept_at) > self._blocked_s:
                print(
                    f"an environment blocked the event loop for {blocked_s:.1f} s, at the stack above: use await, or make it "
                    "synchronous (`def`), so that each episode has a process of its own",
                    file=sys.stderr,
                )

    def _listen(self) -> None:
        with contextlib.suppress(OSError):  # the environment closed the pipe
            for line in self._requests:
                self._loop.call_soon_threadsafe(self._hear, *json.loads(line))
        os._exit(0)

    def _hear(self, key: str, kind: str, body: Any) -> None:
        if kind == "start":
            self._start(key, body)
            return
        episode = self._episodes.get(key)
        if episode is None:  # it has ended in the meantime
            return
        if kind == "said":
            episode.hear(SAID.validate_python(body))
        elif kind == "over":
            episode.hear(EpisodeOver(body["message"], limit=Limit(body["limit"])))
        elif kind == "refused":
            episode.hear(DataError(body))
        elif kind == "too_long":
            episode.hear(TooLongError(body))
        elif not episode.stop(body and Limit(body)):
            self._interrupt(key)

    def _start(self, key: str, body: Any) -> None:
        raise NotImplementedError

    def _interrupt(self, key: str) -> None:
        raise NotImplementedError

    def _opened(self, kind: type[_Kind], key: str, body: Any) -> _Kind:
        send = partial(self._send, key)
        episode = kind(TASK.validate_python(body), self._config, send=send, endpoint=self._endpoint)
        self._episodes[key] = episode
        # A failed episode that has not ended within `cleanup_s` may never end.
        give_up = partial(self._end, key, failure("given up"), is_spent=True)
        episode.on_failure = lambda: self._loop.call_later(self._config.cleanup_s, give_up)
        return episode

    def _endpoint(self, episode: Conversation) -> Endpoint:
        with self._is_opening:
            if self._gateway is None:
                # Imported late: most environments need no server, and the import takes as long as the rest of the start.
                from actors.environments.host.gateway.server import Gateway

                self._gateway = Gateway(self._loop)
            return self._gateway.endpoint(episode)

    def _end(self, key: str, end: EpisodeEnd, *, is_spent: bool = False) -> None:
        episode = self._episodes.pop(key, None)
        if episode is None:  # it was given up earlier
            return
        end = episode.close(end)
        if self._gateway is not None:
            self._gateway.end(episode)
        is_spent |= sum(thread.name == STRAY for thread in threading.enumerate()) > _MAX_STRAY_THREADS
        try:
            self._send(key, "end", END.dump_python(end, mode="json"), is_spent)
        except Exception as error:  # noqa: BLE001 - foreign values: any failure to write them is reported
            self._send(key, "end", END.dump_python(raised(error), mode="json"), is_spent)

    def _send(self, *message: Any) -> None:
        line = json.dumps(message)
        if len(line) >= MAX_LINE_BYTES:
            raise DataError(f"the environment sends {len(line)} bytes at once; at most {MAX_LINE_BYTES} are allowed")
        try:
            print(line, file=self._answers, flush=True)
        except OSError:  # the environment closed the pipe: there is no other way to report it
            os._exit(1)


class _SharedHost(_Host):
    """Hosts an asynchronous environment."""

    def run(self) -> None:
        asyncio.run(self._run())

    async def _run(self) -> None:
        self._playing: dict[str, asyncio.Task[None]] = {}
        loop = asyncio.get_running_loop()
        loop.set_task_factory(_kept_task)
        # If an environment forks and its child returns to the loop, the child would run all episodes a second time.
        os.register_at_fork(after_in_child=partial(loop.call_soon, os._exit, 0))
        await self._serve()

    def _start(self, key: str, body: Any) -> None:
        self._loop.create_task(self._play(key, self._opened(HostedEpisode, key, body)))

    def _interrupt(self, key: str) -> None:
        if playing := self._playing.get(key):
            playing.cancel()

    async def _play(self, key: str, episode: HostedEpisode) -> None:
        # Registered here and not at creation: a task cancelled before its first step never runs, and would not report its end.
        if task := asyncio.current_task():
            self._playing[key] = task
        started: set[asyncio.Task[Any]] = set()
        _tasks.set(started)
        is_spent = False
        try:
            end = failure("cancelled") if episode.is_over else returned(await self._environment(episode=episode))
        except BaseException as error:  # noqa: BLE001 - an environment is foreign code, and this is one episode of it
            end, is_spent = raised(error), isinstance(error, MemoryError)
        del self._playing[key]  # the rest must not be cancelled
        if left := set(started):
            for task in left:
                task.cancel()
            _, left = await asyncio.wait(left, timeout=self._config.cleanup_s)
        self._end(key, end, is_spent=is_spent or bool(left))


class _OwnHost(_Host):
    """Hosts a synchronous environment."""

    def run(self) -> None:
        self._turns: queue.SimpleQueue[tuple[str, BlockingHostedEpisode]] = queue.SimpleQueue()
        threading.Thread(target=asyncio.run, args=(self._serve(),), daemon=True).start()
        pid = os.getpid()
        while True:
            key, episode = self._turns.get()
            limit_cpu(deadline_s=self._config.timeout_s)
            is_spent = False
            try:
                end = returned(self._environment(episode=episode))
            except BaseException as error:  # noqa: BLE001 - an environment is foreign code, and this is one episode of it
                end, is_spent = raised(error), isinstance(error, MemoryError)
            if os.getpid() != pid:  # a forked child of the environment: only the parent reports the end
                os._exit(0)
            self._loop.call_soon_threadsafe(partial(self._end, key, end, is_spent=is_spent))

    def _start(self, key: str, body: Any) -> None:
        self._turns.put((key, self._opened(BlockingHostedEpisode, key, body)))

    def _interrupt(self, key: str) -> None:
        self._episodes[key].cancel_asking()


def _kept_task(loop: asyncio.AbstractEventLoop, coroutine: Any, **named: Any) -> asyncio.Task[Any]:
    """Task factory that registers a task with its episode, so that no task outlives the episode."""
    task: asyncio.Task[Any] = asyncio.Task(coroutine, loop=loop, **named)
    if (tasks := _tasks.get(None)) is not None:
        tasks.add(task)
        task.add_done_callback(tasks.discard)
    return task


if __name__ == "__main__":
    main()
