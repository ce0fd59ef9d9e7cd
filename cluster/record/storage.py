"""Files below one folder, on a disk or in s3:// or gs://: whole files atomically. Lines, durably, on a disk alone. No pickle."""

import contextlib
import errno
import json
import os
import posixpath
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.fs as pafs

from cluster.contracts.errors import StorageError

_ADVICE = {
    errno.ENOENT: "it is missing: check the path, or bring it back from a copy",
    errno.ENOSPC: "free space, then start the same command again",
    errno.EDQUOT: "free space or raise the quota, then start the same command again",
    errno.EACCES: "fix its permissions, then start the same command again",
    errno.EPERM: "fix its permissions, then start the same command again",
    errno.EROFS: "its file system takes no writes: mount it otherwise, or name another place",
}
_OTHER_ADVICE = "mend that, then start the same command again"


class Storage:
    """Files by their name below the folder ("metrics.jsonl", "ledger/ledger.jsonl"). Several threads may use it, one for each name."""

    def __init__(self, url: str) -> None:
        """Touches nothing. Raises pyarrow's ArrowInvalid for a URL of an unknown kind."""
        self.url = url
        self._files, self._root = filesystem_of(url)
        self.is_local = isinstance(self._files, pafs.LocalFileSystem)

    def path(self, name: str = "") -> str:
        """Where `name` lies: an absolute path, or a URL for an object store."""
        return self._at(name) if self.is_local else posixpath.join(self.url, name)

    # Whole files

    def remove(self, name: str) -> None:
        """Deletes a file, if it is there."""
        with naming(self.path(name)), contextlib.suppress(FileNotFoundError):
            self._files.delete_file(self._at(name))

    def exists(self, name: str) -> bool:
        with naming(self.path(name)):
            return self._files.get_file_info(self._at(name)).type != pafs.FileType.NotFound

    def names(self, folder: str = "") -> list[str]:
        """Names in `folder`, sorted; empty when it is not there."""
        selector = pafs.FileSelector(self._at(folder), allow_not_found=True)
        with naming(self.path(folder)):
            return sorted(info.base_name for info in self._files.get_file_info(selector))

    def read_file(self, name: str) -> pa.Buffer:
        with naming(self.path(name)), self._files.open_input_file(self._at(name)) as file:
            return file.read_buffer()

    def read_text(self, name: str) -> str:
        return self.read_file(name).to_pybytes().decode()

    def write_file(self, name: str, content: "pa.Buffer | bytes") -> None:
        """All of it or nothing, on the disk when this returns. Raises StorageError (disk full, no permission)."""
        target = self._at(name)
        with naming(self.path(name)):
            self._files.create_dir(posixpath.dirname(target), recursive=True)
            if not self.is_local:
                with self._files.open_output_stream(target) as stream:
                    stream.write(content)
                return
            aside = f"{target}.tmp-{os.getpid()}"
            try:
                with open(aside, "wb") as file:
                    file.write(content)
                    file.flush()
                    os.fsync(file.fileno())
                os.replace(aside, target)
            finally:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(aside)
            sync_folder(os.path.dirname(target))

    def write_json(self, name: str, content: Mapping[str, Any]) -> None:
        self.write_file(name, (json.dumps(content, indent=2) + "\n").encode())

    # Lines

    def append_line(self, name: str, line: str) -> None:
        """Returns once the line is on the disk (the ledger's promise)."""
        self._append(name, line, is_durable=True)

    def append_json(self, name: str, record: Mapping[str, Any]) -> None:
        """One JSON line, readable at once."""
        self._append(name, json.dumps(record), is_durable=False)

    def read_lines(self, name: str) -> list[str]:
        """All lines; empty when there is none. A torn last one, which has no end, is "" whatever it holds: its append did not return."""
        if not self.exists(name):
            return []
        *lines, torn = self.read_text(name).split("\n")
        return [*lines, ""] if torn else lines

    def read_json_lines(self, name: str) -> list[dict[str, Any]]:
        """Each whole line's object. The last line of a living or killed run may be torn, and is left out."""
        lines = self.read_lines(name)
        records: list[dict[str, Any]] = []
        for number, line in enumerate(lines, start=1):
            try:
                records.append(json.loads(line))
            except json.JSONDecodeError as error:
                if number < len(lines):
                    raise StorageError(f"{self.path(name)} line {number} is not JSON: {error}") from error
        return records

    def replace_lines(self, name: str, lines: Sequence[str]) -> None:
        self.write_file(name, "".join(f"{line}\n" for line in lines).encode())

    def remove_torn_line(self, name: str) -> None:
        """Takes the last line out where a crash left it without an end."""
        if self.exists(name) and (text := self.read_text(name)) and not text.endswith("\n"):
            self.replace_lines(name, text.splitlines()[:-1])

    def _append(self, name: str, line: str, *, is_durable: bool) -> None:
        assert self.is_local, f"{self.url}: an object store cannot append"
        path = self._at(name)
        with naming(path):
            os.makedirs(os.path.dirname(path), exist_ok=True)
            # One write call: a reader sees a whole line, or a torn last one, and never two mixed.
            with open(path, "ab", buffering=0) as file:
                before = file.seek(0, os.SEEK_END)
                content = f"{line}\n".encode()
                if file.write(content) != len(content):  # an almost full disk takes a part without an error
                    file.truncate(before)
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                if is_durable:
                    os.fsync(file.fileno())

    def _at(self, name: str) -> str:
        return posixpath.join(self._root, name) if name else self._root


def filesystem_of(url: str) -> tuple[pafs.FileSystem, str]:
    """The file system that `url` or a local path lies in, and its path there. Raises ArrowInvalid for a URL that pyarrow does not know."""
    if "://" not in url:
        return pafs.LocalFileSystem(), os.path.abspath(os.path.expanduser(url))
    return pafs.FileSystem.from_uri(url)


def sync_folder(path: str | os.PathLike[str]) -> None:
    """Makes names that were created, replaced or removed in a local folder outlast a power cut."""
    folder = os.open(path, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def reason(error: OSError) -> str:
    """The system's words; pyarrow's errors bring their own."""
    return error.strerror or str(error)


@contextlib.contextmanager
def naming(path: str) -> Iterator[None]:
    """Says which file a disk error is about, and what helps."""
    try:
        yield
    except OSError as error:
        advice = _ADVICE.get(error.errno or 0, _OTHER_ADVICE)
        raise StorageError(f"{path}: {reason(error)}; {advice}") from error
