"""Judges that misbehave in each way a user's can; the reward service finds them by import path."""

import asyncio
import contextlib
import os
import resource
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cluster.contracts.errors import UnavailableError
from tests.unit.actors.clock import pass_time

TIMEOUT_S = 3600.0
"""A deadline that no slow machine misses: it passes when a clock is moved on."""


class UnspeakableError(Exception):
    def __str__(self) -> str:
        raise ValueError("no words")


def obedient(*, prompt: str, completion: str, columns: Mapping[str, Any]) -> Any:
    """Does what the completion says."""
    print("a judge may print")
    match completion:
        case "allocate":
            return len(bytearray(2**31))
        case "core limit":
            return resource.getrlimit(resource.RLIMIT_CORE)[0]
        case "cpu limit":
            return resource.getrlimit(resource.RLIMIT_CPU)[0]
        case "file limit":
            return resource.getrlimit(resource.RLIMIT_FSIZE)[0]
        case "hang":
            note_begun(columns)
            threading.Event().wait()
        case "wait":
            note_begun(columns)
            while not Path(columns["go_on"]).exists():
                time.sleep(0.01)
            Path(columns["go_on"]).unlink()
        case "exit":
            os._exit(3)
        case "raise":
            raise ValueError("no opinion")
        case "raise the unspeakable":
            raise UnspeakableError
        case "child leaves":
            if not (child := os.fork()):
                sys.exit(3)
            return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        case "leave":
            sys.exit("usage: judge FILE")
        case "nan":
            return float("nan")
        case "raise half":
            raise ValueError("no city \ud83d")
        case "half a name":
            return {"reward": 0.5, "\ud83d": 1}
        case "text":
            return "1.0"
        case "parts":
            return {"reward": 0.5, "format": 1, "length": 0.25}
        case "talk":
            return {"reward": 1.0, "x" * 2**21: 1.0}
        case "pid":
            return float(os.getpid())
    if completion.startswith("env "):
        return float(completion.removeprefix("env ") in os.environ)
    return 1.0


def note_begun(columns: Mapping[str, Any]) -> bool:
    """Makes the file that the column names, if there is one."""
    if "begun" in columns:
        Path(columns["begun"]).touch()
    return "begun" in columns


async def obedient_async(*, prompt: str, completion: str, columns: Mapping[str, Any]) -> Any:
    if completion == "hang":
        if note_begun(columns):
            pass_time(TIMEOUT_S)
        await asyncio.Event().wait()
    if completion == "slow":
        await asyncio.sleep(0.5)
    if completion == "block":
        note_begun(columns)
        threading.Event().wait()
    if completion == "timeout error":
        raise TimeoutError("the remote server is slow")
    return obedient(prompt=prompt, completion=completion, columns=columns)


class Pairs:
    running = 0
    meeting = asyncio.Barrier(2)


async def uncaught(*, prompt: str, completion: str, columns: Mapping[str, Any]) -> float:
    """Lets out that a task of its own was cancelled."""
    if completion == "leak":
        task = asyncio.ensure_future(asyncio.sleep(9))
        task.cancel()
        await task
    return 1.0


def uncaught_adapted(*, prompt: str, completion: str, columns: Mapping[str, Any]) -> Any:
    return uncaught(prompt=prompt, completion=completion, columns=columns)


async def in_pairs(*, prompt: str, completion: str, columns: Mapping[str, Any]) -> float:
    """Judges when two judgements run, and returns how many do."""
    Pairs.running += 1
    await Pairs.meeting.wait()
    num_running = Pairs.running
    await Pairs.meeting.wait()
    Pairs.running -= 1
    return float(num_running)


class Told:
    event = asyncio.Event()


async def until_told(*, completion: str) -> float:
    """Its answer to `wait` comes after one to `tell`."""
    if completion == "tell":
        Told.event.set()
    if completion == "wait":
        await Told.event.wait()
    return 1.0


