"""Runs vLLM's server until the server or this process's parent ends, then kills all processes of this session.

The parent holds the other end of standard input, which closes when the parent ends, even if it is killed. The input is one line: the token
that requests must carry, and the server's arguments. vLLM reads the token from its environment, which only its own user can read.
"""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable
from typing import Any

_App = Callable[[Any, Any, Any], Awaitable[None]]


class KeyedPathsOnly:
    """ASGI middleware around vLLM's own. vLLM requires the token below /v1 and a few other paths, but not at /invocations, which also
    generates, nor at the paths for scaling and metrics. Judges need only /v1."""

    def __init__(self, app: _App) -> None:
        self._app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        path = scope.get("path", "")
        if scope["type"] == "lifespan" or path == "/health" or path.startswith("/v1/"):
            return await self._app(scope, receive, send)
        if scope["type"] == "http":  # a web socket that is not accepted is closed
            await send({"type": "http.response.start", "status": 404, "headers": []})
            await send({"type": "http.response.body", "body": b""})


def main() -> None:
    brief = json.loads(sys.stdin.readline())
    server = subprocess.Popen(
        [sys.executable, "-P", "-m", "vllm.entrypoints.openai.api_server", *brief["arguments"]],
        stdin=subprocess.DEVNULL,
        env=os.environ | {"VLLM_API_KEY": brief["token"]},
    )
    # A fork, not a thread: Ray kills an actor's own children with the actor, so this process would end before it saw its parent end.
    if os.fork() == 0:
        sys.stdin.read()
    else:
        server.wait()
    # The server's engine may outlive the server.
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    main()
