"""Access rules of the viewer. Runs may contain users' texts, so only the viewer's own pages may read them.

* Only GET and HEAD.
* The `Host` header must be a name that the viewer knows: otherwise another site could resolve to this address (DNS rebinding). Requests
  from another site's page are refused too.
* With a token, every request must have it: first in the printed URL, then in a cookie that scripts cannot read and other sites do not send.
* Pages load nothing from elsewhere and run no inline script.
"""

import base64
import hashlib
import hmac
import re
from collections.abc import Collection
from urllib.parse import parse_qsl, urlencode, urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.responses import PlainTextResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

LOOPBACK = ("localhost", "127.0.0.1", "::1")
POLICY = "default-src 'self'; img-src 'self' data:; object-src 'none'; base-uri 'none'; form-action 'self'; frame-ancestors 'none'"
_HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
}
_PREFIX = re.compile(r"(/[\w.~-]+)+")


class Guard:
    """Wraps the application in these rules and handles the URL prefix of a proxy."""

    def __init__(self, app: ASGIApp, *, hosts: Collection[str], token: str | None, root_path: str) -> None:
        """`hosts` are names without ports. `root_path` is the prefix, unless the proxy sends it as `X-Forwarded-Prefix`."""
        self._app = app
        self._hosts = {host.lower() for host in hosts}
        self._token = token
        self._root_path = root_path.rstrip("/")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":  # a web socket: without an answer it is closed
            return
        headers = Headers(scope=scope)
        scope = self._below_prefix(scope, headers)
        answer = self._refusal(scope, headers) or self._login(scope, headers) or self._app

        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                answered = MutableHeaders(scope=message)
                answered.update(_HEADERS)
                # Otherwise a browser may run cached scripts of an older version of the page.
                answered.setdefault("Cache-Control", "no-cache")
            await send(message)

        await answer(scope, receive, with_headers)

    def _below_prefix(self, scope: Scope, headers: Headers) -> Scope:
        sent = headers.get("x-forwarded-prefix", "").rstrip("/")
        prefix = sent if _PREFIX.fullmatch(sent) else self._root_path
        path = scope["path"]
        whole = path if path.startswith(f"{prefix}/") else prefix + path
        return {**scope, "root_path": prefix, "path": whole}

    def _refusal(self, scope: Scope, headers: Headers) -> Response | None:
        if scope["method"] not in ("GET", "HEAD"):
            return _plain(405, "the viewer is read only", {"Allow": "GET, HEAD"})
        host = headers.get("host", "")
        if name_of(host) not in self._hosts:
            return _plain(
                421, f"this viewer is not {name_of(host) or 'nobody'!r}; start it with --trusted-host if it should be"
            )
        origin = headers.get("origin")
        if origin is not None and urlsplit(origin).netloc.lower() != host.lower():
            return _plain(403, "another site's page may not read this one")
        if headers.get("sec-fetch-site") == "cross-site" and headers.get("sec-fetch-mode") != "navigate":
            return _plain(403, "another site's page may not read this one")
        return None

    def _login(self, scope: Scope, headers: Headers) -> Response | None:
        """None if the request has the token. A URL with the token is redirected to one without, with a cookie instead."""
        if self._token is None:
            return None
        query = parse_qsl(scope["query_string"].decode("latin-1"), keep_blank_values=True)
        asked = dict(query).get("token")
        if asked is not None and hmac.compare_digest(asked.encode(), self._token.encode()):
            rest = urlencode([(name, value) for name, value in query if name != "token"])
            answer = RedirectResponse(f"{scope['path']}?{rest}" if rest else scope["path"], status_code=303)
            answer.set_cookie(
                _cookie(self._token),
                _proof(self._token),
                path=scope["root_path"] or "/",
                secure=scope["scheme"] == "https",
                httponly=True,
                samesite="strict",
            )
            return answer
        bearer = headers.get("authorization", "").removeprefix("Bearer ")
        if hmac.compare_digest(bearer.encode(), self._token.encode()):
            return None
        brought = Request(scope).cookies.get(_cookie(self._token), "")
        if hmac.compare_digest(brought.encode(), _proof(self._token).encode()):
            return None
        return _plain(401, "open the viewer by the URL that `treadwheel view` printed: it has the token")


def name_of(host: str) -> str:
    """The name in a `Host` header, without port and in lower case; "" for a malformed header."""
    found = re.fullmatch(r"\[([0-9a-fA-F:.]+)\](?::\d+)?|([^:\[\]/@\s]+)(?::\d+)?", host)
    return (found[1] or found[2]).lower() if found else ""


def source(text: str) -> str:
    """An inline script or style in a content security policy, which allows it by its digest."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _cookie(token: str) -> str:
    """The cookie's name. Cookies are shared by all ports of a host, so two viewers on one machine need two names."""
    return f"treadwheel_{hashlib.sha256(token.encode()).hexdigest()[:8]}"


def _proof(token: str) -> str:
    return hmac.digest(token.encode(), b"cookie", "sha256").hex()


def _plain(status: int, message: str, headers: dict[str, str] | None = None) -> Response:
    return PlainTextResponse(f"treadwheel view: {message}\n", status_code=status, headers=headers)
