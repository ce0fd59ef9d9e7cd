"""Whether two episodes of one task meet the same world: a group whose members guess different secrets has noise for a baseline.

It is the commonest mistake of an environment, and shows itself nowhere else: rewards are right, and nothing is learned.
"""

import asyncio
import contextlib
import json
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import zip_longest

from actors.environments.host.hosting import EnvironmentHost
from actors.processes.printed import PrintedLines
from cluster.contracts.environment_config import EpisodesConfig
from cluster.contracts.episodes import Asked, Converse, EpisodeTask, Rewritten, Said
from cluster.contracts.errors import ConfigError, WorkerError
from cluster.contracts.plugins import Plugin
from cluster.contracts.types import RewardStatus

REPLIES = ("10", "5", "15")
"""Of a model that is not there. What an environment answers to the second may show what its answer to the first did not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstObservations:
    """What an environment said to the same replies in two episodes of one task."""

    num_turns: int
    """That were compared; 0 for an environment that failed, or ended, before it asked."""
    difference: str | None = None
    """The first one, in words; None: both episodes met the same."""
    failure: str | None = None
    """Why the first of the episodes that failed did, with its stage; None: neither. It may have failed for want of a real reply."""
    raises_unasked: bool = False
    """Both episodes raised before they asked the model, whose replies cannot have been why."""
    has_tools: bool = False
    """The model was given tools."""


def first_observations(
    environment: Plugin,
    task: EpisodeTask,
    config: EpisodesConfig,
    *,
    setting: str = "environment",
    replies: Sequence[str] = REPLIES,
) -> FirstObservations:
    """Plays `task` twice, as the episodes 0 and 1 of its group, to the turn after the last reply.

    Raises ConfigError, naming `setting`, for an environment that does not start.
    """
    try:
        first, second = asyncio.run(_both(environment, task, config, setting, replies))
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
    """Whether an episode of `task`, as `run` plays it, gives the model tools when it first asks. One that fails before that, or takes
    longer than `within_s`, does not."""
    witness = _Witness(())
    with contextlib.suppress(_SeenEnough, TimeoutError):
        async with asyncio.timeout(within_s):
            await run(task, witness)
    return witness.has_tools


class _SeenEnough(Exception):
    """Ends an episode of which no more is wanted."""


@dataclass(slots=True)
class _Witness:
    """Stands for the model in one episode, and keeps what it is asked."""

    replies: Sequence[str]
    turns: list[list[str]] = field(default_factory=list[list[str]])
    """The messages or the raw prompt before each, as JSON, and the tools."""
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
        return Said(text=self.replies[len(self.turns) - 1])


async def _both(
    environment: Plugin, task: EpisodeTask, config: EpisodesConfig, setting: str, replies: Sequence[str]
) -> list[_Witness]:
    host = await EnvironmentHost.start(environment, config, setting=setting, printed=PrintedLines())
    try:
        # One after the other: numbers that are drawn without a seed go on between them.
        return [await _witness(host, replace(task, id=f"{task.id}/{n}", index=n), replies) for n in range(2)]
    finally:
        await host.close()


async def _witness(host: EnvironmentHost, task: EpisodeTask, replies: Sequence[str]) -> _Witness:
    witness = _Witness(replies)
    try:
        end = await host.run(task, witness)
    except _SeenEnough:
        return witness
    if end.status is not RewardStatus.OK:
        witness.failure = f"{end.failed_stage}: {end.message}"
        # One that takes its time may have more of it in a run.
        witness.raises_unasked = end.status is RewardStatus.ERROR and not witness.turns
    return witness


def _difference(first: _Witness, second: _Witness) -> str | None:
    for turn, (one, other) in enumerate(zip_longest(first.turns, second.turns), start=1):
        if one is None or other is None:
            return f"turn {turn}: asked for in one episode, and not in the other"
        for mine, its in zip_longest(one, other):
            if mine != its:
                return f"turn {turn}: {_shown(mine)} in one episode, and {_shown(its)} in the other"
    return None


def _shown(message: str | None) -> str:
    return "nothing" if message is None else message if len(message) <= 200 else f"{message[:200]}..."
