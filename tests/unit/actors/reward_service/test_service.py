import asyncio
import contextlib
import os
import re
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import pytest_asyncio

from actors.reference_scorer import ReferenceScorer
from actors.reward_service import judging
from actors.reward_service.recipe import parts_of
from actors.reward_service.service import RewardService
from cluster.contracts.config import RewardConfig
from cluster.contracts.errors import ConfigError, DataError, WorkerError
from cluster.contracts.plugins import Plugin
from cluster.contracts.reward_config import RewardPart
from cluster.contracts.schema import joined, summarize, validate, with_columns
from cluster.contracts.types import Group
from tests.unit.actors.batches import batch_of
from tests.unit.actors.clock import pass_time
from tests.unit.actors.environments.test_failures import is_gone, until
from tests.unit.actors.judges import TIMEOUT_S
from tests.unit.actors.reward_service.test_breaker import Endpoint

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]  # judges are processes

JUDGES = "tests.unit.actors.judges"
SYNC = f"{JUDGES}:obedient"
ASYNC = f"{JUDGES}:obedient_async"
both_kinds = pytest.mark.parametrize("judge", [SYNC, ASYNC])


class Fixed:
    def score(self, prompts, completions):
        return {"reference_logprobs": [[-1.0] * len(completion) for completion in completions]}


@contextlib.asynccontextmanager
async def service(judge: str | Plugin, **settings: Any) -> AsyncIterator[RewardService]:
    made = RewardService(RewardConfig(judge=Plugin(name=judge) if isinstance(judge, str) else judge, **settings))
    try:
        yield made
    finally:
        await made.close()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared() -> AsyncIterator[dict[str, RewardService]]:
    """For tests that leave it as they found it: a process of a judge takes a third of a second to start."""
    async with service(SYNC) as sync, service(ASYNC) as in_loop:
        yield {SYNC: sync, ASYNC: in_loop}


async def pid_of_judge(rewards: RewardService) -> int:
    return int((await rewards.score(batch_of(["pid"])))[0]["reward"][0].as_py())


async def answers_are_read() -> None:
    """Those that have come. Each step of that is a round of the event loop."""
    for _ in range(20):
        await asyncio.sleep(0)


async def overrun(rewards: RewardService, completions: list[str], begun: Path, *, seconds: float = TIMEOUT_S) -> Any:
    """Scores of a group, in which these seconds pass as soon as the file `begun` is there."""
    scoring = asyncio.create_task(rewards.score(batch_of(completions, columns={"begun": str(begun)})))
    await until(begun.exists)
    await answers_are_read()
    pass_time(seconds)
    scored, _ = await scoring
    return scored


@both_kinds
async def test_rewards_and_components_reach_their_rows(judge, shared):
    rewards = shared[judge]
    scored, _ = await rewards.score(batch_of(["good", "parts"]))
    assert scored["reward"].to_pylist() == [1.0, 0.5]
    assert scored["reward_status"].to_pylist() == ["ok", "ok"]
    assert scored["reward_components"].to_pylist() == [[], [("format", 1.0), ("length", 0.25)]]


@both_kinds
async def test_a_failed_reward_is_a_status_and_not_a_zero(judge, shared):
    rewards = shared[judge]
    scored, _ = await rewards.score(batch_of(["raise", "nan", "text", "good"]))
    assert scored["reward"].to_pylist() == [None, None, None, 1.0]
    assert scored["reward_status"].to_pylist() == ["error", "error", "error", "ok"]
    raised, *others = scored["reward_message"].to_pylist()
    assert re.fullmatch(r"ValueError: no opinion \(judges\.py, line \d+\)", raised)
    assert others == [
        "DataError: the judge returned a reward that is not finite: nan",
        "DataError: the judge returned a reward of type str; it must be a number",
        None,
    ]


@both_kinds
async def test_an_exception_whose_message_cannot_be_read_fails_one_row_and_none_beside_it(judge, shared):
    rewards = shared[judge]
    scored, _ = await rewards.score(batch_of(["slow", "raise the unspeakable", "slow"]))
    assert scored["reward_status"].to_pylist() == ["ok", "error", "ok"]
    assert scored["reward_message"][1].as_py().startswith("UnspeakableError: its message cannot be read (")


