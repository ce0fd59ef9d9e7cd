"""HTTP client of the judges: posts JSON to the next healthy one of several equal servers, within the deadline of the calling judge.

Transport failures (no connection, a truncated body, 5xx, 408, 429) are retried: at once on another server, or on the same one with full
jitter (Brooker, AWS, "Exponential Backoff And Jitter") or after its `Retry-After`. Other answers that are no success (3xx, 4xx, a body that
is not JSON) are errors at once.

A request without an answer shortly before the deadline raises UnavailableError, whether the server refuses, fails or is silent. The reward
service then finds out whether the server is down or cannot take this request. If the endpoint's own limits delayed the request, the error
does not blame the server. Only a second request that began late in its judgement can run into the deadline itself.
"""

import asyncio
import functools
import itertools
import json
import math
import os
import random
import ssl
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any
from urllib.parse import urlsplit

import aiohttp
from pydantic import ConfigDict, PositiveFloat, PositiveInt, field_validator, model_validator

from actors.reward_service.deadline import is_late, note_answer, remaining_s
from cluster.contracts.checked import Checked
from cluster.contracts.errors import ConfigError, DataError, UnavailableError

CHARACTERS_PER_TOKEN = 3
"""A cautious estimate, for `tokens_per_minute`."""
_DEADLINE_S = 30.0
"""Deadline of a request outside a judge's call."""
_MARGIN_S = 1.0
"""Requests give up this long before the deadline, or a third of the time left if that is shorter: the errors of many calls must arrive in
time."""
_CONNECT_S = 5.0
_REST_S = 5.0
"""How long a failed server is skipped while others are healthy."""
_FIRST_S, _LONGEST_S = 0.1, 10.0
"""Bounds of the growing interval from which the jitter is drawn."""
_LOOK_S = 0.05
_LONGEST_RETRY_AFTER_S = 60.0
_MAX_ANSWER_BYTES = 64 * 2**20
_SHOWN = 200
"""Characters of an answer in a message."""


class Endpoint(Checked):
    """Equal servers and their limits. A text or a list in its place gives only the URLs.

    Each reward service keeps the limits for itself, and each part of the reward for its own requests.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    urls: tuple[str, ...]
    """Base URLs, http or https."""
    key_env: str | None = None
    """Environment variable with the bearer token. `reward.env` must name it too."""
    ca_file: str | None = None
    """PEM file of the certificate authorities that sign the servers' certificates. None: the system's authorities."""
    max_concurrency: PositiveInt = 64
    """Most requests at the same time."""
    requests_per_minute: PositiveFloat | None = None
    """Most requests per minute, spread evenly. None: no limit."""
    tokens_per_minute: PositiveFloat | None = None
    """Most tokens per minute, spread evenly: estimated before a request, corrected by the answer's `usage`. None: no limit."""

    @model_validator(mode="before")
    @classmethod
    def _from_short_form(cls, value: Any) -> Any:
        if isinstance(value, str):
            return {"urls": [value]}
        return {"urls": value} if isinstance(value, list | tuple) else value

    @field_validator("urls")
    @classmethod
    def _require_plain_urls(cls, urls: tuple[str, ...]) -> tuple[str, ...]:
        if not urls:
            raise ValueError("no server is named; name at least one, as http://host:port")
        return tuple(_checked(url) for url in urls)


class HttpError(DataError):
    """A server's answer that a retry does not change."""

    def __init__(self, message: str, *, status: int | None = None, **facts: Any) -> None:
        """`status`: the HTTP status; 200 when the body is unreadable."""
        super().__init__(message, **facts)
        self.status = status


@dataclass(slots=True)
class _Call:
    """State of one `post` over its retries."""

    urls: Sequence[str]
    path: str
    body: bytes
    num_tokens: int
    gives_up_at: float
    url: str = ""
    """URL of the last attempt; all URLs, with commas, before the first one."""
    failure: "_TransportError | None" = None
    """Failure of the last attempt."""
    asked_at: float = math.inf
    """Monotonic time at which the first attempt was sent, after its wait for a place and a turn."""


