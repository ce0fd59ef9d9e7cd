"""When a run grows and when it shrinks, and by how many workers."""

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from cluster.contracts.config import ElasticConfig
from cluster.supervision.autoscaling import Fleet, StepLoad, decide, most_loads

CONFIG = ElasticConfig(min_workers=1, max_workers=8, scale_up_wait_share=0.3, scale_down_full_steps=2)


def load(wait=0.0, *, idle=0.0, full=False):
    return StepLoad(step_seconds=10, wait_seconds=wait, num_workers=0, idle_share=idle, is_buffer_full=full)


def wanted(loads, num_workers, *, num_coming=0, join_s=None, num_steps_left=None, most_useful=None, config=CONFIG):
    """After steps in all of which as many workers served as now."""
    loads = [replace(each, num_workers=num_workers - num_coming) for each in loads]
    fleet = Fleet(
        num_workers=num_workers,
        num_coming=num_coming,
        join_seconds=join_s,
        num_steps_left=num_steps_left,
        most_useful=most_useful,
    )
    return decide(loads, fleet, config).num_workers


def test_a_learner_that_waits_for_six_tenths_of_its_time_gets_workers_for_all_of_it():
    """2 / (1 - 0.6) = 5, with no more than twice as many at once: 4."""
    assert wanted([load(6)] * 3, 2) == 4
    assert wanted([load(10)] * 3, 2) == 4, "for all of it"
    assert wanted([load(6)] * 3, 2, config=CONFIG.model_copy(update={"max_step_factor": 4.0})) == 5


def test_a_factor_beyond_all_numbers_of_workers_asks_for_what_is_needed():
    """Seen before: twice 1e308 is infinite, and has no whole number."""
    assert wanted([load(6)] * 3, 2, config=CONFIG.model_copy(update={"max_step_factor": 1e308})) == 5


def test_part_of_a_worker_is_a_worker():
    """3 / (1 - 0.4) is 5; 3 / (1 - 0.41) is a little more."""
    assert wanted([load(4)] * 3, 3) == 5
    assert wanted([load(4.1)] * 3, 3) == 6
    wide = CONFIG.model_copy(update={"max_step_factor": 9.0})
    assert wanted([load(8)] * 3, 1, config=wide) == 5, "1 / (1 - 0.8) is 5.000000000000001 to a computer"


def test_a_single_worker_may_be_doubled_however_small_the_factor_is():
    assert wanted([load(4)] * 3, 1, config=CONFIG.model_copy(update={"max_step_factor": 1.1})) == 2
    assert wanted([load(9)] * 3, 1, config=CONFIG.model_copy(update={"max_step_factor": 1.1})) == 2, "and no more"
    assert wanted([load(9)] * 3, 3, config=CONFIG.model_copy(update={"max_step_factor": 1.5})) == 4, "at most 4.5"


def test_one_slow_step_is_not_a_trend():
    assert wanted([load(0), load(0), load(8)], 2) == 2
    assert wanted([load(9)], 2) == 2
    assert wanted([load(9)] * 7 + [load(0)] * 3, 2) == 2, "nor is one that is over"


def test_a_share_that_is_not_exceeded_is_borne():
    assert wanted([load(3)] * 3, 2) == 2


def test_as_many_loads_are_kept_as_growth_needs_however_soon_a_run_shrinks():
    assert most_loads(CONFIG.model_copy(update={"scale_down_full_steps": 1})) == 3


def test_no_more_are_asked_for_while_half_of_them_are_still_coming():
    assert wanted([load(9)] * 9, 2, num_coming=1) == 2
    assert wanted([load(9)] * 9, 4, num_coming=2) == 4
    assert wanted([load(full=True)] * 2, 2, num_coming=1) == 1


def test_a_fleet_that_always_replaces_a_lost_worker_grows():
    """3 of 4 serve: 3 / (1 - 0.6) = 7.5, with no more than twice 3. Seen before: on spot nodes some worker was always coming, and a run
    whose workers served for 30 minutes and joined in 10 took 18,900 s instead of 12,800 s."""
    assert wanted([load(6)] * 3, 4, num_coming=1) == 6
    assert wanted([load(6)] * 3, 4, num_coming=1, config=CONFIG.model_copy(update={"max_step_factor": 1.1})) == 4
    assert wanted([load(6)] * 3, 2, num_coming=2) == 2, "none serves"


