"""Runs a program that is killed when what started it ends, however that ends (Linux only). A script: it imports no package.

For programs that others' code starts in a group of their own, with no descriptor of ours: `keeper.py` ends a whole group. Arguments: the
starter's pid, and the program's own.
"""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def main() -> None:
    starter, program = int(sys.argv[1]), sys.argv[2:]
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # it outlasts the exec
        if os.getppid() != starter:  # gone before it was asked for
            return
    try:
        os.execvp(program[0], program)
    except OSError as error:
        sys.exit(f"{program[0]} cannot be run: {error}")


if __name__ == "__main__":
    main()
