"""Environments that misbehave: each costs its own episodes, has a status and a stage, and never a zero."""

import asyncio
import os
import select
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from actors.processes.printed import PrintedLines
from cluster.contracts.episodes import Asked, EpisodeEnd, Said
from cluster.contracts.errors import WorkerError
from cluster.contracts.types import RewardStatus
from tests.unit.actors.clock import pass_time
from tests.unit.actors.environments.scripted import (
    TIMEOUT_S,
    Scripted,
    Silent,
    calls,
    hosted,
    overrun,
    started,
    task,
)

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]  # environments are processes

both_kinds = pytest.mark.parametrize("kind", ["", "_blocking"])
GOOD = EpisodeEnd(reward=1.0)
GONE_LATER = """
import os
async def ends(episode):
    os._exit(3)
"""


class Held:
    """A model that answers when it is told to go on."""

    def __init__(self) -> None:
        self.asked, self.go_on = asyncio.Event(), asyncio.Event()

    async def __call__(self, asked: Asked) -> Said:
        self.asked.set()
        await self.go_on.wait()
        return Said(text="done")


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(240):
        while not condition():
            await asyncio.sleep(0.01)


def is_gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:  # perhaps only since the first look at it
        return True


def has_text(file: Path) -> bool:
    return file.exists() and file.read_text() != ""


def is_blocked_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("actors.environments.host.process._BLOCKED_S", 0.2)


@both_kinds
@pytest.mark.parametrize(
    ("do", "message"),
    [
        ("raise", "ValueError: no opinion"),
        ("unspeakable", "UnspeakableError: its message cannot be read"),
        ("system exit", "SystemExit: 3"),
        ("keyboard interrupt", "KeyboardInterrupt"),
        ("base exception", "BaseException: bare"),
        ("cancelled", "CancelledError: of its own"),
    ],
)
async def test_what_an_environment_raises_fails_its_episode_alone(kind, do, message, shared):
    host = await shared(f"obedient{kind}")
    pid = await host.run(task("pid"), Scripted())
    end = await host.run(task(do), Scripted())
    assert end == EpisodeEnd(status=RewardStatus.ERROR, failed_stage="environment", message=message)
    assert (await host.run(task("good"), Scripted())) == GOOD
    assert await host.run(task("pid"), Scripted()) == pid  # the process goes on


async def test_several_exceptions_of_a_group_are_an_error(shared):
    host = await shared("obedient")
    end = await host.run(task("raise a group"), Scripted())
    assert end.message == "ExceptionGroup: several (2 sub-exceptions)"


@both_kinds
@pytest.mark.parametrize(
    ("do", "message"),
    [
        ("exit", "its process ended: exit code 3"),
        ("kill", "its process was ended by SIGKILL"),
        ("close pipes", "its process "),  # it ends itself, unless it is killed before
        ("nonsense", "the output of its process cannot be read"),
    ],
)
async def test_a_process_that_is_lost_fails_its_episodes_as_suspects_and_is_replaced(kind, do, message, shared):
    host = await shared(f"obedient{kind}")
    silent = Silent()
    async with asyncio.TaskGroup() as tasks:
        other = tasks.create_task(host.run(task("good", id="beside it"), silent))
        await silent.asked.wait()
        end = await host.run(task(do), Scripted())
        if kind:  # in a process of its own
            assert not other.done()
            other.cancel()
    ends = [end] if kind else [end, other.result()]
    for each in ends:
        assert (each.reward, each.status, each.failed_stage) == (None, RewardStatus.ERROR, "environment")
        assert message in each.message
        assert each.is_suspect
    assert await host.run(task("good"), Scripted()) == GOOD
    assert silent.was_cancelled  # its turn is sampled for nobody


async def test_an_environment_that_does_not_import_a_second_time_is_a_failure_and_no_wrong_setting(
    tmp_path, monkeypatch
):
    """It ended the run, which nobody had configured wrongly; another start of the worker may do better."""
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "gone_later.py").write_text(GONE_LATER)
    async with hosted("gone_later:ends") as host:
        assert (await host.run(task(), Scripted())).is_suspect
        (tmp_path / "gone_later.py").unlink()
        with pytest.raises(WorkerError, match="does not import"):
            await host.run(task(), Scripted())


