"""Episodes of Gymnasium environments whose observations and actions can be written as text.

`gym` plays all episodes in one process. `gym_blocking` plays each in its own process, for steps that take long or may crash.
Each step's reward is earned at its turn. A reply without an action takes no step: the model is told which answers are possible.
"""

import contextlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pydantic import ImportString

from actors.reasoning import after_reasoning
from actors.scripts import WORD
from cluster.contracts.episodes import BlockingEpisode, Episode, EpisodeFacts
from cluster.contracts.errors import ConfigError, ToolError

try:
    import gymnasium
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(f"{error}; pip install 'treadwheel[gym]'") from error

_HIGHLIGHTED = re.compile(r"\x1b\[[\d;]*4\d[\d;]*m(.*?)\x1b\[0m", re.DOTALL)
"""Marks the player in an `ansi` rendering."""
_ESCAPE = re.compile(r"\x1b\[[\d;]*m")
_MAX_CHARACTERS = 10_000
"""Of an observation without a `render`: a text model cannot read pixels."""


async def gym(
    episode: Episode,
    *,
    id: str,
    actions: tuple[str, ...] = (),
    render: ImportString[Callable[..., Any]] | None = None,
    parse: ImportString[Callable[..., Any]] | None = None,
    unreadable_reward: float = 0.0,
    **options: Any,
) -> float:
    """Plays `gymnasium.make(id, **options)`, reset with the task's seed, until it is terminated or truncated.

    A text observation is shown as it is, any other as JSON. If the environment has an `ansi` rendering, that follows; another
    `render_mode`, such as null, leaves it out. `render(observation)` replaces all of this. The action is the last number or name in the
    reply; `actions` names the numbers in order. In a text action space the whole reply is the action. `parse(text)` replaces this reading,
    and must raise ToolError with a message for the model if it finds no action. A reply without an action earns `unreadable_reward`.
    """
    with contextlib.closing(_Game(episode, id, options, actions, render, parse, unreadable_reward)) as game:
        answer = game.begin()
        while answer is not None:
            answer = game.hear((await episode.ask(answer)).text)
    return 0.0


def gym_blocking(
    episode: BlockingEpisode,
    *,
    id: str,
    actions: tuple[str, ...] = (),
    render: ImportString[Callable[..., Any]] | None = None,
    parse: ImportString[Callable[..., Any]] | None = None,
    unreadable_reward: float = 0.0,
    **options: Any,
) -> float:
    """As `gym`, with a process for each running episode. `episodes.max_processes` bounds the episodes that run at once."""
    with contextlib.closing(_Game(episode, id, options, actions, render, parse, unreadable_reward)) as game:
        answer = game.begin()
        while answer is not None:
            answer = game.hear(episode.ask(answer).text)
    return 0.0


class _Game:
    """One episode of one environment, with texts in and out."""

    def __init__(
        self,
        episode: EpisodeFacts,
        id: str,
        options: Mapping[str, Any],
        actions: Sequence[str],
        render: Callable[[Any], str] | None,
        parse: Callable[[str], Any] | None,
        unreadable_reward: float,
    ) -> None:
        self._episode, self._render, self._unreadable_reward = episode, render, unreadable_reward
        self._num_steps = self._num_unreadable = 0
        env: gymnasium.Env[Any, Any] = gymnasium.make(id, **options)
        is_free = render is None and "render_mode" not in options
        if is_free and "ansi" in env.metadata.get("render_modes", ()):
            env.close()
            env = gymnasium.make(id, render_mode="ansi", **options)
        self._env = env
        try:
            # The list of possible answers follows the first observation.
            self._offer, self._parse = ("", parse) if parse else _reading(env.action_space, actions)
        except ConfigError:
            env.close()
            raise

    def begin(self) -> str:
        observation, _ = self._env.reset(seed=self._episode.seed)
        return f"{self._text(observation)}\n{self._offer}".rstrip()

    def hear(self, text: str) -> str | None:
        """The next message to the model, after its reply. None when the game is over."""
        try:
            action = self._parse(text)
        except ToolError as error:
            self._num_unreadable += 1
            self._episode.earn(self._unreadable_reward)
            return str(error)
        observation, reward, is_terminated, is_truncated, _ = self._env.step(action)
        self._num_steps += 1
        self._episode.earn(float(reward))
        return None if is_terminated or is_truncated else self._text(observation)

    def close(self) -> None:
        self._episode.log("steps", self._num_steps)
        self._episode.log("unreadable_actions", self._num_unreadable)
        self._env.close()

    def _text(self, observation: Any) -> str:
        if self._render is not None:
            return self._render(observation)
        text = observation if isinstance(observation, str) else json.dumps(observation, default=_plain)
        if len(text) > _MAX_CHARACTERS:
            raise ConfigError(
                f"an observation of {len(text)} characters is too long; name a function that describes it: render: my_module:render"
            )
        if self._env.render_mode != "ansi":
            return text
        drawn = _ESCAPE.sub("", _HIGHLIGHTED.sub(r"[\1]", str(self._env.render())))
        return f"{text}\n{drawn.strip(chr(10))}"


def _reading(space: "gymnasium.Space[Any]", names: Sequence[str]) -> tuple[str, Callable[[str], Any]]:
    """A sentence that lists the possible answers, and a function that reads an action. Raises ConfigError for actions that need `parse`."""
    if isinstance(space, gymnasium.spaces.Text):
        return "", lambda reply: after_reasoning(reply).strip()
    if not isinstance(space, gymnasium.spaces.Discrete):
        raise ConfigError(f"an action is {space}; name a function that reads it: parse: my_module:parse")
    first, num = int(space.start), int(space.n)
    if names and len(names) != num:
        raise ConfigError(f"actions={list(names)} are {len(names)} names, and there are {num} actions; name each")
    are_numbers = any(name.isdecimal() for name in names)
    numbers = {} if are_numbers else {str(number): number for number in range(first, first + num)}
    numbers |= {name.lower(): first + number for number, name in enumerate(names)}
    answers = f"one of: {', '.join(names)}" if names else f"a number from {first} to {first + num - 1}"
    offer = f"Answer with {answers}."
    words = "|".join(map(re.escape, sorted(names, key=len, reverse=True)))
    written = re.compile(
        rf"(?<!{WORD})(?<![.-])(?:{words + '|' if words else ''}-?\d+)(?!{WORD}|-|\.\d)", re.IGNORECASE
    )

    def read(reply: str) -> int:
        found = written.findall(after_reasoning(reply))
        if not found or found[-1].lower() not in numbers:
            raise ToolError(f"There is no action in that. {offer}")
        return numbers[found[-1].lower()]

    return offer, read


def _plain(value: Any) -> Any:
    """Converts NumPy's values to lists and numbers for JSON."""
    return value.tolist() if hasattr(value, "tolist") else str(value)
