"""Runs a program in a process group of its own, and kills the group at the end: when the program ends, or the process that started this one
closes its pipe, or ends. A script: it imports no package.

Arguments: the descriptor of a pipe whose other end the starter holds and never writes to; then the program and its arguments. The exit code
is the program's, and so is a signal that ends it. On Linux orphans of the program become this process's children, and leave no zombies: in
a container without an init nobody else would wait for them.
"""

import contextlib
import ctypes
import os
import signal
import sys
import threading
import time

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36


def main() -> None:
    held, argv = int(sys.argv[1]), sys.argv[2:]
    os.set_inheritable(held, False)  # the program does not get the pipe
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)
    own = os.getpid()
    if program := os.fork():
        return _end_as(program, held=held)
    os.setpgid(0, 0)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # it outlasts the exec
    if os.getppid() != own:  # the parent ended before the signal was set
        return
    try:
        os.execvp(argv[0], argv)
    except OSError as error:
        sys.exit(f"{argv[0]} cannot be run: {error}")


def _end_as(program: int, *, held: int) -> None:
    with contextlib.suppress(PermissionError):  # the child has done so itself, and runs the program by now
        os.setpgid(program, program)
    threading.Thread(target=_kill_at_end_of, args=(held, program), daemon=True).start()
    ended = status = 0
    while ended != program:
        ended, status = os.wait()
    _kill(program)
    _reap(program)
    code = os.waitstatus_to_exitcode(status)
    if code < 0:
        with contextlib.suppress(OSError):  # SIGKILL has no handler
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    sys.exit(code)


def _kill_at_end_of(pipe: int, group: int) -> None:
    os.read(pipe, 1)
    _kill(group)


def _kill(group: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)


def _reap(group: int) -> None:
    with contextlib.suppress(ChildProcessError):  # there are no more
        for _ in range(100):  # a second: a process of another user cannot be killed
            while os.waitpid(-group, os.WNOHANG)[0]:
                pass
            time.sleep(0.01)


if __name__ == "__main__":
    main()
