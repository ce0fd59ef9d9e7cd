"""A cache for a pure function: most messages between turns differ only in their content, or not at all."""

import contextlib
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, Generic, TypeVar

T = TypeVar("T")
_MOST = 256
_LONGEST = 16_384
"""Characters of an input. A longer one seldom repeats, and would take memory."""


class Kept(Generic[T]):
    """Results of one function of texts and JSON. The least recently used result is dropped first. Threads may share it."""

    def __init__(self) -> None:
        self._results: OrderedDict[str, T] = OrderedDict()

    def of(self, inputs: Any, make: Callable[[], T]) -> T:
        """The result of `make`, which may depend on `inputs` alone. Its exceptions are not kept."""
        key = repr(inputs)
        # Not `if key in`: another thread may drop the result in between.
        with contextlib.suppress(KeyError):
            self._results.move_to_end(key)
            return self._results[key]
        result = make()
        if len(key) <= _LONGEST:
            self._results[key] = result
            if len(self._results) > _MOST:
                self._results.popitem(last=False)
        return result
