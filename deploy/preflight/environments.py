"""Checks of the environments: each starts, the model can converse, and each prompt has an environment that can play it."""

import asyncio
import contextlib
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, cast

from cluster.contracts.config import RunConfig
from cluster.contracts.episodes import EpisodeTask
from cluster.contracts.errors import ConfigError, DataError, WorkerError
from cluster.contracts.protocols import PromptSource
from cluster.contracts.types import Prompt
from deploy.preflight.prompts import firsts

if TYPE_CHECKING:
    from actors.chat.formatter import ChatFormatter
    from deploy.preflight.first_observations import FirstObservations

_PATIENCE_S = 30.0
"""Time limit of an episode that a check plays."""


def check_environments(
    config: RunConfig, formatter: "ChatFormatter | None", source: PromptSource | None
) -> dict[str, str]:
    """Description of each environment, by name. Raises ConfigError for an environment that does not start, for a model whose
    conversations are not exact, and for an environment that gives tools to a model that cannot have any, on its first prompt."""
    if not config.has_episodes:
        return {}
    without_tools = _why_no_tools(config, formatter)
    prompts = _first_prompts(config, source) if without_tools and source is not None else {}
    try:
        descriptions, with_tools = asyncio.run(_started(config, prompts))
    except WorkerError as error:
        raise ConfigError(f"{error}; run it on its own to see why") from error
    if with_tools:
        raise ConfigError(f"{config.environment_setting(with_tools[0])} gives the model tools, and {without_tools}")
    return descriptions


def check_named(source: PromptSource, config: RunConfig, *, field: str) -> None:
    """Raises ConfigError for a first prompt that names no environment, or that its environment cannot play."""
    for prompt in firsts(source) if config.has_episodes else ():
        try:
            environment = config.environment_of(prompt.columns)
        except DataError as error:
            raise ConfigError(f"{field}: prompt {prompt.prompt_id!r}: {error}") from error
        if config.is_played(environment) and prompt.messages is None:
            raise ConfigError(
                f"{field}: prompt {prompt.prompt_id!r} is plain text, and the environment {environment!r} needs chat messages; set "
                f"{field}.text_as=user_message, or give the prompt messages"
            )


def judged(source: PromptSource, config: RunConfig) -> PromptSource:
    """The prompts that judges see. With environments, unless the reward judges episodes: those of the first prompts that no environment
    plays."""
    if not config.has_episodes or config.reward.judges_episodes:
        return source
    seen = [prompt for prompt in firsts(source) if not config.is_played(config.environment_of(prompt.columns))]
    return cast(PromptSource, seen)  # a list has its methods


def world_rows(config: RunConfig, source: PromptSource, formatter: "ChatFormatter") -> Iterator[tuple[str, str, str]]:
    """Plays the first prompt of each environment twice, without the model, and compares the observations.

    A difference is not an error: the environment may need real replies, or draw numbers that do not matter. Raises ConfigError for tools
    at any turn if the model cannot have any, and for an environment that fails before it asks the model.
    """
    from deploy.preflight.first_observations import first_observations

    without_tools = _why_no_tools(config, formatter)
    for name, prompt in _first_prompts(config, source).items():
        environment, task = config.named_environments[name], _task(config, name, prompt)
        patient = {"timeout_s": min(config.episodes.timeout_s, _PATIENCE_S)}
        setting = config.environment_setting(name)
        episodes = config.episodes.model_copy(update=patient)
        seen = first_observations(environment, task, episodes, setting=setting, formatter=formatter)
        if seen.has_tools and without_tools:
            raise ConfigError(f"{setting} gives the model tools, and {without_tools}")
        if seen.raises_unasked:
            raise ConfigError(
                f"{setting} fails before it asks the model ({seen.failure}), so no episode could be sampled; run it with "
                "`treadwheel play` to see why"
            )
        yield "environment", f"{name}, played twice", _in_words(seen)


def _in_words(seen: "FirstObservations") -> str:
    if seen.difference is not None:
        return f"DIFFERS: {seen.difference}; an environment must draw all random numbers from episode.seed, or groups learn noise"
    failed = "" if seen.failure is None else f"; it failed ({seen.failure}), perhaps because the replies were not real"
    return f"both episodes of a task had the same observations in {seen.num_turns} turns{failed}"


def environment_rows(config: RunConfig, found: Mapping[str, str]) -> Iterator[tuple[str, str, str]]:
    for name, description in found.items():
        yield "environment", name, description
    if found:
        episodes = config.episodes
        yield "environment", "limits", f"{episodes.max_turns} turns, {episodes.timeout_s:g} s"
        yield "environment", "under way", f"at most {config.max_concurrent_trajectories} episodes a worker"


def _why_no_tools(config: RunConfig, formatter: "ChatFormatter | None") -> str | None:
    """Why the model cannot have tools. None: it can, or that is unknown. Raises ConfigError for a model that cannot converse, and for a
    parser that does not exist."""
    from actors.chat.calls import NamedParser
    from actors.rollout.episodes.speech import Speech

    parser = config.episodes.parser and NamedParser(config.episodes.parser)
    if formatter is None:
        return None
    speech = Speech(formatter, parser=parser)
    try:
        speech.require_tools()
    except ConfigError as error:
        return str(error)
    return None


def _first_prompts(config: RunConfig, source: PromptSource) -> dict[str, Prompt]:
    """The first prompt of each environment, without single turns. `check_named` finds prompts that name no environment."""
    found: dict[str, Prompt] = {}
    for prompt in firsts(source):
        with contextlib.suppress(DataError):
            found.setdefault(config.environment_of(prompt.columns), prompt)
    return {name: prompt for name, prompt in found.items() if config.is_played(name)}


def _task(config: RunConfig, name: str, prompt: Prompt) -> EpisodeTask:
    from actors.rollout.episodes.play import task_of

    return task_of(prompt, id=f"check/{name}", seed=config.seed, index=0, sampling=config.sampling)


async def _started(config: RunConfig, prompts: Mapping[str, Prompt]) -> tuple[dict[str, str], list[str]]:
    """Description of each environment by name, and the environments that begin these prompts with tools."""
    from actors.environments.host.hosting import close_all, started_hosts
    from actors.processes.printed import PrintedLines
    from deploy.preflight.first_observations import begins_with_tools

    hosts = await started_hosts(config, printed=PrintedLines())
    try:
        with_tools: list[str] = []
        for name, prompt in prompts.items():
            if await begins_with_tools(hosts[name].run, _task(config, name, prompt), within_s=_PATIENCE_S):
                with_tools.append(name)
        descriptions = {
            name: f"{environment.name}, {_kind(hosts[name].num_places) if config.is_played(name) else 'no process'}"
            for name, environment in config.named_environments.items()
        }
        return descriptions, with_tools
    finally:
        await close_all(hosts.values())


def _kind(num_places: int | None) -> str:
    return "all episodes in one process" if num_places is None else f"{num_places} processes, one episode each"
