"""A process that has imported the actors' modules, from which Ray's workers on this machine are forked. They start in tenths of a second
instead of seconds, and share the memory of the imported modules.

Ray starts `forked_worker.py`, which asks this server for a worker. Once the server has ended, workers start in Ray's own way. The program
`python -m cluster.remote.fork_server LISTENER ANSWER PACKAGE.MODULE:FUNCTION...` calls the functions, which import, and serves until its
input ends, as it does when the parent process ends. After the first function it answers a question, if its input has one.
"""

import contextlib
import gc
import json
import os
import pkgutil
import random
import runpy
import select
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from typing import IO, TextIO

from cluster.contracts.importing import hidden
from cluster.freed_memory import share_one_arena
from cluster.remote.forked_worker import ADDRESS, FORKED, GO, Request

_PATIENCE_S = 10.0
"""For the rest of a request that has begun."""
_MOST_WAITING = 128
"""Workers that may wait while the server imports."""
_ANSWER_S = 20.0
"""Without an answer the asker finds it itself within a few seconds."""
_MOST_ASKED = 2**15
"""Most bytes of a question. It waits in a pipe while the server imports."""


class ForkServer:
    """A running server. It takes one question and answers it after its first imports."""

    def __init__(self, process: "subprocess.Popen[bytes]", answer: IO[bytes]) -> None:
        self._process = process
        self._answer = answer
        self._has_asked = False

    def ask(self, function: str, question: str) -> None:
        """`function`: import path of a function that takes the question and returns the answer."""
        line = json.dumps([function, question]).encode() + b"\n"
        if len(line) <= _MOST_ASKED and self._process.stdin is not None:
            with contextlib.suppress(OSError):  # it has ended
                os.write(self._process.stdin.fileno(), line)
                self._has_asked = True

    def answer(self) -> str | None:
        """None if nothing was asked, the function failed, the question came too late, or the answer takes too long."""
        if not self._has_asked:
            return None
        read, *_ = select.select([self._answer], [], [], _ANSWER_S)
        return (self._answer.read().decode() or None) if read else None


@contextlib.contextmanager
def fork_server(*imports: str) -> Iterator[ForkServer]:
    """Runs a server during the block, named in this process's environment. It calls these functions, which import, and answers a question
    after the first one."""
    with tempfile.TemporaryDirectory(prefix="treadwheel-") as folder, tempfile.TemporaryFile() as errors:
        path = os.path.join(folder, "socket")
        with socket.socket(socket.AF_UNIX) as listener:  # here, so that early askers wait
            listener.bind(path)
            listener.listen(_MOST_WAITING)
            server, answer = _started(listener, imports, errors)
        with server, answer:
            os.environ[ADDRESS] = path
            try:
                yield ForkServer(server, answer)
            finally:
                del os.environ[ADDRESS]
                if (server.poll() or 0) > 0:  # it failed; a signal came from outside
                    _tell_of(errors)
                server.kill()


def _tell_of(errors: IO[bytes]) -> None:
    errors.seek(0)
    last = "".join(errors.read().decode(errors="replace").strip().splitlines()[-1:])
    with contextlib.suppress(OSError, ValueError):  # nobody reads this process's output
        print(
            f"treadwheel: each actor imported for itself, since the process that does it for all ended: {last}",
            file=sys.stderr,
        )


def _started(
    listener: socket.socket, imports: Sequence[str], errors: IO[bytes]
) -> "tuple[subprocess.Popen[bytes], IO[bytes]]":
    """(the server's process, the file from which to read its answer)."""
    reading, writing = os.pipe()
    try:
        server = subprocess.Popen(
            [sys.executable, "-P", "-m", __name__, str(listener.fileno()), str(writing), *imports],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=errors,
            pass_fds=[listener.fileno(), writing],
            process_group=0,  # as Ray's processes have one: Ctrl-C is for the driver
        )
    except OSError:
        os.close(reading)
        raise
    finally:
        os.close(writing)
    return server, os.fdopen(reading, "rb")


def main() -> None:
    listening, answering, first, *more = sys.argv[1:]
    with socket.socket(fileno=int(listening)) as listener:
        listener.set_inheritable(False)
        # Workers keep freed memory (`cluster.freed_memory`), large blocks only in the first thread's arena.
        share_one_arena()
        # Ray reads the environment once, when it is imported, and only a worker's own environment names its job.
        with hidden("ray"):
            answers = os.fdopen(int(answering), "w")
            os.set_inheritable(answers.fileno(), False)
            pkgutil.resolve_name(first)()
            with contextlib.suppress(OSError), answers:  # the asker may be gone
                _answer(answers)
            for each in more:
                pkgutil.resolve_name(each)()
        gc.freeze()
        request = _next(listener)
        if request is None:  # the parent is gone, and has left its folder
            shutil.rmtree(os.path.dirname(listener.getsockname()), ignore_errors=True)
            return
    runpy.run_path(request.arguments[0], run_name="__main__")


def _answer(answers: TextIO) -> None:
    """Answers the question that has come by now. Writes nothing if that fails: the asker then meets the failure itself."""
    if select.select([sys.stdin], [], [], 0)[0] and (line := sys.stdin.readline()):
        with contextlib.suppress(Exception):
            function, question = json.loads(line)
            answers.write(pkgutil.resolve_name(function)(question))


def _next(listener: socket.socket) -> Request | None:
    """Returns the request in each forked process, and None in the server at its end."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # no process waits for a worker
    with selectors.DefaultSelector() as selector:
        selector.register(sys.stdin, selectors.EVENT_READ)
        selector.register(listener, selectors.EVENT_READ)
        while True:
            ready = [key.fileobj for key, _ in selector.select()]
            # Only empty input is the end; other input is a late question.
            if sys.stdin in ready and not os.read(sys.stdin.fileno(), _MOST_ASKED):
                return None
            if listener not in ready:
                continue
            with listener.accept()[0] as connection, contextlib.ExitStack() as descriptors:
                request = _received(connection)
                for descriptor in request.descriptors if request else ():
                    descriptors.callback(os.close, descriptor)
                if request is not None and _is_new():
                    _become(request, connection)
                    return request


def _received(connection: socket.socket) -> Request | None:
    """None if the asker was killed before it had asked."""
    connection.settimeout(_PATIENCE_S)
    with contextlib.suppress(OSError, ValueError):
        return Request.receive(connection)
    return None


def _is_new() -> bool:
    """Forks: True in the new process, False in the server. Only False when the system has no room for a process."""
    with contextlib.suppress(OSError):
        return os.fork() == 0
    return False


def _is_wanted(connection: socket.socket) -> bool:
    with contextlib.suppress(OSError):
        connection.sendall(FORKED)
        return connection.recv(1) == GO
    return False


def _become(request: Request, connection: socket.socket) -> None:
    """Makes this new process like one that the asker started. Exits if the asker is gone."""
    if not _is_wanted(connection):
        os._exit(1)
    *standard, folder = request.descriptors
    for number, descriptor in enumerate(standard):
        os.dup2(descriptor, number)
    os.fchdir(folder)
    os.setpgid(0, 0)  # Ray ends a worker with its group
    request.take_limits()
    os.environ.clear()
    os.environ.update(request.environment)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, request.blocked_signals)
    sys.argv = request.arguments
    own = request.environment.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[:0] = [os.path.dirname(request.arguments[0]), *(each for each in own if each and each not in sys.path)]
    random.seed()  # or all workers would draw the same numbers
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed()
    if torch := sys.modules.get("torch"):
        torch.seed()


if __name__ == "__main__":
    main()
