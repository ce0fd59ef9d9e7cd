"""The staleness bound and the start order, under any timing."""

import asyncio
import random
import sys
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.contracts.errors import DataError, DeadlineError
from cluster.contracts.types import EpisodeStats, Group, GroupSummary, StepStats
from cluster.metrics import step_metrics
from cluster.rollouts.buffer import Buffer
from tests.fakes import group_summary
from tests.unit.cluster.simulated_time import run_simulated


def group(version: int = 0, size_bytes: int = 1) -> Group:
    return Group(
        pieces=(),
        summary=GroupSummary(
            group_id="0",
            prompt_id="p",
            num_trajectories=1,
            num_tokens=1,
            size_bytes=size_bytes,
            oldest_versions=(version,),
        ),
    )


async def test_a_finished_group_can_be_moved_until_it_is_taken():
    buffer = Buffer(groups_per_step=2)
    buffer.start()
    kept = group()
    buffer.add(1, Group(pieces=("far", [0, 1], "here"), summary=kept.summary))
    assert list(buffer.ready()) == [1] and not buffer.move(0, {"far": "near"})
    assert buffer.move(1, {"far": "near"})
    buffer.add(0, kept)
    (_, (_, moved)) = await buffer.take(2)
    assert moved.pieces == ("near", [0, 1], "here")
    assert not buffer.move(1, {"near": "home"})


class Starting:
    """Waits until groups may start."""

    def __init__(self, buffer: Buffer) -> None:
        self._buffer = buffer
        self._changed = asyncio.Event()
        buffer.subscribe(self._changed.set)

    async def start(self, limit: int) -> range:
        while not (indices := self._buffer.start(limit)):
            self._changed.clear()
            await self._changed.wait()
        return indices


async def test_a_slow_group_is_not_overtaken():
    buffer = Buffer(groups_per_step=2)
    slow, fast = buffer.start()
    buffer.add(fast, group())
    taking = asyncio.create_task(buffer.take(2))
    await asyncio.sleep(0)
    assert not taking.done()
    buffer.add(slow, group())
    assert [index for index, _ in await taking] == [slow, fast]


async def test_on_policy_starts_one_step_and_waits_for_the_next_version():
    buffer = Buffer(groups_per_step=3)
    assert buffer.start() == range(3)
    assert buffer.num_startable() == 0
    for index in range(3):
        buffer.add(index, group())
    await buffer.take(3)
    assert buffer.num_startable() == 0, "taken, but the workers still have the old weights"
    buffer.advance(1)
    assert buffer.start() == range(3, 6)


async def test_a_bound_of_two_starts_three_steps():
    assert len(Buffer(groups_per_step=4, max_off_policy_steps=2).start()) == 12


async def test_a_dropped_group_frees_its_place():
    buffer = Buffer(groups_per_step=2)
    buffer.start()
    buffer.drop(0, reason="refused")
    assert buffer.start() == range(2, 3)
    buffer.add(2, group())
    buffer.add(1, group())
    assert [index for index, _ in await buffer.take(2)] == [1, 2]


async def test_a_group_is_replaced_while_the_step_before_it_is_learned():
    buffer = Buffer(groups_per_step=2, max_off_policy_steps=1)
    buffer.start()
    for index in (0, 1):
        buffer.add(index, group())
    buffer.drop(3, reason="refused")
    assert buffer.start() == range(4, 5)
    await buffer.take(2)
    buffer.drop(2, reason="refused")
    assert buffer.start() == range(5, 6)


def test_groups_that_are_dropped_in_a_row_are_counted_from_the_last_one_that_was_kept():
    buffer = Buffer(groups_per_step=2, max_dropped_steps=2)

    def drop(*indices: int, reason: str = "refused") -> None:
        for index in indices:
            assert buffer.start(limit=1) == range(index, index + 1)
            buffer.drop(index, reason=reason)

    async def scene() -> None:
        drop(0, 1, 2)
        buffer.start(limit=1)
        buffer.add(3, group())
        drop(4, 5)
        drop(6, reason="quarantined")
        with pytest.raises(
            DataError, match=r"^4 groups in a row were dropped \(refused: 3, quarantined: 1\), .* refused; "
        ):
            drop(7)

    run_simulated(scene())


