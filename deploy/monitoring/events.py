"""Queries about events, which Prometheus counts by kind."""

from deploy.monitoring.series import EVENTS


def grew(kinds: str, *, within: str, labels: str = "") -> str:
    """How many events of the kinds (a regular expression) came within a time, by run and kind; nothing where none did.

    Prometheus's own `increase` does not see a counter's first event.
    """
    now = f"sum by (run, kind) ({EVENTS}{_selector(kinds, labels)})"
    before = f"sum by (run, kind) ({EVENTS}{_selector(kinds, labels)} offset {within})"
    return f"({now} - ({before} or 0 * {now})) > 0"


def _selector(kinds: str, labels: str) -> str:
    of_kinds = f'kind=~"{kinds}"'
    return f"{{{labels}, {of_kinds}}}" if labels else f"{{{of_kinds}}}"
