"""The allow-list of system calls of a confined program, as a seccomp filter. All other calls are refused.

The list suffices for a Python program that computes, reads libraries and starts threads. Calls that reach other processes, a network or a
device, or that write files, are absent. System calls of future kernels are refused too.
"""

import os
import resource
import struct
import sys
from collections.abc import Iterator

_AUDIT_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_X32_BIT = 0x40000000
_FIRST_SHARED = 424
"""From this number on all architectures share one table. Libraries that get ENOSYS there fall back to older calls."""
_EPERM, _ENOSYS = 1, 38
_SIGKILL = 9
_KILL, _ERRNO, _ALLOW = 0x80000000, 0x00050000, 0x7FFF0000
_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06

# Name, number on x86_64, number on aarch64; "-" if there is none.
_ALLOWED = """
access 21 -           alarm 37 -             brk 12 214             clock_getres 229 114    clock_gettime 228 113
clock_nanosleep 230 115  close 3 57          close_range 436 436    dup 32 23               dup2 33 -
dup3 292 24           exit 60 93             exit_group 231 94      faccessat 269 48        faccessat2 439 439
fadvise64 221 223     fdatasync 75 83        fstat 5 80             fsync 74 82             futex 202 98
getcpu 309 168        getcwd 79 17           getdents64 217 61      getegid 108 177         geteuid 107 175
getgid 104 176        getgroups 115 158      getitimer 36 102       getpgid 121 155         getpgrp 111 -
getpid 39 172         getppid 110 173        getrandom 318 278      getresgid 120 150       getresuid 118 148
getrlimit 97 163      getrusage 98 165       getsid 124 156         gettid 186 178          gettimeofday 96 169
getuid 102 174        lseek 8 62             lstat 6 -              madvise 28 233          mmap 9 222
mprotect 10 226       mremap 25 216          msync 26 227           munmap 11 215           nanosleep 35 101
newfstatat 262 79     pause 34 -             pipe 22 -              pipe2 293 59            poll 7 -
ppoll 271 73          pread64 17 67          pselect6 270 72        pwrite64 18 68          read 0 63
readlink 89 -         readlinkat 267 78      readv 19 65            restart_syscall 219 128  rseq 334 293
rt_sigaction 13 134   rt_sigpending 127 136  rt_sigprocmask 14 135  rt_sigreturn 15 139     rt_sigsuspend 130 133
rt_sigtimedwait 128 137  sched_getaffinity 204 123  sched_yield 24 124  select 23 -         set_robust_list 273 99
set_tid_address 218 96   setitimer 38 103    sigaltstack 131 132    stat 4 -                statx 332 291
sysinfo 99 179        time 201 -             times 100 153          uname 63 160            write 1 64
writev 20 66
"""
_CONDITIONAL = """
clone 56 220  fcntl 72 25  ioctl 16 29  kill 62 129  open 2 -  openat 257 56  prctl 157 167  prlimit64 302 261  tgkill 234 131
"""
_CLONE_THREAD = 0x10000
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC
_FCNTL = (0, 1, 2, 3, 4, 1030)
"""Duplicate descriptors, read and set flags. Not F_SETOWN and F_SETSIG, which can send any signal to any process of this user."""
_IOCTL = (0x5401, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451)
"""Terminal attributes and size, number of readable bytes, non-blocking, close-on-exec."""
_PRCTL = (15, 16, 0x53564D41)
"""Names of threads and of memory. Not PR_SET_PDEATHSIG, with which a program could outlive its parent."""

Condition = tuple[int, int, int]
"""(comparison, index of the argument, value). Compares the argument's low 32 bits."""


def seccomp_filter(*, pid: int, may_write: bool) -> bytes:
    """The filter for process `pid`, as an array of `struct sock_filter`.

    `may_write=False` refuses to open any file for writing, for kernels whose Landlock does not cover all kinds of writing.
    Raises OSError on an architecture without a table here.
    """
    machine = os.uname().machine
    if machine not in _AUDIT_ARCH or sys.maxsize < 2**32:
        raise OSError(_ENOSYS, f"no table of system calls for {machine}, {sys.maxsize.bit_length() + 1} bits")
    plain, conditional = _numbers(_ALLOWED, machine), _numbers(_CONDITIONAL, machine)
    code = [_op(_LOAD, 4), _op(_EQUAL, _AUDIT_ARCH[machine], 1, 0), _op(_RETURN, _KILL), _op(_LOAD, 0)]
    code += [_op(_AT_LEAST, _X32_BIT, 0, 1), _op(_RETURN, _KILL)]
    for number in plain.values():
        code += [_op(_EQUAL, number, 0, 1), _op(_RETURN, _ALLOW)]
    for name, conditions in _rules(pid, may_write=may_write):
        if name in conditional:
            code += _when(conditional[name], conditions)
    # glibc creates threads with clone3, whose flags a filter cannot read. If that is refused as unknown, glibc falls back to clone.
    code += [_op(_AT_LEAST, _FIRST_SHARED, 0, 1), _op(_RETURN, _ERRNO | _ENOSYS), _op(_RETURN, _ERRNO | _EPERM)]
    return b"".join(code)


def _rules(pid: int, *, may_write: bool) -> Iterator[tuple[str, list[Condition]]]:
    """A call is allowed if all conditions of one of its rules hold. A negative comparison is negated."""
    yield "clone", [(_ANY_BIT, 0, _CLONE_THREAD)]
    for name, flags in (("open", 1), ("openat", 2)):
        yield name, [] if may_write else [(-_ANY_BIT, flags, _WRITES)]
    for name, values in (("fcntl", _FCNTL), ("ioctl", _IOCTL)):
        yield from ((name, [(_EQUAL, 1, value)]) for value in values)
    yield from (("prctl", [(_EQUAL, 0, value)]) for value in _PRCTL)
    # A program must not kill itself, or lower its CPU limit so that the kernel does: it would look like a program killed by the kernel for
    # lack of memory, which is not its fault.
    yield "prlimit64", [(_EQUAL, 0, 0), (-_EQUAL, 1, resource.RLIMIT_CPU)]
    yield "kill", [(_EQUAL, 0, pid), (-_EQUAL, 1, _SIGKILL)]
    yield "tgkill", [(_EQUAL, 0, pid), (-_EQUAL, 2, _SIGKILL)]


def _when(number: int, conditions: list[Condition]) -> list[bytes]:
    rest = [_op(_RETURN, _ALLOW)]
    for comparison, argument, value in reversed(conditions):
        skip = len(rest)
        jumps = (0, skip) if comparison > 0 else (skip, 0)
        rest = [_op(_LOAD, 16 + 8 * argument), _op(abs(comparison), value, *jumps), *rest]
    return [_op(_LOAD, 0), _op(_EQUAL, number, 0, len(rest)), *rest, _op(_LOAD, 0)]


def _op(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("HBBI", code, if_true, if_false, value)


def _numbers(table: str, machine: str) -> dict[str, int]:
    words = table.split()
    column = 1 + list(_AUDIT_ARCH).index(machine)
    return {
        words[i]: int(words[i + column]) for i in range(0, len(words), 1 + len(_AUDIT_ARCH)) if words[i + column] != "-"
    }
