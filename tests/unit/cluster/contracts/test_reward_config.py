import pytest
from pydantic import ValidationError

from cluster.contracts.reward_config import RewardConfig
from cluster.record.resume_rules import differing


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"judge": "regex", "parts": {"a": {"judge": "none"}}}, "judge='regex' with parts a"),
        ({"parts": {"mean": {"judge": "none"}}}, "parts.mean: a part is named by letters"),
        ({"parts": {"a/b": {"judge": "none"}}}, "parts.a/b"),
        ({"parts": {"a": {"judge": "none", "weight": 0}}}, "every part has weight 0"),
        ({"by_source": {"x": ["a"]}}, "by_source.x names a; parts are: none"),
        ({"parts": {"a": {"judge": "none"}}, "by_source": {"x": []}}, "by_source.x names no part"),
        ({"parts": {"a": {"judge": "none"}}, "by_source": {"x": ["a", "a"]}}, "names a part twice"),
        ({"parts": {"a": {"judge": "none"}, "b": {"judge": "none"}}, "by_source": {"x": ["a"]}}, "parts.b judges no source"),
    ],
)  # fmt: skip
def test_parts_that_cannot_act_are_refused(settings, message):
    with pytest.raises(ValidationError, match=message):
        RewardConfig.model_validate(settings)


def test_deadlines_of_parts_add_up():
    """One waits for the other: 30 s by default, and 5."""
    parts = {"a": {"judge": "none"}, "b": {"judge": "none", "timeout_s": 5}}
    assert RewardConfig.model_validate({"parts": parts}).deadline_s == 35.0


def test_a_resumed_run_may_give_a_part_more_time_and_not_another_weight():
    run = {"reward": {"parts": {"tidy": {"timeout_s": 5.0, "weight": 0.1}}}}
    slower = {"reward": {"parts": {"tidy": {"timeout_s": 9.0, "weight": 0.2}}}}
    assert differing(run, slower) == {"reward.parts.tidy.weight": (0.1, 0.2)}
