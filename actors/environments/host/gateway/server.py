"""The HTTP server of a host process. Each of its episodes has its own path and key."""

import asyncio
import contextvars
import socket
import sys
import traceback
from collections.abc import Awaitable, Callable, Iterable
from functools import partial
from typing import Any

from aiohttp import web

from actors.environments.host.conversation import Conversation
from actors.environments.host.gateway.answers import pieces, whole
from actors.environments.host.gateway.endpoint import EpisodeEndpoint, over
from actors.environments.host.gateway.refusals import RefusedError
from actors.environments.host.gateway.requests import ChatRequest, RawRequest, read_chat_request, read_raw_request

_MAX_BODY_BYTES = 16 * 1024**2
_MODEL = "policy"


class Gateway:
    """Listens on the loopback address only, and ends with its process."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        """May be called from any thread. `loop` serves. The port is open at once: an early connection waits."""
        self._loop = loop
        self._socket = socket.create_server(("127.0.0.1", 0), backlog=1024)
        self._port: int = self._socket.getsockname()[1]
        self._num_opened = 0
        self._endpoints: dict[str, EpisodeEndpoint] = {}
        self._paths: dict[Conversation, str] = {}
        self._connections: dict[asyncio.BaseTransport, EpisodeEndpoint] = {}
        """Connections, each with the endpoint that it used last."""
        # In an empty context: tasks of an episode's context are cancelled with the episode.
        loop.call_soon_threadsafe(self._start, context=contextvars.Context())

    def endpoint(self, conversation: Conversation) -> EpisodeEndpoint:
        """The episode's endpoint, opened at the first call. Calls must not overlap. Raises RuntimeError for an episode that is over."""
        if path := self._paths.get(conversation):
            return self._endpoints[path]
        if conversation.is_over:
            raise RuntimeError(f"episode {conversation.id!r} is over, and had no endpoint")
        path = self._paths[conversation] = str(self._num_opened)
        self._num_opened += 1
        endpoint = EpisodeEndpoint(conversation, f"http://127.0.0.1:{self._port}/{path}/v1")
        self._endpoints[path] = endpoint
        return endpoint

    def end(self, conversation: Conversation) -> None:
        """Closes the episode's endpoint and aborts its connections."""
        path = self._paths.pop(conversation, None)
        if path is None:
            return
        ended = self._endpoints.pop(path)
        for connection, endpoint in [*self._connections.items()]:
            if endpoint is ended:
                del self._connections[connection]
                if isinstance(connection, asyncio.Transport):
                    connection.abort()

    def _start(self) -> None:
        self._serving = self._loop.create_task(self._serve())

    async def _serve(self) -> None:
        application = web.Application(client_max_size=_MAX_BODY_BYTES, middlewares=[_with_error_objects])
        application.add_routes(
            [
                web.post("/{episode}/v1/chat/completions", partial(self._complete, read_chat_request)),
                web.post("/{episode}/v1/completions", partial(self._complete, read_raw_request)),
                web.get("/{episode}/v1/models", self._models),
                web.get("/{episode}/v1/models/{model:.+}", self._model),
            ]
        )
        # When a client disconnects, its turn is cancelled.
        runner = web.AppRunner(application, access_log=None, handle_signals=False, handler_cancellation=True)
        await runner.setup()
        await web.SockSite(runner, self._socket, backlog=1024).start()

    async def _complete(
        self, read: Callable[..., ChatRequest | RawRequest], request: web.Request
    ) -> web.StreamResponse:
        endpoint = self._endpoint_of(request)
        asked = read(await request.read(), sampling=endpoint.sampling)
        said = await endpoint.answer(asked)
        if not asked.is_streamed:
            return web.json_response(whole(said, asked))
        return await _streamed(request, pieces(said, asked))

    async def _models(self, request: web.Request) -> web.StreamResponse:
        self._endpoint_of(request)
        return web.json_response({"object": "list", "data": [_described(_MODEL)]})

    async def _model(self, request: web.Request) -> web.StreamResponse:
        self._endpoint_of(request)
        return web.json_response(_described(request.match_info["model"]))

    def _endpoint_of(self, request: web.Request) -> EpisodeEndpoint:
        path = request.match_info["episode"]
        endpoint = self._endpoints.get(path)
        if endpoint is None:
            is_ended = path.isdecimal() and int(path) < self._num_opened
            raise over() if is_ended else RefusedError(f"there is no episode {path!r}", status=404, code="not_found")
        endpoint.check_key(request.headers.get("Authorization", ""))
        if request.transport is not None:
            self._connections = {each: its for each, its in self._connections.items() if not each.is_closing()}
            self._connections[request.transport] = endpoint
        return endpoint


@web.middleware
async def _with_error_objects(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    try:
        return await handler(request)
    except RefusedError as refused:
        return web.json_response(refused.body, status=refused.status)
    except web.HTTPException as error:
        there_is = "; there are /chat/completions, /completions and /models" if error.status == 404 else ""
        refused = RefusedError(f"{request.method} {request.path}: {error.reason}{there_is}", status=error.status)
        return web.json_response(refused.body, status=error.status)
    except Exception as error:  # noqa: BLE001 - a bug of ours: the client gets the message, and the log the traceback
        traceback.print_exc(file=sys.stderr)
        refused = RefusedError(f"{type(error).__name__}: {error}", status=500)
        return web.json_response(refused.body, status=500)


async def _streamed(request: web.Request, pieces: Iterable[bytes]) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
    await response.prepare(request)
    for piece in pieces:
        await response.write(piece)
    await response.write_eof()
    return response


def _described(model: str) -> dict[str, Any]:
    return {"id": model, "object": "model", "created": 0, "owned_by": "treadwheel"}
