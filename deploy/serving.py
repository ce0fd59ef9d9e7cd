"""`treadwheel serve-reward`: a judge behind HTTP, in the native dialect of the judge `remote`, so that rewards can have their own machines.

The judge runs in processes under deadlines, exactly as in a run. `POST /judge` takes `{groups: [{columns, trajectories: [{prompt,
completion, token_ids, finish_reason, seed}]}]}`: of each trajectory at least the fields that the judge asks for, and of an episode also
its `messages`. It answers `{groups: [[...]]}` with `{reward, components}` or `{status, error}` for each trajectory. `GET /health` answers
while the server is up.
"""

import asyncio
import hmac
import json
import os
import signal
import socket
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from actors.dialects import native_answer
from actors.reward_service.service import Asked, RewardService, conversation
from cluster.contracts.config import RewardConfig
from cluster.contracts.errors import ConfigError, DataError, UnavailableError, WorkerError
from deploy.listening import bound, in_url, is_loopback

_MAX_BODY_BYTES = 64 * 2**20
_SILENCE_S = 10.0
"""Longest pause in the body of a request. A client that stands still would keep the server from stopping."""
_ELSEWHERE = ("rewards", "scores", "all_scores", "servers")
"""Arguments of judges that only a run can provide."""


def serve(config: RewardConfig, *, host: str, port: int, key_env: str | None, says: Callable[[str], None]) -> None:
    """Serves until SIGTERM or SIGINT, and then answers the open requests. `port` 0 takes a free port. Calls `says` with the address.

    Raises ConfigError for a judge that cannot be used, a key that is not set, an address that cannot be bound, and for an address that
    other machines reach without a key.
    """
    key = _key(key_env, host=host)
    with bound(host, port) as listening:
        asyncio.run(_serve(config, listening, key, says))


async def _serve(config: RewardConfig, listening: socket.socket, key: str | None, says: Callable[[str], None]) -> None:
    # If a service that the judge calls is down, this server does not wait for it: the client gets the error at once, and waits.
    service = RewardService(config.model_copy(update={"hold_s": 0.0}))
    await service.warm_up()
    try:
        if foreign := service.asks & {*_ELSEWHERE}:
            raise ConfigError(f"the judge asks for {', '.join(foreign)}, which only a run has; name it in the run file")
        server = uvicorn.Server(uvicorn.Config(app(service, key=key), log_level="warning", lifespan="off"))
        # uvicorn raises the signal again after it has stopped; ignore it, so that the exit code is 0.
        signal.signal(signal.SIGTERM, lambda *_: None)
        host, port = listening.getsockname()[:2]
        says(f"serving {config.judge.name} on http://{in_url(host)}:{port}")
        await server.serve(sockets=[listening])
    finally:
        await service.close()


def app(service: RewardService, *, key: str | None) -> Starlette:
    """The service as a web application."""

    async def judge(request: Request) -> Response:
        if "origin" in request.headers:
            return _refusal(403, "a page in a browser asks no judge")
        authorization = request.headers.get("authorization", "")
        if key is not None and not hmac.compare_digest(authorization.encode(), f"Bearer {key}".encode()):
            return _refusal(401, "the bearer token is missing or wrong")
        body = bytearray()
        try:
            async with asyncio.timeout(_SILENCE_S) as deadline:
                async for chunk in request.stream():
                    deadline.reschedule(asyncio.get_running_loop().time() + _SILENCE_S)
                    body += chunk
                    if len(body) > _MAX_BODY_BYTES:
                        return _refusal(413, f"the body is longer than {_MAX_BODY_BYTES} bytes")
        except TimeoutError:
            # Not 408, which the judge `remote` would take for the judge's answer; a 503 it asks again.
            return _refusal(503, f"the rest of the body has not come within {_SILENCE_S:g} s")
        except ClientDisconnect:
            return _refusal(400, "the client left before the end of its body")
        try:
            groups = [_asked(group, service.wanted) for group in json.loads(body)["groups"]]
        except (DataError, AttributeError, LookupError, TypeError, ValueError, RecursionError) as error:
            return _refusal(422, f"not a request of the native dialect: {type(error).__name__}: {error}")
        try:
            judged = await asyncio.gather(*map(service.judge, groups))
        except (UnavailableError, WorkerError) as error:
            return _refusal(503, str(error))
        return JSONResponse({"groups": [[native_answer(reward) for reward in rewards] for rewards, _ in judged]})

    async def health(request: Request) -> Response:
        return JSONResponse({"status": "ok"})

    return Starlette(routes=[Route("/judge", judge, methods=["POST"]), Route("/health", health)])


def _asked(group: Mapping[str, Any], wanted: Sequence[str]) -> Asked:
    """Raises DataError for a trajectory without a field that the judge asks for. Errors of reading foreign JSON pass through."""
    columns, trajectories = dict(group["columns"]), list[dict[str, Any]]()
    for given in group["trajectories"]:
        trajectory = dict(given)
        if "messages" in wanted and "messages" not in given:
            trajectory["messages"] = conversation(columns, prompt=given["prompt"], completion=given["completion"])
        if missing := [name for name in wanted if name not in trajectory]:
            raise DataError(f"a trajectory without {', '.join(missing)}, which the judge asks for")
        trajectories.append(trajectory)
    return Asked(columns=columns, trajectories=trajectories)


def _refusal(status: int, why: str) -> Response:
    return JSONResponse({"error": why}, status_code=status)


def _key(key_env: str | None, *, host: str) -> str | None:
    # Files of secrets often end with white space, which a client does not send.
    key = os.environ.get(key_env, "").strip() if key_env is not None else None
    if key == "":
        raise ConfigError(f"--key-env {key_env} is not set in the environment, or empty; export it")
    if key_env is None and not is_loopback(host):
        raise ConfigError(f"--host {host} can be reached from other machines: set a token, and name it: --key-env NAME")
    return key
