"""One tool call: its arguments are checked, the tool runs under its deadline, and the result becomes text for the model."""

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import Any

from actors.writable import writable
from cluster.contracts.episodes import ToolCall, Tools
from cluster.contracts.errors import ConfigError, DataError, ToolError
from cluster.contracts.foreign import described
from cluster.contracts.plugins import is_async
from cluster.contracts.tools import Tool, as_tool

RunBlocking = Callable[[Callable[[], Any]], Awaitable[Any]]
"""Runs a function that may block, outside the event loop."""


class OverrunError(TimeoutError):
    """A tool exceeded its own deadline."""


def by_name(tools: Tools) -> dict[str, Tool]:
    """Raises ConfigError if two tools have the same name."""
    made: Sequence[Tool] = [as_tool(each) for each in tools]
    named = {each.name: each for each in made}
    if len(named) < len(made):
        raise ConfigError(f"two tools have the same name: {', '.join(each.name for each in made)}")
    return named


async def answer_of(call: ToolCall, tools: Mapping[str, Tool], run_blocking: RunBlocking) -> str:
    """The text for the model. Raises ToolError for a mistake of the model, OverrunError at the deadline, and the tool's own exceptions."""
    tool = tools.get(call.name)
    if tool is None:
        have = f"there are: {', '.join(tools)}"
        if isinstance(call.arguments, str):
            raise ToolError(
                f"a call must be a tool's name and a JSON object of arguments, not {call.arguments[:200]!r}; {have}"
            )
        raise ToolError(f"there is no tool {call.name!r}; {have}")
    arguments = tool.checked(call.arguments)
    try:
        return _as_text(await _value(tool, arguments, run_blocking), name=tool.name)
    except ToolError:
        raise
    except Exception as error:
        if tool.on_error == "tell":
            raise ToolError(described(error)) from error
        raise


async def _value(tool: Tool, arguments: dict[str, Any], run_blocking: RunBlocking) -> Any:
    call = partial(tool.call, **arguments)
    try:
        async with asyncio.timeout(tool.timeout_s) as deadline:
            return await (call() if is_async(tool.call) else run_blocking(call))
    except TimeoutError as error:
        if deadline.expired():
            raise OverrunError(f"no answer within timeout_s={tool.timeout_s:g}") from error
        raise


def _as_text(value: Any, *, name: str) -> str:
    """A text stays as it is, with unpaired surrogates replaced. Any other value becomes JSON."""
    if isinstance(value, str):
        return writable(value)
    try:
        return writable(json.dumps(value, ensure_ascii=False, allow_nan=False))
    except (TypeError, ValueError) as error:
        raise DataError(
            f"tool {name!r} returned a {type(value).__name__} that is neither text nor JSON: {error}"
        ) from error
