"""A judge that is right, and late."""

import asyncio
from collections.abc import Mapping
from typing import Any

from actors.rewards.reasoning_gym import reasoning_gym


async def slow(*, prompt: str, completion: str, columns: Mapping[str, Any], seconds: float) -> float:
    """Answers after so many seconds, as a judge does that asks a server."""
    await asyncio.sleep(seconds)
    return reasoning_gym(prompt=prompt, completion=completion, columns=columns)
