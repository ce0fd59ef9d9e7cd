"""Programs of any kind, each with the process that keeps it."""

import asyncio
import os
import subprocess
import sys
from pathlib import Path
from time import monotonic

import pytest

from actors.processes import program, tied
from actors.processes.program import run_program
from tests.unit.actors.environments.test_failures import is_gone, until

WITHOUT_AN_INIT = """
import asyncio, ctypes, os, subprocess, sys
from actors.processes.program import run_program
ctypes.CDLL(None).prctl(36, 1)  # orphans become its children, as those of PID 1
if tied := sys.argv[1:]:
    subprocess.run([sys.executable, "-I", "-S", *tied, str(os.getpid()), "sh", "-c", "(true &)"], start_new_session=True)
else:
    how = {"env": dict(os.environ), "cwd": None, "stdin": b"", "on_stdout": print, "on_stderr": print}
    asyncio.run(run_program(["sh", "-c", "(true &); (sleep 600 &)"], **how))
try:
    print(os.waitpid(-1, os.WNOHANG))
except ChildProcessError:
    print("no children")
"""

LEAVES = """
import os, time
reading, writing = os.pipe()
if os.fork() == 0:
    os.setsid()
    os.write(writing, b"1")
    time.sleep(30)
os.read(reading, 1)
print(1)
"""


async def outcome(*argv: str) -> tuple[int, list[bytes]]:
    """The exit code, and all lines."""
    lines = list[bytes]()
    env = dict(os.environ)
    code = await run_program(argv, env=env, cwd=None, stdin=b"", on_stdout=lines.append, on_stderr=lines.append)
    return code, lines


@pytest.mark.skipif(sys.platform != "linux", reason="Linux only")
@pytest.mark.parametrize("wrapper", [[], [tied.__file__]])
def test_programs_leave_no_zombies_where_orphans_are_not_waited_for(wrapper: list[str]):
    ended = subprocess.run([sys.executable, "-c", WITHOUT_AN_INIT, *wrapper], stdout=subprocess.PIPE, text=True)
    assert ended.stdout == "no children\n"


async def test_a_program_is_found_on_the_path():
    assert await outcome("echo", "1") == (0, [b"1\n"])


@pytest.mark.parametrize(("script", "code"), [("exit 3", 3), ("kill -TERM $$", -15), ("kill -KILL $$", -9)])
async def test_a_programs_exit_code_or_signal_is_told(script: str, code: int):
    assert await outcome("sh", "-c", script) == (code, [])


async def test_a_file_that_is_no_program_is_named(tmp_path: Path):
    (file := tmp_path / "file").touch()
    code, (line,) = await outcome(str(file))
    assert (code, line) == (1, f"{file} cannot be run: [Errno 13] Permission denied\n".encode())


async def test_a_program_that_ignores_sigterm_ends_with_its_task():
    lines = list[bytes]()
    script = "trap '' TERM; echo ready; sleep 600"
    how = {"env": dict(os.environ), "cwd": None, "stdin": b"", "on_stdout": lines.append, "on_stderr": lines.append}
    running = asyncio.create_task(run_program(["sh", "-c", script], **how))
    await until(lambda: lines == [b"ready\n"])
    running.cancel()
    ended, _ = await asyncio.wait([running], timeout=10.0)
    assert ended


@pytest.mark.skipif(sys.platform != "linux", reason="Linux only")
async def test_a_program_that_stops_its_keeper_ends_with_its_task_too(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(program, "_KEEPER_S", 0.5)
    lines = list[bytes]()
    script = "kill -STOP $PPID; echo $$; exec sleep 600"
    how = {"env": dict(os.environ), "cwd": None, "stdin": b"", "on_stdout": lines.append, "on_stderr": lines.append}
    running = asyncio.create_task(run_program(["sh", "-c", script], **how))
    await until(lambda: len(lines) == 1)
    running.cancel()
    ended, _ = await asyncio.wait([running], timeout=10.0)
    assert ended
    await until(lambda: is_gone(int(lines[0])))


async def test_a_process_that_left_the_group_does_not_hold_the_episode_for_long(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(program, "_DRAIN_S", 0.5)
    begin = monotonic()
    assert await outcome(sys.executable, "-S", "-c", LEAVES) == (0, [b"1\n"])
    assert 0.5 <= monotonic() - begin < 20.0
