"""Asks the servers of built-in judges whether they answer: each URL once, without the judge's token."""

import http.client
import ssl
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from actors.reward_service.recipe import parts_of
from cluster.contracts.config import RewardConfig
from cluster.contracts.plugins import REWARDS, resolve

_TIMEOUT_S = 5.0


def server_rows(config: RewardConfig) -> Iterator[tuple[str, str, str]]:
    """A row for each URL: a judge asks any of its URLs, so a missing server shows nowhere else.

    Raises ConfigError for an unreadable file of certificate authorities.
    """
    asked = dict[tuple[str, str | None], ssl.SSLContext]()
    for part in parts_of(config):
        if ":" not in part.judge.name:  # user code is imported only in its own process
            bound = resolve(part.judge, home=REWARDS, field=f"{part.setting}.judge")
            given = bound.keywords  # pyright: ignore[reportFunctionMemberAccess]  resolve binds parameters
            asked |= _called(given, field=f"{part.setting}.judge") if given else {}
    with ThreadPoolExecutor() as threads:
        for (url, _), answer in zip(
            asked, threads.map(_answer, (url for url, _ in asked), asked.values()), strict=True
        ):
            yield "reward", url, answer


def _called(given: Mapping[str, Any], *, field: str) -> dict[tuple[str, str | None], ssl.SSLContext]:
    """TLS settings of the servers among a judge's parameters, by URL and file of certificate authorities."""
    from actors.http import Endpoint, tls_of  # imports aiohttp

    servers = {name: value for name, value in given.items() if isinstance(value, Endpoint)}
    tls = {name: tls_of(server.ca_file, field=f"{field}.{name}") for name, server in servers.items()}
    return {(url, server.ca_file): tls[name] for name, server in servers.items() for url in server.urls}


def _answer(url: str, tls: ssl.SSLContext) -> str:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=tls))
    began = time.monotonic()
    try:
        with opener.open(url, timeout=_TIMEOUT_S) as answer:
            status = answer.status
    except urllib.error.HTTPError as error:
        status = error.code
    except (OSError, http.client.HTTPException) as error:
        return f"does not answer: {getattr(error, 'reason', error)}"
    return f"answers (HTTP {status}) in {1000 * (time.monotonic() - began):.0f} ms"
