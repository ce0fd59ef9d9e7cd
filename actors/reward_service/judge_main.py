"""A process that runs one judge: JSON lines in, JSON lines out.

A hanging process can be killed, a hanging thread cannot. The process imports the judge by name: no code travels, nothing is pickled.

In, first line: the judge's name and parameters, the setting that names it, and its limits. Then one line a request: `{"shared": JSON of
the arguments of all calls, "calls": [[number, size, given], ...]}`, where size is the number of trajectories of a call.
Out, first line: its `JudgeFacts`, or `{"refused": why}`. Then one line a call, as soon as it is judged: [number, a list of [value, status,
components, message] or null, whether the process ran out of memory]. If the judge's server is away, `{"away": why, "endpoint": ...}`
replaces the list, and a synchronous judge skips the rest of the request.
"""

import asyncio
import contextlib
import contextvars
import json
import os
from collections.abc import Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TextIO

from actors.processes.confinement import limit_cpu, limit_resources
from actors.processes.inside import begin, say
from actors.returned import MAX_MESSAGE
from actors.reward_service.deadline import verdict_within
from actors.reward_service.judgement import FACTS, Judge, Judged, failed, find_judge, judge_async, judge_now, timed_out
from cluster.contracts.errors import ConfigError, UnavailableError, headline
from cluster.contracts.plugins import Plugin


def main() -> None:
    requests, answers, brief = begin()
    limit_resources(max_memory_bytes=brief["max_memory_bytes"])
    try:
        judge = find_judge(Plugin.model_validate(brief["judge"]), field=f"{brief['setting']}.judge")
    except ConfigError as error:
        say(answers, {"refused": str(error)})
        return
    say(answers, FACTS.dump_python(judge, mode="json"))
    if judge.is_async:
        asyncio.run(_serve_in_loop(judge, requests, answers, brief))
    else:
        # One event loop for all calls: a client or semaphore of the judge's module belongs to the loop of its first use.
        with contextlib.closing(asyncio.Runner()) as runner:
            _serve_in_turn(judge, requests, answers, runner, timeout_s=brief["timeout_s"])


def _serve_in_turn(
    judge: Judge, requests: TextIO, answers: TextIO, runner: asyncio.Runner, *, timeout_s: float
) -> None:
    own_pid = os.getpid()

    def run(coroutine: Coroutine[Any, Any, Any]) -> Any:
        # A context of its own: the runner's is that of the first call, with its deadline.
        return runner.run(coroutine, context=contextvars.copy_context())

    for line in requests:
        request = json.loads(line)
        for number, size, given in request["calls"]:
            limit_cpu(deadline_s=timeout_s)
            is_spent = False
            try:
                # Parsed anew for each call, so that a judge may change its columns.
                with verdict_within(timeout_s):
                    judged = judge_now(judge, json.loads(request["shared"]) | given, size=size, run=run)
            except (MemoryError, asyncio.CancelledError) as error:
                judged, is_spent = [failed(error)] * size, isinstance(error, MemoryError)
            except UnavailableError as error:
                judged = error
            # A forked child of the judge returned here: only the parent answers.
            if os.getpid() != own_pid:
                os._exit(0)
            # One line a call: the service sees which call hangs, and keeps the verdicts before it.
            _answer(answers, number, judged, is_spent=is_spent)
            if isinstance(judged, UnavailableError):
                break


async def _serve_in_loop(judge: Judge, requests: TextIO, answers: TextIO, brief: dict[str, Any]) -> None:
    async def serve(shared: str, number: int, size: int, given: dict[str, Any]) -> None:
        is_spent = False
        # The judge's own TimeoutError is an error and stays inside judge_async: one that comes out is our deadline.
        try:
            with verdict_within(brief["timeout_s"]):
                async with asyncio.timeout(brief["timeout_s"]):
                    judged = await judge_async(judge, json.loads(shared) | given, size=size)
        except TimeoutError:
            judged = [timed_out(brief["timeout_s"], setting=f"{brief['setting']}.timeout_s")] * size
        except MemoryError as error:
            judged, is_spent = [failed(error)] * size, True
        except UnavailableError as error:
            judged = error
        except asyncio.CancelledError as error:
            # The judge awaited a task of its own that was cancelled. If our own task is cancelled, no answer is needed.
            if (task := asyncio.current_task()) and task.cancelling():
                raise
            judged = [failed(error)] * size
        _answer(answers, number, judged, is_spent=is_spent)

    # The judge may fill the event loop's own threads: a request that is not read has no deadline here, and the parent's ends this process.
    with ThreadPoolExecutor(1, thread_name_prefix="requests") as reading:
        loop = asyncio.get_running_loop()
        async with asyncio.TaskGroup() as tasks:
            while line := await loop.run_in_executor(reading, requests.readline):
                request = json.loads(line)
                for call in request["calls"]:
                    tasks.create_task(serve(request["shared"], *call))


def _answer(answers: TextIO, number: int, judged: Judged | UnavailableError, *, is_spent: bool) -> None:
    if isinstance(judged, UnavailableError):
        facts = {"endpoint": judged.endpoint, "retry_after_s": judged.retry_after_s}
        said: Any = {"away": headline(judged)[:MAX_MESSAGE], **facts}
    else:
        said = judged and [[each.value, each.status, each.components, each.message] for each in judged]
    say(answers, [number, said, is_spent])


if __name__ == "__main__":
    main()
