"""Reward service: a batch of trajectories in, the same batch with rewards out. The controller calls it, after sampling.

A judge that raises gives status `error`, one that overruns its deadline `timeout`; neither is ever a zero. Asynchronous judges
share the event loop; synchronous ones run in processes of their own, which are killed at the deadline and replaced.
"""

import asyncio
import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import pyarrow as pa

from actors.judgement import failed, find_judge, is_async, judge_async, timed_out
from cluster.contracts import schema
from cluster.contracts.errors import DataError, WorkerError
from cluster.contracts.plugins import Plugin
from cluster.contracts.types import Progress, Reward, RewardStatus

_START_S = 120.0
"""Deadline for a judge's process to import the judge: heavy packages on a busy machine take a while."""
_READY = {"ready": True}
_PATIENCE_S = 0.2
"""How long rows wait for a busy process before another one is started."""
_ROWS_PER_REQUEST = 8
"""Enough to make the round trip cheap, few enough to share the rows of a slow judge between processes."""
_MAX_LINE_BYTES = 2**20
"""Of one answer: a number, components and a short message."""


@dataclass(frozen=True, slots=True)
class _Row:
    prompt: str
    completion: str
    columns: dict[str, Any]


class _Judging(Protocol):
    async def warm_up(self) -> None: ...

    async def judge(self, rows: Sequence[_Row]) -> list[Reward]: ...

    async def close(self) -> None: ...


