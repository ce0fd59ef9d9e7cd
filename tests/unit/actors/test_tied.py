"""A program that is tied to its starter ends with it, and what the program started too."""

import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from actors.processes import tied
from tests.unit.actors.environments.test_failures import is_gone, until

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="Linux only")

STARTER = """
import os, subprocess, sys
command = [sys.executable, "-I", "-S", sys.argv[1], str(os.getpid()), "sh", "-c", sys.argv[2]]
subprocess.run(command, start_new_session=True)
print("ended", flush=True)
sys.stdin.read()
"""


def started(program: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", STARTER, tied.__file__, program]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def watchers(program: str) -> list[psutil.Process]:
    return [each for each in psutil.process_iter(["cmdline"]) if program in (each.info["cmdline"] or ())]


async def test_what_a_program_started_ends_with_its_starter_and_the_watcher_too(tmp_path: Path):
    with started(program := f": {tmp_path}; sleep 600 & echo $!; wait") as starter:
        assert starter.stdout
        child = int(starter.stdout.readline())
        assert not is_gone(child)
        starter.kill()
    await until(lambda: is_gone(child) and not watchers(program))


async def test_what_a_program_leaves_behind_ends_with_it(tmp_path: Path):
    with started(f": {tmp_path}; sleep 600 & echo $!") as starter:
        assert starter.stdout
        child = int(starter.stdout.readline())
        assert starter.stdout.readline() == "ended\n"
        await until(lambda: is_gone(child))
        starter.kill()


async def test_the_watcher_of_a_program_that_leaves_nothing_ends_with_it(tmp_path: Path):
    with started(program := f"echo {tmp_path}") as starter:
        assert starter.stdout
        assert [starter.stdout.readline() for _ in range(2)] == [f"{tmp_path}\n", "ended\n"]
        # The starter, whose arguments name the program as well, is still there.
        await until(lambda: [each.pid for each in watchers(program)] == [starter.pid])
        starter.kill()
