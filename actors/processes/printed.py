"""Prints of a user's code. All of them are copied to this process's own stderr, which Ray keeps; heartbeats take the last lines to the
driver."""

import asyncio
import contextlib
import os
from collections import deque
from collections.abc import Iterator

from cluster.contracts.types import Printed

_MOST_LINES = 5
_MOST_CHARACTERS = 200
"""Characters kept of a line; the log has all of it."""
_PIECE_BYTES = 65_536
_MOST_PIECES = 17
"""Reads that empty a pipe: Linux lets a process enlarge it to 1 MiB, 16 pieces; one more read finds its end."""
_STDERR = 2


class PrintedLines:
    """Prints of all processes of an actor that run a user's code, and of their descendants."""

    def __init__(self) -> None:
        self._lines: deque[str] = deque(maxlen=_MOST_LINES)
        self._num_lines = 0
        self._torn: dict[int, bytes] = {}
        """By the descriptor of a pipe: its last line, while that is incomplete."""

    def last(self) -> Printed:
        return Printed(lines=tuple(self._lines), num_lines=self._num_lines)

    @contextlib.contextmanager
    def pipe(self) -> Iterator[int]:
        """A pipe's writing end for a new process. The other end is read until the last process that holds the pipe has ended."""
        reading, writing = os.pipe()
        os.set_blocking(reading, False)
        self._torn[reading] = b""
        asyncio.get_running_loop().add_reader(reading, self._read, reading)
        try:
            yield writing
        finally:
            os.close(writing)

    def drain(self) -> None:
        """Reads the present content of each pipe, since the event loop may end before the pipe does. It reads no more than a pipe holds: a
        process may fill it faster than it is read."""
        for reading in list(self._torn):
            for _ in range(_MOST_PIECES):
                if reading in self._torn:
                    self._read(reading)

    def _read(self, reading: int) -> None:
        try:
            piece = os.read(reading, _PIECE_BYTES)
        except BlockingIOError:  # nothing is there, or another call has read it since the event loop saw it
            return
        with contextlib.suppress(OSError):
            _write(_STDERR, piece)
        *lines, torn = (self._torn[reading] + piece).split(b"\n")
        for line in lines if piece else [torn]:
            self._add(line)
        self._torn[reading] = torn[: 4 * _MOST_CHARACTERS]
        if not piece:
            asyncio.get_running_loop().remove_reader(reading)
            os.close(reading)
            del self._torn[reading]

    def _add(self, line: bytes) -> None:
        if text := line.decode(errors="replace").rstrip():
            self._lines.append(text[:_MOST_CHARACTERS])
            self._num_lines += 1


def _write(descriptor: int, piece: bytes) -> None:
    while piece:
        piece = piece[os.write(descriptor, piece) :]
