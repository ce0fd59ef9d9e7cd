"""A process that another one of ours started does not outlive it."""

import contextlib
import ctypes
import multiprocessing
import os
import signal

_PR_SET_PDEATHSIG = 1


def end_with_parent() -> None:
    """Has the system kill this process when the thread that started it ends, by `multiprocessing`. In any other process, and on systems
    without such a call, it does nothing."""
    parent = multiprocessing.parent_process()
    if parent is None:
        return
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent.pid:  # it was gone before
            os.kill(os.getpid(), signal.SIGKILL)
