"""Which groups train: the cluster, which has a group's summary, and the learner, which has the whole step, say the same."""

import random

import pytest
from torch import Tensor

from cluster.contracts.algorithm_config import AlgorithmConfig
from cluster.contracts.errors import ConfigError, DataError
from cluster.contracts.schema import summarize
from learner.algorithms.objective import Objective
from learner.assemble import assemble
from tests.unit.learner.algorithms import options
from tests.unit.learner.trajectories import VOCABULARY, make_group

OVERLONG = {"name": "overlong_penalty", "max_length": 4, "cache": 2}
"""Takes half a point from a completion of 3 tokens, and a whole one from 4."""


def make(**fields) -> Objective:
    return Objective.from_config(AlgorithmConfig.model_validate(fields))


def better_than_half(rewards_G: Tensor) -> bool:
    return bool(rewards_G.mean() > 0.5)


def centred_in_the_batch(rewards_N: Tensor) -> Tensor:
    return rewards_N - rewards_N.mean()


def spread_in_both(rewards_G: Tensor, *, rewards_N: Tensor) -> bool:
    return bool(rewards_G.std() > rewards_N.std())


def verdicts(objective: Objective, *groups) -> tuple[list[bool], list[bool]]:
    """Of each group, whether the cluster keeps it, and whether the learner does."""
    batch = assemble(groups, current_version=0, vocabulary_size=VOCABULARY)
    prepared = objective.prepare(batch.tensors)
    leaders = [batch.tensors.group_ids.index(group["group_id"][0].as_py()) for group in groups]
    in_cluster = [objective.dropped_by(summarize(group)) is None for group in groups]
    return in_cluster, [bool(prepared.is_kept_N[row]) for row in leaders]


def test_a_group_that_shaping_makes_different_is_kept_by_cluster_and_learner_and_one_that_it_makes_equal_by_none():
    objective = make(filters=["zero_variance"], reward_shaping=[OVERLONG])
    different = make_group(0, rewards=(1.0, 1.0), lengths=(2, 4))  # 1 and 0
    equal = make_group(1, rewards=(0.5, 1.0), lengths=(2, 3))  # 0.5 and 0.5
    assert verdicts(objective, different, equal) == ([True, False], [True, False])


def test_steps_that_need_the_whole_batch_and_those_behind_them_do_not_move_what_group_filters_see():
    whole = f"{__name__}:centred_in_the_batch"
    objective = make(filters=["zero_variance"], reward_shaping=[whole, OVERLONG])
    groups = make_group(0, rewards=(1.0, 1.0), lengths=(2, 4)), make_group(1, rewards=(0.5, 1.0), lengths=(2, 3))
    assert verdicts(objective, *groups) == ([False, True], [False, True])


def test_without_a_filter_every_group_trains_and_a_function_of_the_users_may_be_one():
    groups = make_group(0, rewards=(1.0, 1.0)), make_group(1, rewards=(0.0, 1.0))
    assert verdicts(make(), *groups) == ([True, True], [True, True])
    own = make(filters=[f"{__name__}:better_than_half"])
    assert [own.dropped_by(summarize(each)) for each in groups] == [None, f"{__name__}:better_than_half"]
    assert verdicts(own, groups[0]) == ([True], [True])


def test_failed_rewards_are_not_part_of_the_group_that_is_asked_for():
    group = make_group(0, rewards=(1.0, None, 1.0))
    other = make_group(1, rewards=(0.0, None, 1.0))
    assert verdicts(make(filters=["zero_variance"]), group, other) == ([False, True], [False, True])


def test_a_group_whose_components_differ_is_kept_although_their_sum_does_not():
    components = [[("format", 1.0), ("right", 0.0)], [("format", 0.0), ("right", 1.0)]]
    differs = make_group(0, rewards=(1.0, 1.0), reward_components=components)
    equal = make_group(1, rewards=(1.0, 1.0), reward_components=[components[0]] * 2)
    objective = make(advantage="gdpo", filters=["zero_variance_components"])
    assert verdicts(objective, differs, equal) == ([True, False], [True, False])


