"""Calls of one judge process, at the service's side; the process is scripted."""

import asyncio
from typing import Any

import pytest

from actors.reward_service.judge_process import InterruptedCallError, JudgeProcess
from actors.reward_service.judgement import JudgeFacts
from actors.reward_service.recipe import parts_of
from cluster.contracts.errors import UnavailableError
from cluster.contracts.reward_config import RewardConfig
from cluster.contracts.types import Reward, RewardStatus
from tests.unit.actors.clock import pass_time

TIMEOUT_S = 60.0


class Scripted:
    """A process that answers as it is told. None: it has ended."""

    def __init__(self) -> None:
        self.exit_code: int | None = None
        self.sent: list[Any] = []
        self.num_kills = 0
        self.lines: asyncio.Queue[Any] = asyncio.Queue()
        self.last_words: list[Any] = []
        """Answers that come while it is killed."""

    async def send(self, message: Any) -> None:
        self.sent.append(message)

    async def receive(self) -> Any:
        return await self.lines.get()

    async def wait(self) -> None:
        self.exit_code = 3

    async def kill(self) -> None:
        self.num_kills += 1
        self.exit_code = -9 if self.exit_code is None else self.exit_code
        for line in (*self.last_words, None):
            self.lines.put_nowait(line)
        await settled()  # the answers are read on meanwhile

    def answer(self, number: int, *values: float, is_spent: bool = False) -> None:
        self.lines.put_nowait([number, [[value, "ok", {}, None] for value in values], is_spent])


def begun(*, is_async: bool = False) -> tuple[JudgeProcess, Any]:
    facts = JudgeFacts(asks=frozenset(), is_of_groups=True, is_async=is_async, keeps_verdicts=False, digest="")
    (part,) = parts_of(RewardConfig.model_validate({"judge": "exact_match", "timeout_s": TIMEOUT_S}))
    process: Any = Scripted()
    return JudgeProcess(process, part, facts), process


async def settled() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


def statuses(judged: Any) -> list[list[RewardStatus]]:
    return [[reward.status for reward in each] for each in judged]


async def test_a_process_that_has_ended_takes_no_call():
    judge, process = begun()
    process.lines.put_nowait(None)
    await asyncio.wait([judge._reading])
    async with asyncio.timeout(10):
        assert await judge.judge("{}", [(1, {})]) == []
    assert process.sent == [] and process.num_kills == 1, "its children may still run"


async def test_each_call_of_a_request_has_a_deadline_of_its_own_and_the_late_one_gets_a_reward_for_each_trajectory():
    judge, process = begun()
    judging = asyncio.create_task(judge.judge("{}", [(1, {}), (2, {}), (3, {}), (4, {})]))
    await settled()
    for number, values in enumerate([(1.0,), (2.0, 3.0)]):
        pass_time(0.9 * TIMEOUT_S)
        process.answer(number, *values)
        await settled()
    pass_time(TIMEOUT_S)
    first, second, third = await judging
    assert (first, second) == ([Reward(value=1.0)], [Reward(value=2.0), Reward(value=3.0)])
    assert statuses([third]) == [[RewardStatus.TIMEOUT] * 3] and process.num_kills >= 1
    assert judge._waiting == {}


async def test_a_process_whose_call_is_cancelled_is_killed():
    judge, _ = begun()
    judging = asyncio.create_task(judge.judge("{}", [(1, {})]))
    await settled()
    judging.cancel()
    with pytest.raises(asyncio.CancelledError):
        await judging
    assert not judge.is_alive


async def test_a_process_that_ran_out_of_memory_stays_spent_when_it_answers_another_request():
    judge, process = begun(is_async=True)
    first = asyncio.create_task(judge.judge("{}", [(1, {}), (1, {})]))
    second = asyncio.create_task(judge.judge("{}", [(1, {})]))
    await settled()
    process.answer(0, 1.0, is_spent=True)
    process.answer(1, 2.0)
    await settled()
    process.answer(2, 3.0)
    assert await first == [[Reward(value=1.0)]], "the second call is asked again, in another process"
    assert await second == [[Reward(value=3.0)]]
    assert judge.is_spent


async def test_calls_that_wait_when_the_process_ends_fail_and_only_the_first_of_a_request_is_answered():
    judge, process = begun()
    judging = asyncio.create_task(judge.judge("{}", [(2, {}), (1, {})]))
    await settled()
    process.lines.put_nowait(None)
    (failed,) = await judging
    assert statuses([failed]) == [[RewardStatus.ERROR] * 2]
    assert "the judge ended its process (exit code 3)" in str(failed[0].message)


async def test_the_answers_end_where_the_server_is_away():
    judge, process = begun()
    judging = asyncio.create_task(judge.judge("{}", [(1, {}), (1, {}), (1, {})]))
    await settled()
    process.answer(0, 1.0)
    process.lines.put_nowait([1, {"away": "refused", "endpoint": "http://here"}, False])
    process.answer(2, 3.0)
    first, away = await judging
    assert first == [Reward(value=1.0)] and isinstance(away, UnavailableError) and away.endpoint == "http://here"


async def test_an_asynchronous_judges_process_has_five_seconds_more_to_tell_of_its_own_deadline():
    judge, process = begun(is_async=True)
    judging = asyncio.create_task(judge.judge("{}", [(1, {})]))
    await settled()
    pass_time(TIMEOUT_S + 4.0)
    await settled()
    process.lines.put_nowait([0, [[None, "timeout", {}, "late"]], False])
    assert await judging == [[Reward(value=None, status=RewardStatus.TIMEOUT, message="late")]] and judge.is_alive


async def test_of_the_calls_beside_one_that_overran_its_deadline_the_late_are_timeouts_and_the_others_interrupted():
    """The process is killed at second 65, when the calls of seconds 5 and 6 are 60 and 59 s old, with 60 s for each."""
    judge, process = begun(is_async=True)
    process.last_words = [[0, [[1.0, "ok", {}, None]], False]]
    late = asyncio.create_task(judge.judge("{}", [(1, {})]))
    await settled()
    pass_time(5.0)
    as_late = asyncio.create_task(judge.judge("{}", [(2, {})]))
    await settled()
    pass_time(1.0)
    other = asyncio.create_task(judge.judge("{}", [(1, {})]))
    await settled()
    pass_time(59.0)
    assert statuses(await late) == [[RewardStatus.TIMEOUT]]
    async with asyncio.timeout(10):
        assert statuses(await as_late) == [[RewardStatus.TIMEOUT] * 2]
        with pytest.raises(InterruptedCallError):
            await other
    assert judge._waiting == {}