async def test_in_waves_a_replacement_waits_until_nothing_is_under_way():
    buffer = Buffer(groups_per_step=2, in_waves=True)
    buffer.start()
    buffer.drop(0, reason="refused")
    assert buffer.num_startable() == 0
    buffer.add(1, group())
    assert buffer.num_startable() == 1


async def test_nothing_starts_that_no_step_would_consume():
    assert len(Buffer(groups_per_step=2, max_off_policy_steps=5, num_steps=3).start()) == 6


async def test_full_bytes_pause_starting_but_never_the_next_step():
    buffer = Buffer(groups_per_step=2, max_off_policy_steps=3, max_size_bytes=10)
    assert buffer.start(limit=1) == range(1)
    buffer.add(0, group(size_bytes=100))
    assert buffer.num_startable() == 1


async def test_a_group_is_added_once():
    buffer = Buffer(groups_per_step=1)
    buffer.start()
    buffer.add(0, group())
    with pytest.raises(KeyError):
        buffer.add(0, group())


@settings(max_examples=200)
@given(
    seed=st.integers(0, 10**6),
    num_workers=st.integers(1, 20),
    bound=st.integers(0, 4),
    groups_per_step=st.integers(1, 5),
    drop_share=st.sampled_from([0.0, 0.3]),
)
def test_the_bound_holds_for_every_token_under_any_timing(seed, num_workers, bound, groups_per_step, drop_share):
    """Workers of random speed; a token is as old as the weights that its worker had when the group started."""
    clock = random.Random(seed)

    async def run() -> None:
        num_steps = 8
        buffer = Buffer(
            groups_per_step=groups_per_step,
            max_off_policy_steps=bound,
            num_steps=num_steps,
            max_dropped_steps=10**6,  # by chance some example would drop 20 in a row
        )
        loaded = 0  # version that all workers serve

        async def pause() -> None:
            for _ in range(clock.choice([0, 1, 2, 5, 30])):
                await asyncio.sleep(0)

        async def worker() -> None:
            starting = Starting(buffer)
            while True:
                for index in await starting.start(limit=clock.randint(1, 3)):
                    version = loaded
                    await pause()
                    if clock.random() < drop_share:
                        buffer.drop(index, reason="refused")
                    else:
                        buffer.add(index, group(version))

        workers = [asyncio.create_task(worker()) for _ in range(num_workers)]
        order: list[int] = []
        for version in range(num_steps):
            taken = await buffer.take(groups_per_step)
            assert all(0 <= version - each.summary.min_policy_version <= bound for _, each in taken)
            order += [index for index, _ in taken]
            await pause()  # learning
            await pause()  # broadcast
            loaded = version + 1
            buffer.advance(loaded)
        for task in workers:
            task.cancel()
        assert order == sorted(set(order))

    asyncio.run(asyncio.wait_for(run(), 240))


class CountingWaits(Buffer):
    num_waits = 0

    async def _news_within(self, seconds):
        self.num_waits += 1
        return await super()._news_within(seconds)


async def test_a_take_is_woken_once_for_its_step_and_not_by_every_group():
    buffer = CountingWaits(groups_per_step=4, max_off_policy_steps=1)
    taking = asyncio.create_task(buffer.take(4))
    await asyncio.sleep(0)
    buffer.start()
    for index in (3, 2, 1, 0):
        buffer.add(index, group())
        await asyncio.sleep(0)
    assert [index for index, _ in await taking] == [0, 1, 2, 3]
    assert buffer.num_waits == 1


