"""Runs a program, and kills its whole process group when the program or its starter ends, however that ends (Linux only).

A script: it imports no package. For programs that foreign code starts in a group of their own, without the descriptor that `keeper.py`
needs, and ends by signals to the group. Arguments: the starter's pid; then the program and its arguments. As with `keeper.py`, orphans of
the program leave no zombies.
"""

import ctypes
import os
import signal
import sys
import time

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36


def _prctl(option: int, value: int) -> None:
    ctypes.CDLL(None).prctl(option, value)


def main() -> None:
    starter, argv = int(sys.argv[1]), sys.argv[2:]
    if sys.platform == "linux":
        own = os.getpid()
        _prctl(_PR_SET_CHILD_SUBREAPER, 1)  # a fork does not inherit it
        if program := os.fork():
            sys.exit(_outcome(program, starter=starter))
        _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # it outlasts the exec
        if os.getppid() != own:  # the parent ended before the signal was set
            return
    try:
        os.execvp(argv[0], argv)
    except OSError as error:
        sys.exit(f"{argv[0]} cannot be run: {error}")


def _outcome(program: int, *, starter: int) -> int:
    """The program's exit code, as a shell gives it."""
    signal.signal(signal.SIGHUP, lambda *_: os.killpg(0, signal.SIGKILL))
    signal.signal(signal.SIGTERM, lambda *_: None)  # the program, which gets it too, decides
    _prctl(_PR_SET_PDEATHSIG, signal.SIGHUP)
    if os.getppid() != starter:  # it ended before the signal was set
        os.killpg(0, signal.SIGKILL)
    ended = status = 0
    while ended != program:
        ended, status = os.wait()
    try:
        for _ in range(100):  # a second for the rest of the group to end by itself
            while os.waitpid(0, os.WNOHANG)[0]:
                pass
            time.sleep(0.01)
    except ChildProcessError:  # nothing is left
        code = os.waitstatus_to_exitcode(status)
        return code if code >= 0 else 128 - code
    os.killpg(0, signal.SIGKILL)
    return 1


if __name__ == "__main__":
    main()