@both_kinds
async def test_a_judge_that_wants_to_leave_its_process_fails_one_row_and_none_beside_it(judge, shared):
    rewards = shared[judge]
    scored, _ = await rewards.score(batch_of(["slow", "leave", "slow"]))
    assert scored["reward_status"].to_pylist() == ["ok", "error", "ok"]
    assert scored["reward_message"][1].as_py().startswith("SystemExit: usage: judge FILE (")


async def test_a_child_that_a_judge_forks_ends_with_its_own_exit_code(shared):
    rewards = shared[SYNC]
    scored, _ = await rewards.score(batch_of(["child leaves"]))
    assert scored["reward"].to_pylist() == [3.0]


@both_kinds
async def test_half_characters_of_a_judge_are_written_as_question_marks(judge, shared):
    rewards = shared[judge]
    scored, _ = await rewards.score(batch_of(["raise half", "half a name", "good"]))
    assert scored["reward"].to_pylist() == [None, 0.5, 1.0]
    assert scored["reward_message"][0].as_py().startswith("ValueError: no city ? (")
    assert scored["reward_components"][1].as_py() == [("?", 1.0)]


async def test_a_trajectory_that_failed_while_it_was_sampled_is_not_judged_and_keeps_its_status(shared):
    group = with_columns(
        batch_of(["good", "", "good"]),
        reward_status=[None, "timeout", None],
        reward_message=[None, "the environment took 10 s", None],
    )
    rewards = shared[SYNC]
    scored, told = await rewards.score(group)
    assert scored["reward"].to_pylist() == [1.0, None, 1.0]
    assert scored["reward_message"].to_pylist() == [None, "the environment took 10 s", None]
    assert (told["num_reward_timeouts"], told["part_stats"][""].num_failed) == (1, 0)


async def test_a_group_of_which_all_failed_while_they_were_sampled_needs_no_judge(shared):
    rewards = shared[SYNC]
    scored, _ = await rewards.score(with_columns(batch_of(["", ""]), reward_status=["error"] * 2))
    assert scored["reward_status"].to_pylist() == ["error", "error"]


async def test_an_episode_is_judged_once_with_all_its_segments(shared):
    segments = {"sample_index": [0, 0, 1], "segment_index": [0, 1, 0], "num_segments": [2, 2, 1]}
    rewards = shared[SYNC]
    scored, told = await rewards.score(with_columns(batch_of(["go", "od", "parts"]), **segments))
    assert scored["reward"].to_pylist() == [1.0, 1.0, 0.5]
    assert told["rewards"] == (1.0, 0.5)


@both_kinds
async def test_a_hanging_judge_costs_one_row_and_one_deadline(judge, tmp_path):
    async with service(judge, timeout_s=TIMEOUT_S) as rewards:
        # The deadline of an asynchronous judge passes by the clock of its own process, which it moves itself.
        seconds = TIMEOUT_S if judge == SYNC else 0.0
        scored = await overrun(rewards, ["good", "hang", "good"], tmp_path / "begun", seconds=seconds)
    assert scored["reward_status"].to_pylist() == ["ok", "timeout", "ok"]
    assert "reward.timeout_s=3600" in scored["reward_message"][1].as_py()


async def test_of_several_calls_in_a_request_each_has_a_deadline_of_its_own(tmp_path):
    begun, go_on = tmp_path / "begun", tmp_path / "go_on"
    columns = {"begun": str(begun), "go_on": str(go_on)}
    async with service(SYNC, timeout_s=TIMEOUT_S) as rewards:
        scoring = asyncio.create_task(rewards.score(batch_of(["wait", "wait"], columns=columns)))
        for _ in range(2):
            await until(begun.exists)
            await answers_are_read()
            pass_time(0.6 * TIMEOUT_S)
            begun.unlink()
            go_on.touch()
        scored, _ = await scoring
    assert scored["reward_status"].to_pylist() == ["ok", "ok"]


