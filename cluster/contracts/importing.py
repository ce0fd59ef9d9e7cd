"""Imports of large libraries, spared the garbage collector.

Hundreds of thousands of objects of torch, transformers and vLLM live as long as their process. Python walks all of them again and again
while more come, a fifth of the time of an import, and half a second for every full collection afterwards.
"""

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def importing() -> Iterator[None]:
    """No garbage is collected in the block. What lives at its end is never looked at again: for what stays, not for data."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if was_enabled:
            gc.enable()
