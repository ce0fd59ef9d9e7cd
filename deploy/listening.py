"""Addresses that a server of the command line listens on."""

import ipaddress
import socket

from cluster.contracts.errors import ConfigError


def bound(host: str, port: int) -> socket.socket:
    """`port` 0 takes a free one. Raises ConfigError for an address that cannot be had."""
    try:
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        return socket.create_server(address[:2], family=family)
    except (OSError, UnicodeError) as error:  # UnicodeError: no name of a machine can be so, such as `a..b`
        why = error.strerror if isinstance(error, OSError) else None
        raise ConfigError(f"--host {host} --port {port} cannot be had: {why or error}; take another") from error


def is_loopback(host: str) -> bool:
    """Whether this machine alone reaches it."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def in_url(host: str) -> str:
    return f"[{host}]" if ":" in host else host
