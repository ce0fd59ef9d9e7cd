import math
import re

import pytest
from pydantic import ValidationError

from cluster.contracts.reward_config import RewardConfig
from cluster.record.resume_rules import differing


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"judge": "regex", "parts": {"a": {"judge": "none"}}}, "judge='regex' with parts a"),
        ({"parts": {"mean": {"judge": "none"}}}, "parts.mean: a part's name has letters"),
        ({"parts": {"a/b": {"judge": "none"}}}, "parts.a/b"),
        ({"parts": {"a": {"judge": "none", "weight": math.nan}}}, "a finite number"),
        ({"by_source": {"x": ["a"]}}, "by_source.x names a; parts are: none"),
        ({"parts": {"a": {"judge": "none"}}, "by_source": {"x": []}}, "by_source.x names no part"),
        ({"parts": {"a": {"judge": "none"}}, "by_source": {"x": ["a", "a"]}}, "names a part twice"),
        ({"parts": {"a": {"judge": "none"}, "b": {"judge": "none"}}, "by_source": {"x": ["a"]}}, "parts.b judges no source"),
    ],
)  # fmt: skip
def test_parts_that_cannot_act_are_refused(settings, message):
    with pytest.raises(ValidationError, match=message):
        RewardConfig.model_validate(settings)


MODELS = {"helpful": {"path": "a"}, "harmless": {"path": "b"}}


@pytest.mark.parametrize(
    ("judge", "models", "message"),
    [
        ({"name": "reward_model", "model": "kind"}, MODELS, r"judge.model='kind' is not among reward.models, which has: helpful, harm"),
        ({"name": "reward_model"}, MODELS, "judge.model='None' is not among reward.models"),
        ({"name": "reward_model", "model": "helpful"}, MODELS, "models.harmless judges nothing; give a part the judge"),
        ("exact_match", {"a/b": {"path": "a"}}, "models.a/b: a name has letters"),
    ],
)  # fmt: skip
def test_models_that_judge_nothing_and_judges_without_a_model_are_refused(judge, models, message):
    with pytest.raises(ValidationError, match=message):
        RewardConfig.model_validate({"judge": judge, "models": models})


def test_a_group_asks_the_models_of_its_recipe_each_once():
    parts = {
        "good": {"judge": {"name": "reward_model", "model": "helpful", "label": "good"}},
        "bad": {"judge": {"name": "reward_model", "model": "helpful", "label": "bad"}},
        "safe": {"judge": {"name": "actors.rewards.reward_model:reward_model", "model": "harmless"}},
        "right": {"judge": "exact_match"},
    }
    recipes = {"chat": ["good", "right", "bad", "safe"], "math": ["right"]}
    config = RewardConfig.model_validate({"parts": parts, "models": MODELS, "by_source": recipes})
    asked = [config.models_for(columns) for columns in ({"source": "chat"}, {"source": "math"}, {"source": "?"}, {})]
    assert asked == [["helpful", "harmless"], [], [], []]
    everywhere = RewardConfig.model_validate({"parts": parts, "models": MODELS})
    assert everywhere.models_for({}) == ["helpful", "harmless"]


GRADER = {"grader": {"path": "x"}}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"judge": {"name": "pairwise", "server": "grader"}}, "judge.server='grader' is not among reward.servers, which has: none"),
        ({"servers": GRADER}, "servers.grader judges nothing; give a part the judge {name: llm_judge, server: grader"),
        ({"servers": {"a b": {"path": "x"}}}, "servers.a b: a name has letters"),
        ({"servers": {"grader": {"path": "x", "gpus": 1.5}}}, "servers.grader[^;]*gpus=1.5: a model is split over whole GPUs; use 1 or 2"),
    ],
)  # fmt: skip
def test_servers_that_cannot_act_are_refused(settings, message):
    with pytest.raises(ValidationError) as raised:
        RewardConfig.model_validate(settings)
    assert re.search(message, str(raised.value).replace("\n", " "))


@pytest.mark.parametrize("judge", ["my_rewards:judge", {"name": "llm_judge", "server": "grader"}])
def test_a_server_may_be_asked_by_a_judge_of_the_users_own(judge):
    assert RewardConfig.model_validate({"servers": GRADER, "judge": judge}).servers["grader"].num_servers == 1


def test_deadlines_of_parts_add_up():
    """One waits for the other: 30 s by default, and 5."""
    parts = {"a": {"judge": "none"}, "b": {"judge": "none", "timeout_s": 5}}
    assert RewardConfig.model_validate({"parts": parts}).deadline_s == 35.0


def test_a_resumed_run_may_give_a_part_more_time_and_not_another_weight():
    run = {
        "reward": {"parts": {"tidy": {"timeout_s": 5.0, "weight": 0.1}}, "models": {"kind": {"gpus": 0, "path": "a"}}}
    }
    other = {
        "reward": {"parts": {"tidy": {"timeout_s": 9.0, "weight": 0.2}}, "models": {"kind": {"gpus": 1, "path": "b"}}}
    }
    assert differing(run, other) == {"reward.parts.tidy.weight": (0.1, 0.2), "reward.models.kind.path": ("a", "b")}


def test_a_resumed_run_may_have_more_judge_servers_and_not_another_model():
    run = {"reward": {"servers": {"grader": {"path": "x", "num_servers": 1}}}}
    other = {"reward": {"servers": {"grader": {"path": "y", "num_servers": 2}}}}
    assert differing(run, other) == {"reward.servers.grader.path": ("x", "y")}
