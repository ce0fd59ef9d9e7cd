"""Environments of the benchmark `episodes`. Their processes import this file, and nothing heavy with it."""

import asyncio

from cluster.contracts.episodes import Episode


async def chat(episode: Episode, *, turns: int, wait_s: float = 0.0) -> float:
    """So many turns, before each but the first a wait as of a tool, and a text that no other episode and no other turn has."""
    await episode.ask()
    for turn in range(1, turns):
        if wait_s:
            await asyncio.sleep(wait_s)
        await episode.ask(told(seed=episode.seed, index=episode.index, turn=turn))
    return 1.0


def told(*, seed: int, index: int, turn: int) -> str:
    """What this environment says before a turn."""
    return f"go on {seed} {index} {turn}"
