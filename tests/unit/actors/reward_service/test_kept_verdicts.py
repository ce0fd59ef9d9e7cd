"""A verdict that was paid for is not asked for again, and nothing else is taken for it."""

import asyncio
import importlib
import json
import sys
import zipfile
from types import ModuleType
from typing import Any

import pytest

from actors.reward_service.judge_process import JudgeProcess
from actors.reward_service.judgement import find_judge
from actors.reward_service.judging import Judging
from actors.reward_service.recipe import parts_of
from actors.reward_service.service import RewardService
from cluster.contracts.plugins import Plugin
from cluster.contracts.reward_config import RewardConfig, RewardPart
from cluster.contracts.types import Reward, RewardStatus
from tests.unit.actors.batches import batch_of
from tests.unit.actors.reward_service.test_breaker import Endpoint, calls, values
from tests.unit.cluster.simulated_time import simulated

COLUMNS = json.dumps({"columns": {"answer": "42"}})


def judging(endpoint: Any, known: dict[str, str], *, name: str = "style", digest: str = "", **params: Any) -> Judging:
    endpoint.digest = digest
    config = RewardConfig(parts={name: RewardPart(judge=Plugin(name="remote", params=params), cache=True)})
    return Judging(parts_of(config)[0], config, endpoint, known)


@simulated
async def test_what_is_known_is_not_asked_again_and_a_failure_is():
    known: dict[str, str] = {}
    endpoint = Endpoint()
    endpoint.nonsense.add(2)
    first = judging(endpoint, known)
    answer = await first.judge(COLUMNS, calls(1, 2))
    assert values(answer) == [1, None] and [*answer[1].values()] == ["[[1.0, {}]]"] and answer[1] == known
    answer = await first.judge(COLUMNS, calls(3, 1, 2))
    assert values(answer) == [3, 1, None] and len(answer[1]) == 1
    assert [number for _, number in endpoint.asked] == [1, 2, 3, 2]
    # Another service, to which what is known was told.
    endpoint = Endpoint((0.0, 1e9))
    assert values(await judging(endpoint, dict(known)).judge(COLUMNS, calls(1, 3))) == [1, 3]
    assert endpoint.asked == [], "neither asks for what is known, nor waits for a server that is away"


class Half(Endpoint):
    """Fails for the second of two trajectories."""

    async def judge(self, shared: str, calls: Any) -> list[Any]:
        self.asked += [(self.now(), given["completion"]) for _, given in calls]
        failure = Reward(value=None, status=RewardStatus.ERROR, message="ValueError: no opinion")
        return [[Reward(value=1.0), failure] for _ in calls]


@simulated
async def test_a_verdict_on_a_group_in_which_one_reward_failed_is_asked_again():
    endpoint = Half()
    made = judging(endpoint, {})
    for _ in range(2):
        (((first, second),), new) = await made.judge(COLUMNS, calls(1))
        assert (first.value, second.status, new) == (1.0, RewardStatus.ERROR, {})
    assert len(endpoint.asked) == 2


@simulated
async def test_equal_questions_of_one_group_are_asked_once():
    endpoint = Endpoint()
    answer = await judging(endpoint, {}).judge(COLUMNS, calls(1, 2, 1, 1))
    assert values(answer) == [1, 2, 1, 1] and len(answer[1]) == 2
    assert sorted(number for _, number in endpoint.asked) == [1, 2]


@pytest.mark.parametrize(
    "other",
    [{"name": "tidy"}, {"digest": "of another source"}, {"model": "another"}, {"shared": {"columns": {"answer": "7"}}}],
    ids=str,
)
@simulated
async def test_another_part_source_parameter_or_column_is_another_question(other):
    known: dict[str, str] = {}
    shared = json.dumps(other.pop("shared", None) or json.loads(COLUMNS))
    await judging(Endpoint(), known).judge(COLUMNS, calls(1))
    endpoint = Endpoint()
    await judging(endpoint, known, **other).judge(shared, calls(1))
    assert len(endpoint.asked) == 1 and len(known) == 2


@simulated
async def test_a_verdict_of_a_source_that_was_edited_in_mid_run_is_not_kept_for_the_first_one(monkeypatch):
    """The first process ends, and the one in its place reads the file anew."""
    edited, known = Endpoint(), dict[str, str]()
    edited.digest = "of the edited source"
    monkeypatch.setattr(JudgeProcess, "start", lambda *_, **__: asyncio.sleep(0, edited))
    endpoint = Endpoint()
    made = judging(endpoint, known)
    await made.judge(COLUMNS, calls(1))
    endpoint.is_alive = False
    assert values(await made.judge(COLUMNS, calls(1, 2))) == [1, 2]
    assert [number for _, number in edited.asked] == [2] and len(known) == 1


