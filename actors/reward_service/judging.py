"""Runs one part's judge in as many processes as it needs.

A synchronous judge has several processes with one request at a time each. A process is killed at the deadline and replaced. An asynchronous
judge has one process, whose event loop its calls share. During an outage of its server, calls wait outside the processes.
"""

import asyncio
import contextlib
import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from actors.processes.printed import PrintedLines
from actors.reward_service.breaker import Breaker
from actors.reward_service.judge_process import Call, InterruptedCallError, JudgeProcess
from actors.reward_service.judgement import Judged, failed
from actors.reward_service.recipe import Part
from cluster.contracts.errors import ConfigError, UnavailableError, WorkerError
from cluster.contracts.reward_config import RewardConfig, server_of
from cluster.contracts.types import Hold, Reward, RewardStatus
from cluster.machine import num_cpus
from cluster.record.verdicts import remember

_PATIENCE_S = 0.2
"""How long calls wait for a busy process before another one is started."""
_MOST_TRIES = 5
"""After this many tries that found the server away while other calls got answers, the call may be the cause, and its reward fails."""
_ANSWERS_BY = {"path", "revision", "dtype", "max_model_len"}
"""Settings of a server that decide its answers."""
_CALLS_PER_REQUEST = 8
"""Enough to make the round trip cheap, few enough to spread a slow judge's calls over processes."""


