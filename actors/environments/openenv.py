"""An environment of an OpenEnv server: one WebSocket session an episode, `{"type": "reset" | "step" | "close", "data": ...}`.

It needs no package. Tests use a stand-in; the client was tried by hand with the server of openenv-core 0.3.0.
"""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from functools import partial
from typing import Any

import aiohttp
from pydantic import ImportString, PositiveFloat

from actors.reasoning import after_reasoning
from cluster.contracts.episodes import Episode
from cluster.contracts.errors import DataError, ToolError, WorkerError

_MAX_BYTES = 16 * 1024**2
_CLOSE_S = 1.0
_SEEDS = 2**31
"""Seeds are reduced modulo this number: many environments pass theirs to NumPy, which takes 32 bits."""


async def openenv(
    episode: Episode,
    *,
    url: str,
    action: str = "message",
    observation: str | None = None,
    parse: ImportString[Callable[..., Any]] | None = None,
    render: ImportString[Callable[..., Any]] | None = None,
    reset: dict[str, Any] | None = None,
    reset_column: str | None = None,
    timeout_s: PositiveFloat = 60.0,
) -> float | None:
    """Plays the environment at `url`, such as `http://host:8000`, until it is done. Its rewards are earned turn by turn.

    `action` names the field of an action that gets the reply without its reasoning. `parse(text)` replaces that; it may raise ToolError
    with a message for the model. `observation` names the field of an observation that the model sees; None: all but `metadata` as JSON.
    `render(observation)` replaces that. The server gets the task's seed, `reset`, and the prompt's column `reset_column`. If the server
    calls an action malformed, its message goes to the model. Any other error, or no answer within `timeout_s`, is the environment's
    failure. If the server gives no reward, the judges decide.
    """
    begin = {
        "seed": episode.seed % _SEEDS,
        "episode_id": episode.id,
        **(reset or {}),
        **_of_column(episode, reset_column),
    }
    show = render or partial(_shown, field=observation)
    is_rewarded, num_refused = False, 0
    try:
        async with _session(url, timeout_s=timeout_s) as call:
            seen = await call("reset", begin)
            answer = show(seen["observation"])
            while not seen["done"]:
                text = (await episode.ask(answer)).text
                try:
                    seen = await call("step", parse(text) if parse else {action: after_reasoning(text).strip()})
                except ToolError as error:
                    num_refused += 1
                    answer = str(error)
                    continue
                if seen["reward"] is not None:
                    episode.earn(float(seen["reward"]))
                    is_rewarded = True
                answer = show(seen["observation"])
    finally:
        episode.log("refused_actions", num_refused)
    return 0.0 if is_rewarded else None


@contextlib.asynccontextmanager
async def _session(url: str, *, timeout_s: float) -> AsyncIterator[Callable[[str, Any], Awaitable[dict[str, Any]]]]:
    """Yields a function that sends the server a message of a kind and returns the answer. It raises ToolError if the server calls a step
    malformed, WorkerError for its other errors and for a closed session, and TimeoutError if there is no answer."""
    async with contextlib.AsyncExitStack() as stack:
        http = await stack.enter_async_context(aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None)))
        connecting = http.ws_connect(f"{url.rstrip('/')}/ws", max_msg_size=_MAX_BYTES)
        try:
            # A `ClientTimeout` would not cover a server that accepts the connection and never answers.
            async with asyncio.timeout(timeout_s):
                socket = await stack.enter_async_context(connecting)
        except TimeoutError:
            raise TimeoutError(f"{url} opens no session within timeout_s={timeout_s:g}") from None
        heard: asyncio.Queue[str | None] = asyncio.Queue()
        # In a task, so that pings are answered while the model generates: a server closes a session that answers none.
        listening = asyncio.create_task(_listen(socket, heard))
        stack.callback(listening.cancel)

        async def call(kind: str, data: Any) -> dict[str, Any]:
            try:
                async with asyncio.timeout(timeout_s):
                    with contextlib.suppress(ConnectionError):  # the queue reports the end of the session
                        await socket.send_str(json.dumps({"type": kind, "data": data}))
                    message = await heard.get()
            except TimeoutError:
                raise TimeoutError(f"{url} does not answer a {kind} within timeout_s={timeout_s:g}") from None
            if message is None:
                raise WorkerError(f"{url} closed the session")
            return _answered(json.loads(message), kind, url)

        try:
            yield call
        finally:
            # A server reports an error if the session ends before the server has closed it: wait for that.
            with contextlib.suppress(ConnectionError, TimeoutError):
                await socket.send_str(json.dumps({"type": "close"}))
                async with asyncio.timeout(_CLOSE_S):
                    await heard.get()


async def _listen(socket: aiohttp.ClientWebSocketResponse, heard: asyncio.Queue[str | None]) -> None:
    """Queues the texts that arrive. None, the last item, marks the end of the session or a message of another type."""
    with contextlib.suppress(ConnectionError):  # raised by the answer to a ping
        while (message := await socket.receive()).type is aiohttp.WSMsgType.TEXT:
            heard.put_nowait(message.data)
    heard.put_nowait(None)


def _answered(message: Mapping[str, Any], kind: str, url: str) -> dict[str, Any]:
    data = message.get("data") or {}
    if message.get("type") == "error":
        mistakes = [f"{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in data.get("errors", ())]
        said = "; ".join([str(data.get("message", "no message")), *mistakes])
        if kind == "step" and data.get("code") == "VALIDATION_ERROR":
            raise ToolError(said)
        raise WorkerError(f"{url} answers a {kind} with {data.get('code', 'an error')}: {said}")
    if "observation" not in data:
        raise DataError(f"{url} answers a {kind} without an observation: {str(message)[:200]}")
    return {"reward": None, "done": False, **data}


def _shown(observation: Mapping[str, Any], *, field: str | None) -> str:
    if field is None:
        return json.dumps({key: each for key, each in observation.items() if key != "metadata"}, ensure_ascii=False)
    if field not in observation:
        raise DataError(f"an observation has no field {field!r}; it has: {', '.join(observation)}")
    value = observation[field]
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _of_column(episode: Episode, column: str | None) -> Mapping[str, Any]:
    if column is None:
        return {}
    given = episode.columns.get(column)
    if not isinstance(given, Mapping):
        raise DataError(f"reset_column={column!r}: the prompt has {given!r} there, not a mapping")
    return given
