"""Runs a program, and kills it with its whole process group when the process that started it ends. A script: it imports no package.

Arguments: the descriptor of a pipe whose other end the starter holds and never writes to; then the program and its arguments.
"""

import os
import signal
import sys


def main() -> None:
    held, program = int(sys.argv[1]), sys.argv[2:]
    os.set_inheritable(held, False)  # the program does not get the pipe
    if (between := os.fork()) == 0:
        if os.fork() == 0:  # a grandchild: the program may wait for all of its own children
            _kill_group_at_end_of(held)
        os._exit(0)
    os.waitpid(between, 0)
    try:
        os.execvp(program[0], program)
    except OSError as error:
        sys.exit(f"{program[0]} cannot be run: {error}")


def _kill_group_at_end_of(pipe: int) -> None:
    nothing = os.open(os.devnull, os.O_RDWR)
    for descriptor in range(3):  # readers of the program's output must not wait for this process
        os.dup2(nothing, descriptor)
    os.read(pipe, 1)
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    main()
