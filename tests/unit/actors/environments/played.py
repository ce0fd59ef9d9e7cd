"""Environments played by a scripted model, without a process."""

import asyncio
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from actors.environments.host.ends import returned
from cluster.contracts.episodes import Said


class ScriptedEpisode:
    """Says its lines in turn, or raises them, and notes what it was asked and what was logged."""

    id = "e"

    def __init__(
        self, lines: Iterable[str | Exception], *, seed: int = 0, columns: Mapping[str, Any] | None = None
    ) -> None:
        self.seed, self.columns = seed, columns or {}
        self.heard: list[Any] = []
        self.logged: dict[str, float | str] = {}
        self.num_calls = 0
        self._lines = iter(lines)

    async def ask(self, messages: Any = None, *, tools: Any = ()) -> Said:
        self.heard.append(messages)
        line = next(self._lines)
        if isinstance(line, Exception):
            raise line
        return Said(text=line)

    def log(self, name: str, value: float | str) -> None:
        self.logged[name] = value


def play(environment: Callable[..., Any], episode: Any, **parameters: Any) -> float | None:
    return returned(asyncio.run(environment(episode, **parameters))).reward
