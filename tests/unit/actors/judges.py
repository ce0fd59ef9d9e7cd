"""Judges that misbehave in each way a user's can; the reward service finds them by import path."""

import asyncio
import os
import threading
from collections.abc import Mapping
from typing import Any


def obedient(*, prompt: str, completion: str, columns: Mapping[str, Any]) -> Any:
    """Does what the completion says."""
    print("a judge may print")
    match completion:
        case "hang":
            threading.Event().wait()
        case "exit":
            os._exit(3)
        case "raise":
            raise ValueError("no opinion")
        case "nan":
            return float("nan")
        case "text":
            return "1.0"
        case "parts":
            return {"reward": 0.5, "format": 1, "length": 0.25}
        case "talk":
            return {"reward": 1.0, **{f"component {i}": 1.0 for i in range(100_000)}}
        case "pid":
            return float(os.getpid())
    return 1.0


async def obedient_async(*, prompt: str, completion: str, columns: Mapping[str, Any]) -> Any:
    if completion == "hang":
        await asyncio.Event().wait()
    if completion == "timeout error":
        raise TimeoutError("the remote server is slow")
    return obedient(prompt=prompt, completion=completion, columns=columns)


class Counting:
    """Most judgements that ran at one time."""

    running = 0
    most = 0


async def counting(*, prompt: str, completion: str, columns: Mapping[str, Any]) -> float:
    Counting.running += 1
    Counting.most = max(Counting.most, Counting.running)
    await asyncio.sleep(0)
    Counting.running -= 1
    return 1.0
