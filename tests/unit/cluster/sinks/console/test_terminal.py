"""What is known of a terminal. tests/integration/test_terminal.py draws in one."""

import fcntl
import os
import struct
import termios

import pytest

from cluster.sinks.console.terminal import _Frames, _Terminal


@pytest.mark.parametrize(("told", "size"), [((0, 0), (80, 25)), ((30, 0), (80, 30)), ((30, 100), (100, 30))])
def test_a_terminal_without_a_size_is_drawn_in_as_one_of_80_columns(told, size):
    """As in a container or from a script, where nobody told the terminal how large it is."""
    ours, theirs = os.openpty()
    try:
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", *told, 0, 0))
        assert tuple(_Terminal(_Frames(theirs, encoding="utf-8")).size) == size
    finally:
        os.close(ours)
        os.close(theirs)
