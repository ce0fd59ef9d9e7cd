"""Runs a program that ends with the process that started it, together with all of its process group. A script: it imports no package.

Arguments: a pipe's descriptor, whose other end the starter holds and never writes to, and the program's own.
"""

import os
import signal
import sys


def main() -> None:
    held, program = int(sys.argv[1]), sys.argv[2:]
    os.set_inheritable(held, False)  # the program gets none of it
    if (between := os.fork()) == 0:
        if os.fork() == 0:  # nobody's child: the program may wait for all of its own
            _kill_group_at_end_of(held)
        os._exit(0)
    os.waitpid(between, 0)
    try:
        os.execvp(program[0], program)
    except OSError as error:
        sys.exit(f"{program[0]} cannot be run: {error}")


def _kill_group_at_end_of(pipe: int) -> None:
    nothing = os.open(os.devnull, os.O_RDWR)
    for descriptor in range(3):  # whose readers wait for the program alone
        os.dup2(nothing, descriptor)
    os.read(pipe, 1)
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    main()
