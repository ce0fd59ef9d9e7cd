"""Environments for tests of the worker, and an engine that speaks."""

import asyncio
import os
import re
import time
from collections.abc import Callable
from pathlib import Path
from random import Random

from cluster.contracts.episodes import Episode
from cluster.contracts.errors import ToolError
from cluster.contracts.protocols import EngineOutput, EngineRequest
from cluster.contracts.tools import tool
from cluster.contracts.types import FinishReason
from tests.unit.actors.scripted_engine import ScriptedEngine

HERE = "tests.unit.actors.rollout.conversations"


async def two_turns(episode: Episode):
    said = await episode.ask()
    episode.log("first", said.text)
    await episode.ask("go on")
    return 0.5


async def two_raw_turns(episode: Episode, *, prompt: str, between: str):
    """Writes the chat template itself."""
    from openai import AsyncOpenAI  # a second of processor time, which no other environment's process needs

    async with AsyncOpenAI(base_url=episode.base_url, api_key=episode.api_key) as client:
        first = await client.completions.create(model="any", prompt=prompt)
        episode.log("first", first.choices[0].text)
        await client.completions.create(model="any", prompt=prompt + first.choices[0].text + between)
    return 0.5


async def earning(episode: Episode):
    await episode.ask()
    episode.earn(0.25, "step")
    await episode.ask("go on")
    episode.earn(0.5)
    return 1.0


async def earning_once(episode: Episode):
    await episode.ask()
    if episode.index == 0:
        episode.earn(1.0, "first")
    return 0.0


async def rewriting(episode: Episode):
    said = await episode.ask()
    episode.earn(0.25)
    episode.rewrite([{"role": "user", "content": f"note: {said.text}"}])
    await episode.ask()
    return 1.0


async def endless(episode: Episode):
    await episode.ask()
    while True:
        await episode.ask("go on")


async def forgetting(episode: Episode):
    while True:
        await episode.ask()
        episode.rewrite(episode.messages)


async def failing(episode: Episode):
    await episode.ask()
    if episode.index == 0:
        raise RuntimeError("the game broke")
    return 1.0


async def dead_on_arrival(episode: Episode):
    raise RuntimeError("no game today")


async def greeting(episode: Episode):
    await episode.ask("go on")
    return 1.0


async def unasked(episode: Episode):
    return 1.0


async def judged(episode: Episode):
    await episode.ask()


async def killing(episode: Episode):
    await episode.ask()
    if episode.prompt == "die":
        os._exit(3)
    await episode.ask("go on")
    return 1.0


async def giving_up(episode: Episode):
    """The second turn comes too late, and what it earns is for the first."""
    await episode.ask()
    try:
        async with asyncio.timeout(0.2):
            await episode.ask("slowly")
    except TimeoutError:
        episode.earn(1.0)
    return 0.0


async def with_a_tool_that_refuses(episode: Episode):
    @tool
    def find(page: str) -> str:
        """Finds a page."""
        raise ToolError(f"no page \ud83d, but {page}")

    await episode.ask(tools=[find])
    return 1.0


async def late_tools(episode: Episode):
    await episode.ask()
    await episode.ask("now with a tool", tools=[double])


async def bad_words(episode: Episode, *, what: str):
    await episode.ask()
    half = "\ud83d"
    if what == "log":
        episode.log(half, half)
    if what == "earn":
        episode.earn(1.0, half)
    if what == "raise":
        raise RuntimeError(half)
    return {"reward": 1.0, half: 2.0}


async def asking_wrongly(episode: Episode, *, max_tokens: int | None = None, stop: str = "END"):
    await episode.ask(max_tokens=max_tokens, stop=stop)
    return 1.0


async def flooding(episode: Episode):
    await episode.ask("page " * 2000)


async def mostly_failing(episode: Episode):
    if episode.index < 2:
        raise RuntimeError("broken")
    await episode.ask()
    return 1.0


async def mostly_unasked(episode: Episode):
    if episode.index >= 2:
        await episode.ask()
    return 1.0


TOGETHER: set[int] = set()
"""Episodes of this process that have had their first turn."""


