"""A rank's folder on its local disk for files to upload.

A process's lock ends with the process, however it ends. A folder without a lock was left by a killed rank, and the next rank removes it.
"""

import fcntl
import os
import shutil
import tempfile
from pathlib import Path

_PREFIX = "treadwheel-checkpoint-"
_NUM_TRIES = 5


class Scratch:
    """One folder, until `close`."""

    def __init__(self) -> None:
        """Removes folders left by killed ranks. Raises OSError if no folder can be made or locked."""
        for left in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
            if (lock := _locked(left)) is not None:
                _remove(left, lock)
        self.folder, self._lock = _new()

    def close(self) -> None:
        _remove(self.folder, self._lock)


def _new() -> tuple[Path, int]:
    for _ in range(_NUM_TRIES):  # another rank may remove a new folder before it is locked
        folder = Path(tempfile.mkdtemp(prefix=_PREFIX))
        if (lock := _locked(folder)) is not None:
            if folder.is_dir():
                return folder, lock
            os.close(lock)
    raise OSError(f"{tempfile.gettempdir()}: its folders cannot be locked; set TMPDIR to another folder")


def _locked(folder: Path) -> int | None:
    """The lock's file descriptor; None if another process holds the lock, or the folder is gone or another user's."""
    try:
        lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError:
        return None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(lock)
        return None
    return lock


def _remove(folder: Path, lock: int) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    os.close(lock)