async def test_a_judges_own_timeout_error_is_an_error(shared):
    rewards = shared[ASYNC]
    scored, _ = await rewards.score(batch_of(["timeout error"]))
    assert scored["reward_message"][0].as_py().startswith("TimeoutError: the remote server is slow (")


@pytest.mark.parametrize("judge", ["uncaught", "uncaught_adapted"])
async def test_a_judge_that_lets_out_a_cancellation_of_its_own_costs_one_row(judge):
    async with service(f"tests.unit.actors.judges:{judge}", timeout_s=60) as rewards:
        scored, _ = await rewards.score(batch_of(["good", "leak", "good"]))
    assert scored["reward_status"].to_pylist() == ["ok", "error", "ok"]
    assert scored["reward_message"][1].as_py().startswith("CancelledError")


async def test_an_asynchronous_judge_that_blocks_meets_its_deadline_and_is_replaced(monkeypatch, tmp_path):
    monkeypatch.setattr("actors.reward_service.judge_process._BLOCKED_S", TIMEOUT_S)
    async with service(ASYNC, timeout_s=TIMEOUT_S) as rewards:
        scored = await overrun(rewards, ["block"], tmp_path / "begun", seconds=2 * TIMEOUT_S)
        assert scored["reward_status"].to_pylist() == ["timeout"]
        assert (await rewards.score(batch_of(["good"])))[0]["reward"].to_pylist() == [1.0]


async def test_a_call_that_comes_while_another_one_blocks_is_asked_again_in_the_next_process(monkeypatch, tmp_path):
    """It comes 1.9 deadlines after the blocking one, which ends the process after two."""
    monkeypatch.setattr("actors.reward_service.judge_process._BLOCKED_S", TIMEOUT_S)
    async with service(ASYNC, timeout_s=TIMEOUT_S) as rewards:
        begun = tmp_path / "begun"
        blocking = asyncio.create_task(rewards.score(batch_of(["block"], columns={"begun": str(begun)})))
        await until(begun.exists)
        pass_time(1.9 * TIMEOUT_S)
        innocent = asyncio.create_task(rewards.score(batch_of(["good"])))
        await answers_are_read()
        pass_time(0.1 * TIMEOUT_S)
        assert (await blocking)[0]["reward_status"].to_pylist() == ["timeout"]
        assert (await innocent)[0]["reward"].to_pylist() == [1.0]


async def test_an_asynchronous_judge_that_ends_its_process_fails_what_it_had_and_is_replaced(shared):
    rewards = shared[ASYNC]
    scored, _ = await rewards.score(batch_of(["exit"]))
    assert "exit code 3" in scored["reward_message"][0].as_py()
    assert (await rewards.score(batch_of(["good"])))[0]["reward"].to_pylist() == [1.0]


@both_kinds
async def test_a_judge_sees_no_secrets_but_those_that_the_run_names(judge, monkeypatch):
    secrets = ["HF_TOKEN", "RAY_AUTH_TOKEN", "AWS_SECRET_ACCESS_KEY", "OPENAI_API_KEY"]
    for name in secrets:
        monkeypatch.setenv(name, "secret")
    async with service(judge, env=("OPENAI_API_KEY",)) as rewards:
        scored, _ = await rewards.score(batch_of([f"env {name}" for name in (*secrets, "PATH")]))
    assert scored["reward"].to_pylist() == [0.0, 0.0, 0.0, 1.0, 1.0]


@both_kinds
async def test_a_judge_that_takes_too_much_memory_fails_and_lives_on(judge):
    async with service(judge, max_memory_bytes=2**30) as rewards:
        scored, _ = await rewards.score(batch_of(["allocate", "good"]))
    assert scored["reward_status"].to_pylist() == ["error", "ok"]
    assert scored["reward_message"][0].as_py().startswith("MemoryError")


async def test_a_judges_files_have_a_largest_size_and_its_end_leaves_no_core(shared):
    rewards = shared[SYNC]
    scored, _ = await rewards.score(batch_of(["file limit", "core limit"]))
    assert scored["reward"].to_pylist() == [2.0**30, 0.0]


