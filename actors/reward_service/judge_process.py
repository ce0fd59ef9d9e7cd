"""One process that runs a synchronous judge, from outside: start it, ask it under a deadline per row, kill it with all it started.

The reward service keeps some of them; `judge_main.py` is what runs inside.
"""

import asyncio
import contextlib
import json
import os
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from actors.reward_service.judgement import failed, timed_out
from cluster.contracts.errors import DataError, WorkerError
from cluster.contracts.plugins import Plugin
from cluster.contracts.types import Reward, RewardStatus

_START_S = 120.0
"""Deadline for a judge's process to import the judge: heavy packages on a busy machine take a while."""
_READY = {"ready": True}
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

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self.is_busy = False

    @classmethod
    async def start(cls, judge: Plugin) -> "JudgeProcess":
        """Raises WorkerError if the process dies, refuses the judge, or is not ready in time."""
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "actors.reward_service.judge_main",
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            limit=_MAX_LINE_BYTES,
            # A session of its own: what the judge starts ends with it, and a Ctrl-C in the terminal is the driver's to answer.
            start_new_session=True,
            # A user's judge is found where this process finds it: Ray adds the job's folder to the path at run time.
            env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
        )
        started = cls(process)
        answer: Any = "no sign of life"
        try:
            async with asyncio.timeout(_START_S):
                await started._send({"name": judge.name, "params": judge.params})
                answer = await started._receive()
        except TimeoutError:
            answer = f"not ready after {_START_S:g} s"
        finally:
            if answer != _READY:
                await started.kill()
        if answer == _READY:
            return started
        why = "it died, with its message on stderr" if answer is None else answer
        raise WorkerError(f"the process of reward.judge={judge.name!r} does not start: {why}")

    @property
    def is_alive(self) -> bool:
        return self._process.returncode is None

    async def judge(self, rows: Sequence[Row], *, timeout_s: float) -> list[Reward]:
        """Rewards of the first rows: of all, or up to and with the one that overran its deadline or ended this process."""
        self.is_busy = True
        rewards: list[Reward] = []
        request = [[row.prompt, row.completion, row.columns] for row in rows]
        while len(rewards) < len(rows) and self.is_alive:
            try:
                async with asyncio.timeout(timeout_s):
                    if not rewards:
                        await self._send(request)
                    answer = await self._receive()
            except TimeoutError:
                await self.kill()
                rewards.append(timed_out(timeout_s))
                break
            except ValueError as error:
                await self.kill()
                rewards.append(failed(DataError(f"the judge's answer cannot be read: {error}")))
                break
            if answer is None:
                await self.kill()
                rewards.append(
                    failed(WorkerError(f"the judge ended its process (exit code {self._process.returncode})"))
                )
                break
            value, status, components, message = answer
            rewards.append(Reward(value=value, status=RewardStatus(status), components=components, message=message))
        self.is_busy = False
        return rewards

    async def kill(self) -> None:
        """Ends the process and whatever it started at once, and waits until it is gone."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        await self._process.wait()

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
