"""What code of a user's prints. All of it goes on to this process's own stderr, where Ray keeps it.

Heartbeats take the last lines to the driver.
"""

import asyncio
import contextlib
import os
from collections import deque
from collections.abc import Iterator

from cluster.contracts.types import Printed

_MOST_LINES = 5
_MOST_CHARACTERS = 200
"""Of a line; more is in the log."""
_PIECE_BYTES = 65_536
_MOST_PIECES = 17
"""That a pipe may hold: Linux lets a process enlarge it to 1 MiB. Its end is one more."""
_STDERR = 2


class PrintedLines:
    """Of all processes of an actor that run such code, and of what they start."""

    def __init__(self) -> None:
        self._lines: deque[str] = deque(maxlen=_MOST_LINES)
        self._num_lines = 0
        self._torn: dict[int, bytes] = {}
        """By the pipe that is read: a line that has not ended yet."""

    def last(self) -> Printed:
        return Printed(lines=tuple(self._lines), num_lines=self._num_lines)

    @contextlib.contextmanager
    def pipe(self) -> Iterator[int]:
        """The end for a new process to print into. The other end is read until the last process that holds it has ended."""
        reading, writing = os.pipe()
        os.set_blocking(reading, False)
        self._torn[reading] = b""
        asyncio.get_running_loop().add_reader(reading, self._read, reading)
        try:
            yield writing
        finally:
            os.close(writing)

    def drain(self) -> None:
        """Reads what is there, of each pipe as much as it holds: one that is filled faster than it is read has no end. The event loop may
        end before it does."""
        for reading in list(self._torn):
            for _ in range(_MOST_PIECES):
                if reading in self._torn:
                    self._read(reading)

    def _read(self, reading: int) -> None:
        try:
            piece = os.read(reading, _PIECE_BYTES)
        except BlockingIOError:  # all is read, perhaps since the event loop saw that there is some
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
