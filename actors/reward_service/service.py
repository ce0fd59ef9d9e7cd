"""Reward service: a batch of trajectories in, the same batch with rewards out.

A judge that raises gives status `error`, one that overruns its deadline `timeout`; neither is ever a zero. Judges run in processes
of their own: synchronous ones in several, which are killed at the deadline and replaced; asynchronous ones share the event loop of one.
"""

import asyncio
import contextlib
import os
import time
from collections.abc import Sequence
from typing import Protocol

import pyarrow as pa

from actors.reward_service.judge_process import JudgeProcess, Row
from cluster.contracts import schema
from cluster.contracts.config import RewardConfig
from cluster.contracts.types import Progress, Reward

_PATIENCE_S = 0.2
"""How long rows wait for a busy process before another one is started."""
_ROWS_PER_REQUEST = 8
"""Enough to make the round trip cheap, few enough to share the rows of a slow judge between processes."""


class _Judging(Protocol):
    async def judge(self, rows: Sequence[Row]) -> list[Reward]: ...

    async def close(self) -> None: ...


class RewardService:
    """One judge."""

    def __init__(self, config: RewardConfig, *, name: str = "reward_service") -> None:
        """A synchronous judge runs on at most one process per available core (and `max_concurrency`): what waits for a network
        should be asynchronous.
        """
        self._config = config
        self._name = name
        self._num_scored = 0
        self._num_waiting = 0
        self._since = self._last_progress = time.time()
        self._judging: _Judging | None = None
        self._starting = asyncio.Lock()

    async def warm_up(self) -> None:
        """Starts a process with the judge now and not while the first batch waits.

        Raises ConfigError if the judge does not import or its parameters do not fit, WorkerError if its process does not start.
        """
        async with self._starting:
            if self._judging is None:
                process = await JudgeProcess.start(self._config)
                self._judging = (_SideBySide if process.is_async else _InTurn)(self._config, process)

    async def score(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """The batch with reward, status, components and message of every row. Batches may be scored at the same time."""
        schema.validate(batch)
        rows = _rows(batch)
        await self.warm_up()
        assert self._judging is not None
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

    def take(self, batch: pa.RecordBatch, places: Sequence[int]) -> pa.RecordBatch:
        """Some rows of a batch, in the order given."""
        return batch.take(pa.array(places, type=pa.int64()))

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
        if self._judging is not None:
            await self._judging.close()


class _SideBySide:
    """Asynchronous judges: one process, `max_concurrency` rows at a time."""

    def __init__(self, config: RewardConfig, process: JudgeProcess) -> None:
        self._config = config
        self._process = process
        self._slots = asyncio.Semaphore(config.max_concurrency)
        self._starting = asyncio.Lock()

    async def judge(self, rows: Sequence[Row]) -> list[Reward]:
        return list(await asyncio.gather(*(self._judge_row(row) for row in rows)))

    async def _judge_row(self, row: Row) -> Reward:
        async with self._slots:
            async with self._starting:
                if not self._process.is_alive:
                    self._process = await JudgeProcess.start(self._config)
            return await self._process.ask(row)

    async def close(self) -> None:
        await self._process.kill()


class _InTurn:
    """Synchronous judges: processes that start as they are needed, each with one row at a time under its deadline."""

    def __init__(self, config: RewardConfig, process: JudgeProcess) -> None:
        self._config = config
        self._max_processes = min(config.max_concurrency, _num_cores())
        self._processes = {process}
        self._idle = [process]
        self._is_starting = False
        self._changed = asyncio.Condition()

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
                rewards += await process.judge(rows[len(rewards) :])
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
            process = await JudgeProcess.start(self._config)
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
