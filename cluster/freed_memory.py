"""Whether memory that this process frees goes back to the system. Has an effect with glibc only.

The system fills each page of memory that it gives out with zeros, which takes longer than many an operation on it. By default glibc returns
large blocks at once: of a step at a vocabulary of 262k, a quarter goes into getting them again.
"""

import contextlib
import ctypes
from collections.abc import Mapping

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_MMAP_MAX, _M_ARENA_MAX = -1, -3, -4, -8
"""glibc's options: free bytes at the heap's end that go back, the size from which a block has its own mapping, which goes back with it, the
most of these mappings, and the most arenas. glibc changes the first two by itself until one of the first three is set."""


def keep_freed_memory() -> None:
    """Keeps blocks that are taken from now on for the next tensors. The process keeps its peak.

    Large blocks still go back unless they are of the first arena: in another one's heaps, of 64 MiB each, they have no room.
    """
    # No mappings, instead of a high threshold, which glibc long refused.
    _set({_M_MMAP_MAX: 0, _M_TRIM_THRESHOLD: -1})


def share_one_arena() -> None:
    """Lets all threads that start from now on, here and in forked processes, share the arena of the first thread."""
    _set({_M_ARENA_MAX: 1})


def return_large_blocks() -> None:
    """Returns every block of more than 1 MiB as soon as it is free."""
    _set({_M_MMAP_MAX: 2**16, _M_MMAP_THRESHOLD: 2**20, _M_TRIM_THRESHOLD: 2**17})


def return_freed_memory() -> None:
    """Returns what has been kept, once."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def _set(options: Mapping[int, int]) -> None:
    with contextlib.suppress(OSError, AttributeError):
        for option, value in options.items():
            ctypes.CDLL(None).mallopt(option, value)
