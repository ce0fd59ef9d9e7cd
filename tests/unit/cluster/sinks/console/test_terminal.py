"""What is known of a terminal. tests/integration/test_terminal.py draws in one."""

import fcntl
import os
import struct
import termios

import pytest

from cluster.record.run_directory import RunDirectory
from cluster.sinks.console import LiveTable
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


def test_a_file_system_that_stands_still_does_not_hold_up_the_warning_that_it_does(tmp_path, capfd):
    """Opening a pipe that nobody writes waits as a file on a hung NFS does."""
    os.mkfifo(tmp_path / "status.json")
    table = LiveTable(RunDirectory(str(tmp_path)), num_steps=1)
    table.event({"kind": "storage_silent", "time": 0.0, "message": "it has not answered"})
    table.close()
    os.close(os.open(tmp_path / "status.json", os.O_RDWR | os.O_NONBLOCK))
    assert "storage_silent: it has not answered" in capfd.readouterr().out
