"""A file that cannot be written leaves what was there."""

import contextlib
import os
import resource
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from cluster.contracts.errors import StorageError
from deploy.whole_files import write_whole


@contextlib.contextmanager
def files_of_at_most(size_bytes: int) -> Iterator[None]:
    """As on a disk that is full."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_what_was_there_stays_where_the_disk_is_full(tmp_path):
    out = tmp_path / "trace.json"
    write_whole(str(out), "before", option="--out")
    with (
        files_of_at_most(1000),
        pytest.raises(StorageError, match=r"--out='.*trace\.json' cannot be written: File too"),
    ):
        write_whole(str(out), "x" * 100_000, option="--out")
    assert out.read_text() == "before" and [each.name for each in tmp_path.iterdir()] == ["trace.json"]


def test_a_file_is_whole_after_a_power_cut_before_it_takes_the_place_of_another(tmp_path, monkeypatch):
    """Seen in review: an empty file could take the place of a whole one."""
    order = []
    replace = Path.replace
    monkeypatch.setattr(os, "fsync", lambda descriptor: order.append(os.readlink(f"/proc/self/fd/{descriptor}")))
    monkeypatch.setattr(Path, "replace", lambda path, to: order.append("replaced") or replace(path, to))
    write_whole(str(tmp_path / "trace.json"), "text", option="--out")
    written, *then = order
    assert written.endswith("/trace.json") and then == ["replaced", str(tmp_path)]


def test_a_link_goes_on_to_the_file_behind_it(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "file")
    write_whole(str(tmp_path / "link"), "text", option="--out")
    assert (tmp_path / "link").is_symlink() and (tmp_path / "file").read_text() == "text"


def test_a_pipe_stays_one(tmp_path):
    pipe, read = tmp_path / "pipe", []
    os.mkfifo(pipe)
    reader = threading.Thread(target=lambda: read.append(pipe.read_text()), daemon=True)
    reader.start()
    write_whole(str(pipe), "text", option="--out")
    reader.join(60)  # a file in the pipe's place would leave it waiting
    assert read == ["text"] and pipe.is_fifo()