async def dying_together(episode: Episode, *, file: str, num: int):
    """The first of a group of so many ends the process of all, once. None of them ends before."""
    await episode.ask()
    is_first_try = not os.path.exists(file)
    TOGETHER.add(episode.index)
    while is_first_try:
        if episode.index == 0 and len(TOGETHER) == num:
            with open(file, "w"):
                os._exit(3)
        await asyncio.sleep(0.01)
    await episode.ask("go on")
    return 1.0


async def dying_once(episode: Episode, *, file: str):
    await episode.ask()
    if not os.path.exists(file):
        with open(file, "w"):
            os._exit(3)
    return 1.0


async def at_odd_moments(episode: Episode, *, slow: int):
    """Each answer takes its time: another one by `slow`."""
    random = Random(100 * slow + episode.index)
    await episode.ask()
    for _ in range(1 + episode.index % 3):
        await asyncio.sleep(0.02 * random.random())
        await episode.ask("go on")
    return 1.0


def blocking(episode):
    episode.log("pid", os.getpid())
    episode.ask()
    episode.ask("go on")
    return 1.0


async def tidying(episode: Episode, *, folder: str):
    file = Path(folder, str(episode.index))
    file.touch()
    try:
        await episode.ask()
        await asyncio.sleep(600)
    finally:
        file.write_text("tidied")


@tool
def double(number: int) -> str:
    """Twice a number."""
    return str(2 * number)


@tool
def half(number: int) -> str:
    """Half of a number."""
    return str(number / 2)


async def with_two_tools_then_one(episode: Episode):
    await episode.ask(tools=[half, double])
    episode.rewrite([{"role": "user", "content": "once more"}])
    await episode.ask(tools=[double])
    return 1.0


async def with_tools(episode: Episode):
    said = await episode.ask(tools=[double])
    return float(said.num_calls)


class SpeakingEngine(ScriptedEngine):
    """Says what `says` tells of a request's prompt, then the token that ends the turn; cut off at `max_tokens`."""

    def __init__(
        self, tokenizer, says: Callable[[str], str], *, token_ids: list[int] | None = None, **scripted
    ) -> None:
        """`token_ids` in place of those that the tokenizer makes of what it says."""
        super().__init__(length=lambda request: len(self._said(request)), **scripted)
        self._tokenizer = tokenizer
        self._says = says
        self._token_ids = token_ids

    def prompts(self) -> list[str]:
        """As text, in the order in which they came."""
        return [self._tokenizer.decode(request.prompt_token_ids) for request in self.added]

    def _said(self, request: EngineRequest) -> list[int]:
        text = self._says(self._tokenizer.decode(request.prompt_token_ids))
        token_ids = self._token_ids or self._tokenizer(text, add_special_tokens=False).input_ids
        return [*token_ids, self._tokenizer.eos_token_id][: request.sampling.max_tokens]

    def _advance(self) -> list[EngineOutput]:
        requests = {request_id: request for request_id, (request, _) in self._running.items()}
        places = {request_id: place for request_id, (_, place) in self._running.items()}
        return [self._spoken(output, requests, places) for output in super()._advance()]

    def _spoken(self, output: EngineOutput, requests, places) -> EngineOutput:
        if output.refusal is not None:
            return output
        token_id = self._said(requests[output.request_id])[places[output.request_id]]
        reason = output.finish_reason
        if reason is not None and token_id == self._tokenizer.eos_token_id:
            reason = FinishReason.STOP
        return EngineOutput(
            request_id=output.request_id, token_ids=[token_id], logprobs=output.logprobs, finish_reason=reason
        )


class UnfinishedEngine(SpeakingEngine):
    """Says the first five tokens of an episode's second turn, and no more."""

    def _advance(self) -> list[EngineOutput]:
        for request, num_done in self._running.values():
            if num_done == 5 and number_of_turns(self._tokenizer.decode(request.prompt_token_ids)) == 2:
                time.sleep(0.001)
                return []
        return super()._advance()


def number_of_turns(prompt: str) -> int:
    return len(re.findall("<.im_start.>assistant", prompt))
