"""Listening addresses of the command line's servers."""

import ipaddress
import socket

from cluster.contracts.errors import ConfigError


def bound(host: str, port: int) -> socket.socket:
    """A listening socket. `port` 0 takes a free port. Raises ConfigError for an address that cannot be bound."""
    try:
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        return socket.create_server(address[:2], family=family)
    except (OSError, UnicodeError) as error:  # UnicodeError: an impossible host name, such as `a..b`
        why = error.strerror if isinstance(error, OSError) else None
        raise ConfigError(f"--host {host} --port {port} cannot be bound: {why or error}; use another") from error


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches `host`."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def in_url(host: str) -> str:
    return f"[{host}]" if ":" in host else host
