"""SHA-256 of files, whole and in blocks."""

import hashlib
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from learner.checkpoint.manifest import BLOCK_BYTES, FileEntry

NUM_THREADS = 4
"""Threads that read and digest one file's blocks. Both release Python's lock."""

Read = Callable[[int, int], Any]
"""`read(start, length)` returns these bytes of a file as a buffer."""


def entry_of(path: Path, *, in_blocks: bool = False) -> FileEntry:
    with open(path, "rb") as file:
        entry = _in_blocks if in_blocks else _whole
        return entry(lambda start, length: os.pread(file.fileno(), length, start), path.stat().st_size)


def is_as_saved(read: Read, entry: FileEntry) -> bool:
    """Whether the file's digests are the entry's. The caller has checked its size."""
    return (_in_blocks if entry.blocks else _whole)(read, entry.size_bytes) == entry


def _whole(read: Read, size_bytes: int) -> FileEntry:
    digest = hashlib.sha256()
    for start in range(0, size_bytes, BLOCK_BYTES):
        digest.update(read(start, min(BLOCK_BYTES, size_bytes - start)))
    return FileEntry(size_bytes=size_bytes, sha256=digest.hexdigest())


def _in_blocks(read: Read, size_bytes: int) -> FileEntry:
    def digest(start: int) -> str:
        return hashlib.sha256(read(start, min(BLOCK_BYTES, size_bytes - start))).hexdigest()

    with ThreadPoolExecutor(NUM_THREADS) as threads:
        blocks = tuple(threads.map(digest, range(0, size_bytes, BLOCK_BYTES)))
    joined = hashlib.sha256(b"".join(map(bytes.fromhex, blocks)))
    return FileEntry(size_bytes=size_bytes, sha256=joined.hexdigest(), blocks=blocks)
