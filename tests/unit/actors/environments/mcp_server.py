"""A real MCP server with a memory, for tests: `python -m`, over stdio, or over HTTP at the port that it prints."""

import asyncio
import os
import signal
import socket
import sys

import uvicorn
from mcp.server import MCPServer
from mcp.server.mcpserver import Image
from mcp.server.mcpserver.exceptions import ToolError

server = MCPServer("notes", log_level="WARNING")
notes: list[str] = []


@server.tool()
def note(text: str, times: int = 1) -> str:
    """Writes a note down."""
    notes.extend([text] * times)
    return f"{len(notes)} notes"


@server.tool()
def divide(by: float) -> float:
    """One by a number."""
    if by == 0:
        raise ToolError("zero divides nothing")
    return 1 / by


@server.tool()
def picture() -> list[str | Image]:
    """A picture with its title."""
    return ["a dot", Image(data=b"...", format="png")]


@server.tool()
def variable(of: str) -> str:
    """An environment variable of the server."""
    return os.environ.get(of, "not set")


@server.tool()
async def sleep() -> str:
    """Never answers."""
    await asyncio.Event().wait()
    return "never"


@server.tool()
def die() -> str:
    """Ends the server."""
    os._exit(3)


@server.tool()
def stand_still() -> str:
    """As a server that hangs."""
    os.kill(os.getpid(), signal.SIGSTOP)
    return "goes on"


def serve() -> None:
    listening = socket.create_server(("127.0.0.1", 0))
    print(listening.getsockname()[1], flush=True)
    uvicorn.Server(uvicorn.Config(with_key(server.streamable_http_app()), log_level="warning")).run([listening])


def with_key(app):
    async def checked(scope, receive, send):
        wanted = os.environ.get("SERVER_KEY")
        if (
            scope["type"] == "http"
            and wanted
            and (b"authorization", f"Bearer {wanted}".encode()) not in scope["headers"]
        ):
            await send({"type": "http.response.start", "status": 401, "headers": []})
            await send({"type": "http.response.body", "body": b""})
            return
        await app(scope, receive, send)

    return checked


if __name__ == "__main__":
    serve() if "http" in sys.argv else server.run()
