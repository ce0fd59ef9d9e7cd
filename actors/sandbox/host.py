"""Forks the processes of programs. Python has started and imported modules once, so a program starts in a few milliseconds.

The host never reads a program, its input or its answers: it passes them on as in-memory files. So a fork contains no data of earlier
programs. When the other end of its socket closes, the host kills the running programs and exits.
"""

import builtins
import contextlib
import gc
import importlib
import json
import os
import resource
import select
import signal
import socket
import sys
import time
from collections.abc import Sequence
from typing import Any

from actors.sandbox import roles
from actors.sandbox.confinement import NUM_FILES, Bounds, Landlock, confine, hide_memory

_LOOKS_MS = 20
"""Interval between checks of the running processes' processor time and threads."""
_MAX_THREADS = 64
_CLOSED = select.POLLHUP | select.POLLERR | select.POLLNVAL


def main(
    *, control: int, readable: Sequence[str], imports: Sequence[str], search: Sequence[str], filtered: bool
) -> None:
    """Reports the kernel's Landlock, then serves requests on the socket `control`, one at a time."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (NUM_FILES, NUM_FILES))
    # Lifts a CPU limit inherited from a judge, which would end this process in the middle of later work.
    hard = resource.getrlimit(resource.RLIMIT_CPU)[1]
    resource.setrlimit(resource.RLIMIT_CPU, (hard, hard))
    hide_memory()
    sys.path[:] = [*sys.path[1:], *search]
    sys.argv = ["program.py"]
    builtins.__dict__.update(exit=sys.exit, quit=sys.exit)  # as the module site would
    for name in imports:
        importlib.import_module(name)
    landlock, refusal = None, ""
    if filtered:
        try:
            landlock = Landlock.of_readable(readable)
        except OSError as error:
            refusal = str(error)
    gc.freeze()  # a collection in a fork would copy the memory that it shares with this process
    # Moves the socket to a low descriptor: a program closes only the low ones at its start, and `control` may be a high one.
    connection = socket.socket(fileno=os.dup(control))
    os.close(control)
    connection.send(json.dumps({"landlock": landlock and landlock.version, "refusal": refusal}).encode())
    while True:
        request, files, _, _ = socket.recv_fds(connection, 2**16, NUM_FILES // 2)
        if not request:
            return
        asked = json.loads(request)
        ends = _serve(asked, files, connection, landlock=landlock, filtered=filtered)
        connection.send(json.dumps([asked["number"], ends]).encode())


def _serve(
    request: dict[str, Any], files: list[int], connection: socket.socket, *, landlock: Landlock | None, filtered: bool
) -> list[dict[str, Any]]:
    """Runs the processes of the request until the last in the list ends, and kills the others. Returns how each ended."""
    bounds = Bounds(**request["bounds"])
    pids: list[int] = []
    refusal, why = "", None
    rest = files
    for role, num_files in request["processes"]:
        given, rest = rest[:num_files], rest[num_files:]
        pid, refusal = _fork(role, given, bounds, landlock=landlock, filtered=filtered)
        pids.append(pid)
        if refusal:
            break
    for descriptor in files:
        os.close(descriptor)
    if not refusal:
        why = _wait(pids, bounds, connection)
    return [_end(pid, refusal or why) | {"refusal": refusal} for pid in pids]


def _fork(
    role: str, files: Sequence[int], bounds: Bounds, *, landlock: Landlock | None, filtered: bool
) -> tuple[int, str]:
    """The new process, and the reason if it could not confine itself. It reports over a pipe that it closes before its program runs."""
    told, tell = os.pipe()
    parent = os.getpid()
    if pid := os.fork():
        os.close(tell)
        with os.fdopen(told) as pipe:
            return pid, pipe.read()
    try:
        confine([*files, tell], bounds, parent=parent, landlock=landlock, filtered=filtered)
    except BaseException as error:  # noqa: BLE001 - no program may run without confinement
        os.write(tell, str(error).encode() or b"unknown")
        os._exit(1)
    os.close(len(files))
    roles.run(role)


def _wait(pids: Sequence[int], bounds: Bounds, connection: socket.socket) -> str | None:
    """Waits for `pids[-1]` to end. Returns the reason if a process exceeds a limit first, else None."""
    began = time.monotonic()
    ending = os.pidfd_open(pids[-1])
    watched = select.poll()
    watched.register(ending, select.POLLIN)
    watched.register(connection, 0)
    try:
        while True:
            ready = dict(watched.poll(_LOOKS_MS))
            if ready.get(connection.fileno(), 0) & _CLOSED:
                for pid in pids:
                    os.kill(pid, signal.SIGKILL)
                sys.exit()
            if ending in ready:
                return None
            if time.monotonic() - began > bounds.wall_s or max(map(_processor_s, pids)) > bounds.time_s:
                return "time"
            if max(map(_num_threads, pids)) > _MAX_THREADS:
                return f"more than {_MAX_THREADS} threads"
    finally:
        os.close(ending)


def _end(pid: int, why: str | None) -> dict[str, Any]:
    """Kills the process, if it still runs, and its process group. `code` is None if it still ran."""
    used_s = _processor_s(pid)
    has_ended = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
    _, status, usage = os.wait4(pid, 0)
    return {
        "code": os.waitstatus_to_exitcode(status) if has_ended else None,
        "why": why,
        "time_s": used_s,
        "rss_bytes": usage.ru_maxrss * 1024,
    }


def _processor_s(pid: int) -> float:
    # The id of another process's CPU clock, computed as in clock_getcpuclockid(3).
    clock = ~pid << 3 | 2
    try:
        return time.clock_gettime(clock)
    except OSError:
        return 0.0


def _num_threads(pid: int) -> int:
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return int(file.read().rpartition(b")")[2].split()[17])
    except (OSError, IndexError):
        return 0
