"""The child's side of a process that runs a user's code: it ends with its parent, and the code's prints go to stderr."""

import ctypes
import io
import json
import os
import signal
import sys
from typing import Any, TextIO


def begin() -> tuple[TextIO, TextIO, dict[str, Any]]:
    """Begins a process of `LineProcess`: the pipes as `own_pipes` makes them, and the parent's first line. It ends with its parent, and its
    group with it."""
    die_with_parent()
    requests, answers = own_pipes()
    end_with_self()
    return requests, answers, json.loads(requests.readline())


def say(answers: TextIO, message: Any) -> None:
    """Writes a line to the parent."""
    answers.write(json.dumps(message) + "\n")
    answers.flush()


def die_with_parent() -> None:
    """The kernel kills this process when its parent ends (Linux only). Code that hangs would not notice a closed pipe."""
    if sys.platform == "linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)


def own_pipes() -> tuple[TextIO, TextIO]:
    """The pipes from and to the parent. From now on the code and its children print to stderr, and their standard input is empty."""
    requests, answers = os.fdopen(os.dup(0)), os.fdopen(os.dup(1), "w")
    nothing = os.open(os.devnull, os.O_RDWR)
    os.dup2(nothing, 0)
    os.dup2(2, 1)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(line_buffering=True)  # each printed line is seen at once

    def leave_pipes() -> None:
        # When its pipe closes, the parent knows that this process has ended: a fork that outlives it must not hold the other end.
        for pipe in (requests, answers):
            os.dup2(nothing, pipe.fileno(), inheritable=False)

    os.register_at_fork(after_in_child=leave_pipes)
    return requests, answers


def end_with_self() -> None:
    """A fork kills the process group when this process ends, however it ends. The parent does the same, but may be dead. Processes that
    left the group live on."""
    watched, held = os.pipe()
    if (between := os.fork()) == 0:
        if os.fork() == 0:  # a grandchild: the user's code may wait for all of its own children
            os.close(held)
            while os.read(watched, 64):
                pass
            os.killpg(0, signal.SIGKILL)
        os._exit(0)
    os.waitpid(between, 0)
    os.close(watched)
    nothing = os.open(os.devnull, os.O_RDWR)
    os.register_at_fork(after_in_child=lambda: os.dup2(nothing, held, inheritable=False))
