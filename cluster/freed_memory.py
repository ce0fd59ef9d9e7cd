"""Whether memory that this process frees goes back to the system. By glibc's own rules; other C libraries keep theirs.

The system fills each page of memory that it gives out with zeros, which takes longer than many an operation on it. By default glibc returns
large blocks at once: of a step at a vocabulary of 262k, a quarter goes into getting them again.
"""

import contextlib
import ctypes

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8
"""glibc's options: free bytes at the heap's end that go back, the size from which a block has its own mapping, and the most arenas."""
_NEVER, _LARGEST = -1, 2**31 - 1


def keep_freed_memory() -> None:
    """Keeps blocks that are taken from now on for the next tensors. The process keeps its peak.

    Blocks of 64 MiB and more still go back unless they are of the first arena (`share_one_arena`).
    """
    _set(_M_MMAP_THRESHOLD, _LARGEST)
    _set(_M_TRIM_THRESHOLD, _NEVER)


def share_one_arena() -> None:
    """Lets all threads that start from now on, here and in forked processes, share the arena of the first thread."""
    _set(_M_ARENA_MAX, 1)


def return_large_blocks() -> None:
    """Returns every block of more than 1 MiB as soon as it is free."""
    _set(_M_MMAP_THRESHOLD, 2**20)


def return_freed_memory() -> None:
    """Returns what has been kept, once."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def _set(option: int, value: int) -> None:
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).mallopt(option, value)
