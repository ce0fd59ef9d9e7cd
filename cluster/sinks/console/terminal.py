"""A live table at the bottom of a terminal. All other output scrolls by above it, complete.

Only the cursor's position is changed, no mode of the terminal: after a kill the terminal works, and shows the last numbers.
"""

import contextlib
import faulthandler
import os
import select
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any, TextIO

from rich.console import Console, ConsoleDimensions, RenderableType
from rich.live import Live
from rich.text import Text

_PER_SECOND = 2.0
_STANDARD = (1, 2)
_BEGIN, _END = "\x1b[?2026h", "\x1b[?2026l"
"""Marks around a frame. Terminals that know them show it at once; others ignore them."""


def is_live(stream: TextIO) -> bool:
    """Whether `stream` is a terminal in which a line can be redrawn."""
    return stream.isatty() and not Console(file=stream).is_dumb_terminal


class _Frames:
    """The file of a terminal, written frame by frame."""

    def __init__(self, descriptor: int, *, encoding: str) -> None:
        self._descriptor = descriptor
        self.encoding = encoding

    def write(self, text: str) -> int:
        waiting = f"{_BEGIN}{text}{_END}".encode(self.encoding, errors="replace") if text else b""
        # A closed terminal, for example after a lost connection, must not end a run.
        with contextlib.suppress(OSError):
            while waiting:
                waiting = waiting[os.write(self._descriptor, waiting) :]
        return len(text)

    def flush(self) -> None: ...

    def fileno(self) -> int:
        return self._descriptor

    def isatty(self) -> bool:
        return True

    def close(self) -> None:
        os.close(self._descriptor)


class _Terminal(Console):
    """The terminal itself, also while standard output is redirected."""

    def __init__(self, frames: _Frames) -> None:
        super().__init__(file=frames, force_terminal=True, highlight=False, markup=False, emoji=False)  # pyright: ignore[reportArgumentType]
        self._frames = frames
        self.frame_lock = threading.RLock()

    def print(self, *objects: Any, **options: Any) -> None:
        """Prevents a frame between the start of this call and its output: Rich would draw it below the previous one, which would stay."""
        with self.frame_lock:
            super().print(*objects, **options)

    @property
    def size(self) -> ConsoleDimensions:
        columns = lines = 0  # the value of a terminal that does not know its size
        with contextlib.suppress(OSError):
            columns, lines = os.get_terminal_size(self._frames.fileno())
        return ConsoleDimensions(columns or 80, lines or 25)

    def show_cursor(self, show: bool = True) -> bool:
        """Keeps the cursor visible: after a kill nothing would show it again."""
        return False


@contextlib.contextmanager
def live(
    draw: Callable[[], RenderableType], *, per_second: float = _PER_SECOND, is_transient: bool = False
) -> Iterator[Console]:
    """Draws until the block ends, and once at its end: the last numbers stay, unless it is transient. The console prints above them."""
    sys.stdout.flush()
    sys.stderr.flush()
    with contextlib.ExitStack() as at_the_end:
        frames = _Frames(os.dup(1), encoding=sys.stdout.encoding or "utf-8")
        at_the_end.callback(frames.close)
        terminal = _Terminal(frames)
        shown = Live(
            console=terminal,
            get_renderable=draw,
            refresh_per_second=per_second,
            transient=is_transient,
            redirect_stdout=False,
            redirect_stderr=False,
        )
        terminal.frame_lock = shown._lock
        at_the_end.enter_context(shown)
        at_the_end.enter_context(_printed_above(terminal))
        yield terminal


@contextlib.contextmanager
def _printed_above(terminal: Console) -> Iterator[None]:
    """Sends the output of this process, its libraries and its children through a pipe: written directly, it would tear the table."""
    ours = {number: os.dup(number) for number in _STANDARD if os.isatty(number)}
    reading, writing = os.pipe()
    woken, wake = os.pipe()
    reader = threading.Thread(target=_print_lines, args=(reading, woken, terminal), name="console", daemon=True)
    reader.start()
    was_enabled = faulthandler.is_enabled()
    for number in ours:
        os.dup2(writing, number)
    os.close(writing)
    if 2 in ours:  # the traceback of a process that a signal ends goes to the terminal
        faulthandler.enable(file=ours[2])
    try:
        yield
    finally:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        faulthandler.disable()
        for number, before in ours.items():
            os.dup2(before, number)
        if was_enabled:
            faulthandler.enable()
        os.close(wake)
        reader.join()
        for descriptor in (reading, woken, *ours.values()):
            os.close(descriptor)


def _print_lines(reading: int, woken: int, terminal: Console) -> None:
    """Prints until the other end of `woken` is closed and everything is read. A child may keep the pipe open for longer."""
    waiting = b""
    while True:
        ready, _, _ = select.select([reading, woken], [], [])
        if reading in ready:
            piece = os.read(reading, 65_536)
            *lines, waiting = (waiting + piece).split(b"\n")
            _print(lines, terminal)
            if piece:
                continue
        if waiting:
            _print([waiting], terminal)
        return


def _print(lines: list[bytes], terminal: Console) -> None:
    if lines:
        # Text that a carriage return would overwrite is not shown: of a library's progress bar only the last state.
        texts = [line.rstrip(b"\r").rpartition(b"\r")[2].decode(errors="replace") for line in lines]
        terminal.print(Text.from_ansi("\n".join(texts)), soft_wrap=True)