async def test_what_a_judge_leaves_behind_has_its_processor_time_limited():
    async with service(SYNC, timeout_s=TIMEOUT_S) as rewards:
        (limit,) = (await rewards.score(batch_of(["cpu limit"])))[0]["reward"].to_pylist()
    assert 4 * TIMEOUT_S < limit < 4 * TIMEOUT_S + 60, "its deadline on four cores, after what importing took"


async def test_a_judge_that_ends_its_process_costs_one_row(shared):
    rewards = shared[SYNC]
    scored, _ = await rewards.score(batch_of(["good", "exit", "good"]))
    assert scored["reward_status"].to_pylist() == ["ok", "error", "ok"]
    assert "exit code 3" in scored["reward_message"][1].as_py()


async def test_an_answer_that_is_too_long_costs_one_row(shared):
    rewards = shared[SYNC]
    scored, _ = await rewards.score(batch_of(["good", "talk", "good"]))
    assert scored["reward_status"].to_pylist() == ["ok", "error", "ok"]
    assert "the judge's answer cannot be read" in scored["reward_message"][1].as_py()


async def test_a_process_that_does_not_even_read_meets_the_deadline():
    async with service(SYNC, timeout_s=TIMEOUT_S, max_concurrency=1) as rewards:
        os.kill(await pid_of_judge(rewards), signal.SIGSTOP)
        ((process,),) = (judging._under_way for judging in rewards._judges.values())
        scoring = asyncio.create_task(rewards.score(batch_of(["more than a pipe holds" * 100_000])))
        await until(lambda: bool(process._waiting))
        pass_time(TIMEOUT_S)
        scored, _ = await scoring
        assert scored["reward_status"].to_pylist() == ["timeout"]
        assert (await rewards.score(batch_of(["good"])))[0]["reward"].to_pylist() == [1.0]


async def test_a_hanging_judge_leaves_no_process_behind(tmp_path):
    async with service(SYNC, timeout_s=TIMEOUT_S, max_concurrency=1) as rewards:
        before = await pid_of_judge(rewards)
        await overrun(rewards, ["hang"], tmp_path / "begun")
        after = await pid_of_judge(rewards)
    assert before != after
    assert not is_running(before)
    assert not is_running(after), "close ends the replacement too"


async def test_a_judge_that_ends_its_process_leaves_nothing_that_it_started_behind(tmp_path):
    judge = Plugin(name=f"{JUDGES}:leaves_behind", params={"file": str(tmp_path / "pid")})
    async with service(judge, timeout_s=60) as rewards:
        scored, _ = await rewards.score(batch_of(["exit"]))
        assert "exit code 3" in scored["reward_message"][0].as_py()
        left = int((tmp_path / "pid").read_text())
        with contextlib.suppress(psutil.NoSuchProcess):
            _, alive = await asyncio.to_thread(psutil.wait_procs, [psutil.Process(left)], timeout=120)
            assert not alive


async def test_a_process_that_left_the_judges_session_keeps_no_group_waiting(tmp_path):
    """Seen before: it held the pipe of the answers, and the end of the judge's process was waited for as long as it lived."""
    file = tmp_path / "pid"
    judge = Plugin(name=f"{JUDGES}:leaves_behind", params={"file": str(file)})
    async with service(judge, timeout_s=TIMEOUT_S) as rewards:
        try:
            scoring = asyncio.create_task(rewards.score(batch_of(["hang"])))
            await until(lambda: file.exists() and file.read_text() != "")
            pass_time(TIMEOUT_S)
            async with asyncio.timeout(120):
                scored, _ = await scoring
        finally:
            os.kill(int(file.read_text()), signal.SIGKILL)
    assert scored["reward_status"].to_pylist() == ["timeout"]


PARENT = """
import asyncio, sys
from actors.reward_service.service import RewardService
from cluster.contracts.config import RewardConfig
from cluster.contracts.plugins import Plugin
from tests.unit.actors.batches import batch_of

judge = Plugin(name="tests.unit.actors.judges:leaves_behind", params={"file": sys.argv[1]})
asyncio.run(RewardService(RewardConfig(judge=judge)).score(batch_of(["stay"])))
"""


