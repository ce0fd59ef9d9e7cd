"""Holds the calls of one part during an outage of its endpoint: calls wait instead of failing their rewards.

After `_MOST_FAILURES` failures in a row the part holds: its calls wait, and no deadline runs. After a pause one call at a time goes
through as the probe. The first verdict releases all calls. Source: the circuit breaker of M. Nygard, "Release It!", which fails calls
where this one holds them.
"""

import asyncio
import contextlib
import random
import time
from collections.abc import AsyncIterator, Awaitable
from typing import TypeVar

from cluster.contracts.errors import UnavailableError
from cluster.contracts.types import Hold

T = TypeVar("T")
_MOST_FAILURES = 3
"""In a row. A single failure, which comes after the client's retries, may be the call's own fault: it may crash a server's worker."""
_MOST_DEADLINES = 5
"""Calls may be limited without any verdict for `hold_s` plus this many deadlines: the calls of others may use up the turns for a while."""
_FIRST_PAUSE_S = 1.0
_LONGEST_PAUSE_S = 30.0
"""The longest wait of calls after the end of an outage."""


class Breaker:
    """The breaker of one part. It measures outages on the event loop's clock."""

    def __init__(self, *, part: str, setting: str, hold_s: float, timeout_s: float) -> None:
        """`setting` is the part's place in the run file. With `hold_s=0` the first failure is an error, without a retry. `timeout_s` is the
        deadline of a call."""
        self._part = part
        self._setting = setting
        self._hold_s = hold_s
        self._timeout_s = timeout_s
        self._most_failures = _MOST_FAILURES if hold_s else 1
        self._num_calls = 0
        self._num_failures = 0
        self._num_probes = 0
        self._failed_at = 0.0
        self._limited_at: float | None = None
        """Time of the first limited call since the last verdict."""
        self.hold: Hold | None = None
        """The outage that the part waits for. None while its calls go through."""
        self.num_verdicts = 0
        self._turn = asyncio.Lock()

    async def of(self, call: Awaitable[T]) -> T:
        """The call's result. When no call is left, a hold ends even without a verdict: nothing waits for the endpoint."""
        self._num_calls += 1
        try:
            return await call
        finally:
            self._num_calls -= 1
            if not self._num_calls:
                self._let_go()

    @contextlib.asynccontextmanager
    async def passage(self) -> AsyncIterator[bool]:
        """Wraps one try of a call, and waits while the part holds. Yields True if this try is the probe, which runs alone."""
        async with contextlib.AsyncExitStack() as probing:
            if self.hold is not None:
                # A lock serves in order of arrival, so the calls take turns as the probe.
                await probing.enter_async_context(self._turn)
            if self.hold is None:
                await probing.aclose()
                yield False
                return
            await asyncio.sleep(self._pause_s())
            self._num_probes += 1
            yield True

    def note_verdict(self) -> None:
        """The endpoint answers. All calls go on."""
        self.num_verdicts += 1
        self._let_go()

    def note_away(self, away: UnavailableError) -> None:
        """Counts one failure. Raises UnavailableError, which ends the run, if the outage is longer than `hold_s`."""
        now = asyncio.get_running_loop().time()
        if self._num_failures == 0:
            self._failed_at = now
        self._num_failures += 1
        if self._num_failures < self._most_failures:
            return
        seconds = now - self._failed_at
        where = away.endpoint or "its judge's server"
        if seconds >= self._hold_s:
            lasted = f"for {seconds:.0f} s, longer than reward.hold_s={self._hold_s:g}" if self._hold_s else "now"
            raise UnavailableError(
                f"{self._setting}: {where} is away {lasted}: {away}; bring it back and start the same command again: the run resumes "
                "without loss",
                endpoint=away.endpoint,
            )
        since = self.hold.since if self.hold else time.time() - seconds
        self.hold = Hold(part=self._part, endpoint=where, since=since, reason=str(away))

    def note_limited(self, limited: UnavailableError) -> None:
        """Notes a call that got no turn before its deadline because of the endpoint's configured limits. Raises UnavailableError, which
        ends the run, if no verdict came within `hold_s` plus `_MOST_DEADLINES` deadlines of the first one: the limits are too tight."""
        now = asyncio.get_running_loop().time()
        if self._limited_at is None:
            self._limited_at = now
        if (seconds := now - self._limited_at) >= self._hold_s + _MOST_DEADLINES * self._timeout_s:
            raise UnavailableError(
                f"{self._setting}: no verdict for {seconds:.0f} s: {limited}; raise timeout_s, or the limits"
            )

    def _let_go(self) -> None:
        self._num_failures, self._num_probes, self.hold, self._limited_at = 0, 0, None, None

    def _pause_s(self) -> float:
        """Doubles from probe to probe, with jitter so that services do not ask in step. The last probe is at the end of `hold_s`."""
        longest_s = min(_FIRST_PAUSE_S * 2.0 ** min(self._num_probes, 10), _LONGEST_PAUSE_S)
        left_s = self._failed_at + self._hold_s - asyncio.get_running_loop().time()
        return max(min(random.uniform(longest_s / 2, longest_s), left_s), 0.0)