class RewardService:
    """`BatchScorer` around one judge."""

    def __init__(
        self, *, judge: Plugin, timeout_s: float = 30.0, max_concurrency: int = 64, name: str = "reward_service"
    ) -> None:
        """Raises ConfigError if the judge does not import or its parameters do not fit.

        A synchronous judge runs on at most one process per available core (and `max_concurrency`): what waits for a network
        should be asynchronous.
        """
        self._name = name
        self._num_scored = 0
        self._num_waiting = 0
        self._since = self._last_progress = time.time()
        found = find_judge(judge)
        self._judging: _Judging
        if is_async(found):
            self._judging = _EventLoop(found, timeout_s=timeout_s, max_concurrency=max_concurrency)
        else:
            self._judging = _Processes(judge, timeout_s=timeout_s, max_processes=min(max_concurrency, _num_cores()))

    async def warm_up(self) -> None:
        """Imports the judge now and not while the first batch waits. Raises WorkerError if its process does not start."""
        await self._judging.warm_up()

    async def score(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """The batch with reward, status, components and message of every row. Batches may be scored at the same time."""
        schema.validate(batch)
        rows = _rows(batch)
        if self._num_waiting == 0:
            self._since = time.time()
        self._num_waiting += len(rows)
        try:
            rewards = await self._judging.judge(rows)
        finally:
            self._num_waiting -= len(rows)
        self._num_scored += len(rows)
        self._last_progress = time.time()
        return schema.with_columns(
            batch,
            reward=[reward.value for reward in rewards],
            reward_status=[str(reward.status) for reward in rewards],
            reward_components=[list(reward.components.items()) for reward in rewards],
            reward_message=[reward.message for reward in rewards],
        )

    def progress(self) -> Progress:
        # Each row has its own deadline: a service that answers while rows wait is slow, not hung.
        last_progress = time.time() if self._num_waiting else self._last_progress
        return Progress(
            actor=self._name,
            phase="judging" if self._num_waiting else "idle",
            policy_version=0,
            since=self._since,
            last_progress=last_progress,
            pid=os.getpid(),
            detail=f"{self._num_waiting} trajectories waiting, {self._num_scored} judged",
        )

    async def close(self) -> None:
        """Ends the judge's processes."""
        await self._judging.close()


class _EventLoop:
    """Asynchronous judges: `max_concurrency` of them at a time, each cancelled at its deadline."""

    def __init__(self, judge: Callable[..., Awaitable[Any]], *, timeout_s: float, max_concurrency: int) -> None:
        self._judge = judge
        self._timeout_s = timeout_s
        self._slots = asyncio.Semaphore(max_concurrency)

    async def warm_up(self) -> None:
        return

    async def judge(self, rows: Sequence[_Row]) -> list[Reward]:
        return list(await asyncio.gather(*(self._judge_row(row) for row in rows)))

    async def _judge_row(self, row: _Row) -> Reward:
        async with self._slots:
            # The judge's own TimeoutError is an error and stays inside judge_async: one that comes out is our deadline.
            try:
                async with asyncio.timeout(self._timeout_s):
                    return await judge_async(
                        self._judge, prompt=row.prompt, completion=row.completion, columns=row.columns
                    )
            except TimeoutError:
                return timed_out(self._timeout_s)

    async def close(self) -> None:
        return


class _Processes:
    """Synchronous judges: processes that start as they are needed, each with one row at a time under its deadline."""

    def __init__(self, judge: Plugin, *, timeout_s: float, max_processes: int) -> None:
        self._judge = judge
        self._timeout_s = timeout_s
        self._max_processes = max_processes
        self._processes: set[_JudgeProcess] = set()
        self._idle: list[_JudgeProcess] = []
        self._is_starting = False
        self._changed = asyncio.Condition()

    async def warm_up(self) -> None:
        await self._give_back(await self._take())

    async def judge(self, rows: Sequence[_Row]) -> list[Reward]:
        parts = [rows[i : i + _ROWS_PER_REQUEST] for i in range(0, len(rows), _ROWS_PER_REQUEST)]
        judged = await asyncio.gather(*(self._judge_part(part) for part in parts))
        return [reward for part in judged for reward in part]

    async def close(self) -> None:
        await asyncio.gather(*(process.kill() for process in self._processes))
        self._processes.clear()
        self._idle.clear()

    async def _judge_part(self, rows: Sequence[_Row]) -> list[Reward]:
        rewards: list[Reward] = []
        while len(rewards) < len(rows):
            process = await self._take()
            try:
                rewards += await process.judge(rows[len(rewards) :], timeout_s=self._timeout_s)
            finally:
                await self._give_back(process)
        return rewards

    async def _take(self) -> "_JudgeProcess":
        """An idle process; a new one if none comes free soon, so that a fast judge never has more than one or two."""
        async with self._changed:
            if self._processes or self._is_starting:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(_PATIENCE_S):
                        await self._changed.wait_for(lambda: self._idle)
            await self._changed.wait_for(lambda: self._idle or self._may_start())
            if self._idle:
                return self._idle.pop()
            self._is_starting = True
        try:
            process = await _JudgeProcess.start(self._judge)
            self._processes.add(process)
            return process
        finally:
            async with self._changed:
                self._is_starting = False
                self._changed.notify_all()

    def _may_start(self) -> bool:
        return not self._is_starting and len(self._processes) < self._max_processes

    async def _give_back(self, process: "_JudgeProcess") -> None:
        async with self._changed:
            if process.is_busy:  # the call was cancelled: answers of its rows would be taken for those of the next
                await process.kill()
            if process.is_alive:
                self._idle.append(process)
            else:
                self._processes.discard(process)
            self._changed.notify_all()


class _JudgeProcess:
    """The service's end of `actors.reward_process`."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self.is_busy = False

    @classmethod
    async def start(cls, judge: Plugin) -> "_JudgeProcess":
        """Raises WorkerError if the process dies, refuses the judge, or is not ready in time."""
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "actors.reward_process",
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

    async def judge(self, rows: Sequence[_Row], *, timeout_s: float) -> list[Reward]:
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


def _rows(batch: pa.RecordBatch) -> list[_Row]:
    prompts, completions = batch["prompt_text"].to_pylist(), batch["completion_text"].to_pylist()
    return [_Row(prompts[i], completions[i], schema.info_of(batch, i)) for i in range(batch.num_rows)]


def _num_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
