"""Stragglers: unfinished groups that are dropped because enough finished groups for a whole step wait behind them."""

from collections.abc import Mapping, Sequence
from typing import Any


class Stragglers:
    """Tracks the groups that block a step, the step's patience with them, and dropped groups that are not reported yet."""

    def __init__(self, max_head_of_line_s: float | None) -> None:
        """`max_head_of_line_s` None: never drops."""
        self._max_head_of_line_s = max_head_of_line_s
        self._blocked_since: float | None = None
        self._late: set[int] = set()
        self._fresh: list[int] = []

    def patience_s(self, *, is_blocked: bool, now: float) -> float | None:
        """Seconds that a blocked step still waits; 0 or less: drop the groups that block it. None: not blocked, or no limit."""
        if not is_blocked or self._max_head_of_line_s is None:
            return None
        if self._blocked_since is None:
            self._blocked_since = now
        return self._blocked_since + self._max_head_of_line_s - now

    @property
    def would_begin_to_wait(self) -> bool:
        """Whether the patience of a step that is blocked begins now."""
        return self._max_head_of_line_s is not None and self._blocked_since is None

    def begin_wait(self) -> None:
        """Another step waits: its patience starts anew."""
        self._blocked_since = None

    def drop(self, indices: Sequence[int]) -> None:
        """Drops these groups. Each is late until `forget` is called for it."""
        self._late.update(indices)
        self._fresh += indices

    def drain_dropped(self) -> list[int]:
        """Groups that were dropped since the last call. Their sampling may be aborted."""
        fresh, self._fresh = self._fresh, []
        return fresh

    def forget(self, index: int) -> bool:
        """Whether `index` was late. It is late no more."""
        if index not in self._late:
            return False
        self._late.remove(index)
        return True


def blocking(live: Mapping[int, Any], count: int) -> list[int]:
    """Unfinished groups (value None) in front of the `count`-th finished one; none while fewer are finished."""
    unfinished: list[int] = []
    for place, (index, group) in enumerate(live.items(), start=1):
        if group is None:
            unfinished.append(index)
        elif place - len(unfinished) == count:
            return unfinished
    return []
