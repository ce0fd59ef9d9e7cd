"""A real HTTP server that answers as it should, or with one fault after the other."""

import asyncio
import contextlib
import datetime
import email.utils
import ssl
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web


@dataclass
class FaultyServer:
    answer: Callable[[Any], Any]
    """What a healthy server answers to the parsed body."""
    faults: Iterator[str | None]
    """One a request, None for none; when they have run out the server is well."""
    fault_of: Callable[[Any], str | None] = lambda body: None
    """One that a body itself causes."""
    url: str = ""
    elsewhere: str = ""
    """Where a redirect goes."""
    wait: asyncio.Event | None = None
    """Of the fault `slow`: answers when it is set."""
    requests: list[Any] = field(default_factory=list)
    """Bodies, in order."""
    headers: list[dict[str, str]] = field(default_factory=list)

    async def handle(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.requests.append(body)
        self.headers.append(dict(request.headers))
        match self.fault_of(body) or next(self.faults, None):
            case None:
                return web.json_response(self.answer(body))
            case "hang":
                await asyncio.sleep(60)
            case "slow":
                assert self.wait is not None
                await self.wait.wait()
                return web.json_response(self.answer(body))
            case "retry after 1 s":
                return web.Response(status=429, headers={"Retry-After": "1"})
            case "retry after a date":
                date = email.utils.format_datetime(datetime.datetime.fromtimestamp(time.time() + 1.9, datetime.UTC))
                return web.Response(status=429, headers={"Retry-After": date})
            case "retry after 0 s":
                return web.Response(status=429, headers={"Retry-After": "0"})
            case "retry after a past date":
                return web.Response(status=429, headers={"Retry-After": "Wed, 21 Oct 2015 07:28:00 -0000"})
            case "retry after a year beyond C's integers":
                return web.Response(status=429, headers={"Retry-After": "Wed, 21 Oct 99999999999 07:28:00 GMT"})
            case "retry after an hour":
                return web.Response(status=429, headers={"Retry-After": "3600"})
            case "away for an hour":
                return web.Response(status=503, headers={"Retry-After": "3600"})
            case "slow 500":
                assert self.wait is not None
                await self.wait.wait()
                return web.Response(status=500)
            case "redirect":
                return web.Response(status=307, headers={"Location": self.elsewhere})
            case "half a body" | "slow drip" as fault:
                whole = web.json_response(self.answer(body)).body
                response = web.StreamResponse(headers={"Content-Length": str(len(whole))})
                await response.prepare(request)
                await response.write(whole[: len(whole) // 2])
                if fault == "slow drip":
                    for place in range(len(whole) // 2, len(whole)):
                        await asyncio.sleep(5)
                        await response.write(whole[place : place + 1])
                request.transport.abort()
                return response
            case "malformed":
                return web.Response(text='{"rewards": [1.0', content_type="application/json")
            case "html":
                return web.Response(text="<html>It works!</html>", content_type="text/html")
            case "echo":
                return web.Response(status=401, text=f"no such key: {request.headers.get('Authorization')}")
            case "close":
                request.transport.abort()
            case str() as status:
                return web.Response(status=int(status), text="out of order")
        return web.Response()


@contextlib.asynccontextmanager
async def faulty_server(
    answer: Callable[[Any], Any],
    *faults: str | None,
    always: Iterable[str] = (),
    port: int = 0,
    tls: ssl.SSLContext | None = None,
):
    """`always` is an endless fault in place of a few."""
    server = FaultyServer(answer, iter(always or faults))
    app = web.Application()
    app.router.add_post("/{path:.*}", server.handle)
    runner = web.AppRunner(app, shutdown_timeout=0.01)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", port, ssl_context=tls)
    await site.start()
    server.url = f"http{'s' if tls else ''}://127.0.0.1:{runner.addresses[0][1]}"
    try:
        yield server
    finally:
        await runner.cleanup()
