"""Environments for tests, good ones and ones that misbehave; host processes find them by import path."""

import ast
import asyncio
import contextlib
import operator
import os
import re
import resource
import signal
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

from cluster.contracts.episodes import BlockingEpisode, Episode
from cluster.contracts.errors import EpisodeOver, ToolError
from cluster.contracts.tools import tool
from cluster.contracts.types import Reward, RewardStatus
from tests.unit.actors.judges import UnspeakableError

_OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul}


def first_int(text: str) -> int | None:
    found = re.search(r"-?\d+", text)
    return int(found.group()) if found else None


def arithmetic(expression: str) -> int:
    def value(node: Any) -> int:
        match node:
            case ast.Constant(int(number)):
                return number
            case ast.BinOp(left, kind, right) if type(kind) in _OPERATORS:
                return _OPERATORS[type(kind)](value(left), value(right))
        raise ToolError(f"{ast.unparse(node)!r} is no arithmetic")

    return value(ast.parse(expression, mode="eval").body)


async def guess(episode: Episode, *, top: int = 20):
    secret = Random(episode.seed).randint(1, top)
    answer = None
    for turn in range(6):
        said = await episode.ask(answer)
        if (number := first_int(said.text)) == secret:
            return 1.0 - 0.1 * turn
        answer = "?" if number is None else "higher" if number < secret else "lower"
    return 0.0


def guess_blocking(episode: BlockingEpisode, *, top: int = 20):
    secret = Random(episode.seed).randint(1, top)
    answer = None
    for turn in range(6):
        said = episode.ask(answer)
        if (number := first_int(said.text)) == secret:
            return 1.0 - 0.1 * turn
        answer = "?" if number is None else "higher" if number < secret else "lower"
    return 0.0


@tool(timeout_s=60)
def calculate(expression: str) -> str:
    """Value of an arithmetic expression."""
    return str(arithmetic(expression))


async def with_calculator(episode: Episode):
    said = await episode.ask(tools=[calculate])
    episode.log("calls", said.num_calls)
    return float(first_int(said.text) == episode.columns["answer"])


class Search:
    """A session, whose methods are tools."""

    def __init__(self) -> None:
        self.queries: list[str] = []

    @tool
    async def search(self, query: str) -> dict[str, Any]:
        """Pages on a subject."""
        self.queries.append(query)
        return {"query": query, "number": len(self.queries)}

    def undo(self) -> str:
        """Takes the last search back."""
        return self.queries.pop()


async def with_session(episode: Episode):
    session = Search()
    await episode.ask(tools=[session.search, session.undo])
    return float(len(session.queries))


async def with_all_events(episode: Episode):
    await episode.ask()
    episode.earn(0.5, "first")
    episode.log("note", "remember 7")
    episode.rewrite([*episode.messages, {"role": "user", "content": "The note says 7."}])
    await episode.ask()
    episode.earn(0.25)
    await episode.ask("And?", max_tokens=3, stop=["\n"])
    episode.log("last", True)


async def tells_turns(episode: Episode):
    said = await episode.ask()
    said = await episode.ask(f"{said.ending!r}, {said.finish_reason}, {said.num_tokens}, {said.num_context_tokens}")
    await episode.ask(f"{said.ending!r}, {said.finish_reason}, {said.num_tokens}, {episode.num_context_tokens}")


async def tells_facts(episode: Episode):
    before = episode.num_turns, episode.num_context_tokens
    await episode.ask("Well?")
    after = episode.num_turns, episode.num_context_tokens
    facts = [episode.id, episode.prompt, [*episode.messages], episode.columns, episode.seed, episode.index]
    episode.log("facts", repr([*facts, before, after]))


@tool(timeout_s=0.2)
async def slow() -> str:
    """Takes forever."""
    await asyncio.Event().wait()
    return "never"


@tool(timeout_s=0.2)
def slow_blocking() -> str:
    """Takes forever, and holds its thread."""
    threading.Event().wait()
    return "never"


@tool
def broken() -> str:
    """Has a mistake."""
    raise KeyError("page")


@tool
def exits() -> str:
    """Wants to end the process."""
    sys.exit(3)


@tool
def stops() -> str:
    """Raises what a future does not take."""
    raise StopIteration("end")


@tool
async def leaks() -> str:
    """Lets out that a task of its own was cancelled."""
    inner = asyncio.ensure_future(asyncio.sleep(9))
    inner.cancel()
    await inner
    return "never"


@tool
def unspeakable() -> object:
    """Returns what is no JSON."""
    return object()


@tool
def where() -> str:
    """The thread that it runs in."""
    return threading.current_thread().name


