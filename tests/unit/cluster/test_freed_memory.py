"""Each in a process of its own, because glibc's options are the process's. Its page faults tell whether a block came from the system."""

import os
import platform
import subprocess
import sys

import pytest

from cluster import freed_memory

pytestmark = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="glibc's rules")

_FAULTS = """
import ctypes, resource, threading
from cluster.freed_memory import *

glibc = ctypes.CDLL(None)
glibc.malloc.restype = ctypes.c_void_p
glibc.malloc.argtypes, glibc.free.argtypes = [ctypes.c_size_t], [ctypes.c_void_p]
glibc.memset.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t]

def faults(mib):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    block = glibc.malloc(mib * 2**20)
    glibc.memset(block, 1, mib * 2**20)
    glibc.free(block)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
"""


def _printed(program: str) -> list[int]:
    own = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_TUNABLES"))}
    command = [sys.executable, "-c", _FAULTS + program]
    done = subprocess.run(command, env=own, capture_output=True, text=True, check=True)
    return [int(number) for number in done.stdout.split()]


def test_a_kept_block_is_used_again_until_what_is_kept_is_returned():
    first, again, after = _printed(
        "keep_freed_memory(); print(faults(40), faults(40)); return_freed_memory(); print(faults(40))"
    )
    assert 10 * again < first < 2 * after


def test_large_blocks_that_are_returned_come_from_the_system_again():
    _, first, again = _printed("keep_freed_memory(); return_large_blocks(); print(faults(8), faults(8), faults(8))")
    assert first < 2 * again


@pytest.mark.parametrize(("before", "is_kept"), [("share_one_arena()", True), ("", False)])
def test_a_thread_keeps_a_block_larger_than_an_arenas_heap_only_in_the_first_arena(before: str, is_kept: bool):
    first, again = _printed(f"""
{before}
keep_freed_memory()
thread = threading.Thread(target=lambda: print(faults(100), faults(100)))
thread.start()
thread.join()
""")
    assert (10 * again < first) == is_kept


def test_other_c_libraries_keep_their_own_rules(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(freed_memory.ctypes, "CDLL", lambda name: object())
    freed_memory.keep_freed_memory()
    freed_memory.return_freed_memory()