def right_differs(reward_components_GK: Tensor, *, reward_component_names: tuple[str, ...]) -> bool:
    right_G = reward_components_GK[:, reward_component_names.index("right")]
    return bool(right_G.max() > right_G.min())


def test_a_group_filter_finds_a_component_by_its_name_whatever_others_the_groups_of_a_step_have():
    first = make_group(0, rewards=(1.0, 0.0), reward_components=[[("right", 1.0)], [("right", 0.0)]])
    second = make_group(1, rewards=(1.0, 0.0), reward_components=[[("format", 1.0), ("right", x)] for x in (1.0, 0.0)])
    objective = make(filters=[f"{__name__}:right_differs"])
    assert verdicts(objective, first, second) == ([True, True], [True, True])


_CALLS: list[Tensor] = []


def only_once(rewards_G: Tensor) -> bool:
    _CALLS.append(rewards_G)
    return len(_CALLS) % 2 == 1


def test_a_filter_of_the_users_that_drops_in_the_learner_a_group_that_it_kept_in_the_cluster_is_refused():
    """Seen in review: a filter by random numbers left the learner half of the groups that the cluster kept, and each rank another half."""
    _CALLS.clear()
    objective = make(filters=[f"{__name__}:only_once"])
    group = make_group(0, rewards=(1.0, 0.0))
    batch = assemble([group], current_version=0, vocabulary_size=VOCABULARY)
    assert objective.dropped_by(summarize(group)) is None
    with pytest.raises(
        DataError, match=r"group 00000000: algorithm.filters\[0\]=.*only_once' kept it in the cluster, and drops"
    ):
        objective.prepare(batch.tensors)


def random_half(rewards_G: Tensor) -> bool:
    return random.random() < 0.5


def test_the_check_refuses_a_filter_that_keeps_and_drops_the_same_group():
    random.seed(0)
    with pytest.raises(ConfigError, match=r"random_half' keeps and drops the same group; .* without random numbers"):
        make(filters=[f"{__name__}:random_half"]).check_parts(4)


def test_bounds_drop_groups_that_are_too_easy_or_too_hard_and_those_on_a_bound():
    groups = [make_group(index, rewards=rewards) for index, rewards in enumerate([(0.0, 0.0), (0.0, 1.0), (1.0, 1.0)])]
    objective = make(filters=[{"name": "return_bounds", "low": 0.0, "high": 1.0}])
    assert verdicts(objective, *groups) == ([False, True, False], [False, True, False])


def test_the_filter_that_drops_a_group_is_told_by_its_name():
    objective = make(filters=[{"name": "return_bounds", "low": 0.2, "high": 2.0}, "zero_variance"])
    dropped_by = [objective.dropped_by(summarize(make_group(0, rewards=each))) for each in ((0.0, 0.0), (1.0, 1.0))]
    assert dropped_by == ["return_bounds", "zero_variance"]


def test_a_filter_that_needs_the_whole_batch_runs_in_the_learner_alone():
    objective = make(filters=["overlong_mask"])
    truncated = make_group(0, rewards=(1.0, 0.0), finish_reason=["length"] * 2)
    assert verdicts(objective, truncated, make_group(1, rewards=(1.0, 0.0))) == ([True, True], [False, True])


def test_a_filter_that_drops_every_group_of_one_is_refused():
    bounds = {"name": "return_bounds", "low": 0.0, "high": 1.0}
    make(advantage="raw_reward", filters=[bounds]).check_group_size(1, num_candidates=1)
    with pytest.raises(
        ConfigError, match=r"filters\[1\]='zero_variance' with buffer.trajectories_per_group=1 drops every"
    ):
        make(advantage="raw_reward", filters=[bounds, "zero_variance"]).check_group_size(1, num_candidates=1)