async def test_nothing_outlives_a_service_that_is_killed(tmp_path):
    """Not the judge, which hangs, and not what it started."""
    file = tmp_path / "pid"
    search = os.pathsep.join(path for path in sys.path if path)
    parent = subprocess.Popen([sys.executable, "-c", PARENT, str(file)], env={**os.environ, "PYTHONPATH": search})
    try:
        await until(lambda: file.exists() and file.read_text() != "")
        below = [child.pid for child in psutil.Process(parent.pid).children(recursive=True)]
        assert int(file.read_text()) in below and len(below) >= 2
    finally:
        parent.send_signal(signal.SIGKILL)
        parent.wait()
    await until(lambda: all(map(is_gone, below)))


async def test_where_the_machine_has_no_room_for_a_second_process_the_first_goes_on(monkeypatch):
    monkeypatch.setattr(judging, "num_cpus", lambda: 2)
    monkeypatch.setattr(judging, "_PATIENCE_S", 0.0)
    num_tries = 0
    async with service(f"{JUDGES}:slow") as rewards:
        await rewards.warm_up()

        async def no_room(*_: Any, **__: Any) -> None:
            nonlocal num_tries
            num_tries += 1
            raise BlockingIOError(11, "Resource temporarily unavailable")

        monkeypatch.setattr("asyncio.create_subprocess_exec", no_room)
        answers = await asyncio.gather(*(rewards.score(batch_of(["x"])) for _ in range(3)))
    assert [each["reward"].to_pylist() for each, _ in answers] == [[1.0]] * 3
    assert num_tries == 1


async def test_a_fast_judge_keeps_its_one_process(monkeypatch):
    monkeypatch.setattr(judging, "num_cpus", lambda: 4)
    monkeypatch.setattr(judging, "_PATIENCE_S", 600.0)
    async with service(SYNC) as rewards:
        pids = await asyncio.gather(*(pid_of_judge(rewards) for _ in range(8)))
        assert len({*pids, await pid_of_judge(rewards)}) == 1


async def test_a_judge_is_there_before_its_first_batch():
    async with service(SYNC) as rewards:
        await rewards.warm_up()
        ((process,),) = (judging._under_way for judging in rewards._judges.values())
        assert await pid_of_judge(rewards) == process._process._process.pid


async def test_no_more_rewards_are_judged_at_a_time_than_allowed():
    async with service("tests.unit.actors.judges:in_pairs", max_concurrency=2) as rewards:
        scored, _ = await rewards.score(batch_of(["x"] * 6))
    assert scored["reward"].to_pylist() == [2.0] * 6


async def test_progress_says_how_much_was_judged():
    async with service(ASYNC) as rewards:
        await rewards.score(batch_of(["good", "good"]))
        assert rewards.progress().detail == "0 trajectories waiting, 2 judged"
        assert rewards.progress().phase == "idle"


async def test_a_batch_that_breaks_the_schema_is_refused():
    async with service(ASYNC) as rewards:
        with pytest.raises(DataError, match="worker"):
            await rewards.score(batch_of(["good"]).drop_columns(["worker"]))


async def test_several_groups_in_a_call_are_judged_side_by_side_and_neither_a_slow_nor_a_broken_one_keeps_the_others():
    """The second waits until a later call is answered; the third breaks the schema."""
    good, slow, broken = batch_of(["good"]), batch_of(["wait"]), batch_of(["good"]).drop_columns(["worker"])
    async with service("tests.unit.actors.judges:until_told", timeout_s=60) as rewards:
        judged = dict(await rewards.score_several([(each, ()) for each in (7, 8, 9)], good, slow, broken))
        while len(judged) < 2:
            judged |= await rewards.score_several([])
        assert sorted(judged) == [7, 9]
        judged |= await rewards.score_several([(10, ())], batch_of(["tell"]))
        while len(judged) < 4:
            judged |= await rewards.score_several([])
    assert isinstance(judged[9], DataError) and "missing ['worker']" in str(judged[9])
    for number in (7, 8, 10):
        columns, said = judged[number]
        assert columns["reward"].to_pylist() == [1.0] == list(said["rewards"])
        assert (said["num_reward_timeouts"], said["part_stats"][""].num_failed) == (0, 0)


