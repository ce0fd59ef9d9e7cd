"""Uses of a thing that may overlap: counts them, and waits until there is none."""

import asyncio
import contextlib
from collections.abc import Generator


class Uses:
    """The uses that are open now."""

    def __init__(self) -> None:
        self.number = 0
        self._is_none = asyncio.Event()
        self._is_none.set()

    @contextlib.contextmanager
    def one(self) -> Generator[None]:
        """One more use, until the block ends."""
        self.number += 1
        self._is_none.clear()
        try:
            yield
        finally:
            self.number -= 1
            if not self.number:
                self._is_none.set()

    async def none(self) -> None:
        """Returns when no use is open. One may open again before the caller goes on, unless the caller prevents it."""
        await self._is_none.wait()
