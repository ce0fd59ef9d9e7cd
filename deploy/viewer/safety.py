"""Who may read, and what a browser may do with it. Runs hold what users said: the viewer answers its own pages and nobody else's.

* GET and HEAD alone.
* The `Host` must be a name that the viewer knows: another site that resolves to this address (DNS rebinding) is refused. So is a
  request that another site's page makes.
* With a token, every request brings it: once in the URL that was printed, then in a cookie that no script reads and no other site sends.
* Pages load nothing from elsewhere and run no inline script.
"""

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
    """The application, behind all of these rules, and below the prefix that a proxy serves it under."""

    def __init__(self, app: ASGIApp, *, hosts: Collection[str], token: str | None, root_path: str = "") -> None:
        """`hosts` are names without ports. `root_path` is the prefix; a proxy may say it itself (`X-Forwarded-Prefix`)."""
        self._app = app
        self._hosts = {host.lower() for host in hosts}
        self._token = token
        self._root_path = root_path.rstrip("/")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":  # there are no others; a web socket is closed by not being accepted
            return
        headers = Headers(scope=scope)
        scope = self._below_prefix(scope, headers)
        answer = self._refusal(scope, headers) or self._login(scope, headers) or self._app

        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                told = MutableHeaders(scope=message)
                told.update(_HEADERS)
                # Scripts of another version than the page's would break it.
                told.setdefault("Cache-Control", "no-cache")
            await send(message)

        await answer(scope, receive, with_headers)

    def _below_prefix(self, scope: Scope, headers: Headers) -> Scope:
        said = headers.get("x-forwarded-prefix", "").rstrip("/")
        prefix = said if _PREFIX.fullmatch(said) else self._root_path
        path = scope["path"]
        whole = path if path.startswith(f"{prefix}/") else prefix + path
        return {**scope, "root_path": prefix, "path": whole}

    def _refusal(self, scope: Scope, headers: Headers) -> Response | None:
        if scope["method"] not in ("GET", "HEAD"):
            return _said(405, "the viewer is read only", {"Allow": "GET, HEAD"})
        host = headers.get("host", "")
        if name_of(host) not in self._hosts:
            return _said(
                421, f"this viewer is not {name_of(host) or 'nobody'!r}; start it with --trusted-host if it should be"
            )
        origin = headers.get("origin")
        if origin is not None and urlsplit(origin).netloc.lower() != host.lower():
            return _said(403, "another site's page may not read this one")
        if headers.get("sec-fetch-site") == "cross-site" and headers.get("sec-fetch-mode") != "navigate":
            return _said(403, "another site's page may not read this one")
        return None

    def _login(self, scope: Scope, headers: Headers) -> Response | None:
        """None where the request brings the token; the URL that does is replaced by one without, and a cookie."""
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
        return _said(401, "open the viewer by the URL that `treadwheel view` printed: it has the token")


def name_of(host: str) -> str:
    """Of a `Host` header, without the port and in lower case; "" for one that is malformed."""
    found = re.fullmatch(r"\[([0-9a-fA-F:.]+)\](?::\d+)?|([^:\[\]/@\s]+)(?::\d+)?", host)
    return (found[1] or found[2]).lower() if found else ""


def _cookie(token: str) -> str:
    """Cookies know no ports: two viewers of one machine need two names."""
    return f"treadwheel_{hashlib.sha256(token.encode()).hexdigest()[:8]}"


def _proof(token: str) -> str:
    return hmac.digest(token.encode(), b"cookie", "sha256").hex()


def _said(status: int, message: str, headers: dict[str, str] | None = None) -> Response:
    return PlainTextResponse(f"treadwheel view: {message}\n", status_code=status, headers=headers)
