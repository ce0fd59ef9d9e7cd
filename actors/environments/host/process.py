"""The parent's side of one host process. Each of its episodes ends within its limits, whatever the process does."""

import asyncio
import itertools
import signal
from dataclasses import dataclass, field, replace
from typing import Any

from actors.environments.host.ends import failure
from actors.environments.host.wire import ASKED, END, FACTS, MAX_LINE_BYTES, SAID, TASK
from actors.processes.line_process import LineProcess
from actors.processes.printed import PrintedLines
from cluster.contracts.environment_config import EpisodesConfig
from cluster.contracts.episodes import Asked, Converse, EpisodeEnd, EpisodeTask, Event
from cluster.contracts.errors import DataError, EpisodeOver, Limit, TooLongError
from cluster.contracts.foreign import described
from cluster.contracts.plugins import Plugin
from cluster.contracts.types import RewardStatus

_BLOCKED_S = 5.0
"""An event loop blocked for this long has its stack printed. A process is killed if an episode has not ended within `cleanup_s` plus this
time after it was told to stop."""

CLOSED = "its host was closed"
"""Reason given when a process is killed because its work is no longer needed."""


@dataclass(slots=True, eq=False)
class _Open:
    """An episode that has not ended."""

    converse: Converse
    ended: asyncio.Future[EpisodeEnd] = field(default_factory=asyncio.Future[EpisodeEnd])
    error: asyncio.Future[BaseException] = field(default_factory=asyncio.Future[BaseException])
    """Raised by the model's side."""
    answering: asyncio.Task[None] | None = None
    untaken: tuple[Event, ...] = ()
    """Events of an ask that the model's side has not begun to answer. If the ask is given up, they belong to the end."""

    def finish(self, end: EpisodeEnd) -> None:
        if not self.ended.done():
            self.ended.set_result(end)


class HostProcess:
    """The parent's end of `actors.environments.host.main`."""

    def __init__(self, process: LineProcess, config: EpisodesConfig, *, is_async: bool) -> None:
        """Starts a task of the running event loop that reads from the process."""
        self._process = process
        self._config = config
        self.is_async = is_async
        """Its episodes run concurrently. False: one at a time."""
        self.is_spent = False
        """It gets no further episode."""
        self.num_episodes = 0
        """Episodes assigned to it, counted by its owner."""
        self._numbers = itertools.count()
        self._open: dict[str, _Open] = {}
        self._killed_because: str | None = None
        self._reading = asyncio.create_task(self._read())

    @classmethod
    async def start(
        cls, environment: Plugin, config: EpisodesConfig, *, setting: str, printed: PrintedLines
    ) -> "HostProcess":
        """Raises ConfigError if the process refuses the environment, and WorkerError as `LineProcess.start`."""
        brief = {
            "environment": environment.model_dump(mode="json"),
            "field": setting,
            "config": config.model_dump(mode="json"),
            "blocked_s": _BLOCKED_S,
        }
        process, facts = await LineProcess.start(
            "actors.environments.host.main",
            brief,
            answers=FACTS,
            env=config.env,
            max_line_bytes=MAX_LINE_BYTES,
            printed=printed,
            what=f"the process of {setting}={environment.name!r}",
        )
        return cls(process, config, is_async=facts.is_async)

    @property
    def is_alive(self) -> bool:
        return not self._reading.done() and self._killed_because is None

    async def run(self, task: EpisodeTask, converse: Converse) -> EpisodeEnd:
        """Runs an episode to its end. Errors of `converse` other than EpisodeOver and DataError pass through.

        If cancelled, it first lets the environment clean up.
        """
        key = str(next(self._numbers))
        episode = self._open[key] = _Open(converse)
        try:
            self._process.write([key, "start", TASK.dump_python(task, mode="json")])
            either = (episode.ended, episode.error)
            await asyncio.wait(either, timeout=self._config.timeout_s, return_when=asyncio.FIRST_COMPLETED)
            if episode.error.done():
                raise episode.error.result()
            if not episode.ended.done():
                await self._stop(key, task, Limit.DEADLINE)
            return episode.ended.result()
        finally:
            if not episode.ended.done():
                await self._stop(key, task, None)
            await self._give_up_answering(episode)
            del self._open[key]

    async def kill(self, *, because: str) -> None:
        """Kills the process and all processes that it started. Its episodes fail with this reason."""
        self._killed_because = self._killed_because or because
        await self._process.kill()
        await asyncio.wait([self._reading])

    async def _stop(self, key: str, task: EpisodeTask, limit: Limit | None) -> None:
        """Ends the episode. Kills the process if it does not answer."""
        episode = self._open[key]
        await self._give_up_answering(episode)
        self._process.write([key, "stop", limit])
        await asyncio.wait([episode.ended], timeout=self._config.cleanup_s + _BLOCKED_S)
        if not episode.ended.done():
            why = f"no reward within timeout_s={self._config.timeout_s:g}, and it blocks its process"
            end = failure(why, status=RewardStatus.TIMEOUT)
            episode.finish(replace(end, is_suspect=True))
            await self.kill(because=f"its process was killed: episode {task.id!r} blocked it")

    async def _give_up_answering(self, episode: _Open) -> None:
        if episode.answering and not episode.answering.done():
            episode.answering.cancel()
            await asyncio.wait([episode.answering])

    async def _read(self) -> None:
        """Dispatches the lines of the process. When it ends or writes an unreadable line, all its episodes fail."""
        try:
            while (line := await self._process.receive()) is not None:
                self._hear(*line)
            why = await self._why_it_ended()
        except Exception as error:  # noqa: BLE001 - an environment or its children can write anything to the pipe
            why = f"the output of its process cannot be read: {described(error)}"
        is_suspect = self._killed_because != CLOSED
        why = self._killed_because or why
        await self._process.kill()  # its children may still run
        for episode in self._open.values():
            episode.finish(replace(failure(why), is_suspect=is_suspect))

    def _hear(self, key: str, kind: str, body: Any, is_spent: bool = False) -> None:
        self.is_spent |= is_spent
        if (episode := self._open.get(key)) is None:  # no longer wanted
            return
        if kind == "ask":
            asked = ASKED.validate_python(body)
            episode.untaken = asked.events
            episode.answering = asyncio.create_task(self._answer(key, episode, asked))
            return
        if episode.answering:  # an answer that has not begun must not begin: it would take the untaken events, too
            episode.answering.cancel()
        if kind == "end":
            end = END.validate_python(body)
            episode.finish(replace(end, events=(*episode.untaken, *end.events)))

    async def _answer(self, key: str, episode: _Open, asked: Asked) -> None:
        episode.untaken = ()
        try:
            said = await episode.converse(asked)
        except EpisodeOver as over:
            self._process.write([key, "over", {"limit": over.limit, "message": str(over)}])
        except DataError as error:
            self._process.write([key, "too_long" if isinstance(error, TooLongError) else "refused", str(error)])
        except asyncio.CancelledError:  # the answer is no longer wanted
            raise
        except BaseException as error:  # noqa: BLE001 - `run` raises it
            if not episode.error.done():
                episode.error.set_result(error)
        else:
            self._process.write([key, "said", SAID.dump_python(said, mode="json")])

    async def _why_it_ended(self) -> str:
        try:
            async with asyncio.timeout(_BLOCKED_S):
                await self._process.wait()
        except TimeoutError:
            return "its process closed its pipe but still runs"
        code = self._process.exit_code
        assert code is not None  # it has ended
        return (
            f"its process was ended by {signal.Signals(-code).name}"
            if code < 0
            else f"its process ended: exit code {code}"
        )