@pytest.mark.parametrize(
    ("judge", "message"),
    [
        (
            Plugin(name="no_such_reward"),
            r"reward.judge='no_such_reward' is not there; actors.rewards has: .*exact_match",
        ),
        (Plugin(name="exact_match", params={"colum": "x"}), r"reward.judge.colum='x' is not a parameter.*column"),
        (Plugin(name="regex"), r"reward.judge='regex' needs pattern"),
    ],
)
async def test_a_judge_that_cannot_work_is_refused_before_its_first_batch(judge, message):
    with pytest.raises(ConfigError, match=message):
        await RewardService(RewardConfig(judge=judge)).warm_up()


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


async def test_what_is_judged_chosen_and_scored_by_the_reference_is_joined_to_a_group_that_its_summary_describes(
    shared,
):
    sampled = batch_of(["good", "raise", "parts"])
    rewards = shared[SYNC]
    judged, told = await rewards.score(sampled)
    group = Group(pieces=(sampled,), summary=summarize(sampled)).with_columns(judged, told).of([0, 2])
    columns, (of_columns,) = ReferenceScorer(model=Fixed()).score(*group.pieces)
    group = group.with_columns(columns, of_columns)
    (whole,) = map(validate, joined(group.pieces))
    assert whole["reward"].to_pylist() == [1.0, 0.5] and whole["reference_logprobs"].to_pylist() == [[-1.0], [-1.0] * 3]
    told = replace(group.summary, size_bytes=whole.nbytes, part_stats={}, is_chosen=False)
    assert told == summarize(whole)
    assert group.summary.size_bytes == sampled.nbytes + judged.nbytes + columns.nbytes, (
        "of the whole, which stays there"
    )


async def test_a_judge_that_cannot_be_built_a_second_time_goes_on_in_its_first_process(monkeypatch, tmp_path):
    monkeypatch.setattr(judging, "num_cpus", lambda: 2)
    monkeypatch.setattr(judging, "_PATIENCE_S", 0.0)
    judge = Plugin(name="tests.unit.actors.judges:BuiltOnce", params={"marker": str(tmp_path / "built")})
    rewards = RewardService(RewardConfig(judge=judge))
    try:
        answers = await asyncio.gather(*(rewards.score(batch_of(["x"] * 2)) for _ in range(2)))
        assert [each["reward"].to_pylist() for each, _ in answers] == [[1.0, 1.0]] * 2
        await rewards.score(batch_of(["exit"]))
        with pytest.raises(WorkerError, match=r"no process of reward.judge is up, and none starts: .*FileExistsError"):
            await rewards.score(batch_of(["x"]))
    finally:
        await rewards.close()


async def test_nonsense_for_an_answer_is_a_failed_reward_and_ends_the_process():
    async with service("tests.unit.actors.judges:talkative", timeout_s=60) as rewards:
        scored, _ = await rewards.score(batch_of(["nonsense"]))
        assert scored["reward_message"][0].as_py().startswith("DataError: the judge's answer cannot be read: ")
        assert (await rewards.score(batch_of(["good"])))[0]["reward"].to_pylist() == [1.0]


async def test_a_process_whose_first_answer_cannot_be_read_ends():
    before = psutil.Process().children()
    with pytest.raises(
        WorkerError, match=r"the first answer of the process of reward\.judge='.*:undeclared' is unreadable: .*\nkeeps_"
    ):
        await RewardService(RewardConfig(judge=Plugin(name=f"{JUDGES}:undeclared"))).warm_up()
    assert [child for child in psutil.Process().children() if child not in before] == []


