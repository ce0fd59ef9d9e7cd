"""Results of a pure function, kept for inputs that come again: most messages between turns differ in their content alone, or not at all."""

from collections import OrderedDict
from collections.abc import Callable
from typing import Any, Generic, TypeVar

T = TypeVar("T")
_MOST = 256
_LONGEST = 16_384
"""Characters of an input. A longer one seldom comes again, and would keep memory."""


class Kept(Generic[T]):
    """Of one function of texts and JSON. The result that was not used for longest goes first."""

    def __init__(self) -> None:
        self._results: OrderedDict[str, T] = OrderedDict()

    def of(self, inputs: Any, make: Callable[[], T]) -> T:
        """What `make` returns for these inputs, on which alone it depends. An exception of it is not kept."""
        key = repr(inputs)
        if key in self._results:
            self._results.move_to_end(key)
            return self._results[key]
        result = make()
        if len(key) <= _LONGEST:
            self._results[key] = result
            if len(self._results) > _MOST:
                self._results.popitem(last=False)
        return result
