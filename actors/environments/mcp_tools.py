"""Tools of an MCP server, either started by the environment (`command`) or running elsewhere (`url`, streamable HTTP).

Each episode has its own session, and with `command` its own server. So no episode sees the effects of another, and a server that dies
fails one episode. If a server starts slowly and keeps no state, run it once and name its URL.
"""

import asyncio
import contextlib
import json
import os
import shlex
import shutil
import sys
from collections.abc import AsyncIterator, Collection, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from pydantic import PositiveFloat

from actors.processes import tied
from actors.schema_tools import schema_tool
from cluster.contracts.episodes import Episode
from cluster.contracts.errors import ConfigError, ToolError
from cluster.contracts.tools import Tool

try:
    import httpx2
    from mcp import Client, MCPError, StdioServerParameters, types
    from mcp.client.streamable_http import streamable_http_client
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(f"{error}; pip install 'treadwheel[mcp]'") from error

_TIED = Path(tied.__file__)
"""The SDK starts a server in its own session, so a hanging server would outlive this process. This wrapper ends it."""
_HTTP_TIMEOUT = httpx2.Timeout(30.0, read=None)
"""No limit on reads: a server may hold its streams open, and each call has its own deadline."""
_FAILURES = frozenset(
    (
        types.CONNECTION_CLOSED,
        types.REQUEST_TIMEOUT,
        types.PARSE_ERROR,
        types.INVALID_REQUEST,
        types.METHOD_NOT_FOUND,
    )
)
"""Codes of errors of the connection or the protocol. All others are errors of a tool."""
_FAILURES_OVER_HTTP = _FAILURES | {types.INTERNAL_ERROR}
"""The SDK gives this code to an answer such as 503."""


async def mcp_tools(
    episode: Episode,
    *,
    command: tuple[str, ...] = (),
    url: str | None = None,
    key_env: str | None = None,
    env: tuple[str, ...] = (),
    tools: tuple[str, ...] = (),
    timeout_s: PositiveFloat = 60.0,
    start_timeout_s: PositiveFloat = 120.0,
) -> None:
    """The model answers the prompt once, with the server's tools. The judges decide. The parameters are those of `mcp_session`."""
    async with mcp_session(
        command=command,
        url=url,
        key_env=key_env,
        env=env,
        tools=tools,
        timeout_s=timeout_s,
        start_timeout_s=start_timeout_s,
    ) as offered:
        await episode.ask(tools=offered)


@contextlib.asynccontextmanager
async def mcp_session(
    *,
    command: Sequence[str] = (),
    url: str | None = None,
    key_env: str | None = None,
    env: Sequence[str] = (),
    tools: Sequence[str] = (),
    timeout_s: float = 60.0,
    start_timeout_s: float = 120.0,
) -> AsyncIterator[list[Tool]]:
    """A session with the server, for your own environments. Yields the tools that `tools` names, in this order; by default all.

    `key_env` names the environment variable with the bearer token for `url`. `env` names the variables that `command` sees. `timeout_s` is
    the deadline of a call, `start_timeout_s` the deadline for starting and listing the tools. An error that a tool reports goes to the
    model. A call without an answer is the environment's failure, and so are errors of the protocol, and over HTTP an internal error
    (-32603), which may be a gateway's. Raises ConfigError unless exactly one of `command` and `url` is given, and for a tool that the
    server does not have.
    """
    async with contextlib.AsyncExitStack() as stack:
        try:
            async with asyncio.timeout(start_timeout_s) as deadline:
                client = await stack.enter_async_context(_client(command, url, key_env, env))
                offered = await _listed(client)
        except TimeoutError as error:
            if not deadline.expired():
                raise
            server = url or shlex.join(command)
            raise TimeoutError(
                f"the MCP server has not listed its tools within start_timeout_s={start_timeout_s:g}: {server}"
            ) from error
        if missing := [name for name in tools if name not in offered]:
            raise ConfigError(f"the MCP server has no tool {missing[0]!r}; it has: {', '.join(offered) or 'none'}")
        failures = _FAILURES if url is None else _FAILURES_OVER_HTTP
        yield [_tool(client, offered[name], timeout_s=timeout_s, failures=failures) for name in tools or offered]


@contextlib.asynccontextmanager
async def _client(
    command: Sequence[str], url: str | None, key_env: str | None, env: Sequence[str]
) -> AsyncIterator[Client]:
    if bool(command) == (url is not None):
        raise ConfigError("an MCP server needs exactly one of command and url: the command that starts it, or its URL")
    if url is None:
        program, *arguments = command
        seen = {name: os.environ[name] for name in env if name in os.environ}
        if shutil.which(program) is None:
            raise ConfigError(
                f"command[0]={program!r} is not a program here; install it where environments run, or give its path"
            )
        command = ["-I", "-S", str(_TIED), str(os.getpid()), program, *arguments]
        async with Client(StdioServerParameters(command=sys.executable, args=command, env=seen)) as client:
            yield client
        return
    key = os.environ.get(key_env, "").strip() if key_env else None
    if key_env and not key:
        raise ConfigError(
            f"key_env={key_env!r} is not set where environments run; export it, and add it to episodes.env"
        )
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    async with (
        httpx2.AsyncClient(headers=headers, timeout=_HTTP_TIMEOUT) as http,
        Client(streamable_http_client(url, http_client=http)) as client,
    ):
        yield client


async def _listed(client: Client) -> dict[str, types.Tool]:
    """All tools of the server by name."""
    found: dict[str, types.Tool] = {}
    cursor = None
    while True:
        page = await client.list_tools(cursor=cursor)
        found |= {each.name: each for each in page.tools}
        if (cursor := page.next_cursor) is None:
            return found


def _tool(client: Client, tool: types.Tool, *, timeout_s: float, failures: Collection[int]) -> Tool:
    return schema_tool(
        partial(_called, client, tool.name, failures),
        name=tool.name,
        description=tool.description or tool.title or "",
        parameters=tool.input_schema,
        timeout_s=timeout_s,
    )


async def _called(client: Client, tool: str, failures: Collection[int], /, **arguments: Any) -> str:
    try:
        result = await client.call_tool(tool, arguments)
    except MCPError as error:
        if error.code in failures:
            raise
        raise ToolError(error.message) from error
    text = "\n".join(map(_as_text, result.content))
    if result.is_error:
        raise ToolError(text)
    if not result.content and result.structured_content is not None:
        return json.dumps(result.structured_content, ensure_ascii=False)
    return text


def _as_text(block: types.ContentBlock) -> str:
    if isinstance(block, types.TextContent):
        return block.text
    if isinstance(block, types.EmbeddedResource) and isinstance(block.resource, types.TextResourceContents):
        return block.resource.text
    if isinstance(block, types.ResourceLink):
        return f"{block.name}: {block.uri}"
    return f"[{block.type}, which is not shown]"
