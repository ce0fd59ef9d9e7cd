"""Queries about events, which Prometheus counts by kind. Its own `increase` does not see a counter's first event."""

from deploy.monitoring.series import EVENTS, LAST_STEP_TIME


def grew(kinds: str, *, within: str, labels: str) -> str:
    """How many events of the kinds (a regular expression) came within a time, by run and kind; nothing where none did. Old ones seem new
    when Prometheus was away at that time."""
    selected = f'{EVENTS}{{{labels}, kind=~"{kinds}"}}'
    now, before = (f"sum by (run, kind) ({each})" for each in (selected, f"{selected} offset {within}"))
    return f"({now} - ({before} or 0 * {now})) > 0"


def came(kind: str, *, within: str) -> str:
    """How many events of a kind came within a time, by run, as far as Prometheus saw them come; nothing where none did."""
    selected = f'{EVENTS}{{kind="{kind}"}}'
    now, before, first = (
        f"sum by (run, WorkerId) ({each})"
        for each in (selected, f"{selected} offset {within}", f"min_over_time({selected}[{within}])")
    )
    # A counter that was scraped less often than its driver began at none. Another one may be old, and Prometheus was away.
    counted, lived = (
        f"max by (run, WorkerId) (count_over_time({each}[{within}]))" for each in (selected, LAST_STEP_TIME)
    )
    return f"sum by (run) (({now} - ({before} or 0 * ({counted} < {lived}) or {first})) > 0)"