class Judging:
    """The processes of one judge. They start on demand."""

    def __init__(
        self,
        part: Part,
        config: RewardConfig,
        first: JudgeProcess,
        known: dict[str, str] | None = None,
        *,
        printed: PrintedLines | None = None,
    ) -> None:
        """`printed` gets the judge's output. If the part keeps verdicts, those in `known` are not asked for again, and new ones are added.

        A synchronous judge has at most as many processes as this service's share of the cores, and at most `max_concurrency`. So a judge
        that waits for a network should be asynchronous.
        """
        self._part = part
        self._config = config
        self._printed = printed or PrintedLines()
        self._breaker = Breaker(
            part=part.name or "", setting=part.setting, hold_s=config.hold_s, timeout_s=part.timeout_s
        )
        facts = first.facts
        self._known = known if (facts.keeps_verdicts if part.cache is None else part.cache) else None
        only = server_of(part.judge)
        servers = {
            name: server.model_dump(include=_ANSWERS_BY)
            for name, server in config.servers.items()
            if "servers" in facts.asks and only in (None, name)
        }
        self._digest = facts.digest
        self._has_changed = False
        """A process runs other source code than the verdicts' keys name, so no new verdict is kept."""
        asked = [part.name, part.judge.model_dump(mode="json"), facts.digest, servers]
        self._asked = json.dumps(asked, sort_keys=True)
        self._each_asks = facts.keeps_verdicts
        """Each verdict proves that the endpoint is up. False: a verdict may come without asking it."""
        self._control: tuple[str, Call] | None = None
        """The last call that was answered."""
        self.servers: Mapping[str, Sequence[str]] = {}
        """URLs of the run's servers by name. Not part of a verdict's key: servers may move while a call waits."""
        self.asks, self.is_of_groups = facts.asks, facts.is_of_groups
        num_cores = max(1, num_cpus() // config.num_services)
        self._max_processes = 1 if facts.is_async else min(part.max_concurrency, num_cores)
        self._requests_each = part.max_concurrency if facts.is_async else 1
        self._calls_per_request = 1 if facts.is_async else _CALLS_PER_REQUEST
        self._under_way = {first: 0}
        """Number of open requests of each process."""
        self._is_starting = False
        self._changed = asyncio.Condition()

    @classmethod
    async def start(
        cls, part: Part, config: RewardConfig, known: dict[str, str] | None = None, *, printed: PrintedLines
    ) -> "Judging":
        """Raises as `JudgeProcess.start`."""
        return cls(part, config, await JudgeProcess.start(part, config, printed=printed), known, printed=printed)

    @property
    def hold(self) -> Hold | None:
        """The outage that calls wait for. None while they go through."""
        return self._breaker.hold

    async def judge(self, shared: str, calls: Sequence[Call]) -> tuple[list[Judged], dict[str, str]]:
        """One answer for each call, in order, and the new verdicts to keep, by their keys.

        Raises UnavailableError, which ends the run, if an outage is longer than `hold_s` or the endpoint's limits leave calls no turn.
        """
        if self._known is None:
            return await self._ask(shared, calls), {}
        keys = [self._key(shared, given) for _, given in calls]
        found = {key: _rewards(self._known[key]) for key in keys if key in self._known}
        if self._control is None and self._each_asks:
            self._control = next(((shared, call) for key, call in zip(keys, calls, strict=True) if key in found), None)
        # A dict: equal questions are asked once.
        asked = {key: call for key, call in zip(keys, calls, strict=True) if key not in found}
        answers = found | dict(zip(asked, await self._ask(shared, [*asked.values()]), strict=True))
        judged = [answers[key] for key in keys]
        new = {
            key: json.dumps([[reward.value, reward.components] for reward in each])
            for key, each in zip(keys, judged, strict=True)
            if each
            and key not in found
            and not self._has_changed
            and all(reward.status is RewardStatus.OK for reward in each)
        }
        remember(self._known, new)
        return judged, new

    def _key(self, shared: str, given: Mapping[str, Any]) -> str:
        asked = json.dumps([self._asked, shared, given], sort_keys=True)
        return hashlib.sha256(asked.encode()).hexdigest()

    async def _ask(self, shared: str, calls: Sequence[Call]) -> list[Judged]:
        each = self._calls_per_request
        requests = [calls[start : start + each] for start in range(0, len(calls), each)]
        judged = await asyncio.gather(*(self._breaker.of(self._judge(shared, request)) for request in requests))
        return [answer for request in judged for answer in request]

    async def close(self) -> None:
        await asyncio.gather(*(process.kill() for process in self._under_way))

    async def _judge(self, shared: str, calls: Sequence[Call]) -> list[Judged]:
        judged: list[Judged] = []
        num_tries, num_verdicts, was_away = 0, self._breaker.num_verdicts, False
        while len(judged) < len(calls):
            async with self._breaker.passage() as is_probe:
                left = calls[len(judged) :][: 1 if is_probe else None]
                for answer in await self._answers(shared, left):
                    call = calls[len(judged)]
                    if not isinstance(answer, UnavailableError):
                        judged.append(answer)
                        if self._note(answer, is_probe=is_probe) and (self._each_asks or was_away):
                            self._control = shared, call
                        num_tries, was_away = 0, False
                        continue
                    was_away, is_again = True, was_away or is_probe
                    if answer.retry_after_s is not None:
                        if answer.endpoint is not None:
                            self._breaker.note_away(answer)
                        else:
                            self._breaker.note_limited(answer)
                        # A longer pause would put off the end of an outage, or of limits that leave no turn, by hours.
                        await asyncio.sleep(min(answer.retry_after_s, max(self._config.hold_s, self._part.timeout_s)))
                        continue
                    if is_again and self._breaker.num_verdicts == num_verdicts:
                        await self._ask_control()
                    num_tries += self._breaker.num_verdicts > num_verdicts
                    num_verdicts = self._breaker.num_verdicts
                    if num_tries == _MOST_TRIES:
                        error = UnavailableError(f"{answer}; others were answered between {num_tries} tries")
                        judged.append([failed(error)] * call[0])
                        num_tries, was_away = 0, False
                        continue
                    self._breaker.note_away(answer)
        return judged

    async def _ask_control(self) -> None:
        """Repeats the last answered call. If that is answered again, the endpoint is up, and the failing call may be the cause."""
        if self._control is None:
            return
        was_shared, call = self._control
        for answer in await self._answers(was_shared, [call]):
            if not isinstance(answer, UnavailableError):
                self._note(answer, is_probe=False)

    def _note(self, judged: Judged, *, is_probe: bool) -> bool:
        """Records an answer. True if it proves that the endpoint is up. A failed reward proves nothing: the judge may have failed before it
        asked."""
        failures = [reward for reward in judged or () if reward.status is not RewardStatus.OK]
        if judged is None or len(failures) < len(judged):
            self._breaker.note_verdict()
            return True
        if is_probe and (hold := self._breaker.hold):
            self._breaker.note_away(UnavailableError(str(failures[0].message), endpoint=hold.endpoint))
        return False

    async def _answers(self, shared: str, calls: Sequence[Call]) -> list[Judged | UnavailableError]:
        """As `JudgeProcess.judge`. An interrupted call is asked once more. Its costs and side effects may come twice: the killed process
        may have begun it."""
        with contextlib.suppress(InterruptedCallError):
            return await self._answers_of_one(shared, calls)
        try:
            return await self._answers_of_one(shared, calls)
        except InterruptedCallError:
            error = WorkerError(
                "twice, another call of this asynchronous judge blocked beyond its deadline, and the judge's process was killed; let the "
                "judge await, or make it synchronous"
            )
            return [[failed(error)] * calls[0][0]]

    async def _answers_of_one(self, shared: str, calls: Sequence[Call]) -> list[Judged | UnavailableError]:
        process = await self._take()
        if "servers" in self.asks:
            shared = json.dumps(json.loads(shared) | {"servers": self.servers})
        try:
            return await process.judge(shared, calls)
        finally:
            await self._give_back(process)

    async def _take(self) -> JudgeProcess:
        """A process with a free place. A new one starts only if none becomes free soon, so a fast judge has one or two.

        If a new one does not start, the running ones must do. Raises WorkerError if none runs.
        """
        while (process := await self._taken_or_started()) is None:
            pass
        return process

    async def _taken_or_started(self) -> JudgeProcess | None:
        """None if a new process was needed and did not start while others run. Their number is the maximum from then on."""
        async with self._changed:
            try:
                if self._under_way or self._is_starting:
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(_PATIENCE_S):
                            await self._changed.wait_for(self._free)
                await self._changed.wait_for(lambda: self._free() or self._may_start())
            except asyncio.CancelledError:
                self._changed.notify()  # passes on the place that woke this call
                raise
            if process := self._free():
                self._under_way[process] += 1
                return process
            self._is_starting = True
        try:
            process = await JudgeProcess.start(self._part, self._config, printed=self._printed)
            self._has_changed |= process.facts.digest != self._digest
            self._under_way[process] = 1
            return process
        except (ConfigError, WorkerError) as error:
            # The first process started, so there is no room for another one, or a dependency of the judge is away.
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
        # No call gives back a process that died while idle: drop it here.
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
            self._changed.notify()  # one place is free, so one waiting call is woken


def _rewards(text: str) -> list[Reward]:
    return [Reward(value=value, components=components) for value, components in json.loads(text)]
