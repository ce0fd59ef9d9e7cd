"""Lines in a store that cannot append: metrics.jsonl is the objects metrics/000001.jsonl, 000002.jsonl and so on, in their order.

A process gathers appended lines, and a thread writes them as the next segment after 20 s or at 256 kB. A killed process loses the last 20
s. Segments are merged now and then, and at the end: 000001-000064.jsonl replaces the segments 1 to 64 even while they still exist. A file
metrics.jsonl, which came with a copy of a local run, is segment 0.
"""

import contextlib
import re
import sys
import threading
from collections.abc import Iterable, Sequence
from itertools import takewhile
from typing import Protocol

from cluster.contracts.errors import AlreadyExistsError, StorageError

CLOSE_AFTER_S = 20.0
CLOSE_AT_BYTES = 256_000
MERGED_AT = 64
"""Unmerged segments of one name."""
Span = tuple[int, int]
"""First and last number of a segment."""


def is_lines(name: str) -> bool:
    return name.endswith(".jsonl")


def segments_of(name: str, files: Iterable[str]) -> list[str]:
    """Objects with the lines of `name`, in order, given the files in its folder. Segments that a merged one replaces are left out."""
    return [_object(name, span) for span in _live(_spans_of(files))]


class Objects(Protocol):
    def create(self, name: str, content: bytes) -> None: ...
    def write(self, name: str, content: bytes) -> None: ...
    def names(self, folder: str) -> list[str]: ...
    def has(self, name: str) -> bool: ...
    def read_many(self, names: Sequence[str]) -> list[bytes | None]: ...
    def delete(self, names: Sequence[str]) -> None: ...


