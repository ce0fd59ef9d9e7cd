"""Files below one folder, on a disk or in an object store (s3://, gs://, az://): whole files, written atomically, and lines. No pickle."""

import json
import math
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import pyarrow as pa

from cluster.contracts.errors import DamagedError
from cluster.record.local_files import LocalFiles
from cluster.record.object_store import ObjectStore


class Storage:
    """Files by their name below the folder ("metrics.jsonl", "checkpoints/step-000010/manifest.json").

    Several threads may use it, but only one for each name. Every call raises StorageError with the file and what helps (disk full, no
    permission, no such bucket). `LocalFiles` and `ObjectStore` pass the same tests.
    """

    def __init__(self, url: str) -> None:
        """Touches nothing. Raises StorageError for a URL of an unknown kind, or if settings of its store are missing (Azure's account)."""
        self.url = url
        self._store = ObjectStore(url) if "://" in url else None
        self._files = self._store or LocalFiles(url)

    @property
    def is_local(self) -> bool:
        return self._store is None

    def path(self, name: str = "") -> str:
        """The absolute path of `name`, or its URL in an object store."""
        return self._files.path(name)

    def reach(self) -> None:
        """Raises StorageError within seconds if an object store does not answer: for a URL that was just typed. Other calls wait for a
        minute."""
        if self._store:
            self._store.reach()

    # Whole files

    def remove(self, name: str) -> None:
        """Deletes a file, or lines, if they are there."""
        self._files.remove(name)

    def remove_folder(self, name: str) -> None:
        """Deletes all files below a folder, if it is there. A killed call leaves some of them."""
        self._files.remove_folder(name)

    def exists(self, name: str) -> bool:
        return self._files.exists(name)

    def size_bytes(self, name: str) -> int | None:
        """Size of a whole file; None when it is not there."""
        return self._files.size_bytes(name)

    def names(self, folder: str = "") -> list[str]:
        """Names in `folder`, of files and folders, sorted; empty when it is not there."""
        return self._files.names(folder)

    def folders(self, folder: str = "") -> list[str]:
        """Names of the folders in `folder`, sorted, on a disk with links to folders; empty when it is not there."""
        return self._files.folders(folder)

    def versions(self, folder: str = "") -> dict[str, str]:
        """Version of each file in `folder`: a text that changes when the file is written anew. Empty when the folder is not there."""
        return self._files.versions(folder)

    def read_file(self, name: str) -> pa.Buffer:
        return self._files.read(name)

    def read_range(self, name: str, start: int, length: int) -> pa.Buffer:
        """`length` bytes from `start` on, or fewer at the file's end."""
        return self._files.read_range(name, start, length)

    def read_text(self, name: str) -> str:
        return self.read_file(name).to_pybytes().decode()

    def read_json(self, name: str) -> dict[str, Any]:
        """A file's JSON object; empty when the file is not there. Raises DamagedError for a file without one."""
        if not self.exists(name):
            return {}
        try:
            content = json.loads(self.read_text(name))
        except ValueError as error:
            raise DamagedError(f"{self.path(name)} is damaged: {error}; bring it back from a copy") from error
        if not isinstance(content, dict):
            raise DamagedError(f"{self.path(name)} is damaged: it holds no object; bring it back from a copy")
        return content

    def write_file(self, name: str, content: "pa.Buffer | bytes") -> None:
        """All of it or nothing, durable when this returns."""
        self._files.write(name, content)

    def create(self, name: str, content: "pa.Buffer | bytes") -> None:
        """As `write_file`. Raises AlreadyExistsError when the file is there: of concurrent calls for one name, one succeeds.

        In an object store a file with the same content counts as created by this call, whose answer may have been lost.
        """
        self._files.create(name, content)

    def write_json(self, name: str, content: Mapping[str, Any]) -> None:
        self.write_file(name, (json.dumps(finite(content), indent=2) + "\n").encode())

    def upload(self, name: str, local_path: str) -> None:
        """Writes a local file as `name`, all of it or nothing; a large one in several parts at a time."""
        self._files.upload(name, local_path)

    def download(self, name: str, local_path: str) -> None:
        """Writes `name` as a durable local file; a large one in several parts at a time. A failed call may leave a part."""
        self._files.download(name, local_path)

    # Lines

    def append_line(self, name: str, line: str) -> None:
        """On a disk it returns once the line is durable. An object store gets it together with other lines, within 20 s."""
        self._files.append(name, line, is_durable=True)

    def append_json(self, name: str, record: Mapping[str, Any]) -> None:
        """One JSON line. On a disk it is readable at once."""
        self._files.append(name, json.dumps(finite(record)), is_durable=False)

    def flush_lines(self) -> None:
        """Returns once all lines that were appended here are durable."""
        self._files.flush()

    def compact_lines(self) -> None:
        """Merges the lines that were appended here into few objects of a store."""
        self._files.compact()

    def read_lines(self, name: str) -> list[str]:
        """All lines. A torn last line, which has no end, is "" whatever it holds: its append did not return."""
        *lines, torn = self._text_of(name).split("\n")
        return [*lines, ""] if torn else lines

    def read_json_lines(self, name: str) -> list[dict[str, Any]]:
        """The JSON object of each line, without a torn last one. Raises DamagedError for a line without an object."""
        lines = self.read_lines(name)
        records: list[dict[str, Any]] = []
        for number, line in enumerate(lines, start=1):
            try:
                record = json.loads(line, object_pairs_hook=interned)
            except json.JSONDecodeError as error:
                if number < len(lines):
                    raise self._damaged(name, number, f"is not JSON: {error}") from error
                break
            if not isinstance(record, dict):
                raise self._damaged(name, number, "holds no object")
            records.append(record)
        return records

    def replace_lines(self, name: str, lines: Sequence[str]) -> None:
        self._files.replace_appended(name, _text(lines))

    def read_last_lines(self, name: str, count: int) -> list[str]:
        """The last `count` lines, or all if there are fewer, without a torn one. Of a long file it reads only the end."""
        return self._files.read_last(name, count).split("\n")[:-1]

    def replace_last_lines(self, name: str, count: int, lines: Sequence[str]) -> None:
        """Replaces the last `count` lines, and a torn one after them: all of it or nothing, durable when this returns."""
        self._files.replace_last(name, count, _text(lines))

    def remove_torn_line(self, name: str) -> None:
        """Removes a last line that a crash left without an end. In an object store no reader sees such a line."""
        # Only the last byte is read: a run of weeks has gigabytes of lines.
        if self.is_local and (size := self.size_bytes(name)) and self.read_range(name, size - 1, 1) != b"\n":
            self.replace_lines(name, self._text_of(name).split("\n")[:-1])

    def _damaged(self, name: str, number: int, why: str) -> DamagedError:
        return DamagedError(
            f"{self.path(name)} line {number} {why}; take that line out, or bring the file back from a copy"
        )

    def _text_of(self, name: str) -> str:
        try:
            return self._files.read_appended(name)
        except UnicodeDecodeError as error:
            raise DamagedError(f"{self.path(name)} was damaged: {error}; bring it back from a copy") from error


def interned(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """For `json.loads`: all lines share their names. Otherwise the numbers of a long run take three times the memory."""
    return {sys.intern(name): value for name, value in pairs}


def _text(lines: Sequence[str]) -> str:
    return "".join(f"{line}\n" for line in lines)


def finite(value: Any) -> Any:
    """The value for JSON, which has no NaN and no infinity: None replaces them."""
    if isinstance(value, Mapping):
        return {name: finite(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