class _TransportError(Exception):
    """A failed attempt that says nothing about the request itself."""

    def __init__(self, message: str, *, retry_after_s: float | None = None, status: int = 0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s
        self.is_limit = status == 429


class _Pace:
    """A limit per minute, spread evenly, first come, first served. If an answer used less than estimated, waiting calls start earlier."""

    def __init__(self, per_minute: float | None) -> None:
        self._seconds_each = 60 / per_minute if per_minute else 0.0
        self._next_at = 0.0
        self._num_waiting = 0
        self._is_free = asyncio.Lock()

    @property
    def wait_s(self) -> float:
        """How long another call would wait."""
        return max(self._next_at - time.monotonic(), 0.0) + self._num_waiting * self._seconds_each

    async def turn(self, amount: int) -> None:
        """Waits until `amount` may be used. A cancelled wait uses nothing."""
        came_at = time.monotonic()
        self._num_waiting += amount
        try:
            async with self._is_free:
                self._next_at = max(self._next_at, came_at)
                while (wait_s := self._next_at - time.monotonic()) > 0:
                    await asyncio.sleep(min(wait_s, _LOOK_S))  # a correction may shorten the wait
                self.correct(amount)
        finally:
            self._num_waiting -= amount

    def correct(self, amount: int) -> None:
        self._next_at += amount * self._seconds_each


class HttpClient:
    """Posts JSON. Its connections belong to the event loop of the first request."""

    def __init__(self, endpoint: Endpoint, *, field: str = "endpoint", key: str | None = None) -> None:
        """`key`: a bearer token, in place of the one in the environment. Raises ConfigError naming `field` when the environment lacks the
        token or `ca_file` is unreadable."""
        self._endpoint = endpoint
        name = endpoint.key_env
        self._key = key or (name and os.environ.get(name, "").strip())
        if name and not self._key:
            raise ConfigError(
                f"{field}.key_env={name!r} is not in the judge's environment; export it, and name it in reward.env: [{name}]"
            )
        self._tls = tls_of(endpoint.ca_file, field=field)
        self._places = asyncio.Semaphore(endpoint.max_concurrency)
        self._requests = _Pace(endpoint.requests_per_minute)
        self._tokens = _Pace(endpoint.tokens_per_minute)
        self._turns = itertools.count()
        self._rests_until: dict[str, float] = {}
        self._closed: dict[str, tuple[float, _TransportError]] = {}
        """By server: the time from which it accepts requests again, by its own `Retry-After`, and its last failure."""
        self._session: aiohttp.ClientSession | None = None

    async def post(self, path: str, body: Any, *, urls: Sequence[str] = (), num_tokens: int = 0) -> Any:
        """Returns the parsed answer of one of `urls`, by default the endpoint's. The request may reach several servers, or one twice.

        `num_tokens`: estimated tokens, for `tokens_per_minute`. Raises UnavailableError when no answer, or no turn within the limits, comes
        in time; HttpError for a refusal or a body that is not JSON; TimeoutError when a second request that began late gets no answer.
        """
        left_s = remaining_s()
        total_s = _DEADLINE_S if left_s is None else left_s
        margin_s = min(_MARGIN_S, total_s / 3)
        urls = urls or self._endpoint.urls
        patience_s, began_late = total_s - margin_s, is_late()
        gives_up_at = time.monotonic() + patience_s
        call = _Call(urls, path, json.dumps(body).encode(), num_tokens, gives_up_at, url=", ".join(urls))
        asking = asyncio.create_task(self._ask(call))
        try:
            done, _ = await asyncio.wait([asking], timeout=patience_s)
            if not done and 2 * (gives_up_at - call.asked_at) < patience_s:
                why = "max_concurrency, requests_per_minute and tokens_per_minute leave too little of the deadline"
                raise UnavailableError(f"{call.url}: {why}", retry_after_s=_FIRST_S)
            if not done and not began_late:
                self._rest(call.url, _REST_S)
                before = f"; before that: {call.failure}" if call.failure else ""
                raise UnavailableError(
                    f"{call.url} has answered nothing for {patience_s:.3g} s{before}", endpoint=call.url
                )
            async with asyncio.timeout(2 * margin_s):  # later than the judge's own deadline, which ends it first
                return await asking
        finally:
            asking.cancel()
            await asyncio.wait([asking])

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()

    async def _ask(self, call: _Call) -> Any:
        for attempt in itertools.count():
            async with self._places:
                # A call that is too late for one limit must not use up a turn of the other.
                self._refuse_late(max(self._requests.wait_s, self._tokens.wait_s), call)
                await self._requests.turn(1)
                self._refuse_late(self._tokens.wait_s, call)
                await self._tokens.turn(call.num_tokens)
                call.url = self._next(call.urls)
                if self._opens_at(call.url) > time.monotonic():
                    call.failure = self._closed[call.url][1]
                else:
                    call.asked_at = min(call.asked_at, time.monotonic())
                    try:
                        return await self._asked(call.url, call)
                    except _TransportError as error:
                        call.failure = error
                        self._rest(call.url, error.retry_after_s or _REST_S)
                        opens_at = time.monotonic() + (error.retry_after_s or 0.0)
                        # A late failure does not end the Retry-After of another request.
                        if opens_at >= self._opens_at(call.url):
                            self._closed[call.url] = opens_at, error
            if not any(map(self._is_healthy, call.urls)):
                jitter_s = random.uniform(0, min(_FIRST_S * 2 ** min(attempt, 10), _LONGEST_S))
                opens_in_s = min(map(self._opens_at, call.urls)) - time.monotonic()
                self._refuse_late(wait_s := max(jitter_s, opens_in_s), call)
                await asyncio.sleep(wait_s)

    def _refuse_late(self, seconds: float, call: _Call) -> None:
        """Raises UnavailableError when the call would give up before `seconds` are over."""
        if not seconds or time.monotonic() + seconds < call.gives_up_at:
            return
        if call.failure is None:
            why = "requests_per_minute and tokens_per_minute leave no turn within the deadline"
            raise UnavailableError(f"{call.url}: {why}", retry_after_s=seconds / 2)
        was_sent = not math.isinf(call.asked_at)
        retry_after_s = None if was_sent and not call.failure.is_limit else seconds
        why = f"{call.url}{call.path}: {call.failure}, until just before the deadline"
        raise UnavailableError(why, endpoint=call.url, retry_after_s=retry_after_s)

    async def _asked(self, url: str, call: _Call) -> Any:
        headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {self._key}"} if self._key else {})
        if self._session is None:
            connector = aiohttp.TCPConnector(ssl=self._tls, limit=self._endpoint.max_concurrency)
            timeout = aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_S)
            self._session = aiohttp.ClientSession(connector=connector, timeout=timeout)
        # Redirects are never followed: the token is for this server alone.
        asking = self._session.post(url + call.path, data=call.body, headers=headers, allow_redirects=False)
        try:
            async with asking as response:
                content = await _read(response)
        except aiohttp.ClientConnectorCertificateError as error:
            raise UnavailableError(
                f"{url} has a certificate that is not trusted ({error.certificate_error}); name its authorities in ca_file",
                endpoint=url,
            ) from error
        except (aiohttp.ClientError, OSError) as error:
            raise _TransportError(f"{type(error).__name__}: {error}") from error
        shown = self._shown(content)
        if response.status in (408, 429) or response.status >= 500:
            retry_after_s = _retry_after_s(response.headers.get("Retry-After"))
            raise _TransportError(
                f"HTTP {response.status}: {shown}", retry_after_s=retry_after_s, status=response.status
            )
        note_answer()
        self._rests_until.pop(url, None)
        if response.status >= 300:
            goes_to = response.headers.get("Location", "")
            why = f"redirects to {goes_to[:_SHOWN]}, which is not followed; name that URL" if goes_to else shown
            raise HttpError(f"{url}{call.path}: HTTP {response.status}: {why}", status=response.status)
        try:
            answer = json.loads(content)
        except (ValueError, RecursionError) as error:
            raise HttpError(
                f"{url}{call.path}: the answer is no JSON ({error}): {shown}", status=response.status
            ) from error
        usage = answer.get("usage") if isinstance(answer, dict) else None
        if isinstance(used := usage.get("total_tokens") if isinstance(usage, dict) else None, int):
            self._tokens.correct(used - call.num_tokens)
        return answer

    def _next(self, urls: Sequence[str]) -> str:
        """Round robin over the healthy servers. If none is healthy: the one that accepts requests soonest, then has rested longest."""
        turn = next(self._turns)
        in_turn = [urls[(turn + i) % len(urls)] for i in range(len(urls))]
        soonest = min(in_turn, key=lambda url: (self._opens_at(url), self._rests_until.get(url, 0.0)))
        return next(filter(self._is_healthy, in_turn), soonest)

    def _opens_at(self, url: str) -> float:
        return self._closed[url][0] if url in self._closed else 0.0

    def _is_healthy(self, url: str) -> bool:
        # A late answer to an earlier request ends the server's rest, but not its Retry-After.
        return max(self._rests_until.get(url, 0.0), self._opens_at(url)) <= time.monotonic()

    def _rest(self, url: str, seconds: float) -> None:
        self._rests_until[url] = time.monotonic() + seconds

    def _shown(self, content: bytes) -> str:
        text = content.decode(errors="replace")
        return " ".join((text.replace(self._key, "***") if self._key else text)[:_SHOWN].split()) or "no body"