def test_steps_of_different_numbers_of_workers_are_weighed_by_the_work_that_was_done():
    """A step is 50 worker seconds of sampling and 10 s of learning: 2 workers take 25 s and 4 take 12.5 s, so 5 are needed. Seen before:
    steps before a death or a join did not count. Simulated on spot nodes, a run that needed 40 workers, each of which lived for 10 minutes
    and joined in 2, grew by chance alone: 17,000 s instead of 4,700 s."""
    by_two = StepLoad(step_seconds=25, wait_seconds=15, num_workers=2, idle_share=0, is_buffer_full=False)
    by_four = StepLoad(step_seconds=12.5, wait_seconds=2.5, num_workers=4, idle_share=0, is_buffer_full=False)
    assert decide([by_two, by_four, by_two], Fleet(num_workers=4, num_coming=0), CONFIG).num_workers == 5


def test_workers_that_are_idle_while_the_learner_waits_are_not_what_it_waits_for():
    """The judge is: 4 workers, idle for 0.7 of the time that the learner waits for half of, would do with 4 * 0.3 / 0.5 = 2.4."""
    assert wanted([load(5, idle=0.7)] * 3, 4) == 4


def test_on_policy_sampling_grows_until_it_takes_as_long_as_learning():
    """Workers and learner take turns: 2 workers sample for 8 s, are idle for 2 s of learning, and 8 would sample for 2 s."""
    assert wanted([load(8, idle=0.2)] * 3, 2, config=CONFIG.model_copy(update={"max_step_factor": 9.0})) == 8
    assert wanted([load(5, idle=0.5)] * 3, 8, config=CONFIG.model_copy(update={"max_workers": 99})) == 8


def test_a_buffer_that_stays_full_gives_back_what_was_idle():
    """6 workers, idle for 0.6 of their time, do the work of 2.4."""
    assert wanted([load(idle=0.6, full=True)] * 2, 6) == 3
    assert wanted([load(idle=0.6, full=True), load(idle=0.6)], 6) == 6
    assert wanted([load(idle=0.1, full=True)] * 2, 6) == 6, "5.4 of 6 are busy"
    assert wanted([load(idle=0.6, full=True)], 6) == 6, "for one step alone"
    assert wanted([load(2, full=True)] * 2, 4) == 4, "4 / (1 - 0.2) would be 5"
    large = CONFIG.model_copy(update={"max_workers": 20})
    assert wanted([load(idle=0.7, full=True)] * 2, 10, config=large) == 3, "3.0000000000000004 to a computer"


def test_limits_hold():
    assert wanted([load(9)] * 3, 8) == 8
    assert wanted([load(idle=1.0, full=True)] * 5, 2) == 1
    assert wanted([], 9) == 8


def test_no_more_workers_are_asked_for_than_groups_that_may_be_under_way():
    """4 / (1 - 0.6) = 10. Seen before: on-policy with 8 groups a step, 8 workers of 16 were idle, and 16 / 2 / (1 - 0.9) = 80 were
    asked for."""
    config = CONFIG.model_copy(update={"max_workers": 128, "max_step_factor": 9.0})
    assert wanted([load(6)] * 3, 4, most_useful=8, config=config) == 8
    assert wanted([load(9, idle=0.5)] * 3, 16, most_useful=8, config=config) == 8, "nor kept"
    assert wanted([], 16, num_coming=3, most_useful=8, config=config) == 8
    assert wanted([load(6)] * 3, 12, most_useful=8, config=config.model_copy(update={"min_workers": 12})) == 12


def test_without_a_maximum_nothing_scales_by_itself():
    assert wanted([load(9)] * 3, 2, config=ElasticConfig()) == 2
    assert wanted([load(9)] * 3, 20, most_useful=8, config=ElasticConfig()) == 20


