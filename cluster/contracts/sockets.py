"""Where processes meet: addresses that are a process's own before anybody hears of them, and how long torch waits there."""

import socket
from datetime import timedelta

_LONGEST_S = 1e9
"""Gloo adds a wait to a clock of nanoseconds in 64 bits: ten times as long is over at once."""


def bound(host: str) -> tuple[socket.socket, str]:
    """A socket that will listen at `host`, on this address alone, and the address (host:port).

    No other process gets the port meanwhile. Who connects is refused at once, and may try again, until somebody listens: a connection to
    a socket that listens and has nobody behind it waits without end.
    """
    family = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0][0]
    listener = socket.socket(family)
    listener.bind((host, 0))
    return listener, f"{host}:{listener.getsockname()[1]}"


def patience(timeout_s: float) -> timedelta:
    """A timeout as torch takes it, which is no longer than torch can count."""
    return timedelta(seconds=min(timeout_s, _LONGEST_S))
