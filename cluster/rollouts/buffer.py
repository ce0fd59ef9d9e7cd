"""Staleness-bounded buffer. Groups leave in the order they started, never as they finish.

Why the bound is exact. Let g be the groups per step and n the bound. At attested version s, only the first (s + n + 1) * g groups may have
started, dropped ones not counted. A group's place among these never grows, and groups are taken in that order, so a group that starts at
version s is consumed by the step that begins at version s + n at the latest. `advance` frees slots. It is called when the workers have
loaded the version, not when the learner has made it. A dropped group, straggler or not, only moves the groups behind it forward.
"""

import asyncio
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice, takewhile
from typing import Any

from cluster.contracts.errors import DataError, DeadlineError
from cluster.contracts.types import Group, GroupSummary, mean_of
from cluster.metrics import failures
from cluster.rollouts.byte_budget import ByteBudget
from cluster.rollouts.stragglers import Stragglers, blocking


@dataclass(slots=True)
class _Counters:
    """Counts that `drain_stats` reports and resets."""

    kept: set[int] = field(default_factory=set[int])
    """Indices of kept groups."""
    dropped: Counter[str] = field(default_factory=Counter[str])
    """Dropped groups by reason."""
    candidates: list[GroupSummary] = field(default_factory=list[GroupSummary])
    learner_wait_s: float = 0.0
    head_of_line_s: float = 0.0


