"""One driver per run directory. On a disk the kernel holds the claim and drops it with the process; in an object store it is a lease.

`RunDirectory.claim` calls this. The file's content only says who the owner is, for the error that refuses a second one.
"""

import fcntl
import json
import os
import socket
import time
from typing import Any, Protocol

import psutil
import pyarrow.fs as pafs

from cluster.contracts.errors import ConfigError

LEASE_S = 900.0
"""Seconds after which an owner on another machine that wrote nothing counts as dead (object stores only)."""


class Claim(Protocol):
    def renew(self) -> None: ...

    def release(self) -> None: ...


class LocalClaim:
    """A lock on an open file: it ends with the process, however that ends, and so is never stale."""

    def __init__(self, path: str, descriptor: int) -> None:
        self._path = path
        self._descriptor = descriptor

    def renew(self) -> None:
        """The kernel keeps it."""

    def release(self) -> None:
        os.ftruncate(self._descriptor, 0)
        os.close(self._descriptor)


def claim_local(path: str) -> LocalClaim:
    """Raises ConfigError naming the living owner."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        owner = _parsed(os.pread(descriptor, 4096, 0))
        os.close(descriptor)
        raise _in_use(os.path.dirname(path), owner) from error
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, json.dumps(_identity()).encode(), 0)
    return LocalClaim(path, descriptor)


class LeaseClaim:
    """A file that says who owns the directory and until when we believe it."""

    def __init__(self, files: pafs.FileSystem, path: str) -> None:
        self._files = files
        self._path = path
        self.renew()

    def renew(self) -> None:
        with self._files.open_output_stream(self._path) as stream:
            stream.write(json.dumps(_identity()).encode())

    def release(self) -> None:
        self._files.delete_file(self._path)


def claim_remote(files: pafs.FileSystem, path: str) -> LeaseClaim:
    """Raises ConfigError naming the owner, unless that one is dead (this machine) or silent for `LEASE_S` (another one)."""
    owner = owner_of(files, path)
    if owner and owner.get("pid") != os.getpid():
        raise _in_use(os.path.dirname(path), owner)
    return LeaseClaim(files, path)


def owner_of(files: pafs.FileSystem, path: str) -> dict[str, Any] | None:
    """The living owner, None when there is none. One on another machine counts as living for `LEASE_S` after its last sign."""
    if files.get_file_info(path).type == pafs.FileType.NotFound:
        return None
    with files.open_input_stream(path) as stream:
        owner = _parsed(stream.read())
    return owner if owner and _is_alive(owner) else None


def _identity() -> dict[str, Any]:
    pid = os.getpid()
    return {"host": socket.gethostname(), "pid": pid, "started": psutil.Process(pid).create_time(), "time": time.time()}


def _is_alive(owner: dict[str, Any]) -> bool:
    if owner.get("host") != socket.gethostname():
        return time.time() - owner.get("time", 0.0) < LEASE_S
    try:
        process = psutil.Process(owner.get("pid", -1))
        return process.create_time() == owner.get("started")
    except (psutil.NoSuchProcess, ValueError):
        return False


def _parsed(content: bytes) -> dict[str, Any]:
    try:
        return json.loads(content)
    except json.JSONDecodeError:
        return {}


def _in_use(folder: str, owner: dict[str, Any]) -> ConfigError:
    who = f"process {owner.get('pid', '?')} on {owner.get('host', '?')}"
    return ConfigError(f"run_dir={folder!r} is in use by {who}; wait for it, stop it, or name another run_dir")
