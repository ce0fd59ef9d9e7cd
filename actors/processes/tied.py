"""Runs a program that is killed with all of its process group when its starter ends, however that ends (Linux only).

A script: it imports no package. For programs that others' code starts in a group of their own, with no descriptor of ours, as `keeper.py`
needs. Arguments: the starter's pid, and the program's own.
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
        if os.getppid() != starter:  # gone before it was asked for
            return
    try:
        os.execvp(program[0], program)
    except OSError as error:
        sys.exit(f"{program[0]} cannot be run: {error}")


def _watch(starter: int) -> None:
    """Forks a process that ends this one's group with `starter`. It ends by itself once the group is empty."""
    group = os.getpid()
    with contextlib.suppress(OSError):  # no room, or an old kernel: the program alone is killed
        ends = os.pidfd_open(starter), os.pidfd_open(group)
        if (between := os.fork()) == 0:
            try:
                os.setsid()  # what is sent to the group is not for the watcher
                if os.fork() == 0:  # nobody's child: the program may wait for all of its own
                    _end_with(*ends, group=group)
            finally:
                os._exit(0)
        os.waitpid(between, 0)


def _end_with(starter: int, program: int, *, group: int) -> None:
    nothing = os.open(os.devnull, os.O_RDWR)
    for descriptor in range(3):  # whose readers wait for the program alone
        os.dup2(nothing, descriptor)
    watched = select.poll()
    watched.register(starter, select.POLLIN)
    watched.register(program, select.POLLIN)
    wait_ms = None
    while starter not in (ended := [descriptor for descriptor, _ in watched.poll(wait_ms)]):
        if program in ended:  # what it has left may live on
            watched.unregister(program)
            wait_ms = 1000
        if wait_ms:
            os.killpg(group, 0)  # raises once the group is empty
    os.killpg(group, signal.SIGKILL)


if __name__ == "__main__":
    main()