async def test_a_take_is_woken_when_its_patience_begins_and_when_its_groups_are_there():
    buffer = CountingWaits(groups_per_step=2, max_off_policy_steps=2, max_head_of_line_s=3600.0)
    buffer.start()
    taking = asyncio.create_task(buffer.take(2))
    await asyncio.sleep(0)
    for index in (1, 2, 3, 4, 0):
        buffer.add(index, group())
        await asyncio.sleep(0)
    assert [index for index, _ in await taking] == [0, 1]
    assert buffer.num_waits == 2


def test_a_take_that_slept_through_changes_counts_its_stall_from_the_last_one():
    async def scene() -> None:
        buffer = Buffer(groups_per_step=3)
        buffer.start(limit=2)
        clock = asyncio.get_running_loop().time
        taking = asyncio.create_task(buffer.take(3, stall_s=10))
        await finish(buffer, 1, after_s=8)
        await asyncio.sleep(8)
        buffer.start()
        await asyncio.sleep(8)
        buffer.drop(2, reason="test")
        with pytest.raises(DeadlineError, match=r"has 0; nothing moved for 10 s; under way: groups \[0\]"):
            await taking
        assert clock() == 34

    run_simulated(scene())


def test_the_wait_of_a_take_and_of_its_groups_for_the_last_of_them_are_measured():
    """The learner waits for 8 s. Group 1 is there after 2 s, and so waits 6 s for group 0, which waits for none: 3 s on average."""

    async def scene() -> None:
        buffer = Buffer(groups_per_step=2)
        buffer.start()
        await asyncio.sleep(100)
        taking = asyncio.create_task(buffer.take(2, stall_s=10))
        await finish(buffer, 1, after_s=2)
        await finish(buffer, 0, after_s=6)
        await taking
        stats = buffer.drain_stats()
        assert (stats["buffer/learner_wait_s"], stats["buffer/head_of_line_s"]) == (8.0, 3.0)

    run_simulated(scene())


async def test_groups_put_back_stand_in_front_and_the_lost_ones_are_under_way_again():
    buffer = Buffer(groups_per_step=2, max_off_policy_steps=1)
    buffer.start()
    for index in range(4):
        buffer.add(index, group(size_bytes=10))
    taken = await buffer.take(2)
    buffer.put_back(taken, lost={1})
    assert buffer.num_startable() == 0 and buffer.size_bytes == 30
    taking = asyncio.create_task(buffer.take(2))
    await asyncio.sleep(0)
    assert not taking.done(), "group 1 is sampled again, and nobody overtakes it"
    buffer.add(1, group())
    assert [index for index, _ in await taking] == [0, 1]
    buffer.drop(2, reason="test")
    assert buffer.drain_stats()["buffer/tries_per_group"] == 5 / 4, "the lost one is kept once"


async def test_a_lost_group_that_an_earlier_step_counted_is_not_taken_off_what_this_one_kept():
    """Seen in review: dropped when it was sampled again, it made the step's kept groups negative."""
    buffer = Buffer(groups_per_step=1, max_off_policy_steps=1)
    buffer.start()
    for index in (0, 1):
        buffer.add(index, group())
    await buffer.take(1)
    assert buffer.drain_stats()["buffer/kept_share"] == 1.0
    buffer.put_back(await buffer.take(1), lost={1})
    buffer.drop(1, reason="test")
    stats = buffer.drain_stats()
    assert stats["buffer/kept_share"] == 0.0 and "buffer/tries_per_group" not in stats


async def test_a_lost_group_that_is_dropped_when_it_is_sampled_again_was_not_kept():
    buffer = Buffer(groups_per_step=2)
    buffer.start()
    for index in (0, 1):
        buffer.add(index, group())
    buffer.put_back(await buffer.take(2), lost={1})
    buffer.drop(1, reason="test")
    assert buffer.drain_stats()["buffer/kept_share"] == 0.5


