"""The loop of a judge's process, on pipes of its own."""

import asyncio
import json
import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any, TextIO

import pytest

from actors.reward_service.judge_main import _serve_in_loop
from actors.reward_service.judgement import Judge

JUDGES = """
from actors.reward_service.deadline import remaining_s
from cluster.contracts.errors import UnavailableError
def pops(*, completion, columns):
    return float(len(columns.pop("answer", "")))
def left(*, completion):
    return round(remaining_s())
async def left_async(*, completion):
    return round(remaining_s())
def unavailable_once(*, completion):
    if completion == "a":
        raise UnavailableError("no answer", endpoint="here")
    return 1.0
"""


@pytest.mark.parametrize(
    ("judge", "answers"),
    [
        ("pops", [(0, 3.0), (1, 3.0)]),  # columns of its own
        ("left", [(0, 60.0), (1, 60.0)]),  # its deadline
        ("left_async", [(0, 60.0), (1, 60.0)]),
        ("unavailable_once", [(0, None)]),  # the parent asks for the rest again
    ],
)
def test_each_call_of_a_request_has_columns_and_a_deadline_of_its_own(
    tmp_path: Path, judge: str, answers: list[tuple[int, float | None]]
):
    (tmp_path / "scripted_judges.py").write_text(JUDGES)
    how = {"setting": "reward", "timeout_s": 60.0, "max_memory_bytes": 4 * 2**30}
    calls = [[0, 1, {"completion": "a"}], [1, 1, {"completion": "b"}]]
    request = {"shared": json.dumps({"columns": {"answer": "xyz"}} if judge == "pops" else {}), "calls": calls}
    ended = subprocess.run(
        [sys.executable, "-P", "-m", "actors.reward_service.judge_main"],
        input=f"{json.dumps({'judge': {'name': f'scripted_judges:{judge}'}, **how})}\n{json.dumps(request)}\n",
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [str(tmp_path), *sys.path]))},
        start_new_session=True,  # at its end it kills its group
    )
    _facts, *lines = ended.stdout.splitlines()
    assert [_reward(json.loads(line)) for line in lines] == answers


def _reward(answer: list[Any]) -> tuple[int, float | None]:
    number, judged, *_ = answer
    return number, judged[0][0] if isinstance(judged, list) else None


async def test_calls_that_block_all_threads_of_the_loop_leave_those_beside_them_read_and_judged():
    """Seen in review: the next request was not read, and when the parent's deadline passed, all calls of the process were errors."""
    has_begun, may_end = threading.Event(), threading.Event()

    def block() -> float:
        has_begun.set()
        assert may_end.wait(60)
        return 1.0

    async def call(*, completion: str) -> float:
        return await asyncio.to_thread(block) if completion == "blocks" else 0.5

    judge = Judge(
        asks=frozenset({"completion"}), is_of_groups=False, is_async=True, keeps_verdicts=False, digest="", call=call
    )
    loop = asyncio.get_running_loop()
    with ExitStack() as ended:
        threads, own = (ended.enter_context(ThreadPoolExecutor(1)) for _ in range(2))
        (requests, to_judge), (from_judge, answers) = (tuple(map(ended.enter_context, _pipe())) for _ in range(2))
        ended.callback(may_end.set)
        loop.set_default_executor(threads)

        def request(*calls: tuple[int, str]) -> None:
            numbered = [[number, 1, {"completion": completion}] for number, completion in calls]
            print(json.dumps({"shared": "{}", "calls": numbered}), file=to_judge, flush=True)

        async def answer() -> tuple[int, float | None]:
            number, verdicts, _ = json.loads(await loop.run_in_executor(own, from_judge.readline))
            return number, verdicts[0][0]

        brief = {"timeout_s": 50.0, "setting": "reward"}
        serving = asyncio.create_task(_serve_in_loop(judge, requests, answers, brief))
        request((0, "blocks"), (1, "blocks"))
        request((2, "fast"))
        assert await answer() == (2, 0.5)
        await loop.run_in_executor(own, has_begun.wait)
        request((3, "fast"))
        assert await answer() == (3, 0.5)
        may_end.set()
        assert sorted([await answer(), await answer()]) == [(0, 1.0), (1, 1.0)]
        to_judge.close()
        await serving


def _pipe() -> tuple[TextIO, TextIO]:
    """Its end to read from, and its end to write to."""
    read, write = os.pipe()
    return os.fdopen(read), os.fdopen(write, "w")
