"""Addresses at which processes meet. A process owns its address before it tells it to others; torch waits there for a limited time."""

import socket
from datetime import timedelta

_LONGEST_S = 1e9
"""Gloo adds a wait to a 64-bit clock of nanoseconds. Ten times this would overflow and end at once."""


def bound(host: str) -> tuple[socket.socket, str]:
    """A socket bound to `host` alone that does not listen yet, and its address (host:port).

    No other process can take the port. Until the socket listens, connections are refused at once and may be tried again. A connection to a
    socket that listens but accepts nothing would wait without limit.
    """
    family = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0][0]
    listener = socket.socket(family)
    listener.bind((host, 0))
    return listener, f"{host}:{listener.getsockname()[1]}"


def patience(timeout_s: float) -> timedelta:
    """A timeout for torch, limited to the longest that torch can count."""
    return timedelta(seconds=min(timeout_s, _LONGEST_S))