async def test_groups_put_back_are_taken_at_once_although_an_earlier_take_waited_for_one_behind_them():
    buffer = Buffer(groups_per_step=2, max_off_policy_steps=2)
    buffer.start()
    for index in (0, 1, 3, 4):
        buffer.add(index, group())
    taken = await buffer.take(2)
    waiting = asyncio.create_task(buffer.take(2))  # for group 2
    await asyncio.sleep(0)
    waiting.cancel()
    buffer.put_back(taken, lost=())
    assert [index for index, _ in await asyncio.wait_for(buffer.take(2), 60)] == [0, 1]


async def test_bytes_of_groups_that_wait_for_their_scores_count():
    buffer = Buffer(groups_per_step=1, max_off_policy_steps=3, max_size_bytes=100)
    buffer.start(limit=2)
    buffer.hold(0, 60)
    buffer.hold(1, 60)
    assert buffer.size_bytes == 120 and buffer.num_startable() == 0
    buffer.add(0, group(size_bytes=70))
    await buffer.take(1)
    assert buffer.size_bytes == 60 and buffer.num_startable() == 0, "two groups of 70 would not fit"
    buffer.drop(1, reason="test")
    assert buffer.size_bytes == 0


async def test_groups_under_way_count_as_much_as_the_largest_of_the_recent_ones():
    buffer = Buffer(groups_per_step=1, max_off_policy_steps=9, max_size_bytes=100)
    assert buffer.start(limit=1) == range(1)
    buffer.add(0, group(size_bytes=30))
    assert buffer.start() == range(1, 3), "30 wait, and two more may make it 90"
    await buffer.take(1)
    assert buffer.num_startable() == 1, "nothing waits, and three may make it 90"


async def finish(buffer: Buffer, *indices: int, after_s: float = 0.0) -> None:
    await asyncio.sleep(after_s)
    for index in indices:
        buffer.add(index, group())


def test_a_straggler_is_dropped_when_a_step_has_waited_behind_it_for_long_enough():
    async def scene() -> None:
        buffer = Buffer(groups_per_step=2, max_off_policy_steps=1, max_head_of_line_s=5.0)
        buffer.start()
        clock = asyncio.get_running_loop().time
        taking = asyncio.create_task(buffer.take(2))
        await finish(buffer, 1, after_s=10)
        await finish(buffer, 2, after_s=10)
        assert [index for index, _ in await taking] == [1, 2]
        assert clock() == 25, "the second finished at 20"
        assert buffer.drain_stragglers() == [0] and not buffer.is_live(0) and buffer.is_live(3)
        assert buffer.num_startable() == 1, "another one in its place; group 3 goes on"
        stats = buffer.drain_stats()
        assert stats["buffer/dropped_straggler"] == stats["buffer/num_dropped"] == 1
        assert "buffer/dropped_straggler" not in buffer.drain_stats()

    run_simulated(scene())


def test_a_listener_is_called_once_for_every_change():
    async def scene() -> None:
        buffer = Buffer(groups_per_step=2, max_off_policy_steps=1, max_head_of_line_s=5.0)
        calls: list[None] = []
        buffer.subscribe(lambda: calls.append(None))

        def num_calls() -> int:
            number = len(calls)
            calls.clear()
            return number

        buffer.start()
        assert num_calls() == 1
        assert not buffer.start() and num_calls() == 0
        await finish(buffer, 1, 2)
        assert num_calls() == 2
        taken = await buffer.take(2)
        assert num_calls() == 2, "group 0 was dropped as a straggler, then the others were taken"
        buffer.drop(0, reason="straggler")
        buffer.put_back(taken, lost=())
        buffer.advance(1)
        assert num_calls() == 3

    run_simulated(scene())


