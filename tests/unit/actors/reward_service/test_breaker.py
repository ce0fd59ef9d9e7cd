"""An outage of what a judge calls is a wait: hours of them, on simulated time."""

import asyncio
import itertools
import random
from typing import Any

import pytest

from actors.reward_service.judgement import JudgeFacts
from actors.reward_service.judging import Judging
from actors.reward_service.recipe import parts_of
from cluster.contracts.errors import UnavailableError
from cluster.contracts.plugins import Plugin
from cluster.contracts.reward_config import RewardConfig, RewardPart
from cluster.contracts.types import Reward, RewardStatus
from tests.unit.cluster.simulated_time import simulated

ENDPOINT = "http://judge:8000"


class Endpoint:
    """A judge's process whose server is away between these seconds: each call takes one, and its verdict is its own number."""

    asks, is_of_groups, is_spent, is_alive = frozenset({"completion"}), False, False, True
    digest = "of its source"

    def __init__(self, *outages: tuple[float, float], is_async: bool = True, keeps_verdicts: bool = False) -> None:
        self.is_async, self.keeps_verdicts = is_async, keeps_verdicts
        self._outages = outages
        self.asked: list[tuple[float, int]] = []
        self.answered: list[int] = []
        self.never: set[int] = set()
        """Calls that find it away whenever they ask."""
        self.nonsense: set[int] = set()
        """Calls whose judge raises before it asks."""
        self.free: set[int] = set()
        """Calls whose judge has a verdict before it asks."""
        self.limits: dict[int, list[UnavailableError]] = {}
        """What calls find first."""
        self.now = asyncio.get_running_loop().time

    @property
    def facts(self) -> JudgeFacts:
        return JudgeFacts(
            asks=self.asks,
            is_of_groups=self.is_of_groups,
            is_async=self.is_async,
            keeps_verdicts=self.keeps_verdicts,
            digest=self.digest,
        )

    def judging(
        self, *, hold_s: float = 600.0, max_concurrency: int = 64, known: dict[str, str] | None = None
    ) -> Judging:
        part = RewardPart(judge=Plugin(name="remote"), max_concurrency=max_concurrency)
        config = RewardConfig(parts={"style": part}, hold_s=hold_s)
        fake: Any = self
        made = Judging(parts_of(config)[0], config, fake, known)
        made._max_processes = 1  # a second one would be real, and real processes do not live in simulated time
        return made

    async def judge(self, shared: str, calls: Any) -> list[Any]:
        answers: list[Any] = []
        for _, given in calls:
            number = given["completion"]
            self.asked.append((self.now(), number))
            await asyncio.sleep(1)
            if number in self.nonsense:
                answers.append([Reward(value=None, status=RewardStatus.ERROR, message="KeyError: 'anser'")])
            elif self.limits.get(number):
                answers.append(self.limits[number].pop())
                return answers
            elif number not in self.free and (
                number in self.never or any(begin <= self.now() < end for begin, end in self._outages)
            ):
                answers.append(UnavailableError("connection refused", endpoint=ENDPOINT))
                return answers
            else:
                self.answered.append(number)
                answers.append([Reward(value=float(number))])
        return answers

    async def kill(self) -> None: ...


def calls(*numbers: int) -> Any:
    return [(1, {"completion": number}) for number in numbers]


def values(answer: Any) -> list[float | None]:
    judged, _ = answer
    return [reward.value for (reward,) in judged]


@simulated
async def test_in_an_outage_calls_wait_one_probes_at_a_time_and_the_first_verdict_lets_all_go():
    endpoint = Endpoint((0.0, 100.0))
    judging = endpoint.judging()
    assert values(await judging.judge("{}", calls(*range(8)))) == [0, 1, 2, 3, 4, 5, 6, 7]
    assert [at for at, _ in endpoint.asked[:8]] == [0.0] * 8, "all were under way when it went"
    assert [at for at, _ in endpoint.asked[8:10]] == [1.0, 1.0], "two failures may be chance, and are tried again"
    probes = [(at, number) for at, number in endpoint.asked[10:] if at < 100]
    assert {number for _, number in probes} > {0, 1, 2}, "each in its turn"
    pauses = [later - earlier - 1 for (earlier, _), (later, _) in itertools.pairwise(probes)]
    assert all(low <= pause <= 2 * low for low, pause in zip((1, 2, 4, 8), pauses, strict=False)), pauses
    back = [at for at, _ in endpoint.asked if at >= 100 - 1]
    assert len(back) == 8 and back[0] < 100 + 30 and back[1:] == [back[0] + 1] * 7
    assert judging.hold is None and sorted(endpoint.answered) == [*range(8)]


@simulated
async def test_two_failures_are_tried_again_at_once_and_hold_nobody():
    endpoint = Endpoint((0.0, 2.5), is_async=True)
    judging = endpoint.judging()
    assert values(await judging.judge("{}", calls(7))) == [7]
    assert endpoint.asked == [(0, 7), (1, 7), (2, 7)]


