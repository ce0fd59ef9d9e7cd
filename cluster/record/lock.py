"""One driver per run directory of a disk: a lock on a file, which the kernel drops with the process. The file names the owner."""

import fcntl
import os
import socket
import time
import uuid

from cluster.contracts.errors import InUseError

_TRIES, _PAUSE_S = 5, 0.02
"""`owner_of` holds the lock for an instant: only a lock that stays is an owner's."""


class Claim:
    """The lock. It is ours until `release` or until this process ends in any way."""

    def __init__(self, path: str) -> None:
        """Raises InUseError naming the living owner, OSError if the disk does not take the file with this one's name."""
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        for _ in range(_TRIES):
            if _is_free(self._descriptor, fcntl.LOCK_EX):
                break
            time.sleep(_PAUSE_S)
        else:
            owner = _name_in(self._descriptor)
            os.close(self._descriptor)
            raise in_use(os.path.dirname(path), owner)
        try:
            os.ftruncate(self._descriptor, 0)
            os.pwrite(self._descriptor, this_process().encode(), 0)
        except OSError:  # a full disk: else the lock would stay ours until this process ends
            os.close(self._descriptor)
            raise

    def release(self) -> None:
        os.ftruncate(self._descriptor, 0)
        os.close(self._descriptor)


def owner_of(path: str) -> str | None:
    """The living owner, such as `process 4711 on node-1`, on any machine; None when there is none."""
    try:
        with open(path, "rb") as file:
            return None if _is_free(file.fileno(), fcntl.LOCK_SH) else _name_in(file.fileno())
    except FileNotFoundError:
        return None


def in_use(folder: str, owner: str) -> InUseError:
    return InUseError(
        f"run_dir={folder!r} is in use by {owner}; wait for it (--wait-for-claim 10m), stop it, or name another run_dir"
    )


def this_process() -> str:
    return f"process {os.getpid()} on {socket.gethostname()}"


def this_driver() -> str:
    """A different text for each driver, also for two in one process."""
    return f"{this_process()}, {uuid.uuid4().hex[:8]}"


def _is_free(descriptor: int, lock: int) -> bool:
    """Takes the lock if it is free."""
    try:
        fcntl.flock(descriptor, lock | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _name_in(descriptor: int) -> str:
    return os.pread(descriptor, 4096, 0).decode() or "another process"