def test_nothing_is_dropped_while_too_few_stand_behind_or_the_learner_does_not_wait():
    async def scene() -> None:
        buffer = Buffer(groups_per_step=2, max_off_policy_steps=1, max_head_of_line_s=5.0)
        buffer.start()
        await finish(buffer, 2, 3)
        await asyncio.sleep(100)  # the learner is busy
        taking = asyncio.create_task(buffer.take(2))
        await finish(buffer, 0, after_s=4)
        await finish(buffer, 1, after_s=0.5)
        assert [index for index, _ in await taking] == [0, 1]
        taking = asyncio.create_task(buffer.take(2))
        assert [index for index, _ in await taking] == [2, 3]
        buffer.advance(2)
        buffer.start()
        await finish(buffer, 5, 6)
        await asyncio.sleep(100)
        taking = asyncio.create_task(buffer.take(2))
        await finish(buffer, 4, after_s=4)
        assert [index for index, _ in await taking] == [4, 5] and "buffer/dropped_straggler" not in buffer.drain_stats()

    run_simulated(scene())


def test_what_comes_of_a_straggler_is_forgotten_and_its_bytes_count_until_then():
    async def scene() -> None:
        buffer = Buffer(groups_per_step=1, max_off_policy_steps=1, max_head_of_line_s=1.0)
        buffer.start()
        buffer.hold(0, 50)  # sampled, and at the judge
        await finish(buffer, 1)
        assert [index for index, _ in await buffer.take(1)] == [1]
        assert buffer.size_bytes == 50
        buffer.add(0, group(size_bytes=60))
        assert buffer.size_bytes == 0 and buffer.drain_stats()["buffer/num_ready"] == 0

    run_simulated(scene())


def test_nothing_is_kept_of_the_stragglers_of_a_long_run():
    """A step is one group that finishes, and one before it that is dropped, and reported when it is stopped or judged."""

    async def kept_after(num_steps: int) -> int:
        buffer = Buffer(groups_per_step=1, max_off_policy_steps=1, max_head_of_line_s=1.0)
        for version in range(1, num_steps + 1):
            slow, fast = buffer.start()
            buffer.hold(slow, 50)
            await finish(buffer, fast)
            assert [index for index, _ in await buffer.take(1)] == [fast]
            assert buffer.drain_stragglers() == [slow]
            if version % 2:
                buffer.drop(slow, reason="refused")
            else:
                buffer.add(slow, group())
            buffer.advance(version)
        return num_kept(buffer)

    async def scene() -> None:
        assert await kept_after(1000) == await kept_after(10)

    run_simulated(scene())


def num_kept(thing: object) -> int:
    """Entries of all containers inside."""
    if isinstance(thing, dict | list | set):
        return len(thing)
    is_ours = type(thing).__module__.startswith("cluster.") and hasattr(thing, "__dict__")
    return sum(map(num_kept, vars(thing).values())) if is_ours else 0


