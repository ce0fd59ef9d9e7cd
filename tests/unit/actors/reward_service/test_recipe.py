"""Which parts judge a prompt, and what their verdicts sum to, by hand."""

from typing import Any

import pytest

from actors.reward_service.recipe import Part, names_for, parts_of, reward_of
from cluster.contracts.errors import DataError
from cluster.contracts.reward_config import RewardConfig
from cluster.contracts.types import Reward, RewardStatus

LATE = Reward(value=None, status=RewardStatus.TIMEOUT, message="no reward within 1 s")
BROKEN = Reward(value=None, status=RewardStatus.ERROR, message="ValueError: no opinion")


def config(**settings: Any) -> RewardConfig:
    return RewardConfig.model_validate(settings)


def two_parts(**style: Any) -> list[Part]:
    return parts_of(
        config(parts={"right": {"judge": "exact_match", "weight": 2.0}, "style": {"judge": "exact_match", **style}})
    )


def test_the_components_of_a_part_bear_its_name():
    """2 x 0.5 + 1 x -0.25."""
    right, style = two_parts()
    verdicts = {right: [Reward(value=0.5, components={"digits": 3.0})], style: [Reward(value=-0.25)]}
    components: dict[str, float | None] = {"right": 0.5, "right/digits": 3.0, "style": -0.25}
    assert reward_of(verdicts, size=1) == [Reward(value=0.75, components=components)]


def test_a_part_that_does_not_judge_a_prompt_is_no_failure_of_it():
    """A message would count as a part that left its recipe."""
    right, style = two_parts()
    (reward,) = reward_of({right: [Reward(value=1.0)], style: None}, size=1)
    assert reward == Reward(value=2.0, components={"style": None, "right": 1.0})


def test_a_trajectory_whose_parts_fail_has_the_first_ones_status_and_all_messages():
    right, style = two_parts()
    rewards = reward_of({right: [LATE, Reward(value=1.0)], style: [BROKEN, Reward(value=0.5)]}, size=2)
    message = "judge:right no reward within 1 s; judge:style ValueError: no opinion"
    components: dict[str, float | None] = {"right": None, "style": None}
    assert rewards == [
        Reward(value=None, status=RewardStatus.TIMEOUT, message=message, components=components),
        Reward(value=2.5, components={"right": 1.0, "style": 0.5}),
    ]


def test_a_group_that_a_part_left_and_another_does_not_judge_has_no_reward():
    right, style = two_parts(on_failure="part")
    why = (
        "judge:right left the recipe: no verdict on any trajectory; judge:style left the recipe: ValueError: no opinion"
    )
    rewards = reward_of({right: None, style: [Reward(value=1.0), BROKEN]}, size=2)
    assert len(rewards) == 2
    for reward in rewards:
        assert reward.value is None and reward.message is not None and reward.message.endswith(why)


@pytest.mark.parametrize(("own", "limits"), [({}, (30.0, 8)), ({"timeout_s": 2.0, "max_concurrency": 3}, (2.0, 3))])
def test_a_part_has_the_limits_of_the_reward_or_its_own(own, limits):
    (part,) = parts_of(config(timeout_s=30.0, max_concurrency=8, parts={"right": {"judge": "exact_match", **own}}))
    assert (part.timeout_s, part.max_concurrency) == limits


@pytest.mark.parametrize("source", ["7", 7])
def test_a_source_may_be_a_number(source):
    of = config(parts={"right": {"judge": "exact_match"}}, by_source={"7": ["right"]}, source_column="level")
    assert [*names_for(of, {"level": source})] == ["right"]


@pytest.mark.parametrize("columns", [{}, {"level": None}])
def test_a_prompt_without_a_source_has_no_recipe_even_if_one_has_that_name(columns):
    of = config(parts={"right": {"judge": "exact_match"}}, by_source={"None": ["right"]}, source_column="level")
    with pytest.raises(DataError, match=r"no entry for the source None \(column 'level'\); it has: None"):
        names_for(of, columns)


def test_a_single_part_with_a_name_is_weighed_and_is_a_component():
    (part,) = parts_of(config(parts={"right": {"judge": "exact_match", "weight": 3.0}}))
    assert reward_of({part: [Reward(value=0.5)]}, size=1) == [Reward(value=1.5, components={"right": 0.5})]


def test_a_judge_without_a_name_gives_the_reward_itself():
    (part,) = parts_of(config(judge="exact_match"))
    judged = [Reward(value=0.5, components={"digits": 3.0}), BROKEN]
    assert reward_of({part: judged}, size=2) == judged


def test_a_weighted_part_that_overflows_is_a_failed_reward():
    """3 x 1e308 is infinite."""
    (part,) = parts_of(config(parts={"right": {"judge": "exact_match", "weight": 3.0}}))
    (reward,) = reward_of({part: [Reward(value=1e308)]}, size=1)
    assert (reward.value, reward.status) == (None, RewardStatus.ERROR) and "is not finite: inf" in str(reward.message)
