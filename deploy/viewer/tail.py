"""JSON lines of a growing file. Each line is read and parsed once."""

import json
import posixpath
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from cluster.contracts.errors import DamagedError, StorageError
from cluster.record.run_directory import RunDirectory, wrong_in
from cluster.record.segments import segments_of
from cluster.record.storage import interned

_OVERLAP = 512
"""Bytes before the current offset that are compared at each look: if they changed, the file was rewritten and is read again."""
_NUM_REREAD = 64
"""Lines that are read again, unless earlier ones have changed too. A driver rewrites the last lines of its metrics now and then."""
_NEVER = ("", [])
_LONGEST_LINE = 65_536
_PIECE_BYTES = 4_000_000
"""Bytes read at a time, unless a line is longer."""
_NUM_READ = 16
"""Segments of an object store read at a time."""


Keep = Callable[[dict[str, Any]], dict[str, Any] | None]
"""Returns the part of a line to keep; None drops the line."""


class Tail:
    """Lines of one file of a run. An incomplete last line is left for a later look. Several threads may use it."""

    def __init__(
        self,
        directory: RunDirectory,
        name: str,
        *,
        keep: Keep | None = None,
        newest_bytes: int | None = None,
        store_every_s: float = 5.0,
    ) -> None:
        """Reads nothing yet. Of more than `newest_bytes` at the first look, earlier lines are left out, in an object store earlier
        segments; so they are whenever twice as much was read. A store is read every `store_every_s` seconds at most."""
        self._directory = directory
        self._keep = keep
        self._name = name
        self._newest_bytes = newest_bytes
        self._store_every_s = store_every_s
        self._lock = threading.Lock()
        self._records: list[dict[str, Any]] = []
        self._num_bytes = 0
        """Of the lines that were read."""
        self._offset, self._before = 0, b""
        self._places: deque[tuple[int, bytes, int]] = deque(maxlen=2)
        """(offset, bytes before it, number of records before it) of places to which to go back. The first is `_NUM_REREAD` lines back."""
        self._num_since = 0
        """Lines since the last of these places."""
        self._segments: dict[str, tuple[str, list[dict[str, Any]]]] = {}
        """By segment of an object store, in order: (version, its lines)."""
        self._asked_at = float("-inf")
        self.generation = 0
        """Grows when lines that were read have changed."""
        self._returned = (0, 0)
        """Generation and number of the lines that `new_records` has returned."""

    @property
    def is_read(self) -> bool:
        return bool(self._records)

    def records(self, *, key: str | None = None) -> list[dict[str, Any]]:
        """All lines so far. With `key`, the last line for each of its values, sorted by it."""
        return self.versioned_records(key=key)[0]

    def versioned_records(self, *, key: str | None = None) -> tuple[list[dict[str, Any]], int]:
        """(records, their generation): another thread may find changed lines right after."""
        with self._lock:
            self._read_on()
            lines, generation = list(self._records), self.generation
        if key is None:
            return lines, generation
        by_key = {line[key]: line for line in lines}
        return [by_key[value] for value in sorted(by_key)], generation

    def new_records(self) -> list[dict[str, Any]]:
        """Lines since the last call, or all lines if earlier ones have changed."""
        lines, generation = self.versioned_records()
        before, number = self._returned
        self._returned = (generation, len(lines))
        return lines[number:] if generation == before else lines

    def forget(self) -> None:
        """Frees the memory; the next look is a first one."""
        with self._lock:
            if self.is_read:
                self._forget()

    def _forget(self) -> None:
        self._records, self._segments, self._num_bytes = [], {}, 0
        self._offset, self._before = 0, b""
        self._places.clear()
        self._asked_at = float("-inf")
        self.generation += 1

    def _is_full(self, more: int = 0) -> bool:
        return self._newest_bytes is not None and self._num_bytes + more > 2 * self._newest_bytes

    def _read_on(self) -> None:
        if self._directory.is_local:
            self._read_file()
        elif time.monotonic() - self._asked_at > self._store_every_s:
            try:
                self._read_segments()
            finally:  # after an error too: otherwise each request would ask a store that does not answer
                self._asked_at = time.monotonic()

    def _read_file(self) -> None:
        size = self._directory.size_bytes(self._name) or 0
        while size < self._offset:
            self._go_back()
        if size == self._offset:
            return
        if self._offset and self._is_full(size - self._offset):
            self._forget()
        if not self._offset and self._newest_bytes is not None and size > self._newest_bytes:
            self._skip_to(size - self._newest_bytes)
        length = _PIECE_BYTES
        while self._offset < size:
            start = self._offset - len(self._before)
            content = self._directory.read_range(self._name, start, len(self._before) + length).to_pybytes()
            if not content.startswith(self._before):
                self._go_back()
            elif whole := content[len(self._before) : content.rfind(b"\n") + 1]:
                self._add_all(whole.splitlines(keepends=True))
                length = _PIECE_BYTES
            elif self._offset + length < size:
                length *= 2
            else:
                return  # the last line is incomplete

    def _add_all(self, lines: list[bytes]) -> None:
        if earlier := lines[:-_NUM_REREAD]:
            self._add(earlier)
            self._places.clear()
        if not self._places or self._num_since >= _NUM_REREAD:
            self._places.append((self._offset, self._before, len(self._records)))
            self._num_since = 0
        self._add(lines[-_NUM_REREAD:])

    def _add(self, lines: list[bytes]) -> None:
        content = b"".join(lines)
        self._records += self._parsed(content)
        self._offset += len(content)
        self._num_bytes += len(content)
        self._num_since += len(lines)
        self._before = (self._before + content)[-_OVERLAP:]

    def _go_back(self) -> None:
        """To the first of the places, or if the file has changed before it too, to its start."""
        self._offset, self._before, number = self._places[0] if self._places else (0, b"", 0)
        self._places.clear()
        del self._records[number:]
        self.generation += 1

    def _skip_to(self, offset: int) -> None:
        """Moves to the first line that begins after `offset`."""
        content = self._directory.read_range(self._name, offset, _LONGEST_LINE).to_pybytes()
        self._offset = offset + content.find(b"\n") + 1

    def _read_segments(self) -> None:
        """In an object store a file of lines is a folder of segments. Reads those that are new or have changed."""
        if self._is_full():
            self._forget()
        folder = self._name.removesuffix(".jsonl")
        versions = {f"{folder}/{file}": version for file, version in self._directory.versions(folder).items()}
        copied = self._directory.size_bytes(self._name)  # a single file, if someone copied a local run to the store
        order = [self._name] if copied is not None else []
        order += segments_of(self._name, [posixpath.basename(each) for each in versions])
        versions[self._name] = str(copied)
        new = [each for each in order if self._segments.get(each, _NEVER)[0] != versions[each]]
        if not new and order == list(self._segments):
            return
        try:
            read = self._read_new(new)
        except StorageError:
            if all(map(self._directory.exists, new)):
                raise
            return  # merged since they were listed: the next look finds the merged segment
        self._segments = {
            each: (versions[each], read[each]) if each in read else self._segments[each] for each in order
        }
        records = [record for _, lines in self._segments.values() for record in lines]
        self.generation += records[: len(self._records)] != self._records
        self._records = records

    def _read_new(self, segments: Sequence[str]) -> dict[str, list[dict[str, Any]]]:
        """Lines of each segment. The first look reads backwards from the newest segment until it has `newest_bytes`."""
        if self._segments or self._newest_bytes is None:
            with ThreadPoolExecutor(_NUM_READ) as threads:
                contents = threads.map(self._directory.read_file, segments)
                found = {each: content.to_pybytes() for each, content in zip(segments, contents, strict=True)}
            self._num_bytes += sum(map(len, found.values()))
            return {each: self._parsed(content) for each, content in found.items()}
        wanted = self._newest_bytes
        read: dict[str, list[dict[str, Any]]] = {}
        for each in reversed(segments):
            content = self._directory.read_file(each).to_pybytes() if wanted > 0 else b""
            wanted -= len(content)
            self._num_bytes += len(content)
            read[each] = self._parsed(content)
        return read

    def _parsed(self, content: bytes) -> list[dict[str, Any]]:
        """Parses the complete lines of `content`; an incomplete last line is left out."""
        whole = content[: content.rfind(b"\n") + 1]
        keep = self._keep or (lambda line: line)
        found = (keep(self._line(line)) for line in whole.splitlines() if line.strip())
        return [line for line in found if line is not None]

    def _line(self, text: bytes) -> dict[str, Any]:
        try:
            line = json.loads(text, object_pairs_hook=None if self._keep else interned)
        except ValueError as error:
            raise DamagedError(f"{self._directory.path(self._name)} has a line that is not JSON: {error}") from error
        if why := wrong_in(self._name, line) if isinstance(line, dict) else "holds no object":
            raise DamagedError(f"{self._directory.path(self._name)} is damaged: its line {line!r:.60} {why}")
        return line