def test_a_worker_that_would_serve_for_less_than_three_joins_is_not_asked_for():
    """Steps take 10 s and a join 100 s: after 40 steps a new worker serves for 300 s."""
    assert wanted([load(5)] * 3, 2, join_s=100, num_steps_left=40) == 4
    assert wanted([load(5)] * 3, 2, join_s=100, num_steps_left=39) == 2
    assert wanted([load(5)] * 3, 2, join_s=None, num_steps_left=1) == 4, "nothing is known of joins"
    assert wanted([load(5)] * 3, 2, join_s=100, num_steps_left=None) == 4, "nor of an end"


def test_bounds_in_the_wrong_order_are_refused():
    with pytest.raises(
        ValidationError, match="min_workers=3 is more than max_workers=2; lower it, or raise max_workers"
    ):
        ElasticConfig(min_workers=3, max_workers=2)


# A constant load: a step costs `work` workers' time in units of the learner's.


# No more than `num_groups` workers have anything to sample.


def asynchronous(num_workers: int, work: float, num_groups: int) -> StepLoad:
    """Workers sample while the learner learns; the slower one is waited for."""
    seconds = max(work / min(num_workers, num_groups), 1.0)
    return StepLoad(
        step_seconds=seconds,
        wait_seconds=seconds - 1.0,
        num_workers=num_workers,
        idle_share=1 - work / num_workers / seconds,
        is_buffer_full=seconds == 1.0,
    )


def on_policy(num_workers: int, work: float, num_groups: int) -> StepLoad:
    """They take turns; the buffer is never full."""
    sampling = work / min(num_workers, num_groups)
    return StepLoad(
        step_seconds=sampling + 1,
        wait_seconds=sampling,
        num_workers=num_workers,
        idle_share=1 - work / num_workers / (sampling + 1),
        is_buffer_full=False,
    )


Model = Callable[[int, float, int], StepLoad]


def sizes(start: int, work: float, config: ElasticConfig, model: Model, num_groups: int = 10_000) -> list[int]:
    """Every number of workers that the run has, each once it serves."""
    found = [start]
    for _ in range(200):
        loads = [model(found[-1], work, num_groups)] * 20
        number = wanted(loads, found[-1], most_useful=num_groups, config=config)
        if number == found[-1]:
            return found
        found.append(number)
    raise AssertionError(f"it never rests: {found}")


CONFIGS = st.builds(
    lambda low, more, share, factor: ElasticConfig(
        min_workers=low, max_workers=low + more, scale_up_wait_share=share, max_step_factor=factor
    ),
    st.integers(1, 20),
    st.integers(0, 100),
    st.floats(0.01, 0.99),
    st.floats(1.01, 8),
)


@given(
    st.integers(1, 150), st.floats(0.01, 200), CONFIGS, st.sampled_from([asynchronous, on_policy]), st.integers(1, 100)
)
def test_a_constant_load_never_leaves_the_bounds_and_never_flaps(start, work, config, model, num_groups):
    found = sizes(start, work, config, model, num_groups)
    most = max(min(config.max_workers, num_groups), config.min_workers)
    assert all(config.min_workers <= number <= most for number in [*found[1:], found[-1]])
    assert found in (sorted(found), sorted(found, reverse=True)), "it grows or it shrinks"


@given(st.integers(1, 40), st.floats(1, 4), CONFIGS, st.sampled_from([asynchronous, on_policy]))
def test_two_joins_bring_all_workers_that_the_learner_waits_for(start, ratio, config, model):
    """`start` workers do a `ratio`-th of the work, and twice as many may come at once."""
    config = config.model_copy(update={"min_workers": 1, "max_workers": 1000, "max_step_factor": 2.0})
    found = sizes(start, work := start * ratio, config, model)
    needed = math.ceil(work - 1e-6)
    assert len(found) <= 3 and found[-1] <= needed
    end = model(found[-1], work, 10_000)
    assert found[-1] == needed or end.wait_seconds / end.step_seconds <= config.scale_up_wait_share


@given(st.integers(1, 1000), st.floats(0.01, 1000))
def test_one_decision_takes_away_all_workers_that_are_idle(start, work):
    config = ElasticConfig(max_workers=1000, scale_up_wait_share=1.0)
    needed = max(math.ceil(work - 1e-6), 1)
    assert sizes(start, work, config, asynchronous)[-1] == min(start, needed)
