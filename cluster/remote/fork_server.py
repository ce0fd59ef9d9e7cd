"""A process that has imported what actors need, of which Ray's workers on this machine are forked: they start in tenths of a second, where
each would import for seconds, and share the memory of what is imported.

Ray starts `forked_worker.py`, which asks here. Nobody loses anything when this ends: workers then start as Ray starts them. A program:
`python -m cluster.remote.fork_server LISTENER ANSWER PACKAGE.MODULE:FUNCTION...` calls the functions, which import, and serves until its
input ends, as it does when what started it ends. After the first function it answers a question, if its input has one.
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
from cluster.remote.forked_worker import ADDRESS, FORKED, GO, Request

_PATIENCE_S = 10.0
"""For a request that has begun to come."""
_MOST_WAITING = 128
"""Workers, while the server imports."""
_ANSWER_S = 20.0
"""What asks here has the answer by itself within a few seconds."""
_MOST_ASKED = 2**15
"""Bytes of a question, which waits in a pipe while the server imports."""


class ForkServer:
    """Takes one question, which it answers once it has imported for it."""

    def __init__(self, process: "subprocess.Popen[bytes]", answer: IO[bytes]) -> None:
        self._process = process
        self._answer = answer

        self._has_asked = False

    def ask(self, function: str, question: str) -> None:
        """`function` is an import path: it is to be called with the question, and returns the answer."""
        line = json.dumps([function, question]).encode() + b"\n"
        if len(line) <= _MOST_ASKED and self._process.stdin is not None:
            with contextlib.suppress(OSError):  # it has ended
                os.write(self._process.stdin.fileno(), line)
                self._has_asked = True

    def answer(self) -> str | None:
        """None where there is none: nothing was asked, the function has failed, the question came too late, or it takes too long."""
        if not self._has_asked:
            return None
        read, *_ = select.select([self._answer], [], [], _ANSWER_S)
        return (self._answer.read().decode() or None) if read else None


@contextlib.contextmanager
def fork_server(*imports: str) -> Iterator[ForkServer]:
    """In the block a server runs beside this process, whose environment tells of it. It imports with the functions of these import
    paths, and answers a question after the first one."""
    with tempfile.TemporaryDirectory(prefix="treadwheel-") as folder, tempfile.TemporaryFile() as errors:
        path = os.path.join(folder, "socket")
        with socket.socket(socket.AF_UNIX) as listener:  # here, so that who asks early waits
            listener.bind(path)
            listener.listen(_MOST_WAITING)
            server, answer = _started(listener, imports, errors)
        with server, answer:
            os.environ[ADDRESS] = path
            try:
                yield ForkServer(server, answer)
            finally:
                del os.environ[ADDRESS]
                if (server.poll() or 0) > 0:  # by itself; a signal came from outside
                    _tell_of(errors)
                server.kill()


def _tell_of(errors: IO[bytes]) -> None:
    errors.seek(0)
    last = "".join(errors.read().decode(errors="replace").strip().splitlines()[-1:])
    with contextlib.suppress(OSError, ValueError):  # nobody reads what the run says
        print(f"treadwheel: actors imported each for itself, since what does it for all ended: {last}", file=sys.stderr)


def _started(
    listener: socket.socket, imports: Sequence[str], errors: IO[bytes]
) -> "tuple[subprocess.Popen[bytes], IO[bytes]]":
    """And what it will answer with."""
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
        # Ray reads the environment once, as soon as it is imported, and a worker's tells it for whom it works.
        with hidden("ray"):
            answers = os.fdopen(int(answering), "w")
            os.set_inheritable(answers.fileno(), False)
            pkgutil.resolve_name(first)()
            with contextlib.suppress(OSError), answers:  # who asked may be gone
                _answer(answers)
            for each in more:
                pkgutil.resolve_name(each)()
        gc.freeze()
        request = _next(listener)
        if request is None:  # what started this is gone, and has left its folder
            shutil.rmtree(os.path.dirname(listener.getsockname()), ignore_errors=True)
            return
    runpy.run_path(request.arguments[0], run_name="__main__")


def _answer(answers: TextIO) -> None:
    """To what was asked by now. Nothing where that fails: who asked finds the failure by itself."""
    if select.select([sys.stdin], [], [], 0)[0] and (line := sys.stdin.readline()):
        with contextlib.suppress(Exception):
            function, question = json.loads(line)
            answers.write(pkgutil.resolve_name(function)(question))


def _next(listener: socket.socket) -> Request | None:
    """Returns in each new process, with what it is to run; in the server at its end, with None."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for a worker
    with selectors.DefaultSelector() as selector:
        selector.register(sys.stdin, selectors.EVENT_READ)
        selector.register(listener, selectors.EVENT_READ)
        while True:
            ready = [key.fileobj for key, _ in selector.select()]
            # A question that came late is no end.
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
    """None where the asker was killed before it had asked."""
    connection.settimeout(_PATIENCE_S)
    with contextlib.suppress(OSError, ValueError):
        return Request.receive(connection)
    return None


def _is_new() -> bool:
    """Of two processes the new one. None is new where the system has room for no more."""
    with contextlib.suppress(OSError):
        return os.fork() == 0
    return False


def _is_wanted(connection: socket.socket) -> bool:
    with contextlib.suppress(OSError):
        connection.sendall(FORKED)
        return connection.recv(1) == GO
    return False


def _become(request: Request, connection: socket.socket) -> None:
    """This new process is as one that the asker started. Ends it where nobody asks any more."""
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
    random.seed()  # or all would draw the same
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed()
    if torch := sys.modules.get("torch"):
        torch.seed()


if __name__ == "__main__":
    main()