class Segments:
    """Lines by the name of their file. Several threads may use it."""

    def __init__(self, objects: Objects) -> None:
        self._objects = objects
        self._gathered: dict[str, list[str]] = {}
        self._names: set[str] = set()
        self._size = 0
        self._timer: threading.Timer | None = None
        self._unsure: dict[str, tuple[int, bytes]] = {}
        """Number and content of a segment whose write failed: the store may have it nevertheless. Number 0: no number yet."""
        self._is_behind = False
        self._lock = threading.Lock()
        self._writing = threading.Lock()

    def append(self, name: str, line: str) -> None:
        """Returns at once. If the store does not take the lines, they are kept and tried again 20 s later."""
        with self._lock:
            self._names.add(name)
            self._gathered.setdefault(name, []).append(f"{line}\n")
            self._size += len(line) + 1
            self._flush_in(0.0 if self._size >= CLOSE_AT_BYTES else CLOSE_AFTER_S)

    def flush(self) -> None:
        """Returns once all appended lines are in the store. Raises StorageError, and keeps the lines that are not."""
        with self._writing:
            with self._lock:
                gathered, self._gathered, self._size = self._gathered, {}, 0
                if self._timer:
                    self._timer.cancel()
                self._timer = None
            try:
                for name in list(self._unsure):
                    self._write_unsure(name)
                while gathered:
                    name = next(iter(gathered))
                    self._write_next(name, "".join(gathered.pop(name)).encode())
            except StorageError:
                self._keep(gathered)
                raise
            self._is_behind = False

    def read(self, name: str) -> str:
        """All lines, also those that wait here. A last line without an end is left out."""
        self.flush()
        while True:
            found = self._objects.read_many([_object(name, span) for span in _live(self._spans(name))])
            if None not in found:  # else segments were merged after they were listed
                return b"".join(_whole(each) for each in found if each).decode()

    def replace(self, name: str, text: str) -> None:
        """Replaces all lines by `text`."""
        self.flush()
        with self._writing:
            self._put_in_place_of(name, self._spans(name), text.encode())

    def read_last(self, name: str, count: int) -> str:
        """The last `count` lines, or all if there are fewer."""
        self.flush()
        _, lines = self._last(name, count)
        return "".join(lines[max(len(lines) - count, 0) :])

    def replace_last(self, name: str, count: int, text: str) -> None:
        """Replaces the last `count` lines by `text`. Segments without one of them stay."""
        self.flush()
        with self._writing:
            spans, lines = self._last(name, count)
            self._put_in_place_of(name, spans, "".join([*lines[: max(len(lines) - count, 0)], text]).encode())

    def compact(self) -> None:
        """Merges the last unmerged segments of each name that was appended to here. Merged ones stay: they may hold gigabytes."""
        self.flush()
        with self._writing:
            for name in sorted(self._names):
                small = [*takewhile(_is_one, reversed(_live(self._spans(name))))]
                if len(small) > 1:
                    self._merge(name, small[::-1])

    def exists(self, name: str) -> bool:
        return bool(self._spans(name))

    def remove(self, name: str) -> None:
        with self._lock:
            self._gathered.pop(name, None)
            self._unsure.pop(name, None)
        self._objects.delete([_object(name, span) for span in self._spans(name)])

    def _flush_later(self) -> None:
        try:
            self.flush()
        except StorageError as error:
            if not self._is_behind:
                message = f"treadwheel: lines wait until the store takes them: {error}"
                print(message, file=sys.stderr, flush=True)
            self._is_behind = True

    def _flush_in(self, seconds: float) -> None:
        """Flushes after `seconds` at the latest. The caller holds the lock."""
        if self._timer and self._timer.interval <= seconds:
            return
        if self._timer:
            self._timer.cancel()
        self._timer = threading.Timer(seconds, self._flush_later)
        self._timer.daemon = True
        self._timer.start()

    def _keep(self, gathered: dict[str, list[str]]) -> None:
        with self._lock:
            for name, lines in gathered.items():
                self._gathered[name] = lines + self._gathered.get(name, [])
                self._size += sum(map(len, lines))
            self._flush_in(CLOSE_AFTER_S)

    def _write_next(self, name: str, content: bytes) -> None:
        self._unsure[name] = (0, content)
        self._write_unsure(name)

    def _write_unsure(self, name: str) -> None:
        """Writes it with its earlier number, in case the store has it."""
        number, content = self._unsure[name]
        spans = self._written_spans(name)
        merged = [span for span in spans if number and span[0] <= number <= span[1] and not _is_one(span)]
        if merged and self._holds(name, merged, content):
            self._unsure.pop(name, None)
            return
        if merged or not number:
            number = max((last for _, last in spans), default=0) + 1
        while True:
            self._unsure[name] = (number, content)
            try:
                self._objects.create(_object(name, (number, number)), content)
                break
            except AlreadyExistsError:  # another process appends to the same lines
                number += 1
        self._unsure.pop(name, None)
        small = [span for span in _live(spans) if _is_one(span)]
        if len(small) >= MERGED_AT:
            with contextlib.suppress(StorageError):  # the lines are in the store; the next segment merges
                self._merge(name, small)

    def _holds(self, name: str, spans: Sequence[Span], lines: bytes) -> bool:
        found = self._objects.read_many([_object(name, span) for span in spans])
        return any(b"\n" + lines in b"\n" + each for each in found if each)

    def _merge(self, name: str, spans: Sequence[Span]) -> None:
        found = self._objects.read_many([_object(name, span) for span in spans])
        if None not in found:
            self._put_in_place_of(name, spans, b"".join(_whole(each) for each in found if each))

    def _put_in_place_of(self, name: str, spans: Sequence[Span], content: bytes) -> None:
        if not spans:
            return self._write_next(name, content)
        whole = (min(first for first, _ in spans), max(1, *(last for _, last in spans)))
        self._objects.write(_object(name, whole), content)
        self._objects.delete([_object(name, span) for span in spans if span != whole])

    def _last(self, name: str, count: int) -> tuple[list[Span], list[str]]:
        """The last segments that have `count` lines together, also those that a merged one replaces; and their lines."""
        spans = self._spans(name)
        lines: list[str] = []
        first = None
        for span in reversed(_live(spans)):
            if len(lines) >= count:
                break
            (found,) = self._objects.read_many([_object(name, span)])
            if found is None:  # segments were merged after they were listed
                return self._last(name, count)
            first = span[0]
            lines[:0] = [f"{line}\n" for line in _whole(found).decode().split("\n")[:-1]]
        return [span for span in spans if first is not None and span[0] >= first], lines

    def _spans(self, name: str) -> list[Span]:
        """All existing segments in order, also those that a merged one replaces."""
        return [*([(0, 0)] if self._objects.has(name) else []), *self._written_spans(name)]

    def _written_spans(self, name: str) -> list[Span]:
        """Existing segments without segment 0."""
        return _spans_of(self._objects.names(_folder(name)))


def _spans_of(files: Iterable[str]) -> list[Span]:
    found = (re.fullmatch(r"(\d{6,})(?:-(\d{6,}))?\.jsonl", each) for each in files)
    return sorted((int(each[1]), int(each[2] or each[1])) for each in found if each)


def _live(spans: Sequence[Span]) -> list[Span]:
    """Segments that no other one holds. Each is looked at once: a run of weeks has thousands, and calls this for every new one."""
    held = set[Span]()
    furthest = -1
    for span in sorted(set(spans), key=lambda span: (span[0], -span[1])):  # a span comes after the one that holds it
        if span[1] <= furthest:
            held.add(span)
        furthest = max(furthest, span[1])
    return [span for span in spans if span not in held]


def _is_one(span: Span) -> bool:
    """Whether the segment is unmerged."""
    return span[0] == span[1]


def _folder(name: str) -> str:
    return name.removesuffix(".jsonl")


def _object(name: str, span: Span) -> str:
    first, last = span
    if last == 0:
        return name
    return f"{_folder(name)}/{first:06d}.jsonl" if first == last else f"{_folder(name)}/{first:06d}-{last:06d}.jsonl"


def _whole(content: bytes) -> bytes:
    """`content` without a last line that has no end."""
    return content[: content.rfind(b"\n") + 1]