@settings(max_examples=300)
@given(
    seed=st.integers(0, 10**6),
    num_workers=st.integers(1, 20),
    bound=st.integers(1, 4),
    groups_per_step=st.integers(1, 5),
    drop_share=st.sampled_from([0.0, 0.3]),
    patience_s=st.sampled_from([0.5, 3.0, 40.0]),
)
def test_with_stragglers_dropped_the_bound_holds_and_every_group_has_one_fate(
    seed, num_workers, bound, groups_per_step, drop_share, patience_s
):
    """Long-tailed sampling; a dropped straggler is stopped at once, or its result comes late all the same."""
    clock = random.Random(seed)
    num_steps = 8

    async def scene() -> None:
        buffer = Buffer(
            groups_per_step=groups_per_step,
            max_off_policy_steps=bound,
            num_steps=num_steps,
            max_head_of_line_s=patience_s,
            max_dropped_steps=10**6,
        )
        loaded = 0  # version that all workers serve
        taken: list[int] = []
        dropped: set[int] = set()
        late: set[int] = set()
        sampling: dict[int, asyncio.Task[None]] = {}

        async def sample(index: int) -> None:
            version = loaded
            await asyncio.sleep(clock.choice([0, 1, 2, 5, 300]))
            if clock.random() < drop_share:
                if buffer.is_live(index):
                    dropped.add(index)
                buffer.drop(index, reason="refused")
            else:
                buffer.add(index, group(version))

        async def worker() -> None:
            starting = Starting(buffer)
            while True:
                for index in await starting.start(limit=clock.randint(1, 3)):
                    sampling[index] = asyncio.create_task(sample(index))
                    await asyncio.wait({sampling[index]})

        async def stop() -> None:
            changed = asyncio.Event()
            buffer.subscribe(changed.set)
            while True:
                changed.clear()
                await changed.wait()
                for index in buffer.drain_stragglers():
                    late.add(index)
                    if index in sampling and not sampling[index].done() and clock.random() < 0.5:
                        sampling[index].cancel()
                        buffer.drop(index, reason="refused")

        tasks = [asyncio.create_task(each) for each in (stop(), *(worker() for _ in range(num_workers)))]
        for version in range(num_steps):
            step = await buffer.take(groups_per_step)
            assert all(0 <= version - each.summary.min_policy_version <= bound for _, each in step)
            taken += [index for index, _ in step]
            await asyncio.sleep(clock.choice([0, 1, 5]))  # learning and broadcast
            loaded = version + 1
            buffer.advance(loaded)
        await asyncio.sleep(1000)  # late results come in
        assert all(task.done() and (task.cancelled() or not task.exception()) for task in sampling.values())
        assert not any(task.done() for task in tasks), "a late result is no error"
        assert taken == sorted(set(taken)) and len(taken) == num_steps * groups_per_step
        fates = [*taken, *dropped, *late]
        assert sorted(fates) == list(range(buffer.next_index)), "one fate each, and none is lost"
        assert buffer.size_bytes == 0

    run_simulated(scene())


async def test_a_huge_group_is_forgotten_after_some_hundred_others():
    """A decay of one in a hundred: 1000 bytes count as 10 after 460 groups of 1 byte (0.99**460 = 0.0098)."""
    buffer = Buffer(groups_per_step=1, max_off_policy_steps=900, max_size_bytes=2000)
    buffer.start(limit=1)
    buffer.add(0, group(size_bytes=1000))
    await buffer.take(1)
    assert buffer.num_startable() == 2, "as if all were that large"
    for index in range(1, 461):
        buffer.start(limit=1)
        buffer.add(index, group())
        await buffer.take(1)
    assert buffer.num_startable() > 150


async def test_candidates_with_the_largest_rewards_have_a_mean():
    """Seen before: an OverflowError ended the run."""
    buffer = Buffer(groups_per_step=1)
    buffer.note_candidates(group_summary(0, rewards=(sys.float_info.max, None, sys.float_info.max)))
    assert buffer.drain_stats()["buffer/candidate_reward"] == sys.float_info.max


async def test_candidates_of_which_every_reward_failed_have_no_mean():
    buffer = Buffer(groups_per_step=1)
    buffer.note_candidates(group_summary(0, rewards=(None, None), num_reward_errors=2))
    stats = buffer.drain_stats()
    assert "buffer/candidate_reward" not in stats and stats["reward/num_errors"] == 2.0


async def test_failed_episodes_are_counted_among_candidates_since_none_of_them_is_chosen():
    numbers: dict[str, Any] = {"num_turns": 1, "num_calls": 0, "num_malformed_calls": 0, "num_sampled_tokens": 5}
    played = EpisodeStats(environment="game", num_written_tokens=0, seconds=1.0, model_seconds=1.0, **numbers)
    episodes = (played, replace(played, failed_stage="environment"))
    candidates = group_summary(0, rewards=(1.0, None), num_reward_errors=1, episodes=episodes)
    buffer = Buffer(groups_per_step=1)
    buffer.note_candidates(candidates)
    assert buffer.drain_stats()["environment/game/num_failed"] == 1.0
    learned = step_metrics(
        [candidates.of([0])], StepStats(policy_version=1, metrics={}, num_trained_tokens=5, seconds=1.0)
    )
    assert learned["environment/game/turns"] == 1.0 and "environment/game/num_failed" not in learned
