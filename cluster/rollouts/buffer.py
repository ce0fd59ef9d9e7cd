"""Staleness-bounded buffer. Groups leave in the order they started, never as they finish.

The dispatcher asks which groups may start, and adds what comes back; the controller takes whole steps and advances the version.

Why the bound is exact. Let g be the groups per step and n the bound. At attested version s, only the first (s + n + 1) * g
groups that were not dropped may have started. A group's place among them never grows, and groups are taken in that order, so
the group that starts at version s is consumed by the step that begins at version s + n at the latest. Slots are freed by
`advance`, which the controller calls after the workers have loaded the version, not when the learner has made it. A straggler
that is cut is one more dropped group: those behind it move up, none moves back.
"""

import asyncio
import contextlib
from collections import OrderedDict
from collections.abc import Collection, Sequence

from cluster.contracts.errors import DataError, DeadlineError
from cluster.contracts.types import Group

_MAX_DROPPED_STEPS = 20
"""Steps' worth of groups that may be dropped in a row: beyond it nothing will ever train, and sampling on would hide it."""


class Buffer:
    """Groups between workers and learner, bounded in groups by the staleness bound and in bytes by `max_size_bytes`."""

    def __init__(
        self,
        *,
        groups_per_step: int,
        max_off_policy_steps: int = 0,
        num_steps: int = 2**62,
        max_size_bytes: int = 2**62,
        max_head_of_line_s: float | None = None,
        in_waves: bool = False,
        version: int = 0,
        next_index: int = 0,
    ) -> None:
        """Nothing starts that no step up to `num_steps` would consume. `version` and `next_index` are where a resumed run goes on.

        `in_waves` starts replacements of dropped groups only when nothing is under way, so that which groups are sampled
        together does not depend on timing. `max_head_of_line_s` is how long enough finished groups for a step wait behind
        unfinished ones before these are cut; None never cuts.
        """
        self._groups_per_step = groups_per_step
        self._bound = max_off_policy_steps
        self._num_steps = num_steps
        self._max_size_bytes = max_size_bytes
        self._max_head_of_line_s = max_head_of_line_s
        self._in_waves = in_waves
        self._version = version
        self._next_index = next_index
        self._num_taken = version * groups_per_step
        self._live: OrderedDict[int, Group | None] = OrderedDict()  # start order; None while under way
        self._finished_at: dict[int, float] = {}
        self._sizes: dict[int, int] = {}
        self._size_bytes = 0
        self._largest_bytes = 1
        self._cut: set[int] = set()
        self._newly_cut: list[int] = []
        self._num_dropped = 0
        self._num_cut = 0
        self._num_dropped_in_a_row = 0
        self._wait_seconds = 0.0
        self._head_of_line_seconds = 0.0
        self._error: BaseException | None = None
        self._changed = asyncio.Condition()

    @property
    def version(self) -> int:
        return self._version

    @property
    def next_index(self) -> int:
        """Index of the next group to start: with the version, all that a resumed run must know."""
        return self._next_index

    def num_startable(self) -> int:
        """How many groups may start now."""
        if self._in_waves and any(group is None for group in self._live.values()):
            return 0
        last_step = min(self._version + self._bound + 1, self._num_steps)
        free = last_step * self._groups_per_step - self._num_taken - len(self._live)
        # The next step must always be able to fill, or a bound below one step's bytes would stop the run.
        free = min(free, max(self._num_that_fit(), self._groups_per_step - len(self._live)))
        return max(free, 0)

    async def start(self, limit: int | None = None) -> range:
        """Indices of groups that start now, at least one and at most `limit`; waits until the bound allows one."""
        async with self._changed:
            await self._changed.wait_for(lambda: self._error or self.num_startable() > 0)
            self._raise_if_closed()
            count = min(self.num_startable(), limit or self._groups_per_step * (self._bound + 1))
            started = range(self._next_index, self._next_index + count)
            self._next_index += count
            self._live.update((index, None) for index in started)
            self._changed.notify_all()
            return started

    async def add(self, index: int, group: Group) -> None:
        """The group that started as `index` is finished; one that was cut meanwhile is forgotten.

        Raises KeyError if it never started, was dropped or was added before.
        """
        async with self._changed:
            if index in self._cut:
                self._forget(index)
                return
            if self._live[index] is not None:
                raise KeyError(f"group {index} was added before")
            self._num_dropped_in_a_row = 0
            self._live[index] = group
            self._size(index, group.summary.size_bytes)
            self._finished_at[index] = _now()
            self._changed.notify_all()

    def hold(self, index: int, size_bytes: int) -> None:
        """The group is sampled, and its bytes wait for what scores it: they count, until it is added or dropped, cut or not."""
        self._size(index, size_bytes)

    async def drop(self, index: int, *, why: str = "") -> None:
        """The group leaves without being trained on, and another one may start in its place. One that was cut has left before.

        Ends the run's waits with DataError when `_MAX_DROPPED_STEPS` steps' worth was dropped and not one group kept.
        """
        async with self._changed:
            if index in self._cut:
                self._forget(index)
                return
            self._num_dropped_in_a_row += 1
            if self._num_dropped_in_a_row >= _MAX_DROPPED_STEPS * self._groups_per_step:
                self._error = self._error or DataError(
                    f"{self._num_dropped_in_a_row} groups in a row were dropped, the last one because: {why or 'unknown'}; "
                    "events.jsonl and the reward's messages say more: mend the reward, the prompts or the filter"
                )
            del self._live[index]
            self._finished_at.pop(index, None)
            self._num_dropped += 1
            self._forget(index)

    def is_cut(self, index: int) -> bool:
        """Whether the group was cut: whatever becomes of it, nobody waits for it."""
        return index in self._cut

    async def newly_cut(self) -> list[int]:
        """Indices of the groups that were cut since the last call, at least one: their engines should stop them."""
        async with self._changed:
            await self._changed.wait_for(lambda: self._newly_cut)
            cut, self._newly_cut = self._newly_cut, []
            return cut

    async def take(self, count: int, *, stall_s: float | None = None) -> list[tuple[int, Group]]:
        """The first `count` groups in start order with their indices, once all of them are finished.

        Cuts the unfinished ones among them when `count` finished ones have waited behind them for `max_head_of_line_s` of this
        call. Raises DeadlineError when no group starts, finishes or is dropped for `stall_s`; None waits for ever.
        """
        began = _now()
        async with self._changed:
            blocked_at: float | None = None
            while not self._error and self._num_ready(count) < count:
                if self._max_head_of_line_s is None or not (stragglers := self._stragglers(count)):
                    await self._change(count, stall_s)
                    continue
                blocked_at = _now() if blocked_at is None else blocked_at
                if (patience_s := blocked_at + self._max_head_of_line_s - _now()) > 0:
                    await self._change_within(patience_s)
                else:
                    self._cut_off(stragglers)
            self._raise_if_closed()
            now = _now()
            self._wait_seconds = now - began
            taken: list[tuple[int, Group]] = []
            while len(taken) < count:
                index, group = self._live.popitem(last=False)
                assert group is not None
                self._size(index, 0)
                taken.append((index, group))
            # What finished groups behind the slowest one of this step waited: head-of-line time.
            finished = [self._finished_at.pop(index) for index, _ in taken]
            self._head_of_line_seconds = sum(max(finished) - at for at in finished) / len(finished)
            self._num_taken += count
            return taken

    async def put_back(self, taken: Sequence[tuple[int, Group]], *, lost: Collection[int]) -> None:
        """Groups that were taken and not consumed stand in front again; those in `lost` are under way again."""
        async with self._changed:
            now = _now()
            for index, group in taken:
                self._live[index] = None if index in lost else group
                if index not in lost:
                    self._size(index, group.summary.size_bytes)
                    self._finished_at[index] = now
            self._live = OrderedDict(sorted(self._live.items()))
            self._num_taken -= len(taken)
            self._changed.notify_all()

    async def advance(self, version: int) -> None:
        """Workers have loaded `version`: further groups may start."""
        async with self._changed:
            self._version = version
            self._changed.notify_all()

    async def close(self, error: BaseException) -> None:
        """Whoever waits, or comes to wait, gets `error`: a dead producer must not leave the learner waiting."""
        async with self._changed:
            self._error = error
            self._changed.notify_all()

    @property
    def size_bytes(self) -> int:
        """Of all groups that are sampled and not taken, scored or not, and of those cut whose scoring goes on."""
        return self._size_bytes

    def stats(self) -> dict[str, float]:
        """Waits of the last take in seconds, levels in groups and bytes, and what was dropped and cut since the last call."""
        num_dropped, num_cut = self._num_dropped, self._num_cut
        self._num_dropped = self._num_cut = 0
        num_ready = sum(group is not None for group in self._live.values())
        return {
            "buffer/learner_wait_s": self._wait_seconds,
            "buffer/head_of_line_s": self._head_of_line_seconds,
            "buffer/num_ready": float(num_ready),
            "buffer/num_under_way": float(len(self._live) - num_ready),
            "buffer/num_dropped": float(num_dropped),
            "buffer/num_cut": float(num_cut),
            "buffer/size_bytes": float(self.size_bytes),
        }

    def _size(self, index: int, size_bytes: int) -> None:
        """Kept as a sum: asking must not cost more the more groups wait."""
        self._size_bytes += size_bytes - self._sizes.pop(index, 0)
        self._largest_bytes = max(self._largest_bytes, size_bytes)
        if size_bytes:
            self._sizes[index] = size_bytes

    def _num_that_fit(self) -> int:
        """Groups that may start before `max_size_bytes` is reached, should each of them, and of those under way, be as large as the
        largest so far: without that, all that the staleness bound allows would start whenever the buffer is empty."""
        num_unsampled = max(len(self._live) - len(self._sizes), 0)
        room = self._max_size_bytes - self._size_bytes - num_unsampled * self._largest_bytes
        return room // self._largest_bytes

    def _forget(self, index: int) -> None:
        self._size(index, 0)
        self._changed.notify_all()

    def _stragglers(self, count: int) -> list[int]:
        """Unfinished groups before the `count`-th finished one; none when fewer are finished."""
        unfinished: list[int] = []
        for place, (index, group) in enumerate(self._live.items(), start=1):
            if group is None:
                unfinished.append(index)
            elif place - len(unfinished) == count:
                return unfinished
        return []

    def _cut_off(self, stragglers: Sequence[int]) -> None:
        for index in stragglers:
            del self._live[index]
        self._cut.update(stragglers)
        self._newly_cut += stragglers
        self._num_dropped += len(stragglers)
        self._num_cut += len(stragglers)
        self._changed.notify_all()

    async def _change_within(self, seconds: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._changed.wait()

    async def _change(self, count: int, stall_s: float | None) -> None:
        try:
            async with asyncio.timeout(stall_s):
                await self._changed.wait()
        except TimeoutError:
            under_way = [index for index, group in self._live.items() if group is None]
            raise DeadlineError(
                f"the learner waits for {count} groups at policy version {self._version} and has {self._num_ready(count)}; nothing moved "
                f"for {stall_s:g} s; under way: groups {under_way[:8]}{' ...' if under_way[8:] else ''}"
            ) from None

    def _num_ready(self, most: int) -> int:
        """Finished groups at the front; counts no further than `most`."""
        ready = 0
        for group in self._live.values():
            if group is None or ready == most:
                break
            ready += 1
        return ready

    def _raise_if_closed(self) -> None:
        if self._error is not None:
            raise self._error


def _now() -> float:
    """The event loop's clock, so that what waits and what measures agree, also where a test simulates it."""
    return asyncio.get_running_loop().time()
