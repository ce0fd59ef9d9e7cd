"""The inside of a process that runs code of a user's: it ends with its parent, and what the code prints goes to stderr."""

import ctypes
import io
import os
import signal
import sys
from typing import TextIO


def die_with_parent() -> None:
    """Code that hangs does not notice that a pipe closed: without this it would outlive a killed parent (Linux only)."""
    if sys.platform == "linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)


def own_pipes() -> tuple[TextIO, TextIO]:
    """The pipes from and to the parent. What the code or its children print goes to stderr, and they find nothing to read."""
    requests, answers = os.fdopen(os.dup(0)), os.fdopen(os.dup(1), "w")
    nothing = os.open(os.devnull, os.O_RDWR)
    os.dup2(nothing, 0)
    os.dup2(2, 1)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(line_buffering=True)  # a print is seen when it is made, not kilobytes later

    def leave_pipes() -> None:
        # The parent knows by the end of its pipe that this process has ended: a fork that outlives it must not hold the other end.
        for pipe in (requests, answers):
            os.dup2(nothing, pipe.fileno(), inheritable=False)

    os.register_at_fork(after_in_child=leave_pipes)
    return requests, answers


def end_with_self() -> None:
    """What this process starts ends with it, however it ends: a fork waits for that, and kills the process group.

    The parent does the same, but may be dead. What left the group goes on.
    """
    watched, held = os.pipe()
    if (between := os.fork()) == 0:
        if os.fork() == 0:  # nobody's child: what runs here may wait for all of its own
            os.close(held)
            while os.read(watched, 64):
                pass
            os.killpg(0, signal.SIGKILL)
        os._exit(0)
    os.waitpid(between, 0)
    os.close(watched)
    nothing = os.open(os.devnull, os.O_RDWR)
    os.register_at_fork(after_in_child=lambda: os.dup2(nothing, held, inheritable=False))