@both_kinds
async def test_too_much_memory_fails_the_episode_and_its_process_gets_no_other(kind):
    async with hosted(f"obedient{kind}", max_memory_bytes=2**30) as host:
        (first,) = started()
        end = await host.run(task("allocate"), Scripted())
        assert end.message.startswith("MemoryError")
        assert not end.is_suspect
        assert not first.is_running()
        assert await host.run(task("good"), Scripted()) == GOOD


async def test_what_a_blocking_environment_leaves_behind_has_its_processor_time_limited(shared):
    host = await shared("obedient_blocking")
    end = await host.run(task("cpu limit"), Scripted())
    assert 4 * TIMEOUT_S < end.reward < 4 * TIMEOUT_S + 60, "its deadline on four cores, after what was used before"


@both_kinds
async def test_an_environment_that_never_asks_ends_at_its_deadline(kind, tmp_path):
    file = tmp_path / "file"
    async with hosted(f"obedient{kind}", cleanup_s=0.2) as host:
        running = host.run(task("block" if kind else "hang", file=str(file)), Scripted())
        end = await overrun(running, begun=until(lambda: has_text(file)))
    message = "episode 'e' is over its deadline, timeout_s=600"
    assert end == EpisodeEnd(status=RewardStatus.TIMEOUT, failed_stage="environment", message=message)


@both_kinds
async def test_code_that_holds_the_interpreter_is_killed_at_the_deadline(kind, tmp_path, monkeypatch):
    is_blocked_soon(monkeypatch)
    file = tmp_path / "file"
    async with hosted(f"obedient{kind}", cleanup_s=0.5) as host:
        running = host.run(task("compute in C", file=str(file)), Scripted())
        end = await overrun(running, begun=until(lambda: has_text(file)))
        assert (end.reward, end.status, end.is_suspect) == (None, RewardStatus.TIMEOUT, True)
        assert await host.run(task("good"), Scripted()) == GOOD


async def test_a_blocked_loop_costs_the_others_their_episodes_and_is_replaced(tmp_path, monkeypatch):
    is_blocked_soon(monkeypatch)
    file = tmp_path / "file"
    async with hosted("obedient", cleanup_s=0.2) as host:
        async with asyncio.TaskGroup() as tasks:
            blocking = tasks.create_task(host.run(task("block", id="blocker", file=str(file)), Scripted()))
            await until(lambda: has_text(file))
            pass_time(TIMEOUT_S)  # the other's deadline is later
            other = tasks.create_task(host.run(task("good"), Silent()))
        assert (blocking.result().status, blocking.result().is_suspect) == (RewardStatus.TIMEOUT, True)
        message = "its process was killed: episode 'blocker' blocked it"
        assert other.result() == EpisodeEnd(
            status=RewardStatus.ERROR, failed_stage="environment", message=message, is_suspect=True
        )
        assert await host.run(task("good"), Scripted()) == GOOD


async def test_a_loop_that_stands_still_is_named_with_its_stack(tmp_path, monkeypatch, capfd):
    is_blocked_soon(monkeypatch)
    file, printed = tmp_path / "file", list[str]()

    def says(words: str) -> bool:
        printed.append(capfd.readouterr().err)
        return words in "".join(printed)

    async with hosted("blocks_a_while") as host:
        running = asyncio.create_task(host.run(task(file=str(file)), Scripted()))
        await until(lambda: says("in blocks_a_while"))
        file.touch()
        assert await running == GOOD
        await until(lambda: says("an environment blocked the event loop for"))


