"""Streaming calls, driver side. Items are waited for where they lie and stay there."""

import asyncio
from typing import Any


async def object_refs(stream: Any) -> list[Any]:
    """Object refs of all items of `Host.stream`. Raises the error of a stream that ended early."""
    refs: list[Any] = []
    while (ref := await _next_object_ref(stream)) is not None:
        refs.append(ref)
    await refs.pop()  # the mark of a complete stream, or the error in its place
    return refs


async def _next_object_ref(stream: Any) -> Any:
    """None after the last. Ray's own `anext` would bring the item to this node."""
    pause_s = 0.0005
    while not stream.next_ready():
        if stream.is_finished():
            return None
        await asyncio.sleep(pause_s)
        pause_s = min(2 * pause_s, 0.02)
    return next(stream, None)
