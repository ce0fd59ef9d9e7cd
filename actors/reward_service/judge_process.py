"""One process that runs a judge, from outside: start it, ask it under a deadline per row, kill it with all it started."""

import asyncio
import contextlib
import itertools
import json
import os
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from actors.reward_service.confinement import environment
from actors.reward_service.judgement import failed, timed_out
from cluster.contracts.config import RewardConfig
from cluster.contracts.errors import ConfigError, DataError, WorkerError
from cluster.contracts.types import Reward, RewardStatus

_START_S = 120.0
"""Deadline for a judge's process to import the judge: heavy packages on a busy machine take a while."""
_BLOCKED_S = 5.0
"""Beyond its deadline, after which an asynchronous judge is taken to block its event loop."""
_MAX_LINE_BYTES = 2**20
"""Of one answer: a number, components and a short message."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """What a judge is asked about."""

    prompt: str
    completion: str
    columns: dict[str, Any]


class JudgeProcess:
    """The service's end of `actors.reward_service.judge_main`."""

    def __init__(self, process: asyncio.subprocess.Process, *, timeout_s: float) -> None:
        self._process = process
        self._timeout_s = timeout_s
        self.is_busy = False
        self.is_async = False
        """Whether its judge takes rows side by side, by `ask`; else in turn, by `judge`."""
        self._numbers = itertools.count()
        self._waiting: dict[int, asyncio.Future[Reward]] = {}
        self._reading: asyncio.Task[None] | None = None

    @classmethod
    async def start(cls, config: RewardConfig) -> "JudgeProcess":
        """Raises ConfigError if it refuses the judge, WorkerError if it dies or is not ready in time."""
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-P",  # the working directory is searched last, as everywhere
            "-m",
            "actors.reward_service.judge_main",
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            limit=_MAX_LINE_BYTES,
            # A session of its own: what the judge starts ends with it, and a Ctrl-C in the terminal is the driver's to answer.
            start_new_session=True,
            # A user's judge is found where this process finds it.
            env=environment(os.environ, names=config.env, search_path=sys.path),
        )
        started = cls(process, timeout_s=config.timeout_s)
        try:
            await started._introduce(config)
        except BaseException:
            await started.kill()
            raise
        return started

    @property
    def is_alive(self) -> bool:
        return self._process.returncode is None

    async def judge(self, rows: Sequence[Row]) -> list[Reward]:
        """Rewards of the first rows: of all, or up to and with the one that overran its deadline or ended this process."""
        self.is_busy = True
        rewards: list[Reward] = []
        while len(rewards) < len(rows) and self.is_alive:
            try:
                async with asyncio.timeout(self._timeout_s):
                    if not rewards:
                        await self._send([_request(number, row) for number, row in enumerate(rows)])
                    answer = await self._receive()
            except TimeoutError:
                await self.kill()
                rewards.append(timed_out(self._timeout_s))
            except ValueError as error:
                await self.kill()
                rewards.append(_unreadable(error))
            else:
                if answer is None:
                    await self.kill()
                rewards.append(self._end() if answer is None else _reward(answer))
        self.is_busy = False
        return rewards

    async def ask(self, row: Row) -> Reward:
        """One row; others may be under way. The process keeps the deadline, unless its judge blocks it: then it is killed."""
        number = next(self._numbers)
        self._waiting[number] = asyncio.get_running_loop().create_future()
        self._reading = self._reading or asyncio.create_task(self._read())
        try:
            async with asyncio.timeout(self._timeout_s + _BLOCKED_S):
                await self._send([_request(number, row)])
                return await self._waiting[number]
        except TimeoutError:
            await self.kill()
            return timed_out(self._timeout_s)
        finally:
            del self._waiting[number]

    async def kill(self) -> None:
        """Ends the process and whatever it started at once, and waits until it is gone."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        await self._process.wait()

    async def _introduce(self, config: RewardConfig) -> None:
        who = f"the process of reward.judge={config.judge.name!r}"
        try:
            async with asyncio.timeout(_START_S):
                await self._send(config.model_dump(mode="json"))
                answer = await self._receive()
        except TimeoutError:
            raise WorkerError(f"{who} is not ready after {_START_S:g} s") from None
        if answer is None:
            raise WorkerError(f"{who} died while it started, with its message on stderr")
        if "refused" in answer:
            raise ConfigError(answer["refused"])
        self.is_async = answer["is_async"]

    async def _read(self) -> None:
        """Hands answers to those who ask, until the process ends or talks nonsense: then all who wait get that for an answer."""
        try:
            while (answer := await self._receive()) is not None:
                # One that has overrun its deadline waits no longer, and is there until its process is gone.
                if (waiting := self._waiting.get(answer[0])) and not waiting.done():
                    waiting.set_result(_reward(answer))
            await self._process.wait()
            last = self._end()
        except ValueError as error:
            await self.kill()
            last = _unreadable(error)
        for waiting in self._waiting.values():
            if not waiting.done():
                waiting.set_result(last)

    def _end(self) -> Reward:
        return failed(WorkerError(f"the judge ended its process (exit code {self._process.returncode})"))

    async def _send(self, message: Any) -> None:
        stdin = self._process.stdin
        assert stdin is not None
        # A process that is gone is noticed by the next receive.
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            stdin.write(json.dumps(message).encode() + b"\n")
            await stdin.drain()

    async def _receive(self) -> Any:
        """The next answer; None if the process has ended. Raises ValueError for one longer than a line may be."""
        stdout = self._process.stdout
        assert stdout is not None
        line = await stdout.readline()
        return json.loads(line) if line.endswith(b"\n") else None


def _request(number: int, row: Row) -> list[Any]:
    return [number, row.prompt, row.completion, row.columns]


def _reward(answer: list[Any]) -> Reward:
    _, value, status, components, message = answer
    return Reward(value=value, status=RewardStatus(status), components=components, message=message)


def _unreadable(error: ValueError) -> Reward:
    return failed(DataError(f"the judge's answer cannot be read: {error}"))