@tool(timeout_s=0.2, on_error="tell")
async def slow_and_tells() -> str:
    """Takes forever."""
    await asyncio.Event().wait()
    return "never"


@tool(on_error="tell")
def broken_and_tells() -> str:
    """Has a mistake."""
    raise KeyError("page")


TOOLS = [slow, slow_blocking, broken, exits, stops, leaks, unspeakable, where, slow_and_tells, broken_and_tells]


async def with_tools(episode: Episode):
    """Calls it a success, whatever its tools do."""
    with contextlib.suppress(Exception, asyncio.CancelledError):
        return float(len((await episode.ask(tools=TOOLS)).text))
    return 1.0


def with_tools_blocking(episode: BlockingEpisode):
    try:
        return float(len(episode.ask(tools=TOOLS).text))
    except Exception:  # noqa: BLE001 - as careless environments do
        return 1.0


RETURNED: dict[str, Any] = {
    "none": None,
    "number": 1,
    "dict": {"reward": 0.5, "format": 1},
    "reward": Reward(value=2.0, components={"style": 0.5}),
    "failed reward": Reward(value=None, status=RewardStatus.ERROR, message="the server is down"),
    "nan": float("nan"),
    "infinity": {"reward": float("-inf")},
    "text": "1.0",
    "list": [1.0],
    "no reward": {"style": 1.0},
    "object": object(),
    "much": {"reward": 1.0, "x" * 2**24: 1.0},
}


IMAGE = {"role": "user", "content": [{"type": "image", "url": "http://cat"}]}
REFUSED: dict[str, Callable[[Any], Any]] = {
    "earn nan": lambda episode: episode.earn(float("nan")),
    "earn text": lambda episode: episode.earn("1"),
    "log infinity": lambda episode: episode.log("loss", float("inf")),
    "rewrite with an image": lambda episode: episode.rewrite([IMAGE]),
    "ask with bytes": lambda episode: episode.ask({"role": "user", "content": "x", "name": b"y"}),
    "ask with half a character": lambda episode: episode.ask("\ud83d"),
    "ask without a role": lambda episode: episode.ask([{"content": "x"}]),
    "ask with two tools of one name": lambda episode: episode.ask("x", tools=[slow, slow]),
    "ask at length": lambda episode: episode.ask("x" * 2**24),
}


async def obedient(episode: Episode):
    """Does what the prompt's column `do` says."""
    do = episode.columns["do"]
    if do in RETURNED:
        return RETURNED[do]
    match do:
        case "pid":
            return float(os.getpid())
        case "earn first":
            episode.earn(1.0)
        case do if do in REFUSED:
            await episode.ask()
            if awaitable := REFUSED[do](episode):
                await awaitable
        case "hang":
            begin(episode.columns)
            await asyncio.Event().wait()
        case "block":
            begin(episode.columns)
            threading.Event().wait()
        case "ask for ever":
            while True:
                await episode.ask("More.")
        case "ask until over":
            with contextlib.suppress(EpisodeOver):
                while True:
                    await episode.ask("More.")
            return 0.5
        case "earn, then ask for ever":
            await episode.ask()
            episode.earn(0.25)
            while True:
                await episode.ask("More.")
        case "ask in a group for ever":
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(obedient_with(episode, "ask for ever"))
        case "ask twice at once":
            await asyncio.gather(episode.ask(), episode.ask())
        case "ask impatiently":
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(0.01):
                    await episode.ask()
            await episode.ask("Still there?")
        case "ask nothing":
            await episode.ask()
            await episode.ask()
        case "ask after its end":
            KEPT.append(episode)
        case "ask in an ended one":
            try:
                await KEPT[0].ask("More.")
            except RuntimeError as error:
                episode.log("refusal", str(error))
        case "leave a task":
            LEFT.append(asyncio.create_task(asyncio.Event().wait()))
            await asyncio.sleep(0)
        case "leave a task that swallows":
            LEFT.append(asyncio.create_task(swallow()))
            await asyncio.sleep(0)
        case "count tasks":
            return float(sum(not task.done() for task in LEFT))
        case "swallow":
            await swallow()
        case "clean up":
            try:
                await episode.ask()
            finally:
                await asyncio.sleep(0)
                Path(episode.columns["file"]).write_text("clean")
        case "clean up for ever":
            try:
                await episode.ask()
            finally:
                await asyncio.Event().wait()
        case "stop at the deadline":
            try:
                await episode.ask()
            except EpisodeOver as over:
                Path(episode.columns["file"]).write_text(over.limit)
                return 1.0
        case "fork":
            if os.fork() == 0:
                await asyncio.sleep(0)
            await episode.ask()
        case "raise a group":
            raise BaseExceptionGroup("several", [ValueError("one"), ValueError("two")])
        case _:
            await episode.ask()
            return misbehave(do, episode.columns)
    return 1.0


