"""What is left when episodes are cancelled, and when the process that runs them is killed."""

import asyncio
import os
import random
import signal
import subprocess
import sys

import psutil
import pytest

from cluster.contracts.episodes import Asked, Said
from tests.unit.actors.environments.scripted import Scripted, calls, hosted, started, task
from tests.unit.actors.environments.test_failures import has_text, is_gone, until

pytestmark = pytest.mark.slow  # all of it: each environment is a process

NUM_EPISODES, NUM_AT_ONCE = 1000, 100


async def test_a_thousand_episodes_cancelled_at_random_leave_nothing(tmp_path):
    file = tmp_path / "marks"
    rng = random.Random(0)
    descriptors, tasks_before = psutil.Process().num_fds(), asyncio.all_tasks()

    async def nap_or_not(asked: Asked) -> Said:
        await asyncio.sleep(rng.choice([0, 0, 0.001]))
        return Said(text="", tool_calls=(calls("nap"),) if rng.random() < 0.5 else ())

    async with hosted("cleans_up", params={"file": str(file)}, max_turns=10**9) as host:
        (process,) = started()
        await host.run(task("count"), Scripted())
        theirs = process.num_fds()

        async def cancelled(number: int) -> None:
            turns = asyncio.Queue[None]()

            async def counted(asked: Asked) -> Said:
                turns.put_nowait(None)
                return await nap_or_not(asked)

            running = asyncio.create_task(host.run(task(), counted))
            if number % 2:  # else it may not even begin
                await turns.get()
            await asyncio.wait([running], timeout=rng.choice([0, 0.01, 0.1, 0.3]))
            running.cancel()
            with pytest.raises(asyncio.CancelledError):
                await running

        for _ in range(NUM_EPISODES // NUM_AT_ONCE):
            async with asyncio.TaskGroup() as tasks:
                for number in range(NUM_AT_ONCE):
                    tasks.create_task(cancelled(number))
        marks = file.read_text()
        assert marks.count("b") == marks.count("e") >= NUM_EPISODES // 2
        # Its own task, and the one that watches the loop: in the same process as before.
        assert (await host.run(task("count"), Scripted())).reward == 2.0
        assert process.is_running()
        assert process.num_fds() == theirs
    assert started() == []
    assert asyncio.all_tasks() == tasks_before
    async with asyncio.timeout(60):  # a pipe is closed soon after its process has ended
        while psutil.Process().num_fds() > descriptors:
            await asyncio.sleep(0.01)


PARENT = """
import asyncio, sys
from tests.unit.actors.environments.scripted import Scripted, hosted, task

async def main(kind, do, file):
    async with hosted(f"obedient{kind}") as host:
        await host.run(task(do, file=file), Scripted())

asyncio.run(main(*sys.argv[1:]))
"""


@pytest.mark.parametrize(
    ("kind", "do"), [("", "leave a process"), ("_blocking", "leave a process"), ("_blocking", "compute in C")]
)
async def test_nothing_outlives_a_parent_that_is_killed(kind, do, tmp_path):
    """Not the host process, which hangs or holds its interpreter, and not what it started."""
    file = tmp_path / "pid"
    search = os.pathsep.join(path for path in sys.path if path)
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, kind, do, str(file)],
        env={**os.environ, "PYTHONPATH": search},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        await until(lambda: has_text(file))
        below = [child.pid for child in psutil.Process(parent.pid).children(recursive=True)]
        assert below if do == "compute in C" else int(file.read_text()) in below and len(below) >= 2
    finally:
        parent.send_signal(signal.SIGKILL)
        parent.wait()
    await until(lambda: all(map(is_gone, below)))