class Buffer:
    """Groups between workers and learner, bounded in groups by the staleness bound and in bytes by `max_size_bytes`.

    The producer reports every group that starts exactly once, by `add` or by `drop`, also a straggler that the buffer dropped itself.
    """

    def __init__(
        self,
        *,
        groups_per_step: int,
        max_off_policy_steps: int = 0,
        num_steps: int = 2**62,
        max_size_bytes: int = 2**62,
        max_head_of_line_s: float | None = None,
        max_dropped_steps: int = 20,
        in_waves: bool = False,
        prompts_depend_on_steps: bool = False,
        version: int = 0,
        next_index: int = 0,
    ) -> None:
        """Starts only groups that a step up to `num_steps` will consume. A resumed run passes its `version` and `next_index`.

        `in_waves`: replacements of dropped groups start only when no group is under way, so that timing does not decide which groups are
        sampled together. `max_head_of_line_s`: seconds that a whole step's finished groups wait behind unfinished ones before these are
        dropped; None: no limit. `max_dropped_steps`: steps' worth of groups that may be dropped in a row.

        `prompts_depend_on_steps`: a group's prompt depends on all steps that end at least `max_off_policy_steps` steps' worth of indices
        before it. After drops the newest of these steps may not be learned yet; the group then waits for it.
        """
        self._groups_per_step = groups_per_step
        self._bound = max_off_policy_steps
        self._num_steps = num_steps
        self._in_waves = in_waves
        self._prompts_depend_on_steps = prompts_depend_on_steps
        self._taken_up_to = 0
        self._awaited: int | None = None
        """Index of an unfinished group that the present `take` waits for."""
        self._version = version
        self._next_index = next_index
        self._num_taken = version * groups_per_step
        self._live: OrderedDict[int, Group | None] = OrderedDict()  # start order; None while under way
        self._finished_at: dict[int, float] = {}
        self._bytes = ByteBudget(max_size_bytes)
        self._stragglers = Stragglers(max_head_of_line_s)
        self._counters = _Counters()
        self._max_dropped_steps = max_dropped_steps
        self._dropped_in_a_row: Counter[str] = Counter()
        self._listeners: list[Callable[[], None]] = []
        self._num_wanted: int | None = None
        """Groups that the present `take` waits for."""
        self._moved_at = 0.0
        """Time of the last start, finish or drop of a group during the present `take`."""
        self._news = asyncio.Event()

    @property
    def version(self) -> int:
        return self._version

    @property
    def next_index(self) -> int:
        """Index of the next group to start. A resumed run needs only this and the version."""
        return self._next_index

    @property
    def size_bytes(self) -> int:
        """Bytes of all groups that are sampled and not taken, and of dropped groups that are still being scored."""
        return self._bytes.size_bytes

    def subscribe(self, listener: Callable[[], None]) -> None:
        """`listener` is called after every change. It must return at once."""
        self._listeners.append(listener)

    # Producers

    def num_startable(self) -> int:
        """Number of groups that may start now."""
        if self._in_waves and None in self._live.values():
            return 0
        last_step = min(self._version + self._bound + 1, self._num_steps)
        free = last_step * self._groups_per_step - self._num_taken - len(self._live)
        if self._prompts_depend_on_steps:
            free = min(free, self._next_steps_end() + self._bound * self._groups_per_step - self._next_index)
        # The next step must always be able to fill, or a budget below one step's bytes would stop the run.
        fitting = max(self._bytes.num_that_fit(num_live=len(self._live)), self._groups_per_step - len(self._live))
        return max(min(free, fitting), 0)

    def start(self, limit: int | None = None) -> range:
        """Indices of the groups that start now, at most `limit`; empty when none may."""
        count = self.num_startable() if limit is None else min(self.num_startable(), limit)
        started = range(self._next_index, self._next_index + count)
        self._next_index += count
        self._live.update((index, None) for index in started)
        if started:
            self._notify()
        return started

    def is_live(self, index: int) -> bool:
        """False for a group that was dropped or taken: its result is not needed."""
        return index in self._live

    def hold(self, index: int, size_bytes: int) -> None:
        """Group `index` is sampled. Its bytes count until it is taken, or reported as dropped."""
        self._bytes.hold(index, size_bytes)

    def add(self, index: int, group: Group) -> None:
        """Group `index` is finished. A straggler's late result is discarded.

        Raises KeyError for a group that never started, was dropped, or was added before.
        """
        if self._stragglers.forget(index):
            self._bytes.release(index)
        elif self._live[index] is not None:
            raise KeyError(f"group {index} was added before")
        else:
            self._dropped_in_a_row.clear()
            self._counters.kept.add(index)
            self._live[index] = group
            self._bytes.hold(index, group.summary.size_bytes)
            self._finished_at[index] = _now()
        self._notify()

    def note_candidates(self, summary: GroupSummary) -> None:
        """Counts the summary that an over-sampled group had before its trajectories were chosen."""
        self._counters.candidates.append(summary)

    def drop(self, index: int, *, reason: str, why: str = "") -> None:
        """Group `index` leaves untrained; another may start in its place. `reason` is a name for counting, and `why` explains this group.

        Raises DataError after `max_dropped_steps` steps' worth of dropped groups in a row.
        """
        self._bytes.release(index)
        if not self._stragglers.forget(index):
            del self._live[index]
            self._counters.dropped[reason] += 1
            self._dropped_in_a_row[reason] += 1
        self._notify()
        if (num_dropped := self._dropped_in_a_row.total()) >= self._max_dropped_steps * self._groups_per_step:
            reasons = ", ".join(f"{name}: {number}" for name, number in self._dropped_in_a_row.most_common())
            raise DataError(
                f"{num_dropped} groups in a row were dropped ({reasons}), the last one because: {why or reason}; nothing can be learned "
                "from such groups: mend the reward, the prompts or the filter, or raise "
                f"buffer.max_dropped_steps={self._max_dropped_steps} where groups worth learning from are that rare"
            )

    def drain_stragglers(self) -> list[int]:
        """Stragglers dropped since the last call. The producer may abort their sampling and must still report each."""
        return self._stragglers.drain_dropped()

    def ready(self) -> dict[int, Group]:
        """Finished groups that are not taken yet, by index."""
        return {index: group for index, group in self._live.items() if group is not None}

    def move(self, index: int, copies: Mapping[Any, Any]) -> bool:
        """Replaces objects of a finished group by their `copies`. False when the group was taken or dropped."""
        if (group := self._live.get(index)) is None:
            return False
        self._live[index] = group.moved(copies)
        return True

    # The controller

    async def take(
        self, count: int, *, stall_s: float | None = None, goes_on: Callable[[], bool] = lambda: False
    ) -> list[tuple[int, Group]]:
        """The first `count` groups in start order with their indices, once all of them are finished.

        Drops unfinished groups among them once `count` finished groups have waited behind them for `max_head_of_line_s` of this call. When
        no group starts, finishes or is dropped for `stall_s` (None: no limit), asks `goes_on` and raises DeadlineError if that is false.
        """
        began = self._moved_at = _now()
        self._stragglers.begin_wait()
        self._awaited = None
        self._num_wanted = count
        try:
            while not self._is_ready(count):
                is_blocked = len(self._finished_at) >= count
                patience_s = self._stragglers.patience_s(is_blocked=is_blocked, now=_now())
                if patience_s is None:
                    await self._change(count, stall_s, goes_on)
                elif patience_s > 0:
                    await self._news_within(patience_s)
                else:
                    self._drop_stragglers(blocking(self._live, count))
        finally:
            self._num_wanted = None
        self._counters.learner_wait_s += _now() - began
        return self._take_first(count)

    def put_back(self, taken: Sequence[tuple[int, Group]], *, lost: Collection[int]) -> None:
        """Puts groups that were taken and not consumed back in front. Those in `lost` are under way again."""
        now = _now()
        self._counters.kept.difference_update(lost)  # each will finish or be dropped once more
        for index, group in taken:
            self._live[index] = None if index in lost else group
            if index not in lost:
                self._bytes.hold(index, group.summary.size_bytes)
                self._finished_at[index] = now
        self._live = OrderedDict(sorted(self._live.items()))
        self._num_taken -= len(taken)
        self._notify()

    def advance(self, version: int) -> None:
        """Workers have loaded `version`: further groups may start."""
        self._version = version
        self._notify()

    def drain_stats(self) -> dict[str, float]:
        """Waits of the last `take` in seconds, levels in groups and bytes, and outcomes of groups since the last call."""
        drained, self._counters = self._counters, _Counters()
        num_ready = sum(group is not None for group in self._live.values())
        num_dropped = drained.dropped.total()
        num_kept = len(drained.kept)
        num_ended = num_kept + num_dropped
        return {
            "buffer/learner_wait_s": drained.learner_wait_s,
            "buffer/head_of_line_s": drained.head_of_line_s,
            "buffer/num_ready": float(num_ready),
            "buffer/num_under_way": float(len(self._live) - num_ready),
            "buffer/num_dropped": float(num_dropped),
            "buffer/size_bytes": float(self.size_bytes),
            "buffer/max_size_bytes": float(self._bytes.max_size_bytes),
            "staleness/bound": float(self._bound),
            **_of_candidates(drained.candidates),
            **({"buffer/kept_share": num_kept / num_ended} if num_ended else {}),
            **({"buffer/tries_per_group": num_ended / num_kept} if num_kept else {}),
            **{
                f"buffer/dropped_{reason.replace(' ', '_')}": float(number)
                for reason, number in drained.dropped.items()
            },
        }

    def _take_first(self, count: int) -> list[tuple[int, Group]]:
        taken: list[tuple[int, Group]] = []
        for _ in range(count):
            index, group = self._live.popitem(last=False)
            assert group is not None
            self._bytes.release(index)
            taken.append((index, group))
        finished = [self._finished_at.pop(index) for index, _ in taken]
        self._counters.head_of_line_s = sum(max(finished) - at for at in finished) / len(finished)
        self._num_taken += count
        self._taken_up_to = taken[-1][0] + 1
        self._notify()
        return taken

    def _drop_stragglers(self, indices: Sequence[int]) -> None:
        for index in indices:
            del self._live[index]
        self._stragglers.drop(indices)
        self._counters.dropped["straggler"] += len(indices)
        self._notify()

    def _next_steps_end(self) -> int:
        """Lower bound of the index after the last group of the step that is learned next: a group of that step may still be dropped."""
        if self._num_taken > self._version * self._groups_per_step:
            return self._taken_up_to
        first = list(islice(self._live, self._groups_per_step))
        return first[-1] + 1 if len(first) == self._groups_per_step else 2**62

    def _is_ready(self, count: int) -> bool:
        """Whether the first `count` groups are finished. Called after every change: scans them only when the last unfinished one has
        changed."""
        known = self._awaited
        if len(self._finished_at) < count or (known in self._live and self._live[known] is None):
            return False
        first = islice(self._live.items(), count)
        self._awaited = next((index for index, group in first if group is None), None)
        return self._awaited is None

    def _notify(self) -> None:
        if self._num_wanted is not None:
            self._moved_at = _now()
            if self._is_news(self._num_wanted):
                self._news.set()
        for listener in self._listeners:
            listener()

    def _is_news(self, count: int) -> bool:
        """Whether a `take` of `count` groups has something to do. All other changes, several per group, do not wake it."""
        is_blocked = len(self._finished_at) >= count
        return is_blocked and (self._is_ready(count) or self._stragglers.would_begin_to_wait)

    async def _news_within(self, seconds: float | None) -> bool:
        self._news.clear()
        try:
            async with asyncio.timeout(seconds):
                await self._news.wait()
        except TimeoutError:
            return False
        return True

    async def _change(self, count: int, stall_s: float | None, goes_on: Callable[[], bool]) -> None:
        left_s = None if stall_s is None else self._moved_at + stall_s - _now()
        if await self._news_within(left_s) or stall_s is None or _now() < self._moved_at + stall_s:
            return
        if goes_on():
            self._moved_at = _now()
            return
        under_way = [index for index, group in self._live.items() if group is None]
        first = islice(self._live.values(), count)
        num_ready = sum(1 for _ in takewhile(lambda group: group is not None, first))
        raise DeadlineError(
            f"the learner waits for {count} groups at policy version {self._version} and has {num_ready}; nothing moved "
            f"for {stall_s:g} s; under way: groups {under_way[:8]}{' ...' if under_way[8:] else ''}"
        )


def _now() -> float:
    """The event loop's clock, so that waits and measurements agree, also under a test's simulated clock."""
    return asyncio.get_running_loop().time()


def _of_candidates(candidates: Sequence[GroupSummary]) -> dict[str, float]:
    """Metrics over all candidates, those of dropped groups included: no chosen trajectory has a failed reward."""
    if not candidates:
        return {}
    rewards = [reward for each in candidates for reward in each.known_rewards]
    return {
        **({"buffer/candidate_reward": mean_of(rewards)} if rewards else {}),
        **failures(candidates),
    }
