"""A process confines itself: no files except libraries, no network, no other process, bounded memory, time and output.

It needs no root, no daemon and no package. Landlock (kernel 5.13) restricts files, seccomp system calls, rlimits resources. It imports only
the standard library, because it runs in the process that it confines.
"""

import ctypes
import fcntl
import os
import resource
import signal
import struct
from collections.abc import Sequence
from dataclasses import dataclass

from actors.sandbox.syscalls import seccomp_filter

NUM_FILES = 64
"""Maximum number of open files of a program."""
_MOVED = 32
_READ_FILE, _READ_DIR, _WRITE_FILE, _TRUNCATE = 1 << 2, 1 << 3, 1 << 1, 1 << 14
_FS_RIGHTS = {1: 13, 2: 14, 3: 15, 5: 16}
"""Landlock's version to its number of file rights. Version 2 adds moving, 3 truncating, 5 device controls."""
_SINCE_NETWORK, _SINCE_SCOPES = 4, 6
_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_SET_SECCOMP, _PR_SET_NO_NEW_PRIVS = 1, 4, 22, 38
_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_CAPABILITIES_V3 = 0x20080522
_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Landlock:
    """A ruleset, made once. Its paths are opened before any program runs, so swapping a link later has no effect."""

    version: int
    """The kernel's ABI. Below 3 Landlock does not see truncation, so seccomp forbids opening any file for writing, even /dev/null. Below 4
    it does not see TCP, and below 6 not signals; seccomp always refuses both."""
    ruleset: int
    """File descriptor."""

    @classmethod
    def of_readable(cls, paths: Sequence[str]) -> "Landlock":
        """Allows only reading below `paths`, and /dev/null. Raises OSError if the kernel has no Landlock, or it was not enabled at boot."""
        version = _checked("landlock", _libc.syscall(_CREATE_RULESET, None, 0, 1))
        rights = (1 << max(num for since, num in _FS_RIGHTS.items() if since <= version)) - 1
        network, scopes = 3 * (version >= _SINCE_NETWORK), 3 * (version >= _SINCE_SCOPES)
        attributes = struct.pack("QQQ", rights, network, scopes)
        size = 24 if version >= _SINCE_SCOPES else 16 if version >= _SINCE_NETWORK else 8
        ruleset = _checked("landlock", _libc.syscall(_CREATE_RULESET, attributes, size, 0))
        for path in paths:
            _allow(ruleset, path, _READ_FILE | _READ_DIR)
        _allow(ruleset, "/dev/null", (_READ_FILE | _WRITE_FILE | _TRUNCATE) & rights)
        return cls(version=version, ruleset=ruleset)


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """Limits of one process."""

    time_s: float
    """Processor time of all its threads."""
    wall_s: float
    memory_bytes: int
    output_bytes: int
    """Size of each of its output files."""


def confine(files: Sequence[int], bounds: Bounds, *, parent: int, landlock: Landlock | None, filtered: bool) -> None:
    """Confines this process. It keeps `files` as descriptors 0, 1, ... and can open, start and reach nothing else. Raises OSError."""
    os.setsid()
    _checked("no_new_privs", _libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0))
    hide_memory()
    if landlock is not None:
        _checked("landlock", _libc.syscall(_RESTRICT_SELF, landlock.ruleset, 0))
    _keep(files)
    _limit(bounds)
    os.chdir("/")
    # Root in a container could otherwise raise the limits, and do things that no Landlock rule covers.
    header, none = struct.pack("Ii", _CAPABILITIES_V3, 0), bytes(24)
    _checked("capabilities", _libc.capset(header, none))
    _checked("death signal", _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0))
    if os.getppid() != parent:
        os._exit(1)
    if filtered:
        _filter(seccomp_filter(pid=os.getpid(), may_write=landlock is None or landlock.version >= 3))


def hide_memory() -> None:
    """Other processes of this user cannot read this one's memory. A crash writes no core file and starts no core handler."""
    _checked("dumpable", _libc.prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0))


def _keep(files: Sequence[int]) -> None:
    moved = [fcntl.fcntl(descriptor, fcntl.F_DUPFD, _MOVED) for descriptor in files]
    for wanted, descriptor in enumerate(moved):
        os.dup2(descriptor, wanted)
    os.closerange(len(files), NUM_FILES)


def _limit(bounds: Bounds) -> None:
    seconds = int(bounds.time_s) + 1
    limits = {
        resource.RLIMIT_AS: (bounds.memory_bytes, bounds.memory_bytes),
        resource.RLIMIT_CPU: (seconds, seconds + 1),
        resource.RLIMIT_FSIZE: (bounds.output_bytes, bounds.output_bytes),
        resource.RLIMIT_NOFILE: (NUM_FILES, NUM_FILES),
        resource.RLIMIT_MEMLOCK: (0, 0),
        resource.RLIMIT_MSGQUEUE: (0, 0),
        resource.RLIMIT_CORE: (0, 0),
    }
    for kind, both in limits.items():
        hard = resource.getrlimit(kind)[1]
        resource.setrlimit(kind, both if hard == resource.RLIM_INFINITY else (min(both[0], hard), min(both[1], hard)))


def _filter(code: bytes) -> None:
    instructions = ctypes.create_string_buffer(code, len(code))
    program = struct.pack("HxxxxxxP", len(code) // 8, ctypes.addressof(instructions))
    _checked("seccomp", _libc.prctl(_PR_SET_SECCOMP, 2, program, 0, 0))


def _allow(ruleset: int, path: str, rights: int) -> None:
    try:
        descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except OSError:
        return
    if not os.path.isdir(path):
        rights &= ~_READ_DIR
    try:
        _checked(f"landlock {path}", _libc.syscall(_ADD_RULE, ruleset, 1, struct.pack("=Qi", rights, descriptor), 0))
    finally:
        os.close(descriptor)


def _checked(what: str, result: int) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
    return result