@simulated
async def test_where_the_runs_own_servers_are_is_no_part_of_the_question():
    endpoint = Endpoint()
    made = judging(endpoint, {})
    for port in (8000, 8001):
        made.servers = {"grader": [f"http://node:{port}"]}
        await made.judge(COLUMNS, calls(1))
    assert len(endpoint.asked) == 1


@simulated
async def test_another_model_behind_the_name_of_a_server_is_another_question_and_another_gpu_or_server_is_none():
    known: dict[str, str] = {}
    a, b, c = {"path": "org/a", "revision": "1"}, {"path": "org/b"}, {"path": "org/c"}
    num_asked: list[int] = []
    for params, grader, other in (
        ({"server": "grader"}, a, b),
        ({"server": "grader"}, b, b),
        ({"server": "grader"}, a | {"gpus": 1.0}, b),
        ({"server": "grader"}, a, c),
        ({}, a, b),
        ({}, a, c),  # it may ask either
    ):
        endpoint = Endpoint()
        endpoint.asks = frozenset({"completion", "servers"})
        users = {name: {"judge": {"name": "llm_judge", "server": name}} for name in ("grader", "other")}
        parts = {"style": {"judge": {"name": "llm_judge", **params}, "cache": True}, **users}
        config = RewardConfig.model_validate({"parts": parts, "servers": {"grader": grader, "other": other}})
        fake: Any = endpoint
        await Judging(parts_of(config)[0], config, fake, known).judge(COLUMNS, calls(1))
        num_asked.append(len(endpoint.asked))
    assert num_asked == [1, 1, 0, 0, 1, 1]


@pytest.mark.parametrize(
    ("keeps_verdicts", "cache", "num_asked"), [(True, None, 1), (False, None, 2), (True, False, 2), (False, True, 1)]
)
@simulated
async def test_a_part_says_whether_its_verdicts_are_kept_or_else_its_judge_does(keeps_verdicts, cache, num_asked):
    endpoint: Any = Endpoint(keeps_verdicts=keeps_verdicts)
    config = RewardConfig(parts={"style": RewardPart(judge=Plugin(name="remote"), cache=cache)})
    made = Judging(parts_of(config)[0], config, endpoint, {})
    for _ in range(2):
        await made.judge(COLUMNS, calls(1))
    assert len(endpoint.asked) == num_asked


@pytest.mark.parametrize("adapter", ["trl", "verl", "openrlhf"])
def test_another_source_of_a_function_behind_an_adapter_is_another_question(adapter, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    judge = Plugin(name=adapter, params={"function": f"of_{adapter}:judge"})
    digests: list[str] = []
    for reward in ("0.0", "0.0", "10.0"):
        sys.modules.pop(f"of_{adapter}", None)
        (tmp_path / f"of_{adapter}.py").write_text(f"def judge(**given):\n    return {reward}\n")
        importlib.invalidate_caches()
        digests.append(find_judge(judge).digest)
    assert digests[0] == digests[1] != digests[2]


@pytest.mark.slow
async def test_a_service_gives_new_verdicts_with_its_answer_and_one_that_is_told_them_asks_nothing(tmp_path):
    server = tmp_path / "away"
    judge = Plugin(name="tests.unit.actors.judges:away_while", params={"file": str(server)})
    config = RewardConfig(parts={"style": RewardPart(judge=judge, cache=True)})
    group, known = batch_of(["a", "bb"]), dict[str, str]()
    for num_new in (2, 0):
        rewards = RewardService(config)
        try:
            rewards.remember(known)
            columns, added = await rewards.score(group)
        finally:
            await rewards.close()
        assert columns["reward"].to_pylist() == [1.0, 2.0]
        told = added["part_stats"]["style"].verdicts
        assert len(told) == num_new
        known |= told
        server.touch()  # away, for the second one
    assert (tmp_path / "away.asked").read_text().split() == ["a", "bb"]


def test_a_judge_in_an_archive_counts_with_its_source_and_one_that_was_made_by_code_without(tmp_path, monkeypatch):
    digests: list[str] = []
    for number, source in enumerate(("return 1.0", "return 2.0")):
        archive = tmp_path / f"{number}.zip"
        with zipfile.ZipFile(archive, "w") as file:
            file.writestr(f"archived_{number}.py", f"def judge(completion: str) -> float:\n    {source}\n")
        monkeypatch.syspath_prepend(archive)
        digests.append(find_judge(Plugin(name=f"archived_{number}:judge")).digest)
    made = ModuleType("made_by_code")
    exec(compile("def judge(completion: str) -> float:\n    return 1.0\n", "<made>", "exec"), made.__dict__)
    monkeypatch.setitem(sys.modules, "made_by_code", made)
    assert len({*digests, find_judge(Plugin(name="made_by_code:judge")).digest}) == 3
