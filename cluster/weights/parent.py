"""Ends a child process together with its parent."""

import contextlib
import ctypes
import multiprocessing
import os
import signal

_PR_SET_PDEATHSIG = 1


def end_with_parent() -> None:
    """Makes the system kill this process when the thread that started it ends. Does nothing in a process that `multiprocessing` did not
    start, and on systems without prctl."""
    parent = multiprocessing.parent_process()
    if parent is None:
        return
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent.pid:  # the parent ended before the call
            os.kill(os.getpid(), signal.SIGKILL)