@pytest.mark.parametrize("is_async", [True, False])
@simulated
async def test_the_run_stops_when_the_endpoint_is_away_for_longer_than_hold_s(is_async):
    endpoint = Endpoint((0.0, 1e9), is_async=is_async)
    judging = endpoint.judging(hold_s=300.0)
    waiting = asyncio.create_task(judging.judge("{}", calls(*range(8))))
    await asyncio.sleep(20)
    assert judging.hold is not None and (judging.hold.part, judging.hold.endpoint) == ("style", ENDPOINT)
    since = judging.hold.since
    await asyncio.sleep(180)
    assert judging.hold.since == since
    with pytest.raises(UnavailableError, match=r"reward\.parts\.style: http://judge:8000 is away for 30\d s") as raised:
        await waiting
    assert "reward.hold_s=300: connection refused; bring it back" in str(raised.value)
    assert endpoint.now() == pytest.approx(302, abs=2), "the last probe is at the end of hold_s"


@simulated
async def test_with_hold_s_0_the_first_failure_is_the_error():
    endpoint = Endpoint((0.0, 1e9))
    with pytest.raises(UnavailableError, match="http://judge:8000 is away now: connection refused"):
        await endpoint.judging(hold_s=0.0).judge("{}", calls(1))
    assert len(endpoint.asked) == 1


@simulated
async def test_a_call_that_finds_away_what_answers_all_others_fails_alone():
    endpoint = Endpoint()
    endpoint.never.add(3)
    judging = endpoint.judging(max_concurrency=2)
    first = asyncio.create_task(judging.judge("{}", calls(*range(40))))
    judged, _ = await first
    assert values((judged, {})) == [None if number == 3 else number for number in range(40)]
    failure = (judged[3] or [])[0]
    assert failure.status is RewardStatus.ERROR
    assert failure.message == "UnavailableError: connection refused; others were answered between 5 tries"


@simulated
async def test_a_judge_that_fails_before_it_asks_ends_no_outage():
    """Number 9 is judged at second 10, while the others hold, and again as the probe: neither lets the others go."""
    endpoint = Endpoint((0.0, 300.0))
    endpoint.nonsense.add(9)
    judging = endpoint.judging()
    others = asyncio.create_task(judging.judge("{}", calls(0, 1, 2)))
    await asyncio.sleep(10)
    assert values(await judging.judge("{}", calls(9))) == [None]
    assert judging.hold is not None and not others.done()
    assert values(await others) == [0, 1, 2]


@pytest.mark.parametrize("seed", range(20))
@simulated
async def test_whatever_the_outages_every_call_gets_its_own_verdict(seed):
    chance = random.Random(seed)
    begins = sorted(chance.uniform(0, 3000) for _ in range(6))
    outages = [(at, at + chance.uniform(0, 400)) for at in begins]
    endpoint = Endpoint(*outages, is_async=chance.random() < 0.5, keeps_verdicts=chance.random() < 0.5)
    judging = endpoint.judging(hold_s=1e6, max_concurrency=chance.choice([1, 3, 64]))

    async def group(first: int) -> None:
        await asyncio.sleep(chance.uniform(0, 3000))
        assert values(await judging.judge("{}", calls(*range(first, first + 12)))) == [*range(first, first + 12)]

    async with asyncio.TaskGroup() as tasks:
        for first in range(0, 240, 12):
            tasks.create_task(group(first))
    assert judging.hold is None and judging._breaker._num_failures == 0


@pytest.mark.parametrize("is_async", [True, False])
@pytest.mark.parametrize("is_resumed", [True, False])
@simulated
async def test_the_last_call_of_a_step_that_breaks_its_server_fails_alone(is_async, is_resumed):
    """Nobody else asks: what was answered before is asked again. Two tries, then five between which that one is answered."""
    known: dict[str, str] = {}
    await Endpoint(keeps_verdicts=True).judging(known=known).judge("{}", calls(0, 1))
    endpoint = Endpoint(is_async=is_async, keeps_verdicts=True)
    endpoint.never.add(7)
    judging = endpoint.judging(known=known if is_resumed else {})
    await judging.judge("{}", calls(0, 1))
    endpoint.asked.clear()
    judged, _ = await judging.judge("{}", [(3, {"completion": 7})])
    assert [reward.value for reward in judged[0] or ()] == [None] * 3, "of a group of three"
    assert [number for _, number in endpoint.asked].count(7) == 6 and len(endpoint.asked) == 11
    assert judging.hold is None and endpoint.now() < 60


@simulated
async def test_two_calls_of_a_request_that_break_their_server_fail_alone():
    """The judge may answer without asking, so the call is repeated that was answered after an outage of one second."""
    endpoint = Endpoint((0.0, 1.5), is_async=False)
    endpoint.never |= {7, 8}
    judging = endpoint.judging()
    await judging.judge("{}", calls(0))
    async with asyncio.timeout(60):
        assert values(await judging.judge("{}", calls(7, 8, 1))) == [None, None, 1]
    assert [[number for _, number in endpoint.asked].count(call) for call in (7, 8)] == [6, 6]


