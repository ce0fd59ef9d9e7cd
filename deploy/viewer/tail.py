"""JSON lines of a file that grows: each is read and parsed once."""

import json
import threading
import time
from typing import Any

from cluster.record.run_directory import RunDirectory

_OVERLAP = 512
"""Bytes before the place where reading goes on that must be as they were: else the file was written anew."""
_STORE_S = 5.0
"""Of an object store: how often it is asked."""


class Tail:
    """Lines of one file of a run. A torn last line waits for its end. Several threads may use it."""

    def __init__(self, directory: RunDirectory, name: str) -> None:
        """Touches nothing."""
        self._directory = directory
        self._name = name
        self._lock = threading.Lock()
        self._records: list[dict[str, Any]] = []
        self._offset, self._before = 0, b""
        self._segments: list[str] | None = None
        self._asked_at = float("-inf")
        self.generation = 0
        """Grows when lines that were read are no longer what they were."""

    def records(self, *, key: str | None = None) -> list[dict[str, Any]]:
        """All lines up to now. With `key`, the last line for each value of it, in its order."""
        with self._lock:
            self._read_on()
            lines = list(self._records)
        if key is None:
            return lines
        by_key = {line[key]: line for line in lines}
        return [by_key[value] for value in sorted(by_key)]

    def _read_on(self) -> None:
        if self._directory.is_local:
            self._read_file()
        elif time.monotonic() - self._asked_at > _STORE_S:
            self._read_segments()
            self._asked_at = time.monotonic()

    def _read_file(self) -> None:
        size = self._directory.size_bytes(self._name) or 0
        if size < self._offset:
            self._start_over()
        if size == self._offset:
            return
        start = self._offset - len(self._before)
        content = self._directory.read_range(self._name, start, size - start).to_pybytes()
        if not content.startswith(self._before):
            self._start_over()
            content = self._directory.read_range(self._name, 0, size).to_pybytes()
        whole = content[len(self._before) : content.rfind(b"\n") + 1]
        self._records += [json.loads(line) for line in whole.splitlines() if line.strip()]
        self._offset += len(whole)
        self._before = (self._before + whole)[-_OVERLAP:]

    def _read_segments(self) -> None:
        """A store's lines are objects: they are read again when other objects are there."""
        segments = self._directory.names(self._name.removesuffix(".jsonl"))
        if segments == self._segments:
            return
        records = self._directory.read_json_lines(self._name)
        if records[: len(self._records)] != self._records:
            self.generation += 1
        self._records, self._segments = records, segments

    def _start_over(self) -> None:
        self._records, self._offset, self._before = [], 0, b""
        self.generation += 1
