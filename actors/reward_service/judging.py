"""One part's judge, in as many processes as it needs.

A synchronous judge takes one request at a time in each of several processes, which are killed at the deadline and replaced; an
asynchronous one shares the event loop of one process.
"""

import asyncio
import contextlib
import os
from collections.abc import Sequence

from actors.reward_service.judge_process import Call, JudgeProcess
from actors.reward_service.judgement import Judged
from actors.reward_service.recipe import Part
from cluster.contracts.errors import ConfigError, WorkerError
from cluster.contracts.reward_config import RewardConfig

_PATIENCE_S = 0.2
"""How long calls wait for a busy process before another one is started."""
_CALLS_PER_REQUEST = 8
"""Enough to make the round trip cheap, few enough to share the rows of a slow judge between processes."""


class Judging:
    """Processes of one judge, which start as they are needed."""

    def __init__(self, part: Part, config: RewardConfig, first: JudgeProcess) -> None:
        """A synchronous judge runs on at most this service's share of the available cores (and `max_concurrency`) in processes: what
        waits for a network should be asynchronous.
        """
        self._part = part
        self._config = config
        self.asks, self.is_of_groups = first.asks, first.is_of_groups
        num_cores = max(1, _num_cores() // config.num_services)
        self._max_processes = 1 if first.is_async else min(part.max_concurrency, num_cores)
        self._requests_each = part.max_concurrency if first.is_async else 1
        self._calls_per_request = 1 if first.is_async else _CALLS_PER_REQUEST
        self._under_way = {first: 0}
        """Requests of each process."""
        self._is_starting = False
        self._changed = asyncio.Condition()

    @classmethod
    async def start(cls, part: Part, config: RewardConfig) -> "Judging":
        """Raises as `JudgeProcess.start`."""
        return cls(part, config, await JudgeProcess.start(part, config))

    async def judge(self, shared: str, calls: Sequence[Call]) -> list[Judged]:
        """One answer for each call, in order."""
        each = self._calls_per_request
        requests = [calls[start : start + each] for start in range(0, len(calls), each)]
        judged = await asyncio.gather(*(self._judge(shared, request) for request in requests))
        return [answer for request in judged for answer in request]

    async def close(self) -> None:
        await asyncio.gather(*(process.kill() for process in self._under_way))

    async def _judge(self, shared: str, calls: Sequence[Call]) -> list[Judged]:
        judged: list[Judged] = []
        while len(judged) < len(calls):
            process = await self._take()
            try:
                judged += await process.judge(shared, calls[len(judged) :])
            finally:
                await self._give_back(process)
        return judged

    async def _take(self) -> JudgeProcess:
        """A process with a free place; a new one if none comes free soon, so that a fast judge never has more than one or two.

        Where a new one does not start, those that are up are enough. Raises WorkerError if none is.
        """
        while (process := await self._taken_or_started()) is None:
            pass
        return process

    async def _taken_or_started(self) -> JudgeProcess | None:
        """None if one had to start and did not, while others are up: no more than these are tried from now on."""
        async with self._changed:
            if self._under_way or self._is_starting:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(_PATIENCE_S):
                        await self._changed.wait_for(self._free)
            await self._changed.wait_for(lambda: self._free() or self._may_start())
            if process := self._free():
                self._under_way[process] += 1
                return process
            self._is_starting = True
        try:
            process = await JudgeProcess.start(self._part, self._config)
            self._under_way[process] = 1
            return process
        except (ConfigError, WorkerError) as error:
            # It was built before: no room for a second one, or what it needs is away.
            self._max_processes = sum(process.is_alive for process in self._under_way)
            if not self._max_processes:
                self._max_processes = 1
                raise WorkerError(
                    f"no process of {self._part.setting}.judge is up, and none starts: {error}"
                ) from error
            return None
        finally:
            async with self._changed:
                self._is_starting = False
                self._changed.notify_all()

    def _free(self) -> JudgeProcess | None:
        # One that died while it was idle is nobody's to give back.
        self._under_way = {process: num for process, num in self._under_way.items() if num or process.is_alive}
        usable = (process for process in self._under_way if process.is_alive and not process.is_spent)
        return next((process for process in usable if self._under_way[process] < self._requests_each), None)

    def _may_start(self) -> bool:
        return not self._is_starting and len(self._under_way) < self._max_processes

    async def _give_back(self, process: JudgeProcess) -> None:
        async with self._changed:
            self._under_way[process] -= 1
            if process.is_spent and not self._under_way[process]:
                await process.kill()
            self._changed.notify_all()


def _num_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