async def test_the_deadline_is_raised_out_of_a_waiting_ask_and_is_final(tmp_path):
    file = tmp_path / "file"
    silent = Silent()
    async with hosted("obedient") as host:
        running = host.run(task("stop at the deadline", file=str(file)), silent)
        end = await overrun(running, begun=silent.asked.wait())
    assert file.read_text() == "timeout_s"
    assert (end.reward, end.status, end.failed_stage) == (None, RewardStatus.TIMEOUT, "environment")
    assert silent.was_cancelled


@both_kinds
async def test_a_slow_model_is_the_infrastructures_doing_whatever_the_environment_does(kind, tmp_path):
    file, silent = tmp_path / "file", Silent()
    async with hosted(f"obedient{kind}") as host:
        end = await overrun(host.run(task("clean up", file=str(file)), silent), begun=silent.asked.wait())
    assert (end.reward, end.status) == (None, RewardStatus.TIMEOUT)
    assert file.read_text() == "clean"


@both_kinds
async def test_a_cancelled_episode_cleans_up_before_it_is_gone(kind, tmp_path, shared):
    file = tmp_path / "file"
    silent = Silent()
    host = await shared(f"obedient{kind}")
    running = asyncio.create_task(host.run(task("clean up", file=str(file)), silent))
    await silent.asked.wait()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert file.read_text() == "clean"
    assert silent.was_cancelled
    assert await host.run(task("good"), Scripted()) == GOOD


@pytest.mark.parametrize("do", ["clean up for ever", "swallow"])
async def test_what_swallows_its_cancellation_is_given_up_and_others_of_its_process_end_well(do):
    silent, patient, given_up = Silent(), asyncio.Event(), asyncio.Event()

    async def late(asked: Asked) -> Said:
        patient.set()
        await given_up.wait()
        return Said(text="at last")

    async with hosted("obedient", cleanup_s=0.2) as host:
        async with asyncio.TaskGroup() as tasks:
            other = tasks.create_task(host.run(task("good"), late))
            await patient.wait()
            running = asyncio.create_task(host.run(task(do), silent))
            if do == "swallow":  # it does not ask
                await host.run(task("good"), Scripted())
            else:
                await silent.asked.wait()
            (process,) = started()
            running.cancel()
            with pytest.raises(asyncio.CancelledError):
                await running
            assert await host.run(task("good"), Scripted()) == GOOD
            assert process.is_running()
            given_up.set()
        assert other.result() == GOOD
        assert not process.is_running()


async def test_a_deadline_that_is_swallowed_is_a_timeout_within_the_time_to_clean_up():
    silent = Silent()
    async with hosted("obedient", cleanup_s=0.2) as host:
        end = await overrun(host.run(task("clean up for ever"), silent), begun=silent.asked.wait())
        assert (end.status, end.is_suspect) == (RewardStatus.TIMEOUT, False)


async def test_a_task_that_an_environment_leaves_behind_is_cancelled_or_its_process_gets_no_other_episode():
    async with hosted("obedient", cleanup_s=0.2) as host:
        (first,) = started()
        assert await host.run(task("leave a task"), Scripted()) == GOOD
        assert await host.run(task("count tasks"), Scripted()) == EpisodeEnd(reward=0.0)
        assert first.is_running()
        assert await host.run(task("leave a task that swallows"), Scripted()) == GOOD
        assert not first.is_running()
        assert await host.run(task("good"), Scripted()) == GOOD


async def test_a_process_with_many_threads_of_hung_tools_gets_no_other_episode():
    async with hosted("with_tools") as host:
        (first,) = started()
        for _ in range(5):
            assert first.is_running()
            assert (await host.run(task(), Scripted(calls("slow_blocking")))).status == RewardStatus.TIMEOUT
        assert not first.is_running()
        assert (await host.run(task(), Scripted("four"))).reward == 4.0


async def test_a_turn_that_is_given_up_is_the_last_one(shared):
    host = await shared("obedient")
    end = await host.run(task("ask impatiently"), Silent())
    assert end.message.startswith("RuntimeError: a turn of episode 'e' was cancelled before the model had answered")


