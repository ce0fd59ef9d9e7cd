"""A proxy before an object store that makes its faults: busy answers, resets, stalls, lost answers; and deaths of who asks."""

import contextlib
import http.client
import os
import random
import signal
import socket
import struct
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from email.utils import format_datetime, parsedate_to_datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import ClassVar

import psutil

STALL_S = 0.05
KINDS = ("slow_down", "reset_before", "lost_answer", "torn_body", "stall", "twice")
"""A 503; a connection reset before the request is passed on; one after it; one in the answer's body; a pause; a request applied twice."""

STRIKES = {"killed_before": signal.SIGKILL, "killed_after": signal.SIGKILL, "stopped_before": signal.SIGSTOP}
"""The process that makes the request gets a signal, and no answer: before the request is passed on, or after it."""

Fault = Callable[[str, str, int], str | None]
"""One of `KINDS` or `STRIKES` or None for a request: its method, path, and number from 0 on. `403:AccessDenied` is that answer."""


def seeded(seed: int, *, share: float) -> Fault:
    """A fault of a random kind in this share of the requests, never three in a row."""
    chance, recent = random.Random(seed), [0]

    def fault(method: str, path: str, number: int) -> str | None:
        is_faulty = recent[0] < 2 and chance.random() < share
        recent[0] = recent[0] + 1 if is_faulty else 0
        return chance.choice(KINDS) if is_faulty else None

    return fault


class Proxy:
    """Passes requests on to a server, with the faults that `fault` asks for, and sets the server's clock."""

    def __init__(self, host: str, port: int) -> None:
        self.fault: Fault = lambda method, path, number: None
        self.made: list[str] = []
        """The faults so far."""
        self._lock = threading.Lock()
        self._number = 0
        self._ahead = timedelta()
        self._written_ahead: dict[str, timedelta] = {}
        """How far the clock was ahead when an object was written, by its path."""
        self.server_address = (host, port)

        class Handler(_Handler):
            proxy: ClassVar = self

        self._server = _Server(("127.0.0.1", 0), Handler)
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def pass_time(self, seconds: float) -> None:
        """By the store's clock: what is written from now on is so much younger."""
        self._ahead += timedelta(seconds=seconds)

    def note_written(self, path: str) -> None:
        self._written_ahead[path] = self._ahead

    def modified_at(self, path: str, stamp: str) -> str:
        """What an object's header says, by the store's clock."""
        ahead = self._written_ahead.get(path, timedelta())
        return format_datetime(parsedate_to_datetime(stamp) + ahead, usegmt=True)

    def pick(self, method: str, path: str) -> str | None:
        with self._lock:
            picked = self.fault(method, path, self._number)
            self._number += 1
            if picked:
                self.made.append(picked)
            return picked


class _Server(ThreadingHTTPServer):
    request_queue_size = 128
    """Connections that wait for a thread. Of more than Python's five at once some would be tried again only a second later."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    proxy: ClassVar[Proxy]

    def handle_one_request(self) -> None:
        with contextlib.suppress(ConnectionError, BrokenPipeError):
            super().handle_one_request()

    def _pass_on(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        fault = self.proxy.pick(self.command, self.path)
        if fault in ("killed_before", "stopped_before"):
            return self._strike(STRIKES[fault])
        if fault == "reset_before":
            return self._reset()
        if fault == "slow_down":
            return self._refuse(503, "SlowDown")
        if fault and ":" in fault:
            status, _, code = fault.partition(":")
            return self._refuse(int(status), code)
        if fault == "stall":
            time.sleep(STALL_S)
        status, headers, answer = self._ask(body)
        if fault == "twice":
            status, headers, answer = self._ask(body)
        if fault == "killed_after":
            return self._strike(STRIKES[fault])
        if fault == "lost_answer":
            return self._reset()
        self.send_response_only(status)
        for name, value in headers:
            if name.lower() == "last-modified":
                self.send_header(name, self.proxy.modified_at(self.path, value))
            elif name.lower() not in ("transfer-encoding", "connection", "content-length"):
                self.send_header(name, value)
        length = {name.lower(): value for name, value in headers}.get("content-length", len(answer))
        self.send_header("Content-Length", str(length if self.command == "HEAD" else len(answer)))
        self.end_headers()
        if fault == "torn_body" and len(answer) > 1:
            self.wfile.write(answer[: len(answer) // 2])
            self.wfile.flush()
            return self._reset()
        self.wfile.write(answer)

    do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = _pass_on

    def _ask(self, body: bytes) -> tuple[int, list[tuple[str, str]], bytes]:
        host, port = self.proxy.server_address
        connection = http.client.HTTPConnection(host, port, timeout=30)
        try:
            connection.request(self.command, self.path, body, dict(self.headers.items()))
            answer = connection.getresponse()
            if self.command == "PUT" and answer.status == 200:
                # Of one that is applied twice, the second may be refused.
                self.proxy.note_written(self.path)
            return answer.status, answer.getheaders(), answer.read()
        finally:
            connection.close()

    def _refuse(self, status: int, code: str) -> None:
        answer = f"<Error><Code>{code}</Code><Message>{code}, says the store.</Message></Error>".encode()
        self.send_response_only(status)
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def _strike(self, number: signal.Signals) -> None:
        """Its pid is that of the other end of our connection. Never ours: a test reads the store too.

        Both addresses tell it: our own connections to the server may have the same port as its.
        """
        ours = self.connection.getsockname()
        ends = psutil.net_connections("tcp")
        pid = next(end.pid for end in ends if (end.laddr, end.raddr) == (self.client_address, ours))
        assert pid and pid != os.getpid(), f"{self.command} {self.path} was asked by the test itself"
        os.kill(pid, number)
        self._reset()

    def _reset(self) -> None:
        self.close_connection = True
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.connection.close()

    def log_message(self, format: str, *args: object) -> None: ...