def test_a_filter_by_rewards_on_another_scale_takes_groups_of_one():
    marks = {"name": "return_bounds", "low": 2.0, "high": 8.0}
    make(advantage="raw_reward", filters=[marks]).check_group_size(1, num_candidates=1)


def per_token(rewards_G: Tensor, *, completion_lengths_G: Tensor, truncated_G: Tensor) -> Tensor:
    return (rewards_G / completion_lengths_G).where(~truncated_G, -1.0)


def shortest(rewards_G: Tensor, *, group_size: int, completion_lengths_G: Tensor) -> Tensor:
    return completion_lengths_G.argsort()[:group_size]


def of_advantages(advantages_NT: Tensor) -> Tensor:
    return advantages_NT != 0


def weighed_by_advantages(loss_mask_NT: Tensor, *, advantages_NT: Tensor) -> Tensor:
    return loss_mask_NT * advantages_NT


def of_rows_and_batch(proximal_logprobs_BT: Tensor, *, rollout_logprobs_NT: Tensor) -> Tensor:
    return proximal_logprobs_BT - rollout_logprobs_NT


def of_the_present_policy(rewards_N: Tensor, *, policy_logprobs_BT: Tensor) -> Tensor:
    return rewards_N


def of_a_group_and_the_batch(rewards_G: Tensor, *, completion_lengths_N: Tensor) -> Tensor:
    return rewards_G


def of_no_column(advantages_NT: Tensor, *, columns: dict[str, Tensor]) -> Tensor:
    return advantages_NT


def test_an_advantage_of_a_group_gets_what_it_asks_for_of_its_trajectories_in_one_order():
    group = make_group(0, rewards=(6.0, 0.0, 4.0), lengths=(2, 1, 4), finish_reason=["stop", "length", "stop"])
    batch = assemble([group], current_version=0, vocabulary_size=VOCABULARY).tensors
    objective = make(advantage=f"{__name__}:per_token")
    objective.check_group_size(3, num_candidates=3)
    assert objective.prepare(batch).advantages_NT[:, 0].tolist() == [3.0, -1.0, 1.0]


def test_a_selection_gets_what_it_asks_for_of_its_candidates():
    objective = make(selection=f"{__name__}:shortest")
    objective.check_group_size(2, num_candidates=4)
    group = make_group(0, rewards=(1.0, None, 0.0, 1.0), lengths=(3, 1, 2, 1))
    assert objective.chosen(summarize(group), group_size=2) == [2, 3]


@pytest.mark.parametrize(
    ("field", "name", "message"),
    [
        (
            "filters",
            "spread_in_both",
            "asks for rewards_N, .* first parameter, rewards_G, it may ask for: completion_lengths_G, r",
        ),
        ("filters", "of_advantages", "asks for advantages_NT, which it cannot have"),
        ("aggregation", "weighed_by_advantages", "asks for advantages_NT, which it cannot have"),
        ("corrections", "of_rows_and_batch", "asks for rollout_logprobs_NT, .* it may ask for: advantages_BT, "),
        ("reward_shaping", "of_the_present_policy", "asks for policy_logprobs_BT, which it cannot have"),
        ("advantage", "of_the_present_policy", "asks for policy_logprobs_BT, which it cannot have"),
        (
            "advantage",
            "of_a_group_and_the_batch",
            "asks for completion_lengths_N, .* it may ask for: completion_lengths_G, r",
        ),
        ("advantage_shaping", "of_no_column", "asks for columns, and has no parameter 'column' that names the one"),
    ],
)
def test_what_a_function_cannot_have_is_refused_as_the_configuration_is_read(field, name, message):
    section = options.with_set({"proximal": "recompute"}, field, f"{__name__}:{name}")
    with pytest.raises(ConfigError, match=rf"{field}.*='{__name__}:{name}' {message}"):
        make(**section)


def test_an_advantage_that_asks_for_more_than_rewards_is_refused_where_returns_stream():
    with pytest.raises(ConfigError, match=r"streaming with advantage='.*per_token': .* one group's rewards alone"):
        make(advantage=f"{__name__}:per_token", streaming={})
