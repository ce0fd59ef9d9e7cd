"""Ports of this machine for servers that tests start."""

import contextlib
import os
import secrets
import socket

_GIVEN = set[int]()
_SHARE = 2500


def free_ports(count: int) -> list[int]:
    """Each is given once by this process. They lie between those that Ray gives to its workers (10002 to 19999) and those that the
    kernel gives to anybody, who may take one before its server listens. Of four processes of tests each has its share."""
    first = 20_000 + _SHARE * (int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")) % 4)
    free: list[int] = []
    while len(free) < count:
        port = first + secrets.randbelow(_SHARE)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            if port not in _GIVEN:
                _GIVEN.add(port)
                free.append(port)
    return free
