"""Runs a program, and kills it with its whole process group when its starter ends, however that ends (Linux only).

A script: it imports no package. For programs that foreign code starts in a group of their own, without the descriptor that `keeper.py`
needs. Arguments: the starter's pid; then the program and its arguments.
"""

import contextlib
import ctypes
import os
import select
import signal
import sys

_PR_SET_PDEATHSIG = 1


def main() -> None:
    starter, program = int(sys.argv[1]), sys.argv[2:]
    if sys.platform == "linux":
        _watch(starter)
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # it outlasts the exec
        if os.getppid() != starter:  # the starter ended before the signal was set
            return
    try:
        os.execvp(program[0], program)
    except OSError as error:
        sys.exit(f"{program[0]} cannot be run: {error}")


def _watch(starter: int) -> None:
    """Forks a watcher that kills this process's group when `starter` ends. The watcher ends by itself once the group is empty."""
    group = os.getpid()
    with contextlib.suppress(OSError):  # no free process or an old kernel: then only the program itself is killed
        ends = os.pidfd_open(starter), os.pidfd_open(group)
        if (between := os.fork()) == 0:
            try:
                os.setsid()  # signals to the group must not reach the watcher
                if os.fork() == 0:  # a grandchild: the program may wait for all of its own children
                    _end_with(*ends, group=group)
            finally:
                os._exit(0)
        os.waitpid(between, 0)


def _end_with(starter: int, program: int, *, group: int) -> None:
    nothing = os.open(os.devnull, os.O_RDWR)
    for descriptor in range(3):  # readers of the program's output must not wait for this process
        os.dup2(nothing, descriptor)
    watched = select.poll()
    watched.register(starter, select.POLLIN)
    watched.register(program, select.POLLIN)
    wait_ms = None
    while starter not in (ended := [descriptor for descriptor, _ in watched.poll(wait_ms)]):
        if program in ended:  # its children may live on
            watched.unregister(program)
            wait_ms = 1000
        if wait_ms:
            os.killpg(group, 0)  # raises once the group is empty
    os.killpg(group, signal.SIGKILL)


if __name__ == "__main__":
    main()
