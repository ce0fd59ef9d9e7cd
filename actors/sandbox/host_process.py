"""The parent's side of the host process: starts it under a confinement, sends one request at a time, replaces it when it has died."""

import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
import sysconfig
import threading
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

from actors.sandbox.confinement import Bounds
from cluster.contracts.errors import ConfigError, WorkerError

_ROOT = Path(__file__).parents[2]
_START_S = 120.0
_ANSWER_S = 10.0
"""If the host process is silent this long after a program's deadline, it is assumed to hang."""
_READABLE = ("/lib", "/lib64", "/usr/lib", "/usr/lib64", "/usr/local/lib", "/usr/share/zoneinfo", "/etc/ld.so.cache")
_DEVICES = ("/dev/null", "/dev/urandom", "/dev/zero")
_IMPORTED = ("bisect", "collections", "copy", "fractions", "functools", "heapq", "itertools", "math", "re", "string")
"""Common modules, imported in advance. Programs may import the whole standard library."""
_ENVIRONMENT = {
    "PATH": "/usr/bin:/bin",
    "LANG": "C.UTF-8",
    "PYTHONUTF8": "1",
    "PYTHONHASHSEED": "0",
    "PYTHONDONTWRITEBYTECODE": "1",
    **dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1"),
}
_START = (
    "import json, sys; sys.path.insert(0, {!r}); from actors.sandbox import host; host.main(**json.loads(sys.argv[1]))"
)


