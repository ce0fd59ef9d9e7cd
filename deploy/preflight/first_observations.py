"""Compares two episodes of one task: members of a group that guess different secrets have a baseline of noise.

It is the most common mistake in an environment, and no other check finds it: rewards are right, and nothing is learned.
"""

import asyncio
import contextlib
import json
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from typing import TYPE_CHECKING

from actors.environments.host.hosting import EnvironmentHost
from actors.processes.printed import PrintedLines
from cluster.contracts.environment_config import EpisodesConfig
from cluster.contracts.episodes import Asked, Converse, EpisodeEnd, EpisodeTask, RawPrompt, Rewritten, Said
from cluster.contracts.errors import ConfigError, WorkerError
from cluster.contracts.plugins import Plugin
from cluster.contracts.types import Prompt, RewardStatus

if TYPE_CHECKING:
    from actors.chat.formatter import ChatFormatter

_REPLIES = ("10", "5", "15")
"""Replies in the place of a model. The answer to a later reply may show a difference that the first did not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstObservations:
    """Result of the comparison of two episodes that got the same replies."""

    num_turns: int
    """Turns that were compared; 0 for an environment that failed or ended before it asked the model."""
    difference: str | None = None
    """The first difference, in words; None: all observations were equal."""
    failure: str | None = None
    """Stage and message of the first failed episode; None: none failed. The cause may be that the replies were not real."""
    raises_unasked: bool = False
    """Both episodes raised before they asked the model, so replies were not the cause."""
    has_tools: bool = False
    """The environment gave the model tools."""


def first_observations(
    environment: Plugin,
    task: EpisodeTask,
    config: EpisodesConfig,
    *,
    setting: str = "environment",
    formatter: "ChatFormatter | None" = None,
) -> FirstObservations:
    """Plays `task` twice, as the episodes 0 and 1 of its group, until the turn after the last reply. Agents that ask for token ids get
    those of `formatter`.

    Raises ConfigError, naming `setting`, for an environment that does not start.
    """
    first, second = witnesses = (_Witness(_REPLIES, formatter), _Witness(_REPLIES, formatter))
    try:
        asyncio.run(_play(environment, task, config, setting, witnesses))
    except WorkerError as error:
        raise ConfigError(f"{error}; run it on its own to see why") from error
    return FirstObservations(
        num_turns=min(len(first.turns), len(second.turns)),
        difference=_difference(first, second),
        failure=first.failure or second.failure,
        raises_unasked=first.raises_unasked and second.raises_unasked,
        has_tools=first.has_tools or second.has_tools,
    )


async def begins_with_tools(
    run: Callable[[EpisodeTask, Converse], Awaitable[object]], task: EpisodeTask, *, within_s: float
) -> bool:
    """Whether an episode of `task`, played by `run`, gives the model tools in its first turn. False for an episode that fails before, or
    takes longer than `within_s`."""
    witness = _Witness(())
    with contextlib.suppress(_SeenEnough, TimeoutError):
        async with asyncio.timeout(within_s):
            await run(task, witness)
    return witness.has_tools


class _SeenEnough(Exception):
    """Ends an episode early."""


@dataclass(slots=True)
class _Witness:
    """Replies in the place of the model in one episode, and keeps the observations."""

    replies: Sequence[str]
    formatter: "ChatFormatter | None" = None
    turns: list[list[str]] = field(default_factory=list[list[str]])
    """The observation of each turn as JSON: messages or raw prompt, and tools."""
    failure: str | None = None
    raises_unasked: bool = False
    has_tools: bool = False

    async def __call__(self, asked: Asked) -> Said:
        rewritten = [message for event in asked.events if isinstance(event, Rewritten) for message in event.messages]
        raw = [] if asked.raw is None else [asked.raw]
        seen = [*rewritten, *raw, *asked.messages, *asked.tools]
        self.has_tools |= bool(asked.tools)
        self.turns.append([json.dumps(each, sort_keys=True, ensure_ascii=False) for each in seen])
        if len(self.turns) > len(self.replies):
            raise _SeenEnough
        said = Said(text=self.replies[len(self.turns) - 1])
        if asked.raw is None or not asked.wants_token_ids or self.formatter is None:
            return said
        return _with_token_ids(said, asked.raw, self.formatter)

    def note(self, end: EpisodeEnd) -> None:
        if end.status is not RewardStatus.OK:
            self.failure = f"{end.failed_stage}: {end.message}"
            # Not TIMEOUT: a slow environment may have more time in a run.
            self.raises_unasked = end.status is RewardStatus.ERROR and not self.turns


async def _play(
    environment: Plugin, task: EpisodeTask, config: EpisodesConfig, setting: str, witnesses: Sequence[_Witness]
) -> None:
    host = await EnvironmentHost.start(environment, config, setting=setting, printed=PrintedLines())
    try:
        # In sequence, so that unseeded random numbers of the second episode differ.
        for n, witness in enumerate(witnesses):
            with contextlib.suppress(_SeenEnough):
                witness.note(await host.run(replace(task, id=f"{task.id}/{n}", index=n), witness))
    finally:
        await host.close()


def _with_token_ids(said: Said, raw: RawPrompt, formatter: "ChatFormatter") -> Said:
    prompt = formatter.encode(Prompt(prompt_id="check", text=raw)).token_ids if isinstance(raw, str) else raw
    reply = formatter.encode_completion(Prompt(prompt_id="check", text=":"), said.text)
    return replace(said, prompt_token_ids=tuple(prompt), token_ids=tuple(reply))


def _difference(first: _Witness, second: _Witness) -> str | None:
    for turn, (one, other) in enumerate(zip_longest(first.turns, second.turns), start=1):
        if one is None or other is None:
            return f"turn {turn}: only one of the episodes has it"
        for mine, its in zip_longest(one, other):
            if mine != its:
                return f"turn {turn}: {_shown(mine)} in one episode, and {_shown(its)} in the other"
    return None


def _shown(message: str | None) -> str:
    return "nothing" if message is None else message if len(message) <= 200 else f"{message[:200]}..."
