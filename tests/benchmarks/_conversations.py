"""Environments of the benchmark `episodes`. Their processes import this file, and nothing heavy with it."""

import asyncio

from cluster.contracts.episodes import Episode


async def chat(episode: Episode, *, turns: int, wait_s: float = 0.0) -> float:
    """So many turns, before each but the first a wait as of a tool."""
    await episode.ask()
    for _ in range(1, turns):
        if wait_s:
            await asyncio.sleep(wait_s)
        await episode.ask("go on")
    return 1.0
