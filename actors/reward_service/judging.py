"""One part's judge, in as many processes as it needs.

A synchronous judge takes one request at a time in each of several processes, which are killed at the deadline and replaced; an
asynchronous one shares the event loop of one process. While what the judge calls is away, its calls wait outside of them.
"""

import asyncio
import contextlib
import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from actors.processes.printed import PrintedLines
from actors.reward_service.breaker import Breaker
from actors.reward_service.judge_process import Call, JudgeProcess
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
"""Of a call that finds away what answers others: it may be the cause, and its reward fails."""
_ANSWERS_BY = {"path", "revision", "dtype", "max_model_len"}
"""Settings of a server that decide what it says."""
_CALLS_PER_REQUEST = 8
"""Enough to make the round trip cheap, few enough to share the rows of a slow judge between processes."""


class Judging:
    """Processes of one judge, which start as they are needed."""

    def __init__(
        self,
        part: Part,
        config: RewardConfig,
        first: JudgeProcess,
        known: dict[str, str] | None = None,
        *,
        printed: PrintedLines | None = None,
    ) -> None:
        """`printed` is for what the judge prints. `known` verdicts are not asked for again, where the part keeps them; new ones are added
        to it.

        A synchronous judge runs on at most this service's share of the available cores (and `max_concurrency`) in processes: what
        waits for a network should be asynchronous.
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
        """A process runs another source than the keys of verdicts say: nothing new is kept."""
        asked = [part.name, part.judge.model_dump(mode="json"), facts.digest, servers]
        self._asked = json.dumps(asked, sort_keys=True)
        self._each_asks = facts.keeps_verdicts
        """Whether each verdict shows that the endpoint is up: one that costs nothing may come without it."""
        self._control: tuple[str, Call] | None = None
        """What was answered last."""
        self.servers: Mapping[str, Sequence[str]] = {}
        """Where the run's servers are: no part of a question, for they may move while a call waits."""
        self.asks, self.is_of_groups = facts.asks, facts.is_of_groups
        num_cores = max(1, num_cpus() // config.num_services)
        self._max_processes = 1 if facts.is_async else min(part.max_concurrency, num_cores)
        self._requests_each = part.max_concurrency if facts.is_async else 1
        self._calls_per_request = 1 if facts.is_async else _CALLS_PER_REQUEST
        self._under_way = {first: 0}
        """Requests of each process."""
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
        """What its calls wait for; None while they go through."""
        return self._breaker.hold

    async def judge(self, shared: str, calls: Sequence[Call]) -> tuple[list[Judged], dict[str, str]]:
        """One answer for each call, in order, and those that are new and to be kept, by their keys.

        Raises UnavailableError, which is for the run, when an outage is longer than `hold_s`, and where limits leave no turn.
        """
        if self._known is None:
            return await self._ask(shared, calls), {}
        keys = [self._key(shared, given) for _, given in calls]
        found = {key: _rewards(self._known[key]) for key in keys if key in self._known}
        if self._control is None and self._each_asks:
            self._control = next(((shared, call) for key, call in zip(keys, calls, strict=True) if key in found), None)
        # Equal questions are one.
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
                        await asyncio.sleep(answer.retry_after_s)
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
        """Asks again what was answered last. If it is answered again, the endpoint is up, and the call may be what it fails at."""
        if self._control is None:
            return
        was_shared, call = self._control
        for answer in await self._answers(was_shared, [call]):
            if not isinstance(answer, UnavailableError):
                self._note(answer, is_probe=False)

    def _note(self, judged: Judged, *, is_probe: bool) -> bool:
        """Whether it shows that the endpoint is up. A failed reward says nothing: the judge may have failed before it asked."""
        failures = [reward for reward in judged or () if reward.status is not RewardStatus.OK]
        if judged is None or len(failures) < len(judged):
            self._breaker.note_verdict()
            return True
        if is_probe and (hold := self._breaker.hold):
            self._breaker.note_away(UnavailableError(str(failures[0].message), endpoint=hold.endpoint))
        return False

    async def _answers(self, shared: str, calls: Sequence[Call]) -> list[Judged | UnavailableError]:
        process = await self._take()
        if "servers" in self.asks:
            shared = json.dumps(json.loads(shared) | {"servers": self.servers})
        try:
            return await process.judge(shared, calls)
        finally:
            await self._give_back(process)

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
            try:
                if self._under_way or self._is_starting:
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(_PATIENCE_S):
                            await self._changed.wait_for(self._free)
                await self._changed.wait_for(lambda: self._free() or self._may_start())
            except asyncio.CancelledError:
                self._changed.notify()  # the place that woke it is another's
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
            self._changed.notify()  # one place, one of those who wait


def _rewards(text: str) -> list[Reward]:
    return [Reward(value=value, components=components) for value, components in json.loads(text)]
