"""A process that runs one judge: JSON lines in, JSON lines out.

A thread that hangs cannot be ended, a process can. It resolves the judge by name itself, so no code travels and nothing is pickled.

In, first line: the judge's name, its parameters and its limits. Then one line a request, a list of [number, prompt, completion, columns].
Out: `{"ready": true, "is_async": ...}` or `{"refused": why}`; then one line a row, as soon as it is judged: [number, value, status,
components, message].
"""

import asyncio
import ctypes
import json
import os
import signal
import sys
from collections.abc import Awaitable, Callable
from typing import Any, TextIO

from actors.reward_service.confinement import allow_cpu_s, limit_resources
from actors.reward_service.judgement import find_judge, is_async, judge_async, judge_now, timed_out
from cluster.contracts.config import RewardConfig
from cluster.contracts.errors import ConfigError
from cluster.contracts.types import Reward

_CPU_SHARE = 4
"""Processor seconds that a synchronous judge may use for each second of its deadline: it may compute in threads."""


def main() -> None:
    _die_with_parent()
    requests, answers = _own_pipes()
    config = RewardConfig.model_validate_json(requests.readline())
    limit_resources(max_memory_bytes=config.max_memory_bytes)
    try:
        judge = find_judge(config.judge)
    except ConfigError as error:
        _say(answers, {"refused": str(error)})
        return
    _say(answers, {"ready": True, "is_async": is_async(judge)})
    if is_async(judge):
        asyncio.run(_serve_in_loop(judge, requests, answers, timeout_s=config.timeout_s))
    else:
        _serve_in_turn(judge, requests, answers, timeout_s=config.timeout_s)


def _serve_in_turn(judge: Callable[..., Any], requests: TextIO, answers: TextIO, *, timeout_s: float) -> None:
    for line in requests:
        for number, prompt, completion, columns in json.loads(line):
            allow_cpu_s(_CPU_SHARE * timeout_s + 1)
            # Row by row: the service sees which row hangs, and keeps what was judged before it.
            _answer(answers, number, judge_now(judge, prompt=prompt, completion=completion, columns=columns))


async def _serve_in_loop(
    judge: Callable[..., Awaitable[Any]], requests: TextIO, answers: TextIO, *, timeout_s: float
) -> None:
    async def serve(number: int, prompt: str, completion: str, columns: dict[str, Any]) -> None:
        # The judge's own TimeoutError is an error and stays inside judge_async: one that comes out is our deadline.
        try:
            async with asyncio.timeout(timeout_s):
                reward = await judge_async(judge, prompt=prompt, completion=completion, columns=columns)
        except TimeoutError:
            reward = timed_out(timeout_s)
        _answer(answers, number, reward)

    async with asyncio.TaskGroup() as tasks:
        while line := await asyncio.to_thread(requests.readline):
            for row in json.loads(line):
                tasks.create_task(serve(*row))


def _answer(answers: TextIO, number: int, reward: Reward) -> None:
    _say(answers, [number, reward.value, reward.status, reward.components, reward.message])


def _say(answers: TextIO, message: Any) -> None:
    answers.write(json.dumps(message) + "\n")
    answers.flush()


def _own_pipes() -> tuple[TextIO, TextIO]:
    """The pipes to and from the service. What a judge or its children print goes to stderr, and they find nothing to read."""
    requests, answers = os.fdopen(os.dup(0)), os.fdopen(os.dup(1), "w")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    return requests, answers


def _die_with_parent() -> None:
    """A hanging judge does not notice that its pipe closed: without this it would outlive a killed service (Linux only)."""
    if sys.platform == "linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)


if __name__ == "__main__":
    main()
