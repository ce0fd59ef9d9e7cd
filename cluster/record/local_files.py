"""Files below a folder of a disk or a shared file system. Whole files are written atomically and synced; lines are synced on request."""

import contextlib
import errno
import os
import posixpath
import re
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa

from cluster.contracts.errors import AlreadyExistsError, StorageError

_ADVICE = {
    errno.ENOENT: "it is missing: check the path, or bring it back from a copy",
    errno.ENOSPC: "free space, then start the same command again",
    errno.EDQUOT: "free space or raise the quota, then start the same command again",
    errno.EACCES: "fix its permissions, then start the same command again",
    errno.EPERM: "fix its permissions, then start the same command again",
    errno.EROFS: "its file system takes no writes: mount it otherwise, or name another place",
}
_OTHER_ADVICE = "mend that, then start the same command again"
_ABANDONED_S = 3600.0
"""A temporary file that was not written to for this long is abandoned."""
_PIECE_BYTES = 1 << 20
"""Bytes read at a time to find the last lines of a file."""


class LocalFiles:
    """The files of one folder by their names below it."""

    def __init__(self, path: str) -> None:
        """Touches nothing."""
        self._root = os.path.abspath(os.path.expanduser(path))
        self._unsynced: set[str] = set()
        """Paths of files whose last lines are not synced yet."""

    def path(self, name: str = "") -> str:
        return posixpath.join(self._root, name) if name else self._root

    def read(self, name: str) -> pa.Buffer:
        with naming(self.path(name)), open(self.path(name), "rb") as file:
            return pa.py_buffer(file.read())

    def read_range(self, name: str, start: int, length: int) -> pa.Buffer:
        with naming(self.path(name)), open(self.path(name), "rb") as file:
            return pa.py_buffer(os.pread(file.fileno(), length, start))

    def write(self, name: str, content: "pa.Buffer | bytes") -> None:
        with naming(self.path(name)), self._aside(name) as aside:
            write_synced(aside, content)
            os.replace(aside, self.path(name))

    def create(self, name: str, content: "pa.Buffer | bytes") -> None:
        with naming(self.path(name)), self._aside(name) as aside:
            write_synced(aside, content)
            try:
                os.link(aside, self.path(name))
            except FileExistsError:
                raise AlreadyExistsError(f"{self.path(name)} exists already") from None

    def remove(self, name: str) -> None:
        with naming(self.path(name)), contextlib.suppress(FileNotFoundError):
            os.unlink(self.path(name))

    def remove_folder(self, name: str) -> None:
        with naming(self.path(name)), contextlib.suppress(FileNotFoundError):
            shutil.rmtree(self.path(name))

    def exists(self, name: str) -> bool:
        return self.size_bytes(name) is not None

    def size_bytes(self, name: str) -> int | None:
        with naming(self.path(name)):
            try:
                return os.stat(self.path(name)).st_size
            except (FileNotFoundError, NotADirectoryError):
                return None

    def names(self, folder: str) -> list[str]:
        with naming(self.path(folder)):
            try:
                return sorted(os.listdir(self.path(folder)))
            except FileNotFoundError:
                return []

    def folders(self, folder: str) -> list[str]:
        return [name for name in self.names(folder) if os.path.isdir(os.path.join(self.path(folder), name))]

    def versions(self, folder: str) -> dict[str, str]:
        with naming(self.path(folder)):
            try:
                found = {each.name: each.stat() for each in os.scandir(self.path(folder)) if each.is_file()}
            except FileNotFoundError:
                return {}
        return {name: f"{about.st_mtime_ns} {about.st_size}" for name, about in found.items()}

    def upload(self, name: str, local_path: str) -> None:
        with naming(self.path(name)), self._aside(name) as aside:
            _copy_synced(local_path, aside)
            os.replace(aside, self.path(name))

    def download(self, name: str, local_path: str) -> None:
        with naming(self.path(name)):
            _copy_synced(self.path(name), local_path)

    def append(self, name: str, line: str, *, is_durable: bool) -> None:
        path = self.path(name)
        with naming(path):
            make_folder(os.path.dirname(path))
            # One write call: a reader sees a whole line, or a torn last one, and never two mixed.
            with open(path, "ab", buffering=0) as file:
                before = file.seek(0, os.SEEK_END)
                content = f"{line}\n".encode()
                if file.write(content) != len(content):  # an almost full disk takes a part without an error
                    file.truncate(before)
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                if is_durable:
                    os.fsync(file.fileno())
                else:
                    self._unsynced.add(path)  # only after the write: an earlier flush would not have synced it
            if not before:
                sync_folder(os.path.dirname(path))

    def read_appended(self, name: str) -> str:
        if not self.exists(name):
            return ""
        content = self.read(name).to_pybytes()
        end = content.rfind(b"\n") + 1
        # The last line may be torn within a character.
        return content[:end].decode() + content[end:].decode(errors="replace")

    def replace_appended(self, name: str, text: str) -> None:
        self.write(name, text.encode())

    def read_last(self, name: str, count: int) -> str:
        if not self.exists(name):
            return ""
        with naming(self.path(name)), open(self.path(name), "rb") as file:
            begin, end = _span_of_last(file.fileno(), count)
            return os.pread(file.fileno(), end - begin, begin).decode()

    def replace_last(self, name: str, count: int, text: str) -> None:
        if not self.exists(name):
            return self.write(name, text.encode())
        path = self.path(name)
        with naming(path), self._aside(name) as aside:
            # The system copies the earlier lines, of which a run of weeks has gigabytes: they do not pass through Python.
            shutil.copyfile(path, aside)
            with open(aside, "r+b") as file:
                begin, _ = _span_of_last(file.fileno(), count)
                file.truncate(begin)
                file.seek(begin)
                file.write(text.encode())
                file.flush()
                os.fsync(file.fileno())
            os.replace(aside, path)

    def flush(self) -> None:
        for path in tuple(self._unsynced):
            self._unsynced.discard(path)  # before the sync: a line that comes meanwhile adds the path again
            try:
                with naming(path), contextlib.suppress(FileNotFoundError), open(path, "rb") as file:
                    os.fsync(file.fileno())
            except StorageError:
                self._unsynced.add(path)
                raise

    def compact(self) -> None: ...

    @contextlib.contextmanager
    def _aside(self, name: str) -> Iterator[str]:
        """Path of a temporary file in the same folder. At the end it is gone, and the name of the file outlasts a power cut."""
        target = self.path(name)
        make_folder(os.path.dirname(target))
        aside = f"{target}.tmp-{os.getpid()}"
        try:
            yield aside
        finally:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(aside)
        sync_folder(os.path.dirname(target))


