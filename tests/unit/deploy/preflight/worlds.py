"""Environments that keep their world equal for a group, and some that do not."""

import asyncio
import random
from functools import partial
from typing import Any

from cluster.contracts.episodes import Episode


async def seeded(episode: Episode, *, greets: bool = True):
    secret = random.Random(episode.seed).randint(1, 20)
    answer = "Guess." if greets else None
    while True:
        said = await episode.ask(answer)
        answer = "higher" if int(said.text) < secret else "lower"


async def drawn(episode: Episode):
    """Has another secret for each episode, which only its answers show."""
    secret = 7 if episode.index else 3
    answer = None
    while True:
        said = await episode.ask(answer)
        answer = "higher" if int(said.text) < secret else "lower"


async def unseeded(episode: Episode):
    await episode.ask(f"Remember {random.getrandbits(64)}.")


async def of_its_index(episode: Episode):
    episode.rewrite([{"role": "user", "content": f"You are number {episode.index}."}])
    await episode.ask()


async def of_its_index_by_a_raw_prompt(episode: Episode):
    from openai import AsyncOpenAI  # a second of processor time, which no other environment's process needs

    async with AsyncOpenAI(base_url=episode.base_url, api_key=episode.api_key) as client:
        await client.completions.create(model="any", prompt=f"You are number {episode.index}.")


async def warm(episode: Episode):
    """Sends the temperature 0.7."""
    from openai import AsyncOpenAI

    async with AsyncOpenAI(base_url=episode.base_url, api_key=episode.api_key) as client:
        await client.completions.create(model="any", prompt="Go.", temperature=0.7)


async def of_token_ids(episode: Episode, *, adds: int = 0):
    """Goes on with the ids of its context and two more. The last one is `adds` higher in the second episode."""
    from openai import AsyncOpenAI

    async with AsyncOpenAI(base_url=episode.base_url, api_key=episode.api_key) as client:
        ask = partial(client.completions.create, model="any", extra_body={"return_token_ids": True})
        (first,) = (await ask(prompt="ab")).choices
        said: Any = first.model_extra
        (second,) = (
            await ask(prompt=[*said["prompt_token_ids"], *said["token_ids"], 5, 6 + adds * episode.index])
        ).choices
        assert second.model_extra and second.model_extra["token_ids"]


async def impatient(episode: Episode):
    await episode.ask()
    if episode.index == 0:
        await episode.ask("Again.")


def look() -> str:
    """What is there."""
    return "a door"


async def with_tool(episode: Episode):
    await episode.ask(tools=[look])


async def with_tool_later(episode: Episode):
    await episode.ask()
    episode.rewrite([{"role": "user", "content": "Look again."}])
    await episode.ask(tools=[look])


async def broken(episode: Episode):
    raise KeyError("page")


async def broken_at_first(episode: Episode):
    if episode.index == 0:
        raise KeyError("page")
    await episode.ask()


async def slow_to_begin(episode: Episode):
    await asyncio.sleep(60)
    await episode.ask()
