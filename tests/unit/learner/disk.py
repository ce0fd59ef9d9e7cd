"""A disk that is full, for one process."""

import contextlib
import resource
from collections.abc import Iterator


@contextlib.contextmanager
def largest_file(size_bytes: int) -> Iterator[None]:
    """Writes beyond this size fail, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
