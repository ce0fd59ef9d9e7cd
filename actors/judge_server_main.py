"""Runs vLLM's server for as long as both it and this process's parent live: then all of this session's processes end.

The parent holds the other end of standard input. It closes when the parent is gone, even one that was killed. In, one line: the token
that requests must bear, and the server's arguments. vLLM takes the token from its environment, which only its own user can read.
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
    """ASGI middleware, outside vLLM's own: vLLM asks for the token below /v1 and a few others, but not at /invocations, which generates
    too, nor where it scales and is measured. Judges need /v1 alone."""

    def __init__(self, app: _App) -> None:
        self._app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        path = scope.get("path", "")
        if scope["type"] == "lifespan" or path == "/health" or path.startswith("/v1/"):
            return await self._app(scope, receive, send)
        if scope["type"] == "http":  # a web socket is closed by not being accepted
            await send({"type": "http.response.start", "status": 404, "headers": []})
            await send({"type": "http.response.body", "body": b""})


def main() -> None:
    brief = json.loads(sys.stdin.readline())
    server = subprocess.Popen(
        [sys.executable, "-P", "-m", "vllm.entrypoints.openai.api_server", *brief["arguments"]],
        stdin=subprocess.DEVNULL,
        env=os.environ | {"VLLM_API_KEY": brief["token"]},
    )
    # Not a thread: Ray ends an actor's own children with it, and would end this process before it saw its parent's end.
    if os.fork() == 0:
        sys.stdin.read()
    else:
        server.wait()
    # Its engine may outlive it.
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    main()