@pytest.mark.parametrize(
    "environment_and_do",
    [("obedient", "fork"), ("obedient_blocking", "fork"), ("obedient_blocking", "fork and return")],
)
async def test_a_fork_does_not_speak_for_its_episode(environment_and_do):
    environment, do = environment_and_do
    model = Scripted("once")
    async with hosted(environment) as host:
        (process,) = started()
        before = process.children()
        assert await host.run(task(do), model) == GOOD
        await until(lambda: all(is_gone(child.pid) for child in process.children() if child not in before))
        assert len(model.asked) == 1
        assert await host.run(task("good"), Scripted()) == GOOD


@both_kinds
async def test_what_an_environment_starts_ends_with_its_process(kind, tmp_path, monkeypatch):
    is_blocked_soon(monkeypatch)
    file = tmp_path / "pid"
    async with hosted(f"obedient{kind}", cleanup_s=0.2) as host:
        running = host.run(task("leave a process", file=str(file)), Scripted())
        await overrun(running, begun=until(lambda: has_text(file)))
        await until(lambda: is_gone(int(file.read_text())))


async def test_gigabytes_of_prints_pass_through(capfd):
    lines = PrintedLines()
    async with hosted("obedient", printed=lines) as host:
        assert await host.run(task("print"), Scripted()) == GOOD
    assert lines.last().num_lines == 64
    assert len(capfd.readouterr().err) >= 64 * 2**20
    assert lines.last().lines[-1] == "x" * 200


async def test_a_process_that_prints_without_end_holds_nobody_up(monkeypatch):
    """Its pipe is full again before it is read: all episodes of the worker waited, and so did its heartbeat."""
    lines, nowhere = PrintedLines(), os.open(os.devnull, os.O_WRONLY)
    monkeypatch.setattr("actors.processes.printed._STDERR", nowhere)
    with lines.pipe() as writing:
        printing = subprocess.Popen(["yes"], stdout=writing)
    ended = threading.Timer(120, printing.kill)
    ended.start()
    with printing:
        assert select.select([*lines._torn], [], [], 120)[0], "it prints"
        lines.drain()
        is_printing = printing.poll() is None
        ended.cancel()
        printing.kill()
    assert is_printing, "it was not waited for"
    lines.drain()
    os.close(nowhere)


async def test_what_is_drained_before_the_event_loop_reads_it_is_no_error_of_the_loops():
    lines, errors, loop = PrintedLines(), list[object](), asyncio.get_running_loop()
    loop.set_exception_handler(lambda _, error: errors.append(error))
    with lines.pipe() as writing:
        os.write(writing, b"a line\n")
        await asyncio.sleep(0)  # the loop has seen that there is something, and reads it after this task's turn
        lines.drain()
        await asyncio.sleep(0)
    loop.set_exception_handler(None)  # the loop is that of the next tests, too
    assert (lines.last().lines, errors) == (("a line",), [])


async def test_a_message_of_an_error_is_cut(shared):
    host = await shared("obedient")
    assert len((await host.run(task("long message"), Scripted())).message) == 500


async def test_episodes_of_a_blocking_environment_wait_for_a_free_process():
    first, second, third = Held(), Held(), Held()
    async with hosted("obedient_blocking", max_processes=2) as host, asyncio.TaskGroup() as tasks:
        for model in (first, second):
            tasks.create_task(host.run(task("good"), model))
            await model.asked.wait()
        last = tasks.create_task(host.run(task("good"), third))
        third.go_on.set()
        for _ in range(10):
            await asyncio.sleep(0)  # a process would start in the first of these turns
        assert len(started()) == 2 and not third.asked.is_set()
        second.go_on.set()
        assert await last == GOOD
        assert len(started()) == 2
        first.go_on.set()


async def test_a_host_that_is_closed_fails_what_runs():
    silent = Silent()
    async with hosted("obedient") as host, asyncio.TaskGroup() as tasks:
        running = tasks.create_task(host.run(task("good"), silent))
        await silent.asked.wait()
        await host.close()
    assert (running.result().status, running.result().message) == (RewardStatus.ERROR, "its host was closed")
