"""The service's side of one judge process: starts it, calls it under a deadline per call, and kills it with all its children."""

import asyncio
import itertools
from collections.abc import Sequence
from typing import Any

from actors.processes.line_process import LineProcess
from actors.processes.printed import PrintedLines
from actors.reward_service.judgement import FACTS, Judged, JudgeFacts, failed, timed_out
from actors.reward_service.recipe import Part
from cluster.contracts.errors import DataError, UnavailableError, WorkerError
from cluster.contracts.reward_config import RewardConfig
from cluster.contracts.types import Reward, RewardStatus

_BLOCKED_S = 5.0
"""An asynchronous judge that is silent for this long after its deadline is assumed to block its event loop."""
_MAX_LINE_BYTES = 2**20
"""Of one answer: numbers, components and short messages."""

Call = tuple[int, dict[str, Any]]
"""Number of trajectories, and the judge's arguments."""

_Answer = tuple[Judged | UnavailableError, bool]
"""The answer to a call, and whether its process has run out of memory."""


class InterruptedCallError(Exception):
    """The process was killed at the deadline of another call. Nobody knows whether it had begun this one."""


class JudgeProcess:
    """The counterpart of `actors.reward_service.judge_main`."""

    def __init__(self, process: LineProcess, part: Part, facts: JudgeFacts) -> None:
        self._process = process
        self._part = part
        self.facts = facts
        self.is_spent = False
        """It ran out of memory and gets no further call."""
        self._was_overrun = False
        """It was killed at the deadline of a call."""
        self._numbers = itertools.count()
        self._waiting: dict[int, asyncio.Future[_Answer | Reward]] = {}
        """Answers by number. A Reward: the process ended, and each trajectory of the call gets this failed reward."""
        self._reading = asyncio.create_task(self._read())

    @classmethod
    async def start(cls, part: Part, config: RewardConfig, *, printed: PrintedLines) -> "JudgeProcess":
        """`printed` gets the judge's output. Raises ConfigError if the judge is refused, and WorkerError as `LineProcess.start`."""
        brief = {
            "judge": part.judge.model_dump(mode="json"),
            "setting": part.setting,
            "timeout_s": part.timeout_s,
            "max_memory_bytes": config.max_memory_bytes,
        }
        process, facts = await LineProcess.start(
            "actors.reward_service.judge_main",
            brief,
            answers=FACTS,
            env=config.env,
            max_line_bytes=_MAX_LINE_BYTES,
            printed=printed,
            what=f"the process of {part.setting}.judge={part.judge.name!r}",
        )
        return cls(process, part, facts)

    @property
    def is_alive(self) -> bool:
        return self._process.exit_code is None

    async def judge(self, shared: str, calls: Sequence[Call]) -> list[Judged | UnavailableError]:
        """Answers to all calls, or to the first ones up to and including the call that overran its deadline, ended this process, ran out of
        memory or found its server away. An empty list if the process had already ended. Raises InterruptedCallError if the call of another
        request overran its deadline before these calls could.

        `shared` is JSON of the arguments of all calls. A synchronous judge's process gets one request at a time.
        """
        if self._reading.done():
            return []
        sizes = {next(self._numbers): size for size, _ in calls}
        self._waiting |= {number: asyncio.get_running_loop().create_future() for number in sizes}
        numbered = [[number, *call] for number, call in zip(sizes, calls, strict=True)]
        timeout_s = self._part.timeout_s
        # An asynchronous judge's process enforces the deadline itself, unless the judge blocks its event loop.
        allowed_s = timeout_s + (_BLOCKED_S if self.facts.is_async else 0)
        late = timed_out(timeout_s, setting=f"{self._part.setting}.timeout_s")
        began = asyncio.get_running_loop().time()
        judged: list[Judged | UnavailableError] = []
        try:
            async with asyncio.timeout(allowed_s) as deadline:
                await self._process.send({"shared": shared, "calls": numbered})
                for number, size in sizes.items():
                    waiting = self._waiting[number]
                    if judged and not waiting.done():
                        deadline.reschedule(asyncio.get_running_loop().time() + allowed_s)
                    answer = await waiting
                    if isinstance(answer, Reward):
                        if self._was_overrun and asyncio.get_running_loop().time() - began < timeout_s:
                            raise InterruptedCallError
                        answer = late if self._was_overrun else answer
                        return [*judged, [answer] * size]
                    verdict, is_spent = answer
                    judged.append(verdict)
                    self.is_spent |= is_spent
                    if is_spent or isinstance(verdict, UnavailableError):
                        break
        except TimeoutError:
            self._was_overrun = True
            await self.kill()
            judged.append([late] * calls[len(judged)][0])
        except asyncio.CancelledError:
            await self.kill()  # it would go on with calls that are no longer needed
            raise
        finally:
            for number in sizes:
                del self._waiting[number]
        return judged

    async def kill(self) -> None:
        """Kills the process and all its children, and waits until it has ended."""
        await self._process.kill()

    async def _read(self) -> None:
        """Delivers answers to waiting calls. When the process ends or writes an unreadable line, all of them get a failed reward."""
        try:
            while (answer := await self._process.receive()) is not None:
                number, said, is_spent = answer
                verdict = (
                    UnavailableError(said.pop("away"), **said)
                    if isinstance(said, dict)
                    else said and [_reward(each) for each in said]
                )
                # A call past its deadline no longer waits, but stays in the dict until its process is killed.
                if (waiting := self._waiting.get(number)) and not waiting.done():
                    waiting.set_result((verdict, is_spent))
            await self._process.wait()
            await self.kill()  # its children may still run
            ended = WorkerError(f"the judge ended its process (exit code {self._process.exit_code})")
            last = failed(ended)
        except Exception as error:  # noqa: BLE001 - the judge or its children can write anything to the pipe
            await self.kill()
            last = failed(DataError(f"the judge's answer cannot be read: {error}"))
        for waiting in self._waiting.values():
            if not waiting.done():
                waiting.set_result(last)


def _reward(answer: list[Any]) -> Reward:
    value, status, components, message = answer
    return Reward(value=value, status=RewardStatus(status), components=components, message=message)
