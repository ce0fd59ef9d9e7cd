"""JSON lines of a file that grows: each is read and parsed once."""

import json
import math
import posixpath
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from cluster.contracts.errors import DamagedError, StorageError
from cluster.record.run_directory import RunDirectory
from cluster.record.segments import segments_of

_OVERLAP = 512
"""Bytes before the place where reading goes on that must be as they were: else the file was written anew."""
_NEVER = ("", [])
_LONGEST_LINE = 65_536
_PIECE_BYTES = 4_000_000
"""That are read at a time, unless a line is longer."""


Keep = Callable[[dict[str, Any]], dict[str, Any] | None]
"""What is kept of a line; None for nothing."""


class Tail:
    """Lines of one file of a run. A torn last line waits for its end. Several threads may use it."""

    def __init__(
        self,
        directory: RunDirectory,
        name: str,
        *,
        keep: Keep | None = None,
        newest_bytes: int | None = None,
        store_every_s: float = 5.0,
    ) -> None:
        """Touches nothing. Of a file that has more than `newest_bytes` already, the lines before them are left out, in an object store by
        whole segments. A store is asked every `store_every_s` seconds at most."""
        self._directory = directory
        self._keep = keep
        self._name = name
        self._newest_bytes = newest_bytes
        self._store_every_s = store_every_s
        self._lock = threading.Lock()
        self._records: list[dict[str, Any]] = []
        self._offset, self._before = 0, b""
        self._segments: dict[str, tuple[str, list[dict[str, Any]]]] = {}
        """Of a store, in order: what was read, and the version of the object when it was."""
        self._asked_at = float("-inf")
        self.generation = 0
        """Grows when lines that were read are no longer what they were."""
        self._told = (0, 0)
        """The generation of what `new_records` returned, and how many lines of it."""

    @property
    def is_read(self) -> bool:
        return bool(self._records)

    def records(self, *, key: str | None = None) -> list[dict[str, Any]]:
        """All lines up to now. With `key`, the last line for each value of it, in its order."""
        with self._lock:
            self._read_on()
            lines = list(self._records)
        if key is None:
            return lines
        by_key = {line[key]: line for line in lines}
        return [by_key[value] for value in sorted(by_key)]

    def new_records(self) -> list[dict[str, Any]]:
        """Lines since the last call; all of them, when those that were read are no longer what they were."""
        lines = self.records()
        generation, number = self._told
        self._told = (self.generation, len(lines))
        return lines[number:] if generation == self.generation else lines

    def _read_on(self) -> None:
        if self._directory.is_local:
            self._read_file()
        elif time.monotonic() - self._asked_at > self._store_every_s:
            try:
                self._read_segments()
            finally:  # a store that is away is not asked by every request in turn
                self._asked_at = time.monotonic()

    def _read_file(self) -> None:
        size = self._directory.size_bytes(self._name) or 0
        if size < self._offset:
            self._start_over()
        if size == self._offset:
            return
        if not self._offset and self._newest_bytes is not None and size > self._newest_bytes:
            self._skip_to(size - self._newest_bytes)
        length = _PIECE_BYTES
        while self._offset < size:
            start = self._offset - len(self._before)
            content = self._directory.read_range(self._name, start, len(self._before) + length).to_pybytes()
            if not content.startswith(self._before):
                self._start_over()
            elif whole := content[len(self._before) : content.rfind(b"\n") + 1]:
                self._records += self._parsed(whole)
                self._offset += len(whole)
                self._before = (self._before + whole)[-_OVERLAP:]
                length = _PIECE_BYTES
            elif self._offset + length < size:
                length *= 2
            else:
                return  # the last line has no end yet

    def _skip_to(self, offset: int) -> None:
        """To the first line that begins after it."""
        content = self._directory.read_range(self._name, offset, _LONGEST_LINE).to_pybytes()
        self._offset = offset + content.find(b"\n") + 1

    def _read_segments(self) -> None:
        """A store's lines are objects: those that are new are read, and those that were written anew."""
        folder = self._name.removesuffix(".jsonl")
        versions = {f"{folder}/{file}": version for file, version in self._directory.versions(folder).items()}
        copied = self._directory.size_bytes(self._name)  # by whoever copied a local run
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
            return  # merged since they were listed: the next look finds the one that took their place
        self._segments = {
            each: (versions[each], read[each]) if each in read else self._segments[each] for each in order
        }
        records = [record for _, lines in self._segments.values() for record in lines]
        self.generation += records[: len(self._records)] != self._records
        self._records = records

    def _read_new(self, segments: Sequence[str]) -> dict[str, list[dict[str, Any]]]:
        """Lines of each. At the first look no more segments are read, from the newest on, than `newest_bytes` ask for."""
        is_first = not self._segments and self._newest_bytes is not None
        wanted = float(self._newest_bytes or 0) if is_first else math.inf
        read: dict[str, list[dict[str, Any]]] = {}
        for each in reversed(segments):
            content = self._directory.read_file(each).to_pybytes() if wanted > 0 else b""
            wanted -= len(content)
            read[each] = self._parsed(content)
        return read

    def _parsed(self, content: bytes) -> list[dict[str, Any]]:
        """Of whole lines: a last one without an end is left out."""
        whole = content[: content.rfind(b"\n") + 1]
        try:
            lines = [line for line in whole.splitlines() if line.strip()]
            if keep := self._keep:
                return [kept for line in lines if (kept := keep(json.loads(line))) is not None]
            return [json.loads(line, object_pairs_hook=_object) for line in lines]
        except ValueError as error:
            raise DamagedError(f"{self._directory.path(self._name)} has a line that is not JSON: {error}") from error

    def _start_over(self) -> None:
        self._records, self._offset, self._before = [], 0, b""
        self.generation += 1


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Its names are shared by all lines: with their own, a step's numbers take three times the memory."""
    return {sys.intern(name): value for name, value in pairs}
