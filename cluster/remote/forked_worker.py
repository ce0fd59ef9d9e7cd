"""What Ray starts in place of its own `setup_worker.py`: asks the fork server for the worker, and starts it as Ray does where none answers.

A script: it imports no package.
"""

import importlib.util
import json
import os
import signal
import socket
import sys
from typing import NamedTuple

ADDRESS = "TREADWHEEL_FORK_SERVER"
"""Variable with the path of the server's socket."""
FORKED = b"\x01"
"""What the new process says to the one that asked for it."""
_PYTHON = "--language=PYTHON"
"""An option for Ray's own script, not for the worker."""
_CHUNK = 1 << 16


class Request(NamedTuple):
    """A Python script to run, and all that the new process inherits."""

    arguments: list[str]
    """The script's path, then its own."""
    environment: dict[str, str]
    blocked_signals: list[int]
    descriptors: list[int]
    """Of input, output, errors, and the folder to be in."""

    @classmethod
    def as_of_here(cls, arguments: list[str]) -> "Request":
        """Inherits what this process has."""
        blocked = [int(each) for each in signal.pthread_sigmask(signal.SIG_BLOCK, ())]
        folder = os.open(".", os.O_RDONLY)  # a folder that was removed has no name
        return cls(arguments, dict(os.environ), blocked, [0, 1, 2, folder])

    def send(self, connection: socket.socket) -> None:
        """Raises OSError where nobody takes it."""
        socket.send_fds(connection, [b"\n"], self.descriptors)
        connection.sendall(json.dumps(self[:-1]).encode())
        connection.shutdown(socket.SHUT_WR)

    @classmethod
    def receive(cls, connection: socket.socket) -> "Request":
        """With descriptors of its own. Raises OSError or ValueError for one that did not come whole."""
        text, descriptors, _, _ = socket.recv_fds(connection, 1, 4)
        while more := connection.recv(_CHUNK):
            text += more
        arguments, environment, blocked = json.loads(text)
        return cls(arguments, environment, blocked, list(descriptors))


def main() -> None:
    arguments = sys.argv[1:]
    if not (_is_plain(arguments) and _is_forked([each for each in arguments if each != _PYTHON])):
        ray = importlib.util.find_spec("ray")
        assert ray and ray.origin, "Ray has started this"
        own = os.path.join(os.path.dirname(ray.origin), "_private/workers/setup_worker.py")
        os.execv(sys.executable, [sys.executable, own, *arguments])


def _is_plain(arguments: list[str]) -> bool:
    """Whether it is a worker in Python, without flags for Python and without an environment of its own."""
    has_environment = any(each.startswith("--serialized-runtime-env-context") for each in arguments)
    return os.path.basename(arguments[0]) == "default_worker.py" and _PYTHON in arguments and not has_environment


def _is_forked(arguments: list[str]) -> bool:
    """Waits for a server that still imports. False where there is none, or it ends meanwhile."""
    with socket.socket(socket.AF_UNIX) as connection:
        try:
            connection.connect(os.environ[ADDRESS])
            Request.as_of_here(arguments).send(connection)
            return connection.recv(1) == FORKED
        except (KeyError, OSError):
            return False


if __name__ == "__main__":
    main()
