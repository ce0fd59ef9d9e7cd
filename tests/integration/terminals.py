"""A command in a terminal of its own, and what that shows: a pseudo-terminal, read by an emulator."""

import contextlib
import fcntl
import os
import pty
import select
import signal
import struct
import subprocess
import termios
import threading
from collections.abc import Callable, Mapping
from pathlib import Path

import pyte

from tests.integration.commands import ROOT, environment

_END = b"\0"
"""No terminal shows it."""


class Terminal:
    """`command` in a terminal. Ctrl-C goes the way of a key that is pressed: through the terminal's driver."""

    def __init__(
        self, *command: str, columns: int = 100, lines: int = 30, env: Mapping[str, str] | None = None, cwd: Path = ROOT
    ) -> None:
        self._ours, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))
        self.modes_before = termios.tcgetattr(theirs)
        self._theirs = theirs
        self._columns = columns
        self._screen = pyte.HistoryScreen(columns, lines, history=2000)
        self._stream = pyte.ByteStream(self._screen)
        self._process = subprocess.Popen(
            command,
            cwd=cwd,
            env={**environment(), "TERM": "xterm-256color", **(env or {})},
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            preexec_fn=_as_terminal_of_its_own,
        )
        self._changed = threading.Condition()
        self._is_closed = False
        self.raw = b""
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def __enter__(self) -> "Terminal":
        return self

    def __exit__(self, *_: object) -> None:
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        os.close(self._theirs)
        self._is_closed = True
        self._reader.join()
        os.close(self._ours)

    @property
    def screen(self) -> str:
        with self._changed:
            return "\n".join(line.rstrip() for line in self._screen.display).rstrip()

    @property
    def everything(self) -> str:
        """What scrolled out at the top, and the screen."""
        with self._changed:
            gone = ("".join(line[x].data for x in range(self._columns)).rstrip() for line in self._screen.history.top)
            return "\n".join([*gone, *(line.rstrip() for line in self._screen.display)]).rstrip()

    @property
    def is_cursor_hidden(self) -> bool:
        return self._screen.cursor.hidden

    @property
    def modes(self) -> list[object]:
        return termios.tcgetattr(self._theirs)

    def wait_for(self, condition: Callable[[str], object], *, timeout_s: float = 500) -> str:
        """The screen on which `condition` first held."""
        with self._changed:
            found = self._changed.wait_for(lambda: condition(self.screen) or self._has_ended(), timeout_s)
            if found and not condition(self.screen):
                self._read_to_the_end()
            assert found and condition(self.screen), f"never seen on\n{self.everything}"
            return self.screen

    def press_ctrl_c(self) -> None:
        os.write(self._ours, b"\x03")

    def kill(self) -> None:
        self._process.kill()

    def exit_code(self) -> int:
        code = self._process.wait(timeout=500)
        self._read_to_the_end()
        return code

    def _read_to_the_end(self) -> None:
        """The kernel hands on what the process wrote last when it finds the time: what is written behind it comes after it."""
        os.write(self._theirs, _END)
        with self._changed:
            assert self._changed.wait_for(lambda: _END in self.raw, 500)

    def _has_ended(self) -> bool:
        return self._process.poll() is not None and not select.select([self._ours], [], [], 0)[0]

    def _read(self) -> None:
        while not self._is_closed:
            if not select.select([self._ours], [], [], 0.1)[0]:
                with self._changed:
                    self._changed.notify_all()
                continue
            with contextlib.suppress(OSError), self._changed:
                piece = os.read(self._ours, 65_536)
                self.raw += piece
                # The emulator does not know synchronized output, and would print it.
                self._stream.feed(piece.replace(b"\x1b[?2026h", b"").replace(b"\x1b[?2026l", b""))
                self._changed.notify_all()


def _as_terminal_of_its_own() -> None:
    os.setsid()
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
