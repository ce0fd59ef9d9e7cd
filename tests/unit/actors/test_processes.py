"""Processes that run a user's code: their lines, their prints and their limits. Each is a script of a few lines."""

import asyncio
import fcntl
import gc
import os
import resource
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from pydantic import TypeAdapter

from actors.processes import confinement, line_process, printed
from actors.processes.line_process import LineProcess
from actors.processes.printed import PrintedLines
from cluster.contracts.errors import ConfigError, WorkerError
from tests.unit.actors.environments.test_failures import is_gone

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="Linux only")


@pytest.fixture
def nowhere(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Prints are copied to nobody."""
    with open(os.devnull, "wb") as file:
        monkeypatch.setattr(printed, "_STDERR", file.fileno())
        yield


def open_descriptors() -> set[str]:
    """An earlier test may have left some, which a collection closes: not in the middle of this one."""
    gc.collect()
    return set(os.listdir("/proc/self/fd"))


async def begun(
    folder: Path, monkeypatch: pytest.MonkeyPatch, lines: PrintedLines, *, script: str
) -> tuple[LineProcess, int]:
    """A process that does as the script says, and its first answer."""
    (folder / "scripted_process.py").write_text(script)
    monkeypatch.setattr(sys, "path", [str(folder), *sys.path])
    return await LineProcess.start(
        "scripted_process", {}, answers=TypeAdapter(int), env=(), max_line_bytes=1000, printed=lines, what="it"
    )


async def started(folder: Path, monkeypatch: pytest.MonkeyPatch, lines: PrintedLines, *, script: str) -> LineProcess:
    """One that has taken its brief and then does as the script says, which answers 1 first."""
    process, _ = await begun(folder, monkeypatch, lines, script=f"import os, sys\ninput()\n{script}")
    return process


async def test_modules_of_the_working_directory_do_not_hide_those_of_the_search_path(tmp_path, monkeypatch, nowhere):
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "scripted_process.py").write_text("raise SystemExit(1)")
    monkeypatch.chdir(tmp_path / "here")
    process = await started(tmp_path, monkeypatch, PrintedLines(), script="print(1)")
    await process.kill()


async def test_a_line_that_a_process_did_not_end_is_no_message(tmp_path, monkeypatch, nowhere):
    process = await started(tmp_path, monkeypatch, PrintedLines(), script="os.write(1, b'1\\n[2]\\n[3')")
    assert [await process.receive(), await process.receive()] == [[2], None]
    await process.kill()


async def test_a_message_to_a_process_that_has_ended_is_no_error(tmp_path, monkeypatch, nowhere):
    process = await started(tmp_path, monkeypatch, PrintedLines(), script="print(1)")
    await process.wait()
    for _ in range(3):
        await process.send("x" * 2**20)
    assert await process.receive() is None
    await process.kill()


def test_nor_is_it_on_the_event_loop_of_rays_actors(tmp_path, monkeypatch, nowhere):
    uvloop = pytest.importorskip("uvloop")

    async def write_late() -> None:
        process = await started(tmp_path, monkeypatch, PrintedLines(), script="print(1)")
        for _ in range(20):
            process.write("x")
            await process.send("x")
            await asyncio.sleep(0.01)
        await process.kill()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(write_late())


@pytest.mark.parametrize(
    ("script", "error", "says"),
    [
        ("input()", WorkerError, "it is not ready after 0.5 s"),
        ("os._exit(1)", WorkerError, "it died while it started, with its message on stderr"),
        ("print('no number')", WorkerError, "the first answer of it is unreadable"),
        ('print(\'{"refused": "a setting"}\')', ConfigError, "a setting"),
    ],
)
async def test_a_process_that_does_not_begin_is_named_and_ended(
    tmp_path, monkeypatch, nowhere, script: str, error: type[Exception], says: str
):
    made, start = list[asyncio.subprocess.Process](), asyncio.create_subprocess_exec

    async def noted(*args, **how):
        made.append(await start(*args, **how))
        return made[-1]

    monkeypatch.setattr(asyncio, "create_subprocess_exec", noted)
    monkeypatch.setattr(line_process, "_START_S", 0.5 if script == "input()" else 120.0)
    with pytest.raises(error, match=says):
        await started(tmp_path, monkeypatch, PrintedLines(), script=f"{script}\nsys.stdout.flush()\ninput()")
    assert made[0].returncode is not None


OWN_PIPES = """
import json, sys
from actors.processes.inside import own_pipes
requests, answers = own_pipes()
requests.readline()
print("a print")
print(1, file=answers, flush=True)
print(json.dumps([sys.stdin.read(), requests.readline()]), file=answers, flush=True)
"""


async def test_the_code_of_a_process_has_an_empty_input_and_takes_no_message(tmp_path, monkeypatch, nowhere):
    lines = PrintedLines()
    process, _ = await begun(tmp_path, monkeypatch, lines, script=OWN_PIPES)
    process.write("go on")
    async with asyncio.timeout(60):
        assert await process.receive() == ["", '"go on"\n']
    await process.kill()
    assert lines.last().lines == ("a print",)


FORKS = """
import os, time
from actors.processes.inside import end_with_self
end_with_self()
input()
if (child := os.fork()) == 0:
    time.sleep(600)
print(child, flush=True)
time.sleep(600)
"""


async def test_a_fork_of_a_process_ends_with_it_and_needs_no_parent_for_that(tmp_path, monkeypatch, nowhere):
    process, child = await begun(tmp_path, monkeypatch, PrintedLines(), script=FORKS)
    assert not is_gone(child)
    os.kill(process._process.pid, signal.SIGKILL)
    try:
        async with asyncio.timeout(60):
            while not is_gone(child):
                await asyncio.sleep(0.01)
    finally:
        await process.kill()


async def test_a_process_that_cannot_be_started_is_named_and_leaves_no_descriptors(tmp_path, monkeypatch):
    lines, before = PrintedLines(), open_descriptors()

    async def failing(*args, **how):
        raise BlockingIOError("Resource temporarily unavailable")

    monkeypatch.setattr(asyncio, "create_subprocess_exec", failing)
    with pytest.raises(WorkerError, match="it cannot start: Resource temporarily unavailable"):
        await started(tmp_path, monkeypatch, lines, script="")
    lines.drain()
    assert open_descriptors() <= before


async def test_a_last_line_without_an_end_counts_and_its_pipe_is_closed_and_another_may_have_its_number(nowhere):
    lines, before = PrintedLines(), open_descriptors()
    for number in (1, 2):
        with lines.pipe() as writing:
            os.write(writing, b"one\n \nKil")
            lines.drain()
            os.write(writing, b"led")
        async with asyncio.timeout(60):
            while lines._torn:  # until the event loop has read it all
                await asyncio.sleep(0.001)
        assert (lines.last().lines, lines.last().num_lines) == (("one", "Killed") * number, 2 * number)
        assert open_descriptors() <= before


async def test_all_prints_that_are_in_an_enlarged_pipe_are_read_at_once(nowhere):
    lines = PrintedLines()
    with lines.pipe() as writing:
        fcntl.fcntl(writing, fcntl.F_SETPIPE_SZ, 2**20)
        os.set_blocking(writing, False)
        assert os.write(writing, b"a line.\n" * 2**17) == 2**20
    lines.drain()
    assert lines.last().num_lines == 2**17 and lines._torn == {}


async def test_of_a_line_without_end_no_more_is_kept_than_is_shown(nowhere):
    lines = PrintedLines()
    with lines.pipe() as writing:
        for _ in range(10):
            os.write(writing, b"x" * 60_000)
            lines.drain()
            assert [len(torn) for torn in lines._torn.values()] == [800]  # 200 characters of at most four bytes
    lines.drain()
    assert lines.last().lines == ("x" * 200,)


async def test_prints_are_kept_for_the_driver_where_the_log_takes_none(monkeypatch):
    lines, errors, loop = PrintedLines(), list[object](), asyncio.get_running_loop()
    loop.set_exception_handler(lambda _, error: errors.append(error))
    with open("/dev/full", "wb", buffering=0) as full, lines.pipe() as writing:
        monkeypatch.setattr(printed, "_STDERR", full.fileno())
        os.write(writing, b"a line\n")
        await asyncio.sleep(0.01)
    lines.drain()
    assert (lines.last().lines, errors) == (("a line",), [])


@pytest.mark.parametrize(
    ("hard", "limits"),
    [(resource.RLIM_INFINITY, (2**31, 2**30, 0)), (2**40, (2**31, 2**30, 0)), (2**20, (2**20, 2**20, 0))],
)
def test_limits_are_those_of_the_run_or_lower_ones_of_the_machine(monkeypatch, hard: int, limits: tuple[int, ...]):
    made = dict[int, tuple[int, int]]()
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (hard, hard))
    monkeypatch.setattr(resource, "setrlimit", made.__setitem__)
    confinement.limit_resources(max_memory_bytes=2**31)
    kinds = (resource.RLIMIT_DATA, resource.RLIMIT_FSIZE, resource.RLIMIT_CORE)
    assert made == {kind: (most, most) for kind, most in zip(kinds, limits, strict=True)}


@pytest.mark.parametrize(("hard", "soft"), [(resource.RLIM_INFINITY, 13), (60, 13), (12, 12)])
def test_processor_time_is_limited_from_now_on(monkeypatch, hard: int, soft: int):
    """2.5 s were used, and 4 * 2.25 + 1 = 10 more are allowed: 12.5, rounded up."""
    made = list[tuple[int, tuple[int, int]]]()
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (hard, hard))
    monkeypatch.setattr(resource, "setrlimit", lambda *limit: made.append(limit))
    monkeypatch.setattr(confinement.time, "process_time", lambda: 2.5)
    confinement.limit_cpu(deadline_s=2.25)
    assert made == [(resource.RLIMIT_CPU, (soft, hard))]


def test_a_process_gets_the_variables_that_are_named_and_no_secrets():
    of = {"PATH": "/bin", "OMP_NUM_THREADS": "2", "HF_TOKEN": "secret", "RAY_ADDRESS": "here", "SHOP": "shop"}
    passed = {"PATH": "/bin", "OMP_NUM_THREADS": "2", "SHOP": "shop", "PYTHONPATH": "/a:/b"}
    assert confinement.environment(of, names=["SHOP", "ABSENT"], search_path=["", "/a", "/b"]) == passed