async def test_the_judges_that_started_end_when_another_one_does_not(monkeypatch):
    started, start = [], judging.Judging.start

    async def starting(*of, **more):
        started.append(await start(*of, **more))
        return started[-1]

    monkeypatch.setattr(judging.Judging, "start", starting)
    parts = {"bad": {"judge": "no_such_judge"}, "good": {"judge": SYNC}}
    with pytest.raises(ConfigError, match="no_such_judge"):
        await RewardService(RewardConfig.model_validate({"parts": parts})).warm_up()
    assert [process.is_alive for each in started for process in each._under_way] == [False]


async def test_the_services_of_a_run_share_the_cores(monkeypatch):
    monkeypatch.setattr(judging, "num_cpus", lambda: 8)
    for num_services, num_processes in ((1, 8), (4, 2), (16, 1)):
        config = RewardConfig(judge=Plugin(name=SYNC), num_services=num_services)
        fake: Any = Endpoint(is_async=False)
        assert judging.Judging(parts_of(config)[0], config, fake)._max_processes == num_processes


@pytest.mark.parametrize("judge", ["away_while", "away_while_async", "group_away_while"])
async def test_what_is_judged_while_a_server_is_away_waits_for_it_and_no_deadline_runs(judge, tmp_path, monkeypatch):
    """An outage of two deadlines. A sync judge's process is free meanwhile: it is the one that judges afterwards."""
    monkeypatch.setattr("actors.reward_service.breaker._FIRST_PAUSE_S", 0.1)
    server = tmp_path / "away"
    server.touch()
    parts = {"style": RewardPart(judge=Plugin(name=f"tests.unit.actors.judges:{judge}", params={"file": str(server)}))}
    rewards = RewardService(RewardConfig(parts=parts, timeout_s=TIMEOUT_S, hold_s=9 * TIMEOUT_S))
    try:
        await rewards.warm_up()
        ((process,),) = (judging._under_way for judging in rewards._judges.values())
        scoring = asyncio.create_task(rewards.score(batch_of(["a", "bb", "ccc"])))
        # Not while the probe is under way, whose deadline runs.
        await until(lambda: rewards.progress().phase == "holding" and not process._waiting)
        pass_time(2 * TIMEOUT_S)
        for _ in range(20):
            await asyncio.sleep(0.01)
        told = rewards.progress()
        assert told.detail == "3 trajectories waiting, 0 judged, style waits for http://judge:8000"
        assert [(hold.part, hold.reason) for hold in told.holds] == [("style", "connection refused")]
        assert not scoring.done()
        server.unlink()
        assert (await scoring)[0]["reward"].to_pylist() == [1.0, 2.0, 3.0]
        assert rewards.progress().phase == "idle"
    finally:
        await rewards.close()
    assert sorted((tmp_path / "away.asked").read_text().split()) == ["a", "bb", "ccc"], "each is asked once"


async def test_groups_that_wait_for_a_server_ask_where_it_comes_up(monkeypatch):
    monkeypatch.setattr("actors.reward_service.breaker._FIRST_PAUSE_S", 0.1)
    rewards = RewardService(RewardConfig(judge="tests.unit.actors.judges:asks_the_new_server", hold_s=600))
    try:
        await rewards.note_servers({"grader": ["http://old"]})
        scoring = asyncio.create_task(rewards.score(batch_of(["x"])))
        await until(lambda: rewards.progress().phase == "holding")
        assert rewards.progress().detail.endswith("waits for http://old")
        await rewards.note_servers({"grader": ["http://new"]})
        assert (await scoring)[0]["reward"].to_pylist() == [1.0]
    finally:
        await rewards.close()


async def test_what_a_judge_prints_goes_on_to_the_log_and_its_last_lines_to_the_driver(capfd):
    async with service(f"{JUDGES}:printing") as rewards:
        await rewards.score(batch_of(["2"]))
        await rewards.score(batch_of(["7"]))
        await rewards.close()
        # The pipe ends with its last holder: for a moment that is any process that another thread has forked.
        await until(lambda: rewards.progress().printed.num_lines == 10)
        printed = rewards.progress().printed
    assert printed.lines == ("line 3", "line 4", "line 5", "line 6", "half")
    assert capfd.readouterr().err.splitlines()[:3] == ["line 0", "line 1", "halfline 0"]
