"""CPUs and memory that this process may use. The limits of a container (control groups, version 2) count."""

import os
from pathlib import Path

import psutil

CONTROL_GROUP = Path("/sys/fs/cgroup")


def num_cpus() -> int:
    """Whole CPUs, at least one. Ray counts those of a container in the same way."""
    own = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota, _, period = _text("cpu.max").partition(" ")
    return min(own, max(int(quota) // int(period), 1)) if quota.isdigit() else own


def total_memory_bytes() -> int:
    """The machine's memory, or the container's limit if that is less."""
    return min([psutil.virtual_memory().total, *_memory_limit()])


def free_memory_bytes() -> int:
    """Memory that a new process can still take. Files cached by the system make room for it, in a container too."""
    free = psutil.virtual_memory().available
    for limit in _memory_limit():
        kept = dict(line.split() for line in _text("memory.stat").splitlines())
        files = sum(int(kept.get(name, 0)) for name in ("inactive_file", "active_file"))
        free = min(free, max(limit - int(_text("memory.current") or 0) + files, 0))
    return free


def _memory_limit() -> tuple[int, ...]:
    """Empty without a limit."""
    limit = _text("memory.max")
    return (int(limit),) if limit.isdigit() else ()


def _text(name: str) -> str:
    """Empty outside a container."""
    try:
        return (CONTROL_GROUP / name).read_text(encoding="utf-8").strip()
    except OSError:
        return ""