def remove_leftovers(folder: str) -> None:
    """Removes temporary files of killed processes. Young ones stay, because their process may live."""
    for path in Path(folder).glob("*.tmp-*"):
        with contextlib.suppress(OSError):
            if time.time() - path.stat().st_mtime > _ABANDONED_S:
                path.unlink()


def _span_of_last(file: int, count: int) -> tuple[int, int]:
    """Begin and end of the last `count` whole lines, or of all lines if there are fewer. A torn last line comes after the end."""
    begin, ends = os.fstat(file).st_size, list[int]()
    while begin > 0 and len(ends) <= count:
        length = min(_PIECE_BYTES, begin)
        begin -= length
        piece = os.pread(file, length, begin)
        ends += [begin + each.end() for each in re.finditer(b"\n", piece)][::-1]
    return ends[count] if len(ends) > count else 0, ends[0] if ends else 0


def write_synced(path: str | os.PathLike[str], content: "pa.Buffer | bytes") -> None:
    with open(path, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _copy_synced(source: str, target: str) -> None:
    shutil.copyfile(source, target)
    _sync_file(target)


def _sync_file(path: str | os.PathLike[str]) -> None:
    with open(path, "rb") as file:
        os.fsync(file.fileno())


def make_folder(path: str, *, mode: int = 0o777) -> None:
    """Creates the folder and those above it, so that they outlast a power cut. `mode` is for this folder if it is new."""
    if os.path.isdir(path):
        return
    parent = os.path.dirname(path)
    make_folder(parent)
    os.makedirs(path, mode=mode, exist_ok=True)
    sync_folder(parent)


def sync_files(path: str | os.PathLike[str]) -> None:
    """Makes a file, or a folder with everything below it, outlast a power cut."""
    if os.path.isfile(path):
        return _sync_file(path)
    for folder, _, names in os.walk(path):
        for name in names:
            _sync_file(os.path.join(folder, name))
        sync_folder(folder)


def sync_folder(path: str | os.PathLike[str]) -> None:
    """Makes names that were created, replaced or removed in a local folder outlast a power cut."""
    folder = os.open(path, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def reason(error: OSError) -> str:
    """The system's message; some libraries' errors have only their own."""
    return error.strerror or str(error)


@contextlib.contextmanager
def naming(path: str) -> Iterator[None]:
    """Raises StorageError for a disk error, with the file and what helps."""
    try:
        yield
    except OSError as error:
        advice = _ADVICE.get(error.errno or 0, _OTHER_ADVICE)
        raise StorageError(f"{path}: {reason(error)}; {advice}") from error
