"""Reward service: a batch of trajectories in, the same batch with rewards out. The controller calls it, after sampling.

A judge that raises gives status `error`, one that overruns its deadline `timeout`; neither is ever a zero. Asynchronous judges
share the event loop; synchronous ones run in processes of their own, which are killed at the deadline and replaced.
"""

import asyncio
import contextlib
import os
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Protocol

import pyarrow as pa

from actors.reward_service.judge_process import JudgeProcess, Row
from actors.reward_service.judgement import find_judge, is_async, judge_async, timed_out
from cluster.contracts import schema
from cluster.contracts.plugins import Plugin
from cluster.contracts.types import Progress, Reward

_PATIENCE_S = 0.2
"""How long rows wait for a busy process before another one is started."""
_ROWS_PER_REQUEST = 8
"""Enough to make the round trip cheap, few enough to share the rows of a slow judge between processes."""


class _Judging(Protocol):
    async def warm_up(self) -> None: ...

    async def judge(self, rows: Sequence[Row]) -> list[Reward]: ...

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

    async def judge(self, rows: Sequence[Row]) -> list[Reward]:
        return list(await asyncio.gather(*(self._judge_row(row) for row in rows)))

    async def _judge_row(self, row: Row) -> Reward:
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
        self._processes: set[JudgeProcess] = set()
        self._idle: list[JudgeProcess] = []
        self._is_starting = False
        self._changed = asyncio.Condition()

    async def warm_up(self) -> None:
        await self._give_back(await self._take())

    async def judge(self, rows: Sequence[Row]) -> list[Reward]:
        parts = [rows[i : i + _ROWS_PER_REQUEST] for i in range(0, len(rows), _ROWS_PER_REQUEST)]
        judged = await asyncio.gather(*(self._judge_part(part) for part in parts))
        return [reward for part in judged for reward in part]

    async def close(self) -> None:
        await asyncio.gather(*(process.kill() for process in self._processes))
        self._processes.clear()
        self._idle.clear()

    async def _judge_part(self, rows: Sequence[Row]) -> list[Reward]:
        rewards: list[Reward] = []
        while len(rewards) < len(rows):
            process = await self._take()
            try:
                rewards += await process.judge(rows[len(rewards) :], timeout_s=self._timeout_s)
            finally:
                await self._give_back(process)
        return rewards

    async def _take(self) -> JudgeProcess:
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
            process = await JudgeProcess.start(self._judge)
            self._processes.add(process)
            return process
        finally:
            async with self._changed:
                self._is_starting = False
                self._changed.notify_all()

    def _may_start(self) -> bool:
        return not self._is_starting and len(self._processes) < self._max_processes

    async def _give_back(self, process: JudgeProcess) -> None:
        async with self._changed:
            if process.is_busy:  # the call was cancelled: answers of its rows would be taken for those of the next
                await process.kill()
            if process.is_alive:
                self._idle.append(process)
            else:
                self._processes.discard(process)
            self._changed.notify_all()


def _rows(batch: pa.RecordBatch) -> list[Row]:
    prompts, completions = batch["prompt_text"].to_pylist(), batch["completion_text"].to_pylist()
    return [
        Row(prompt=prompts[row], completion=completions[row], columns=schema.info_of(batch, row))
        for row in range(batch.num_rows)
    ]


def _num_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
