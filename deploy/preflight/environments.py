"""The environments: each starts, the model can converse, and the prompts say which one plays them."""

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
"""With an episode that is played to look at it."""


def check_environments(
    config: RunConfig, formatter: "ChatFormatter | None", source: PromptSource | None
) -> dict[str, str]:
    """What each is, by its name. Raises ConfigError for one that does not start, for a model whose conversations are not exact, and for an
    environment that begins the first of its prompts with tools where the model cannot have any."""
    if not config.has_episodes:
        return {}
    without_tools = _why_no_tools(config, formatter)
    prompts = _first_prompts(config, source) if without_tools and source is not None else {}
    try:
        what, with_tools = asyncio.run(_started(config, prompts))
    except WorkerError as error:
        raise ConfigError(f"{error}; run it on its own to see why") from error
    if with_tools:
        raise ConfigError(f"{config.environment_setting(with_tools[0])} gives the model tools, and {without_tools}")
    return what


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


def world_rows(config: RunConfig, source: PromptSource, formatter: "ChatFormatter") -> Iterator[tuple[str, str, str]]:
    """Plays the first prompt of each environment twice, without the model: whether both episodes meet the same world.

    A difference is no error: a reply of the model may be what it takes, and an environment may draw where it does not matter. Raises
    ConfigError for tools at any turn where the model cannot have any, and for an environment that fails before it asks the model.
    """
    from deploy.preflight.first_observations import first_observations

    without_tools = _why_no_tools(config, formatter)
    for name, prompt in _first_prompts(config, source).items():
        environment, task = config.named_environments[name], _task(config, name, prompt)
        patient = {"timeout_s": min(config.episodes.timeout_s, _PATIENCE_S)}
        setting = config.environment_setting(name)
        seen = first_observations(environment, task, config.episodes.model_copy(update=patient), setting=setting)
        if seen.has_tools and without_tools:
            raise ConfigError(f"{setting} gives the model tools, and {without_tools}")
        if seen.raises_unasked:
            raise ConfigError(
                f"{setting} fails before it asks the model ({seen.failure}), and no episode could be sampled; play it by itself with "
                "`treadwheel play`"
            )
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


def _why_no_tools(config: RunConfig, formatter: "ChatFormatter | None") -> str | None:
    """Why the model can be given no tools; None: it can, or nobody knows. Raises ConfigError for a model that cannot converse, and for a
    parser that is not there."""
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
    """By their environments, without single turns. A prompt that names no environment is left to `check_named`."""
    found: dict[str, Prompt] = {}
    for prompt in firsts(source):
        with contextlib.suppress(DataError):
            found.setdefault(config.environment_of(prompt.columns), prompt)
    return {name: prompt for name, prompt in found.items() if config.is_played(name)}


def _task(config: RunConfig, name: str, prompt: Prompt) -> EpisodeTask:
    from actors.rollout.episodes.play import task_of

    return task_of(prompt, id=f"check/{name}", seed=config.seed, index=0)


async def _started(config: RunConfig, prompts: Mapping[str, Prompt]) -> tuple[dict[str, str], list[str]]:
    """What each is, by its name, and those that begin these prompts with tools."""
    from actors.processes.printed import PrintedLines
    from actors.rollout.episodes.hosts import close_all, started_hosts
    from deploy.preflight.first_observations import begins_with_tools

    hosts = await started_hosts(config, printed=PrintedLines())
    try:
        with_tools: list[str] = []
        for name, prompt in prompts.items():
            if await begins_with_tools(hosts[name].run, _task(config, name, prompt), within_s=_PATIENCE_S):
                with_tools.append(name)
        what = {
            name: f"{environment.name}, {_kind(hosts[name].num_places) if config.is_played(name) else 'no process'}"
            for name, environment in config.named_environments.items()
        }
        return what, with_tools
    finally:
        await close_all(hosts.values())


def _kind(num_places: int | None) -> str:
    return "all episodes in one process" if num_places is None else f"{num_places} processes, one episode each"
