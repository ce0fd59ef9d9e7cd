"""Addresses that are a process's own before anybody hears of them."""

import socket


def bound(host: str) -> tuple[socket.socket, str]:
    """A socket that will listen at `host`, on this address alone, and the address (host:port).

    No other process gets the port meanwhile. Who connects is refused at once, and may try again, until somebody listens: a connection to
    a socket that listens and has nobody behind it waits without end.
    """
    family = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0][0]
    listener = socket.socket(family)
    listener.bind((host, 0))
    return listener, f"{host}:{listener.getsockname()[1]}"