def leaves_behind(*, completion: str, file: str) -> float:
    """A process, whose pid goes to the file: in its session for `exit` and `stay`, in one of its own for `hang`."""
    if (child := os.fork()) == 0:
        if completion == "hang":
            os.setsid()
        time.sleep(600)
        os._exit(0)
    while completion == "hang" and os.getsid(child) != child:
        time.sleep(0.01)
    Path(file).write_text(str(child))
    if completion == "exit":
        os._exit(3)
    threading.Event().wait()
    return 1.0


class BuiltOnce:
    """As a model that fills the GPU, or whose server went away."""

    def __init__(self, *, marker: str) -> None:
        with open(marker, "x"):
            pass

    def __call__(self, *, completion: str) -> float:
        if completion == "exit":
            os._exit(3)
        time.sleep(0.1)
        return 1.0


def slow(*, completion: str) -> float:
    time.sleep(0.1)
    return 1.0


def talkative(*, completion: str) -> float:
    """Writes nonsense to every pipe that it finds open, that of the answers among them."""
    for fd in range(3, 64) if completion == "nonsense" else ():
        with contextlib.suppress(OSError):
            if stat.S_ISFIFO(os.fstat(fd).st_mode):
                os.write(fd, b"5\n")
    return 1.0


def undeclared(*, completion: str) -> float:
    """Says of itself what cannot be said."""
    return 1.0


undeclared.keeps_verdicts = "mostly"  # pyright: ignore[reportFunctionMemberAccess]


def printing(*, completion: str) -> float:
    """As many lines as its completion says, then half a line that its child prints."""
    for number in range(int(completion)):
        print(f"line {number}")
    subprocess.run(["printf", "half"], check=True)
    return 1.0


def compares(*, completions: list[str], all_token_ids: list[list[int]]) -> list[float]:
    """As good as its completion is short among four."""
    if len(completions) < 4:
        raise ValueError("nothing to compare")
    return [1 / len(ids) for ids in all_token_ids]


def mistyped(*, prompt: str, completion: str, columns: Mapping[str, Any]) -> float:
    return float(columns["anser"] == completion)


def verbose(*, prompt: str, completion: str, columns: Mapping[str, Any]) -> Any:
    return "quite good"


def undecided(*, prompt: str, completion: str, columns: Mapping[str, Any]) -> float:
    return float("nan")


def hanging(*, prompt: str, completion: str, columns: Mapping[str, Any]) -> float:
    threading.Event().wait()
    return 1.0


LEAKED: list[bytearray] = []


def leaking(*, completion: str) -> float:
    """Keeps 200 MB of each call that says so."""
    if completion == "leak":
        LEAKED.append(bytearray(200 * 2**20))
    else:
        bytearray(100 * 2**20)
    return 1.0


def after_others(*, completion: str, rewards: Mapping[str, Any]) -> float:
    return sum(rewards.values())


def away_while(*, completion: str, file: str) -> float:
    """Its server is away as long as there is `file`; adds a line to `file`.asked each time that it is not."""
    if Path(file).exists():
        raise UnavailableError("connection refused", endpoint="http://judge:8000")
    with open(f"{file}.asked", "a") as asked:
        asked.write(f"{completion}\n")
    return float(len(completion))


async def away_while_async(*, completion: str, file: str) -> float:
    return away_while(completion=completion, file=file)


def group_away_while(*, completions: list[str], file: str) -> list[float]:
    return [away_while(completion=completion, file=file) for completion in completions]


async def asks_the_new_server(*, completion: str, servers: Mapping[str, Any]) -> float:
    if servers["grader"] != ["http://new"]:
        raise UnavailableError("connection refused", endpoint=servers["grader"][0])
    return 1.0


def counts_messages(messages: list[dict[str, str]]) -> float:
    return float(len(messages))


def first_message(messages: list[dict[str, str]]) -> float:
    return float(messages[0]["content"] == "good")