@simulated
async def test_a_judge_that_fails_in_an_outage_does_not_prolong_it():
    """From second 5 on it raises an error of its own. Each call would fail as a probe, one every half minute."""
    endpoint = Endpoint((0.0, 1e9))
    judging = endpoint.judging(hold_s=60.0)
    waiting = asyncio.create_task(judging.judge("{}", calls(*range(40))))
    await asyncio.sleep(5)
    endpoint.nonsense |= {*range(40)}
    with pytest.raises(UnavailableError, match=r"away for 6\d s.*KeyError: 'anser'"):
        await waiting


@simulated
async def test_a_verdict_that_a_judge_gave_without_asking_ends_no_outage():
    """Number 0 has no code to run, say: to judge it again shows nothing of the sandbox, which is away."""
    endpoint = Endpoint((0.0, 300.0))
    endpoint.free.add(0)
    judging = endpoint.judging()
    await judging.judge("{}", calls(0))
    assert values(await judging.judge("{}", calls(1, 2, 3))) == [1, 2, 3]
    assert [number for _, number in endpoint.asked].count(0) == 1


@pytest.mark.parametrize("of_the_server", [ENDPOINT, None])
@simulated
async def test_a_limit_of_rate_delays_a_reward_and_never_fails_it(of_the_server):
    endpoint = Endpoint(keeps_verdicts=True)
    endpoint.limits[3] = [UnavailableError("HTTP 429", endpoint=of_the_server, retry_after_s=100.0) for _ in range(9)]
    judging = endpoint.judging()
    limited = asyncio.create_task(judging.judge("{}", calls(3)))
    for number in range(10, 950):
        await judging.judge("{}", calls(number))
    assert values(await limited) == [3]
    asked = [at for at, number in endpoint.asked if number == 3]
    assert all(later - earlier >= 101 for earlier, later in itertools.pairwise(asked)) and len(asked) == 10


@simulated
async def test_an_endpoint_that_limits_for_ever_stops_the_run():
    endpoint = Endpoint()
    endpoint.limits[3] = [UnavailableError("HTTP 429", endpoint=ENDPOINT, retry_after_s=7.0) for _ in range(99)]
    with pytest.raises(UnavailableError, match=r"is away for 3\d\d s.*HTTP 429"):
        await endpoint.judging(hold_s=300.0).judge("{}", calls(3))


@simulated
@pytest.mark.parametrize(("hold_s", "stops_after"), [(300.0, r"4[56]\d"), (0.0, r"1[56]\d")])
async def test_limits_that_leave_no_judgement_enough_turns_stop_the_run(hold_s, stops_after):
    """After `hold_s` and five times the deadline of 30 s, in which nothing was judged."""
    endpoint = Endpoint()
    endpoint.limits[3] = [UnavailableError("no turn", retry_after_s=7.0) for _ in range(999)]
    with pytest.raises(UnavailableError, match=rf"style: no verdict for {stops_after} s: no turn; raise timeout_s"):
        await endpoint.judging(hold_s=hold_s).judge("{}", calls(3))


@simulated
@pytest.mark.parametrize(
    ("of_the_server", "hold_s", "tries", "message"),
    [
        (ENDPOINT, 300.0, [0, 301, 602], "away for 602 s"),
        (None, 300.0, [0, 301, 602], "no verdict for 602 s"),
        (None, 0.0, [0, 31, 62, 93, 124, 155], "no verdict for 155 s"),
    ],
)
async def test_a_pause_ends_with_hold_s_or_a_deadline(of_the_server, hold_s, tries, message):
    """Few tokens a minute and a long prompt ask for a pause of a day."""
    endpoint = Endpoint()
    endpoint.limits[3] = [UnavailableError("no turn", endpoint=of_the_server, retry_after_s=90_000.0) for _ in range(9)]
    with pytest.raises(UnavailableError, match=message):
        await endpoint.judging(hold_s=hold_s).judge("{}", calls(3))
    assert [at for at, _ in endpoint.asked] == tries


@simulated
async def test_a_hold_ends_with_the_last_call_that_waits_and_the_next_outage_has_a_clock_of_its_own():
    endpoint = Endpoint((0.0, 10.0), (905.0, 920.0))
    judging = endpoint.judging()
    waiting = asyncio.create_task(judging.judge("{}", calls(5)))
    await asyncio.sleep(4)
    assert judging.hold is not None
    endpoint.nonsense.add(5)
    assert values(await waiting) == [None] and judging.hold is None
    await asyncio.sleep(905 - endpoint.now())
    assert values(await judging.judge("{}", calls(6))) == [6]
    assert next(at for at, _ in endpoint.asked if at > 907) <= 909, "the pauses begin anew too, with at most 1 s"


@simulated
async def test_a_call_that_is_cancelled_as_its_turn_comes_leaves_the_turn_to_the_next():
    judging = Endpoint(is_async=False).judging()
    process = await judging._take()
    first, second = (asyncio.create_task(judging._take()) for _ in range(2))
    await asyncio.sleep(10)
    await judging._give_back(process)
    first.cancel()
    async with asyncio.timeout(60):
        assert await second is process
