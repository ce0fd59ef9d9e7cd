"""The environments: each starts, the model can converse, and the prompts say which one plays them."""

import asyncio
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, cast

from cluster.contracts.config import RunConfig
from cluster.contracts.errors import ConfigError, DataError, WorkerError
from cluster.contracts.protocols import PromptSource
from cluster.contracts.types import Prompt
from deploy.preflight.prompts import firsts

if TYPE_CHECKING:
    from actors.chat.formatter import ChatFormatter
    from deploy.preflight.first_observations import FirstObservations

_PATIENCE_S = 30.0
"""With an episode that is played to look at it."""


def check_environments(config: RunConfig, formatter: "ChatFormatter | None") -> dict[str, str]:
    """What each is, by its name. Raises ConfigError for one that does not start, and for a model whose conversations are not exact."""
    if not config.has_episodes:
        return {}
    from actors.chat.calls import NamedParser
    from actors.rollout.episodes.speech import Speech

    if config.episodes.parser is not None:
        NamedParser(config.episodes.parser)
    if formatter is not None:
        Speech(formatter)
    try:
        return asyncio.run(_started(config))
    except WorkerError as error:
        raise ConfigError(f"{error}; run it on its own to see why") from error


def check_named(source: PromptSource, config: RunConfig, *, field: str) -> None:
    """Raises ConfigError for one of the first prompts that names no environment, or that no environment can play."""
    for prompt in firsts(source) if config.has_episodes else ():
        try:
            environment = config.environment_of(prompt.columns)
        except DataError as error:
            raise ConfigError(f"{field}: prompt {prompt.prompt_id!r}: {error}") from error
        if config.is_played(environment) and prompt.messages is None:
            raise ConfigError(
                f"{field}: prompt {prompt.prompt_id!r} is a text without roles, and the environment {environment!r} converses; set "
                f"{field}.text_as=user_message, or give it messages"
            )


def judged(source: PromptSource, config: RunConfig) -> PromptSource:
    """Its prompts that judges see; of a run with environments, those among the first ones."""
    if not config.has_episodes or config.reward.judges_episodes:
        return source
    seen = [prompt for prompt in firsts(source) if not config.is_played(config.environment_of(prompt.columns))]
    return cast(PromptSource, seen)  # a list has what it takes


def world_rows(config: RunConfig, source: PromptSource) -> Iterator[tuple[str, str, str]]:
    """Plays the first prompt of each environment twice, without the model: whether both episodes meet the same world.

    Rows, and no error: a reply of the model may be what it takes, and an environment may draw where it does not matter.
    """
    from actors.rollout.episodes.play import task_of
    from deploy.preflight.first_observations import first_observations

    found: dict[str, Prompt] = {}
    for prompt in firsts(source):
        found.setdefault(config.environment_of(prompt.columns), prompt)
    for name, prompt in found.items():
        if not config.is_played(name):
            continue
        environment = config.named_environments[name]
        task = task_of(prompt, id=f"check/{name}", seed=config.seed, index=0)
        limits = replace(config.episodes.limits, timeout_s=min(config.episodes.timeout_s, _PATIENCE_S))
        setting, env = config.environment_setting(name), config.episodes.env
        seen = first_observations(environment, task, limits, setting=setting, env=env)
        yield "environment", f"{name}, played twice", _in_words(seen)


def _in_words(seen: "FirstObservations") -> str:
    if seen.difference is not None:
        return f"DIFFERS: {seen.difference}; all that an environment draws must come from episode.seed, or groups learn noise"
    failed = "" if seen.failure is None else f"; it failed ({seen.failure}), maybe for want of a real reply"
    return f"both episodes of a task met the same in {seen.num_turns} turns{failed}"


def environment_rows(config: RunConfig, found: Mapping[str, str]) -> Iterator[tuple[str, str, str]]:
    for name, what in found.items():
        yield "environment", name, what
    if found:
        episodes = config.episodes
        yield "environment", "limits", f"{episodes.max_turns} turns, {episodes.timeout_s:g} s"
        yield "environment", "under way", f"at most {config.max_concurrent_trajectories} episodes a worker"


async def _started(config: RunConfig) -> dict[str, str]:
    from actors.processes.printed import PrintedLines
    from actors.rollout.episodes.hosts import Hosts

    hosts = await Hosts.start(config, printed=PrintedLines())
    try:
        return {
            name: f"{environment.name}, {_kind(hosts.num_places(name)) if config.is_played(name) else 'no process'}"
            for name, environment in config.named_environments.items()
        }
    finally:
        await hosts.close()


def _kind(num_places: int | None) -> str:
    return "all episodes in one process" if num_places is None else f"{num_places} processes, one episode each"