async def obedient_with(episode: Episode, do: str):
    while do == "ask for ever":
        await episode.ask("More.")


KEPT: list[Any] = []
LEFT: list[asyncio.Task[Any]] = []


def begin(columns: Any) -> None:
    """Tells the test that the misbehaviour begins now."""
    Path(columns["file"]).write_text("begun")


async def swallow() -> None:
    while True:
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.Event().wait()


def obedient_blocking(episode: BlockingEpisode):
    do = episode.columns["do"]
    if do in RETURNED:
        return RETURNED[do]
    match do:
        case "block":
            begin(episode.columns)
            threading.Event().wait()
        case "ask for ever":
            while True:
                episode.ask("More.")
        case "ask twice at once":
            threading.Thread(target=episode.ask).start()
            while not episode._is_free.locked():  # to take it here, for a moment, could refuse the other thread
                time.sleep(0.001)
            episode.ask()
        case "clean up":
            try:
                episode.ask()
            finally:
                Path(episode.columns["file"]).write_text("clean")
        case "fork":
            os.fork()
            episode.ask()
        case "fork and return":
            episode.ask()
            return 1.0 if os.fork() else 2.0
        case "pid":
            return float(os.getpid())
        case _:
            episode.ask()
            return misbehave(do, episode.columns)
    return 1.0


def misbehave(do: str, columns: Any) -> float:
    match do:
        case "raise":
            raise ValueError("no opinion")
        case "unspeakable":
            raise UnspeakableError
        case "system exit":
            raise SystemExit(3)
        case "keyboard interrupt":
            raise KeyboardInterrupt
        case "base exception":
            raise BaseException("bare")
        case "cancelled":
            raise asyncio.CancelledError("of its own")
        case "exit":
            os._exit(3)
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "allocate":
            return len(bytearray(2**31))
        case "close pipes":
            for fd in pipes():
                os.close(fd)
            threading.Event().wait()
        case "nonsense":
            for fd in pipes():
                with contextlib.suppress(OSError):
                    os.write(fd, b"5\n")
            threading.Event().wait()
        case "leave a process":
            child = subprocess.Popen(["sleep", "1000"])
            Path(columns["file"]).write_text(str(child.pid))
            threading.Event().wait()
        case "print":
            for _ in range(64):
                print("x" * 2**20)
        case "long message":
            return float("x" * 10**7)
        case "compute in C":
            begin(columns)
            re.match(r"(a+)+$", "a" * 64 + "b")
        case "environment":
            return float(columns["variable"] in os.environ)
        case "cpu limit":
            return float(resource.getrlimit(resource.RLIMIT_CPU)[0])
    return 1.0


def pipes() -> list[int]:
    """Those of the process that are open, but for its stderr."""
    found = []
    for fd in range(3, 64):
        with contextlib.suppress(OSError):
            if stat.S_ISFIFO(os.fstat(fd).st_mode):
                found.append(fd)
    return found


async def blocks_a_while(episode: Episode):
    """Until there is the file."""
    await episode.ask()
    while not Path(episode.columns["file"]).exists():
        time.sleep(0.01)
    return 1.0


async def with_patient_python(episode: Episode, *, time_s: float, max_characters: int):
    """`with_python`, whose programs may take as long as they like by the wall clock: another process may have the processor."""
    # Here, since no other environment of this file needs them.
    from actors.environments.with_python import with_python
    from actors.sandbox import sandbox

    sandbox._WALL = 10_000
    await with_python(episode, sandbox=sandbox.SandboxConfig(time_s=time_s), max_characters=max_characters)


async def cleans_up(episode: Episode, *, file: str):
    """Writes to the file that it begins, and that it ends, however it ends. Asked to count, returns how many tasks there are."""
    if episode.columns["do"] == "count":
        return float(len(asyncio.all_tasks()))
    mark(file, "b")
    try:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(asyncio.sleep(1000))
            while True:
                await asyncio.sleep(0)
                await episode.ask("More.", tools=[nap])
    finally:
        await asyncio.sleep(0)
        mark(file, "e")


@tool
async def nap() -> str:
    """Sleeps a little."""
    await asyncio.sleep(0.001)
    return "rested"


def mark(file: str, letter: str) -> None:
    with open(file, "a") as marks:
        marks.write(letter)


class OfAClass:
    def __init__(self, episode: Any) -> None:
        pass


async def takes_nothing(*, top: int = 1):
    return 1.0
