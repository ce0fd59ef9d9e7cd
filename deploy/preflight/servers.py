"""How the servers that shipped judges call answer: each URL once, without the judge's token."""

import http.client
import ssl
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

from actors.http import Endpoint, tls_of
from actors.reward_service.recipe import parts_of
from cluster.contracts.config import RewardConfig
from cluster.contracts.plugins import REWARDS, resolve

_TIMEOUT_S = 5.0


def server_rows(config: RewardConfig) -> Iterator[tuple[str, str, str]]:
    """One for each URL: the judge asks any of them, so one that is away shows nowhere else.

    Raises ConfigError for authorities that cannot be read.
    """
    asked = dict[tuple[str, str | None], ssl.SSLContext]()
    for part in parts_of(config):
        if ":" not in part.judge.name:  # a judge of the user's is imported in a process of its own alone
            bound = resolve(part.judge, home=REWARDS, field=f"{part.setting}.judge")
            given = bound.keywords.items()  # pyright: ignore[reportFunctionMemberAccess]  resolve binds parameters
            for name, value in given:
                if isinstance(value, Endpoint):
                    tls = tls_of(value.ca_file, field=f"{part.setting}.judge.{name}")
                    asked |= {(url, value.ca_file): tls for url in value.urls}
    with ThreadPoolExecutor() as threads:
        for (url, _), answer in zip(
            asked, threads.map(_answer, (url for url, _ in asked), asked.values()), strict=True
        ):
            yield "reward", url, answer


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
