"""`treadwheel play`: a person or script plays the model in an environment, which runs in its own process, as in a run. No engine starts."""

import asyncio
import json
import os
import shlex
import sys
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from rich.console import Console
from rich.text import Text

from actors.environments.host.hosting import EnvironmentHost
from actors.processes.printed import PrintedLines
from cluster.contracts.config import RunConfig
from cluster.contracts.environment_config import EpisodesConfig
from cluster.contracts.episodes import (
    Asked,
    Earned,
    EpisodeEnd,
    EpisodeTask,
    Event,
    Message,
    Rewritten,
    Said,
    ToolCall,
    Withdrawn,
)
from cluster.contracts.errors import ConfigError, DataError
from cluster.contracts.plugins import Plugin
from cluster.contracts.sampling_config import SamplingConfig
from cluster.contracts.types import Prompt, RewardStatus
from cluster.record.run_directory import RUN_YAML, RunDirectory
from cluster.rollouts.mixture import open_prompts
from cluster.sinks.console.words import for_terminal
from deploy.config import loading as configuration
from deploy.config.yaml_text import parse
from deploy.reports.run_info import config_of

_UNHURRIED_S = 24 * 3600.0
"""Deadline of an episode: people need time to think."""
_IDLE = {"seed": "--seed names that of the task", "episodes.timeout_s": "a person has a day"}
"""Settings of a run that a game replaces, and why."""
_STYLES = {"system": "magenta", "user": "cyan", "tool": "yellow", "assistant": "bold green"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Game:
    """One episode to play: environment, prompt, seed, sampling and limits."""

    environment: Plugin
    prompt: Prompt
    seed: int = 0
    index: int = 0
    """Index of the episode in its group."""
    episodes: EpisodesConfig = field(default_factory=EpisodesConfig)
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    setting: str = "environment"

    @classmethod
    def of_run(cls, config: RunConfig, *, seed: int) -> "Game":
        """The first prompt of a run, with its environment. Raises ConfigError for prompts that cannot be opened."""
        prompt = open_prompts(config.prompts, field="prompts", source_column=config.reward.source_column)[0]
        try:
            name = config.environment_of(prompt.columns)
        except DataError as error:
            raise ConfigError(f"prompts: prompt {prompt.prompt_id!r}: {error}") from error
        return cls.of_environment(config, name, prompt, seed=seed)

    @classmethod
    def of_environment(cls, config: RunConfig, name: str, prompt: Prompt, *, seed: int, index: int = 0) -> "Game":
        """A prompt in one of a run's environments, with the run's limits and sampling."""
        return cls(
            environment=config.named_environments[name],
            prompt=prompt,
            seed=seed,
            index=index,
            episodes=config.episodes,
            sampling=config.sampling,
            setting=config.environment_setting(name),
        )

    @property
    def task(self) -> EpisodeTask:
        from actors.rollout.episodes.play import task_of  # imports the chat templates' parser

        id = f"play/{self.index}"
        return task_of(self.prompt, id=id, seed=self.seed, index=self.index, sampling=self.sampling)


def game(
    environment: str, params: Sequence[str], prompt: str | None, columns: str, env: Collection[str], *, seed: int
) -> Game:
    """The game that a command line asks for. Raises ConfigError for arguments that do not fit together."""
    is_run = "://" in environment or os.path.isfile(os.path.join(environment, RUN_YAML))
    if is_run or environment.endswith((".yaml", ".yml")):
        if prompt is not None or columns != "{}" or env:
            raise ConfigError(
                f"{environment} has its own prompt, columns and env; leave --prompt, --columns, --env out"
            )
        for each in params:
            if (idle := configuration.parsed(each)[0]) in _IDLE:
                raise ConfigError(f"{each} has no effect on a game: {_IDLE[idle]}; leave {idle} out")
        if not is_run:
            return Game.of_run(configuration.load(environment, params), seed=seed)
        directory = RunDirectory(environment)
        config = config_of(directory, params)
        configuration.refuse_hidden(config, source=directory.path(RUN_YAML))
        return Game.of_run(config, seed=seed)
    read = parse(columns, source=f"--columns={columns!r}")
    if not isinstance(read, dict):
        raise ConfigError(f"--columns={columns!r} must be a mapping, such as '{{answer: 42}}'")
    messages = [] if prompt is None else [{"role": "user", "content": prompt}]
    return Game(
        environment=Plugin(name=environment, params=dict(map(configuration.parsed, params))),
        prompt=Prompt(prompt_id="play", messages=messages, columns=read),
        seed=seed,
        episodes=EpisodesConfig(env=tuple(env)),
    )


class Mouth(Protocol):
    """Turns a typed line into a turn of the model."""

    def take(self, events: Sequence[Event]) -> None:
        """Takes the events since the last turn."""
        ...

    def say(self, asked: Asked, line: str) -> Said:
        """The turn for `line`. Raises EpisodeOver and DataError as `Converse` does."""
        ...


def play(game: Game, says: Iterator[str], screen: Console, *, mouth: Mouth | None = None) -> bool:
    """Plays one episode until it ends or the lines run out; returns whether nothing failed. `says` yields the model's lines, which `mouth`
    turns into turns. Raises ConfigError for an environment that does not start."""
    return asyncio.run(_play(game, says, screen, mouth or Words()))


def scripted(answers: Iterable[str], screen: Console) -> Iterator[str]:
    for answer in answers:
        _print_message(screen, {"role": "assistant", "content": answer})
        yield answer


def typed(screen: Console) -> Iterator[str]:
    """Lines of stdin until its end."""
    if not sys.stdin.isatty():
        yield from scripted((line.rstrip("\n") for line in sys.stdin), screen)
        return
    while True:
        try:
            yield input("assistant> ")
        except EOFError:
            return


class Words:
    """Without a tokenizer: the environment gets each line as typed."""

    def take(self, events: Sequence[Event]) -> None:
        pass

    def say(self, asked: Asked, line: str) -> Said:
        call = call_of(line, asked.tools)
        return Said(text=line) if call is None else Said(text="", tool_calls=(call,))


def call_of(line: str, tools: Sequence[Any]) -> ToolCall | None:
    """The tool call that `/name {"a": 1}` or `/name a=1` means, if tools are offered; None for any other line."""
    if not tools or not line.startswith("/"):
        return None
    name, _, rest = line[1:].strip().partition(" ")
    return ToolCall(name=name, arguments=_arguments(rest.strip()))


def _arguments(text: str) -> dict[str, Any] | str:
    """The arguments, or the text itself if it is malformed: so a model's mistakes can be played too."""
    try:
        if not text.startswith("{"):
            return dict(configuration.parsed(each) for each in shlex.split(text))
        read = json.loads(text)
    except (ValueError, ConfigError):
        return text
    return read if isinstance(read, dict) else text


class _LeftError(Exception):
    """The environment asks for a turn, and there are no more lines."""


class _Player:
    """The model's side of an episode, printed as it is played."""

    def __init__(self, task: EpisodeTask, says: Iterator[str], screen: Console, mouth: Mouth) -> None:
        self._task = task
        self._says = says
        self._screen = screen
        self._mouth = mouth
        self._shown_tools: tuple[str, ...] = ()
        self._has_begun = False
        self.earned = 0.0

    async def __call__(self, asked: Asked) -> Said:
        if not self._has_begun and not any(isinstance(event, Rewritten) for event in asked.events):
            self._show_messages(self._task.messages)
        self._has_begun = True
        self.take(asked.events)
        if asked.raw is not None:
            self._note(f"a raw prompt: {asked.raw}")
        self._show_messages(asked.messages)
        self._show_tools(asked.tools)
        # Blocks the event loop, which has nothing else to do: Ctrl-C ends the wait here.
        line = next(self._says, None)
        if line is None:
            raise _LeftError
        return self._mouth.say(asked, line)

    def take(self, events: Sequence[Event]) -> None:
        self._mouth.take(events)
        for event in events:
            if isinstance(event, Earned):
                self.earned += event.reward
                self._note(f"earned {event.reward:g}{f' ({event.name})' if event.name else ''}")
            elif isinstance(event, Rewritten):
                self._note("the context is rewritten; from here on it is:")
                self._show_messages(event.messages)
            elif isinstance(event, Withdrawn):
                self._note("the environment withdrew the turn")
            else:
                self._note(f"logged {event.name}: {event.value}")

    def _show_messages(self, messages: Sequence[Message]) -> None:
        for message in messages:
            _print_message(self._screen, message)

    def _show_tools(self, tools: Sequence[Any]) -> None:
        names = tuple(str(each["function"]["name"]) for each in tools)
        if names and names != self._shown_tools:
            for each in tools:
                about = each["function"]
                parameters = ", ".join((about.get("parameters") or {}).get("properties", {}))
                described = (about.get("description") or "").partition("\n")[0]
                self._note(f"tool {about['name']}({parameters}): {described}".removesuffix(": "))
            self._note(f"call one as /{names[0]} name=value, or /{names[0]} {{JSON}}")
        self._shown_tools = names

    def _note(self, text: str) -> None:
        self._screen.print(Text(for_terminal(f"  {text}"), style="dim"), soft_wrap=True)


async def _play(game: Game, says: Iterator[str], screen: Console, mouth: Mouth) -> bool:
    task, unhurried = game.task, game.episodes.model_copy(update={"timeout_s": _UNHURRIED_S})
    player = _Player(task, says, screen, mouth)
    printed = PrintedLines()
    host = await EnvironmentHost.start(game.environment, unhurried, setting=game.setting, printed=printed)
    try:
        end = await host.run(task, player)
    except _LeftError:
        screen.print(
            Text("  stopped: the environment asks for another turn, and there is none", style="dim"), soft_wrap=True
        )
        end = None
    finally:
        await host.close()
        printed.drain()
    if end is not None:
        player.take(end.events)
        screen.print(_ending(end, player.earned), soft_wrap=True)
    return end is None or end.status is RewardStatus.OK


def _ending(end: EpisodeEnd, earned: float) -> Text:
    if end.status is not RewardStatus.OK:
        failed = f"failed, no reward: {end.failed_stage}: {end.message}"
        return Text(for_terminal(failed), style="bold red")
    calls = f"; {end.num_calls} tool calls, {end.num_malformed_calls} malformed" if end.num_calls else ""
    if end.limit is not None:
        return Text(f"ended at the limit {end.limit}: reward {earned:g}, which was earned before{calls}", style="bold")
    if end.reward is None:
        return Text(f"ended: {earned:g} earned, and judges score the rest{calls}", style="bold")
    parts = "".join(f", {name} {value}" for name, value in end.components.items())
    sums = f" ({earned:g} earned, {end.reward:g} returned)" if earned else ""
    return Text(f"ended: reward {earned + end.reward:g}{sums}{parts}{calls}", style="bold")


def _print_message(screen: Console, message: Message) -> None:
    role = str(message["role"])
    named = f"{role} {message['name']}" if role == "tool" and message.get("name") else role
    line = Text(for_terminal(f"{named}  "), style=_STYLES.get(role, "bold")).append(
        for_terminal(str(message.get("content") or "")), style="not bold default"
    )
    screen.print(line, soft_wrap=True)
