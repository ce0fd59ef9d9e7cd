"""One driver per run directory. On a disk the kernel holds the claim and drops it with the process; in an object store it is a lease.

The file's content only says who the owner is, for the error that refuses a second one.
"""

import fcntl
import json
import os
import socket
import time
from dataclasses import asdict, dataclass
from typing import Protocol, Self

import psutil
import pyarrow.fs as pafs

from cluster.contracts.errors import ConfigError

LEASE_S = 900.0
"""Seconds after which an owner on another machine that wrote nothing counts as dead (object stores only)."""
_RENEW_S = 60.0


class Claim(Protocol):
    def renew(self) -> None: ...

    def release(self) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Owner:
    """The process that has a run directory."""

    host: str
    pid: int
    started: float
    """Unix seconds of the process's start: a number that is used again for another process is told apart."""
    time: float
    """Unix seconds of its last sign of life."""

    @classmethod
    def us(cls) -> Self:
        pid = os.getpid()
        return cls(host=socket.gethostname(), pid=pid, started=psutil.Process(pid).create_time(), time=time.time())

    @classmethod
    def parse(cls, content: bytes) -> Self | None:
        """None for a file that says nothing, or not this."""
        try:
            return cls(**json.loads(content))
        except (json.JSONDecodeError, TypeError):
            return None

    @property
    def is_here(self) -> bool:
        return self.host == socket.gethostname()

    @property
    def is_alive(self) -> bool:
        """One on another machine counts as alive for `LEASE_S` after its last sign."""
        if not self.is_here:
            return time.time() - self.time < LEASE_S
        try:
            return psutil.Process(self.pid).create_time() == self.started
        except (psutil.NoSuchProcess, ValueError):
            return False

    def to_bytes(self) -> bytes:
        return json.dumps(asdict(self)).encode()


class LocalClaim:
    """A lock on an open file: it ends with the process, however that ends, and so is never stale."""

    def __init__(self, path: str) -> None:
        """Raises ConfigError naming the living owner."""
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            owner = Owner.parse(os.pread(self._descriptor, 4096, 0))
            os.close(self._descriptor)
            raise in_use(os.path.dirname(path), owner) from error
        os.ftruncate(self._descriptor, 0)
        os.pwrite(self._descriptor, Owner.us().to_bytes(), 0)

    def renew(self) -> None:
        """The kernel keeps it."""

    def release(self) -> None:
        os.ftruncate(self._descriptor, 0)
        os.close(self._descriptor)


class LeaseClaim:
    """A file that says who owns the directory and when it last wrote."""

    def __init__(self, files: pafs.FileSystem, path: str) -> None:
        """Raises ConfigError naming the owner, unless that one is dead (this machine) or silent for `LEASE_S` (another one)."""
        owner = owner_of(files, path)
        if owner and not (owner.is_here and owner.pid == os.getpid()):
            raise in_use(os.path.dirname(path), owner)
        self._files = files
        self._path = path
        self._write()

    def renew(self) -> None:
        """To be called at any write: says so at most every `_RENEW_S`."""
        if time.time() - self._written_at >= _RENEW_S:
            self._write()

    def release(self) -> None:
        self._files.delete_file(self._path)

    def _write(self) -> None:
        self._written_at = time.time()
        with self._files.open_output_stream(self._path) as stream:
            stream.write(Owner.us().to_bytes())


def owner_of(files: pafs.FileSystem, path: str) -> Owner | None:
    """The living owner, None when there is none."""
    if files.get_file_info(path).type == pafs.FileType.NotFound:
        return None
    with files.open_input_stream(path) as stream:
        owner = Owner.parse(stream.read())
    return owner if owner and owner.is_alive else None


def in_use(folder: str, owner: Owner | None) -> ConfigError:
    who = f"process {owner.pid} on {owner.host}" if owner else "another process"
    return ConfigError(f"run_dir={folder!r} is in use by {who}; wait for it, stop it, or name another run_dir")
