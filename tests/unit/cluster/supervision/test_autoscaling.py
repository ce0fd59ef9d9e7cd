"""When a run grows and when it shrinks."""

from cluster.contracts.config import ElasticConfig
from cluster.supervision.autoscaling import StepLoad, decide

CONFIG = ElasticConfig(min_workers=1, max_workers=4, scale_up_wait_share=0.3, scale_down_full_steps=2)


def load(wait, *, full=False):
    return StepLoad(step_seconds=10, wait_seconds=wait, is_buffer_full=full)


def test_a_waiting_learner_gets_one_more_worker():
    assert decide([load(4), load(4), load(4)], num_workers=2, num_coming=0, config=CONFIG) == 3


def test_one_slow_step_is_not_a_trend():
    assert decide([load(0), load(0), load(8)], num_workers=2, num_coming=0, config=CONFIG) == 2
    assert decide([load(9)], num_workers=2, num_coming=0, config=CONFIG) == 2


def test_no_more_are_asked_for_while_one_is_still_coming():
    assert decide([load(9)] * 9, num_workers=2, num_coming=1, config=CONFIG) == 2
    assert decide([load(0, full=True)] * 2, num_workers=2, num_coming=1, config=CONFIG) == 1


def test_a_buffer_that_stays_full_gives_one_back():
    assert decide([load(0, full=True)] * 2, num_workers=2, num_coming=0, config=CONFIG) == 1


def test_limits_hold():
    assert decide([load(9)] * 3, num_workers=4, num_coming=0, config=CONFIG) == 4
    assert decide([load(0, full=True)] * 5, num_workers=1, num_coming=0, config=CONFIG) == 1
    assert decide([], num_workers=9, num_coming=0, config=CONFIG) == 4


def test_without_a_maximum_nothing_scales_by_itself():
    assert decide([load(9)] * 3, num_workers=2, num_coming=0, config=ElasticConfig()) == 2
