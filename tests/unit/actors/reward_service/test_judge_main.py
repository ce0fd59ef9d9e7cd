"""The loop of a judge's process, on pipes of its own."""

import asyncio
import json
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import TextIO

from actors.reward_service.judge_main import _serve_in_loop
from actors.reward_service.judgement import Judge


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
