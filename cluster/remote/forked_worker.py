"""Ray starts this script in place of its `setup_worker.py`. It asks the fork server for a worker. Without a server it runs Ray's script.

It imports no package.
"""

import contextlib
import importlib.util
import json
import os
import resource
import signal
import socket
import sys
from typing import NamedTuple

ADDRESS = "TREADWHEEL_FORK_SERVER"
"""Environment variable with the path of the server's socket."""
FORKED, GO = b"\x01", b"\x02"
"""The new process reports that it exists, and the asker that it still wants it."""
_PATIENCE_S = 20.0
"""For a server that still imports. Ray itself waits for a worker for 60 s, and then starts no other one."""
_PYTHON = "--language=PYTHON"
"""An option for Ray's own script, not for the worker."""
_LENGTH_BYTES = 4
_OOM_SCORE = "/proc/self/oom_score_adj"


class Request(NamedTuple):
    """A Python script to run, and the state that the new process inherits."""

    arguments: list[str]
    """The script's path, then its own."""
    environment: dict[str, str]
    blocked_signals: list[int]
    open_files: list[int]
    """Soft and hard limit."""
    oom_score: str
    """How soon the kernel ends the process when memory is short."""
    descriptors: list[int]
    """Standard input, output and errors, and the working directory."""

    @classmethod
    def as_of_here(cls, arguments: list[str]) -> "Request":
        """A request that passes on this process's state."""
        blocked = [int(each) for each in signal.pthread_sigmask(signal.SIG_BLOCK, ())]
        with open(_OOM_SCORE, encoding="ascii") as file:
            oom_score = file.read()
        folder = os.open(".", os.O_RDONLY)  # a folder that was removed has no name
        open_files = list(resource.getrlimit(resource.RLIMIT_NOFILE))
        return cls(arguments, dict(os.environ), blocked, open_files, oom_score, [0, 1, 2, folder])

    def send(self, connection: socket.socket) -> None:
        """Raises OSError if no server takes it."""
        text = json.dumps(self[:-1]).encode()
        socket.send_fds(connection, [len(text).to_bytes(_LENGTH_BYTES)], self.descriptors)
        connection.sendall(text)

    @classmethod
    def receive(cls, connection: socket.socket) -> "Request":
        """Its descriptors belong to this process. Raises OSError or ValueError for an incomplete request."""
        length, descriptors, _, _ = socket.recv_fds(connection, _LENGTH_BYTES, 4)
        try:
            with connection.makefile("rb") as file:
                arguments, environment, blocked, open_files, oom_score = json.loads(file.read(int.from_bytes(length)))
        except (OSError, ValueError):
            for descriptor in descriptors:
                os.close(descriptor)
            raise
        return cls(arguments, environment, blocked, open_files, oom_score, list(descriptors))

    def take_limits(self) -> None:
        """Gives this process the asker's limits, as far as that is allowed."""
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (self.open_files[0], self.open_files[1]))
        with contextlib.suppress(OSError), open(_OOM_SCORE, "w", encoding="ascii") as file:
            file.write(self.oom_score)


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
    """Waits for a server that still imports. False if there is none, it ends meanwhile, or takes too long."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(_PATIENCE_S)
        try:
            connection.connect(os.environ[ADDRESS])
            Request.as_of_here(arguments).send(connection)
            is_there = connection.recv(1) == FORKED
            if is_there:
                connection.sendall(GO)
            return is_there
        except (KeyError, OSError):
            return False


if __name__ == "__main__":
    main()
