"""Time that passes at once, in the event loop that runs."""

import asyncio


def pass_time(seconds: float) -> None:
    """Moves the clock of the running event loop on: what was due within these seconds is due now. The loop keeps that clock."""
    loop = asyncio.get_running_loop()
    before = loop.time
    loop.time = lambda: before() + seconds  # type: ignore[method-assign]
