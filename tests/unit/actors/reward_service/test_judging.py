"""Calls whose process is killed at the deadline of another call; the processes are scripted."""

from typing import Any

from actors.reward_service.judge_process import InterruptedCallError
from actors.reward_service.judgement import Judged
from actors.reward_service.judging import Judging
from cluster.contracts.types import Reward, RewardStatus
from tests.unit.actors.reward_service.test_breaker import Endpoint
from tests.unit.cluster.simulated_time import simulated


class Interrupted(Endpoint):
    """Its first tries of a call end with the process, which is killed at another call's deadline."""

    def __init__(self, *, num_times: int) -> None:
        super().__init__()
        self._num_times = num_times

    async def judge(self, shared: str, calls: Any) -> list[Any]:
        answers = await super().judge(shared, calls)
        if len(self.asked) <= self._num_times:
            raise InterruptedCallError
        return answers


async def judged(endpoint: Endpoint) -> tuple[Judging, Judged]:
    judging = endpoint.judging()
    (answer,), _ = await judging.judge("{}", [(2, {"completion": 7})])
    return judging, answer


@simulated
async def test_an_interrupted_call_is_asked_once_more():
    endpoint = Interrupted(num_times=1)
    judging, answer = await judged(endpoint)
    assert answer == [Reward(value=7.0)] and [number for _, number in endpoint.asked] == [7, 7]
    assert [*judging._under_way.values()] == [0], "its place is free again"


@simulated
async def test_a_call_that_is_interrupted_twice_fails():
    """A third try could be interrupted as well, and each may cost money."""
    endpoint = Interrupted(num_times=2)
    _, answer = await judged(endpoint)
    assert [reward.status for reward in answer or ()] == [RewardStatus.ERROR] * 2, "of a group of two"
    assert "twice, another call of this asynchronous judge blocked beyond its deadline" in str(
        (answer or [])[0].message
    )
    assert len(endpoint.asked) == 2
