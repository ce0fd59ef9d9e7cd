"""The model's side of an episode, scripted; and host processes to try environments in."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Coroutine
from typing import Any

import psutil

from actors.environments.host.hosting import EnvironmentHost
from actors.processes.printed import PrintedLines
from cluster.contracts.environment_config import EpisodesConfig
from cluster.contracts.episodes import Asked, EpisodeEnd, EpisodeTask, Said, ToolCall
from cluster.contracts.plugins import Plugin
from tests.unit.actors.clock import pass_time

_others = set[psutil.Process]()
"""Children of pytest's process before the last host started."""
HERE = "tests.unit.actors.environments.environments"
TIMEOUT_S, CLEANUP_S = 600.0, 120.0
"""Of a host that is not told otherwise: a machine that stands still for a while makes no episode late."""


class Scripted:
    """A model that gives these answers in turn: texts, tool calls, whole answers; or raises them. Then it says `done`."""

    def __init__(self, *answers: str | ToolCall | Said | BaseException) -> None:
        self.asked: list[Asked] = []
        self._answers = iter(answers)

    async def __call__(self, asked: Asked) -> Said:
        self.asked.append(asked)
        match next(self._answers, "done"):
            case str(text):
                return Said(text=text, num_tokens=1, num_context_tokens=10 * len(self.asked))
            case ToolCall() as call:
                return Said(text="", tool_calls=(call,), num_tokens=1, num_context_tokens=10 * len(self.asked))
            case Said() as said:
                return said
            case error:
                raise error

    @property
    def heard(self) -> list[str]:
        """The texts that were added to the context, in order."""
        return [message["content"] for asked in self.asked for message in asked.messages]


class Silent:
    """A model that never answers. `asked` is set when it is asked."""

    def __init__(self) -> None:
        self.asked = asyncio.Event()
        self.was_cancelled = False

    async def __call__(self, asked: Asked) -> Said:
        self.asked.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.was_cancelled = True
            raise
        raise AssertionError


def task(do: str = "", *, seed: int = 0, id: str = "e", **columns: Any) -> EpisodeTask:
    return EpisodeTask(
        id=id,
        prompt="Guess.",
        messages=({"role": "user", "content": "Guess."},),
        columns={"do": do, **columns},
        seed=seed,
        index=0,
    )


def calls(name: str, *, id: str | None = None, **arguments: Any) -> ToolCall:
    return ToolCall(name=name, arguments=arguments, id=id)


def started() -> list[psutil.Process]:
    """Processes of the last host that are there."""
    return [child for child in psutil.Process().children() if child not in _others]


async def overrun(running: Coroutine[Any, Any, EpisodeEnd], *, begun: Coroutine[Any, Any, Any]) -> EpisodeEnd:
    """The end of an episode whose `TIMEOUT_S` pass as soon as it has `begun`."""
    episode, beginning = asyncio.create_task(running), asyncio.create_task(begun)
    await asyncio.wait([episode, beginning], return_when=asyncio.FIRST_COMPLETED)
    pass_time(TIMEOUT_S)
    beginning.cancel()
    return await episode


@contextlib.asynccontextmanager
async def hosted(
    environment: str,
    *,
    printed: PrintedLines | None = None,
    params: Any = None,
    **episodes: Any,
) -> AsyncIterator[EnvironmentHost]:
    _others.clear()
    _others.update(psutil.Process().children())
    name = environment if ":" in environment else f"{HERE}:{environment}"
    plugin = Plugin(name=name, params=params or {})
    config = EpisodesConfig(**{"timeout_s": TIMEOUT_S, "cleanup_s": CLEANUP_S} | episodes)
    host = await EnvironmentHost.start(plugin, config, printed=printed or PrintedLines())
    try:
        yield host
    finally:
        await host.close()
