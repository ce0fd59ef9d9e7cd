"""One process that runs a judge, from outside: start it, call it under a deadline per call, kill it with all it started."""

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
"""Beyond its deadline, after which an asynchronous judge is taken to block its event loop."""
_MAX_LINE_BYTES = 2**20
"""Of one answer: numbers, components and short messages."""

Call = tuple[int, dict[str, Any]]
"""Of how many trajectories, and what the judge is given for them."""

_Answer = tuple[Judged | UnavailableError, bool]
"""To a call, and whether its process has run out of memory."""


class JudgeProcess:
    """The service's end of `actors.reward_service.judge_main`."""

    def __init__(self, process: LineProcess, part: Part, facts: JudgeFacts) -> None:
        self._process = process
        self._part = part
        self.facts = facts
        self.is_spent = False
        """Out of memory: it gets nothing more."""
        self._numbers = itertools.count()
        self._waiting: dict[int, asyncio.Future[_Answer | Reward]] = {}
        """Answers by number; a Reward is that of calls whose process ended."""
        self._reading = asyncio.create_task(self._read())

    @classmethod
    async def start(cls, part: Part, config: RewardConfig, *, printed: PrintedLines) -> "JudgeProcess":
        """What it prints goes to `printed`. Raises ConfigError if it refuses the judge, and WorkerError as `LineProcess.start`."""
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
        """Answers to the first calls: to all, or up to and with the one that overran its deadline, ended this process or found
        away what it calls. None if the process had ended before.

        `shared` is JSON of what all of them are given. A process whose judge takes calls in turn has one request at a time; it may have
        run out of memory after the last answer.
        """
        if self._reading.done():
            return []
        sizes = {next(self._numbers): size for size, _ in calls}
        self._waiting |= {number: asyncio.get_running_loop().create_future() for number in sizes}
        numbered = [[number, *call] for number, call in zip(sizes, calls, strict=True)]
        timeout_s = self._part.timeout_s
        # An asynchronous judge's process keeps the deadline itself, unless its judge blocks it.
        allowed_s = timeout_s + (_BLOCKED_S if self.facts.is_async else 0)
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
                        return [*judged, [answer] * size]
                    verdict, is_spent = answer
                    judged.append(verdict)
                    self.is_spent |= is_spent
                    if is_spent or isinstance(verdict, UnavailableError):
                        break
        except TimeoutError:  # it is silent
            await self.kill()
            late = timed_out(timeout_s, setting=f"{self._part.setting}.timeout_s")
            judged.append([late] * calls[len(judged)][0])
        except asyncio.CancelledError:
            await self.kill()  # it would go on with what nobody waits for
            raise
        finally:
            for number in sizes:
                del self._waiting[number]
        return judged

    async def kill(self) -> None:
        """Ends the process and whatever it started at once, and waits until it is gone."""
        await self._process.kill()

    async def _read(self) -> None:
        """Hands answers to those who ask, until the process ends or talks nonsense: then all who wait get that for an answer."""
        try:
            while (answer := await self._process.receive()) is not None:
                number, said, is_spent = answer
                verdict = (
                    UnavailableError(said.pop("away"), **said)
                    if isinstance(said, dict)
                    else said and [_reward(each) for each in said]
                )
                # One that has overrun its deadline waits no longer, and is there until its process is gone.
                if (waiting := self._waiting.get(number)) and not waiting.done():
                    waiting.set_result((verdict, is_spent))
            await self._process.wait()
            await self.kill()  # what it started may be there still
            ended = WorkerError(f"the judge ended its process (exit code {self._process.exit_code})")
            last = failed(ended)
        except Exception as error:  # noqa: BLE001 - the judge, or what it starts, can write anything there
            await self.kill()
            last = failed(DataError(f"the judge's answer cannot be read: {error}"))
        for waiting in self._waiting.values():
            if not waiting.done():
                waiting.set_result(last)


def _reward(answer: list[Any]) -> Reward:
    value, status, components, message = answer
    return Reward(value=value, status=RewardStatus(status), components=components, message=message)
