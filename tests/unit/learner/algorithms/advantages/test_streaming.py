"""Streaming groups in sentences."""

import functools
import random

import pytest
import torch
from torch import tensor
from torch.testing import assert_close

from learner.algorithms.advantages.candidates import choose
from learner.algorithms.advantages.group import grpo, mean_centered
from learner.algorithms.advantages.streaming import Arrival, StreamingGroups


def arrival(group: str, index: int, *rewards: float, has_failed: bool = False) -> Arrival:
    return Arrival(
        group_id=group, sample_index=index, trajectory_id=f"{group}{index}", step_rewards=rewards, has_failed=has_failed
    )


def test_a_group_leaves_when_it_is_complete_and_not_before():
    groups = StreamingGroups(group_size=2, advantage=mean_centered)
    assert groups.add(arrival("a", 1, 3.0)) is None
    assert groups.add(arrival("b", 0, 0.0)) is None
    released = groups.add(arrival("a", 0, 1.0))
    assert [a.sample_index for a in released.arrivals] == [0, 1]
    assert [values.tolist() for values in released.step_advantages] == [[-1.0], [1.0]]
    assert groups.waiting == {"b": 1}


def test_any_order_of_arrival_gives_the_numbers_of_the_batch():
    rewards = {(group, index): torch.randn(()).item() for group in "abc" for index in range(4)}
    arrivals = [arrival(group, index, reward) for (group, index), reward in rewards.items()]
    random.Random(0).shuffle(arrivals)
    groups = StreamingGroups(group_size=4)
    released = [group for item in arrivals if (group := groups.add(item))]
    assert len(released) == 3
    for group in released:
        want = grpo(tensor([rewards[group.group_id, index] for index in range(4)]))
        assert torch.cat(group.step_advantages).tolist() == want.tolist()


def test_a_failed_trajectory_completes_its_group_without_being_part_of_it():
    groups = StreamingGroups(group_size=3, advantage=mean_centered)
    groups.add(arrival("a", 0, 1.0))
    groups.add(arrival("a", 1, has_failed=True))
    released = groups.add(arrival("a", 2, 3.0))
    assert [a.sample_index for a in released.arrivals] == [0, 2]
    assert torch.cat(released.step_advantages).tolist() == [-1.0, 1.0]


def test_a_group_with_too_little_left_is_dropped():
    groups = StreamingGroups(group_size=2)
    groups.add(arrival("a", 0, 1.0))
    assert groups.add(arrival("a", 1, has_failed=True)) is None
    assert groups.num_dropped == 1


def test_a_group_on_its_bound_is_outside():
    groups = StreamingGroups(group_size=2, return_bounds=(0.0, 1.0))
    groups.add(arrival("a", 0, 1.0))
    assert groups.add(arrival("a", 1, 1.0)) is None
    assert groups.num_dropped == 1 and groups.waiting == {}


def test_a_hard_group_waits_for_a_success_and_trains_on_it():
    groups = StreamingGroups(group_size=2, max_candidates=4, return_bounds=(0.1, 0.9), advantage=mean_centered)
    assert [groups.add(arrival("a", index, 0.0)) for index in range(3)] == [None, None, None]
    released = groups.add(arrival("a", 3, 1.0))
    assert [a.sample_index for a in released.arrivals] == [0, 3]
    assert torch.cat(released.step_advantages).tolist() == [-0.5, 0.5]
    assert groups.waiting == {} and groups.num_dropped == 0


def test_a_group_without_a_choice_is_dropped_after_its_last_candidate():
    groups = StreamingGroups(group_size=2, max_candidates=3, return_bounds=(0.1, 0.9))
    assert [groups.add(arrival("a", index, 0.0)) for index in range(3)] == [None, None, None]
    assert groups.num_dropped == 1 and groups.waiting == {}


def test_candidates_are_chosen_by_coming_by_order_or_by_their_mean():
    returns = [0.0, 4.0, 1.0, 2.0, 3.0]
    assert choose(returns, group_size=2, strategy="first") == [0, 1]
    assert choose(returns, group_size=3, strategy="spread") == [0, 3, 1]
    assert choose(returns, group_size=1, strategy="spread") == [3]
    assert choose(returns, group_size=2, return_bounds=(1.5, 2.5)) == [
        0,
        1,
    ]  # mean 2 as 2 and 4 have, and the largest range
    assert choose(returns, group_size=2, return_bounds=(3.5, 9.0)) is None
    with pytest.raises(ValueError, match="strategy 'spread'"):
        choose([0.0] * 40, group_size=20, return_bounds=(0.0, 1.0))


def test_incomplete_groups_are_dropped_at_the_end_or_released_as_told():
    for rule, num_released in (("drop", 0), ("release", 1)):
        groups = StreamingGroups(group_size=3, incomplete=rule)
        for item in (arrival("a", 0, 1.0), arrival("a", 1, 2.0), arrival("b", 0, 1.0)):
            groups.add(item)
        assert len(groups.close()) == num_released
        assert groups.waiting == {} and groups.num_dropped == 2 - num_released


def test_steps_share_their_trajectory_s_advantage_or_have_their_own():
    trajectories = StreamingGroups(group_size=2, advantage=mean_centered)
    trajectories.add(arrival("a", 0, 0.0, 2.0))
    released = trajectories.add(arrival("a", 1, 0.0))
    assert [values.tolist() for values in released.step_advantages] == [[1.0, 1.0], [-1.0]]
    steps = StreamingGroups(group_size=2, advantage=mean_centered, over="steps")
    steps.add(arrival("a", 0, 0.0, 3.0))
    released = steps.add(arrival("a", 1, 0.0))
    assert [values.tolist() for values in released.step_advantages] == [[-1.0, 2.0], [-1.0]]


@pytest.mark.parametrize(("kind", "want"), [("sum", 3.0), ("mean", 1.5), ("max", 2.0)])
def test_a_trajectory_s_return_is_what_it_is_told_to_be(kind, want):
    groups = StreamingGroups(group_size=2, advantage=lambda returns_G: returns_G, trajectory_return=kind)
    groups.add(arrival("a", 0, 1.0, 2.0))
    released = groups.add(arrival("a", 1, 0.0))
    assert_close(released.step_advantages[0][0].item(), want)


def test_groups_too_easy_or_too_hard_are_dropped():
    groups = StreamingGroups(group_size=2, return_bounds=(0.1, 0.9))
    groups.add(arrival("a", 0, 1.0))
    assert groups.add(arrival("a", 1, 1.0)) is None
    groups.add(arrival("b", 0, 1.0))
    assert groups.add(arrival("b", 1, 0.0)) is not None


def test_a_sliding_window_releases_again_as_torchrl_once_did():
    groups = StreamingGroups(group_size=2, advantage=functools.partial(grpo, epsilon=1e-6), after_release="slide")
    released = [groups.add(arrival("a", index, float(index))) for index in range(4)]
    assert [None if group is None else len(group.arrivals) for group in released] == [None, 2, 2, 2]


def test_a_trajectory_may_not_arrive_twice_nor_without_a_reward():
    groups = StreamingGroups(group_size=3)
    groups.add(arrival("a", 0, 1.0))
    with pytest.raises(ValueError, match="trajectory a0 of group a arrived twice"):
        groups.add(arrival("a", 0, 1.0))
    with pytest.raises(ValueError, match="trajectory a1 of group a has no step_rewards"):
        groups.add(arrival("a", 1))