async def _read(response: aiohttp.ClientResponse) -> bytes:
    content = bytearray()
    async for chunk in response.content.iter_any():
        content += chunk
        if len(content) > _MAX_ANSWER_BYTES:
            raise HttpError(f"{response.url}: an answer of more than {_MAX_ANSWER_BYTES} bytes", status=response.status)
    return bytes(content)


def _retry_after_s(header: str | None) -> float | None:
    """From seconds or a date (RFC 9110, 10.2.3); None for anything else."""
    if header is None or header.isdecimal():
        return None if header is None else min(float(header), _LONGEST_RETRY_AFTER_S)
    try:
        when = parsedate_to_datetime(header)
    except (ValueError, OverflowError):  # OverflowError: a year beyond C's integers
        return None
    seconds = (when.replace(tzinfo=when.tzinfo or UTC) - datetime.now(UTC)).total_seconds()
    return min(max(seconds, 0.0), _LONGEST_RETRY_AFTER_S)


def _checked(url: str) -> str:
    """The URL without a trailing slash. Raises ValueError, without the password that the URL may contain."""
    parts = urlsplit(url)
    if parts.username is not None or parts.password is not None:
        raise ValueError(f"the URL of {parts.hostname} has a user or password in it; use key_env")
    is_whole = parts.hostname and (parts.port or True)  # an invalid port raises ValueError
    if parts.scheme not in ("http", "https") or not is_whole or parts.query or parts.fragment:
        shown = f"{url.partition('?')[0]!r} with a query" if parts.query else repr(url)  # a query may hold a token
        raise ValueError(f"{shown} must be a URL as http://host:port/path")
    return url.rstrip("/")


@functools.cache
def tls_of(ca_file: str | None, *, field: str) -> ssl.SSLContext:
    """Raises ConfigError naming `field` for a file without certificate authorities."""
    try:
        return ssl.create_default_context(cafile=ca_file)
    except OSError as error:
        raise ConfigError(f"{field}.ca_file={ca_file!r} cannot be read: {error}; give a PEM file") from error