class HostProcess:
    """One process that forks programs. It ends with this object or with this process."""

    def __init__(self, *, level: str, imports: Sequence[str]) -> None:
        """Raises ConfigError, with the kernel's reason, if nothing can confine a program at this level."""
        self._level = level
        self._imports = imports
        self._lock = threading.Lock()
        self._num_asked = 0
        self._process: subprocess.Popen[bytes] | None = None
        self.confined_by = self._start()
        """Names of the mechanisms, for people."""

    def exchange(
        self, processes: Sequence[tuple[str, Sequence[int]]], bounds: Bounds, *, lent: Sequence[int] = ()
    ) -> list[dict[str, Any]]:
        """Runs `processes`, each a role with its files, and returns how they ended. `lent` descriptors are closed here once they are sent.

        Raises WorkerError if the host process does not answer. The next exchange starts a new one.
        """
        request = {"bounds": asdict(bounds), "processes": [(role, len(files)) for role, files in processes]}
        with self._lock, contextlib.ExitStack() as ours:
            for descriptor in lent:
                ours.callback(os.close, descriptor)
            self._num_asked += 1
            request["number"] = self._num_asked
            try:
                if self._process is None or self._process.poll() is not None:
                    self._start()
                self._connection.settimeout(bounds.wall_s + _ANSWER_S)
                files = [descriptor for _, files in processes for descriptor in files]
                socket.send_fds(self._connection, [json.dumps(request).encode()], files)
                ours.close()
                number, ends = json.loads(self._connection.recv(2**16) or "[0, null]")
                why = "it answered another request" if number else "it ended"
            except OSError as error:
                number, ends, why = 0, [], str(error)
            if number != request["number"]:
                self.close()
                raise WorkerError(
                    f"sandbox_failed: the process that starts programs does not answer: {why}", stage="sandbox"
                )
        return ends

    def lacks(self, modules: Iterable[str]) -> list[str]:
        """The modules that programs cannot import."""
        search = self._search()
        return sorted(
            name
            for name in modules
            if name not in sys.stdlib_module_names and PathFinder.find_spec(name, search) is None
        )

    def close(self) -> None:
        if self._process is not None:
            self._connection.close()
            self._process.kill()
            self._process.wait()
            self._process = None

    def _start(self) -> str:
        """Starts the host and returns the mechanisms that confine programs. Raises ConfigError if there are none."""
        level, reasons = self._level, []
        if level in ("auto", "bwrap"):
            if bwrap := shutil.which("bwrap"):
                try:
                    found = self._start_behind([bwrap, *_namespaces(self._readable())])
                    return ", ".join(["bubblewrap", *_landlock(found), "seccomp"])
                except WorkerError as error:
                    reasons.append(f"bubblewrap: {error}")
            else:
                reasons.append("bubblewrap: not installed")
        if level != "bwrap":
            found = self._start_behind([])
            if level == "none":
                return "nothing"
            if landlock := _landlock(found):
                return ", ".join([*landlock, "seccomp"])
            reasons.append(found["refusal"])
        self.close()
        raise ConfigError(
            f"sandbox.level={level!r}: nothing confines programs here (kernel {os.uname().release}): {'; '.join(reasons)}; "
            "Landlock needs kernel 5.13, landlock in the boot option lsm=, and a container that permits it; install bubblewrap, or "
            "set level: none to run the model's programs unconfined under your user"
        )

    def _start_behind(self, prefix: Sequence[str]) -> dict[str, Any]:
        """Starts the host behind this command, and returns its report of the kernel. Raises WorkerError if it does not start."""
        self.close()
        self._connection, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        arguments = {
            "control": theirs.fileno(),
            "readable": [*self._readable(), *_DEVICES],
            "imports": [*_IMPORTED, *self._imports],
            "search": self._search(),
            "filtered": self._level != "none",
        }
        python = [os.path.realpath(sys.executable), "-s", "-S", "-P", "-c", _START.format(str(_ROOT))]
        with memory_files("") as (errors,), theirs:
            self._process = subprocess.Popen(
                [*prefix, *python, json.dumps(arguments)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=errors,
                env=_ENVIRONMENT,
                cwd="/",
                pass_fds=[theirs.fileno()],
            )
            theirs.close()
            self._connection.settimeout(_START_S)
            try:
                found = self._connection.recv(2**16)
            except OSError:
                found = b""
            if not found:
                self.close()
                raise WorkerError(f"does not start: {text_of(errors).strip()[-500:]}", stage="sandbox")
        return json.loads(found)

    def _readable(self) -> list[str]:
        """Library folders, and site-packages if programs may use packages."""
        own = [f"{sys.base_prefix}/lib", f"{sys.base_prefix}/lib64"]
        return [*_READABLE, *own, *self._search()]

    def _search(self) -> list[str]:
        return sorted({sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}) if self._imports else []


@contextlib.contextmanager
def memory_files(*texts: str) -> Iterator[list[int]]:
    """Descriptors of in-memory files with these texts. No other process can find them, and they vanish with their descriptors."""
    files = [os.memfd_create("program") for _ in texts]
    try:
        for descriptor, text in zip(files, texts, strict=True):
            with os.fdopen(os.dup(descriptor), "wb") as file:
                file.write(text.encode(errors="replace"))
            os.lseek(descriptor, 0, os.SEEK_SET)
        yield files
    finally:
        for descriptor in files:
            os.close(descriptor)


def text_of(descriptor: int) -> str:
    """The whole content of such a file."""
    os.lseek(descriptor, 0, os.SEEK_SET)
    with os.fdopen(os.dup(descriptor), "rb") as file:
        return file.read().decode(errors="replace")


def _namespaces(readable: Sequence[str]) -> list[str]:
    """Arguments of bubblewrap: no network, no other process, only these files, and all of them read-only."""
    shown = [*readable, f"{sys.base_prefix}/bin", str(_ROOT / "actors")]
    files = [word for path in shown for word in ("--ro-bind-try", path, path)]
    devices = [word for path in _DEVICES for word in ("--dev-bind", path, path)]
    return ["--unshare-all", "--new-session", *files, *devices, "--proc", "/proc", "--remount-ro", "/"]


def _landlock(found: dict[str, Any]) -> list[str]:
    return [f"Landlock {found['landlock']}"] if found["landlock"] else []
