"""Imports of large libraries, spared the garbage collector.

Hundreds of thousands of objects of torch, transformers and vLLM live as long as their process. Python walks all of them again and again
while more come, a fifth of the time of an import, and half a second for every full collection afterwards.
"""

import contextlib
import gc
from collections.abc import Generator


@contextlib.contextmanager
def importing() -> Generator[None]:
    """No garbage is collected in the block. What lives at its end is old at once: collections rarely look at it."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.unfreeze()  # into the oldest generation
        if was_enabled:
            gc.enable()


@contextlib.contextmanager
def importing_for_good() -> Generator[None]:
    """As `importing`, and no collection ever looks at what lives at the end: for processes that hold nothing of a user's yet."""
    with importing():
        yield
    gc.freeze()
