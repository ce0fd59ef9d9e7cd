"""Rewards per token: where they land, and what they add up to."""

from torch import tensor

from learner.algorithms.objective.token_rewards import place_rewards, to_go
from tests.unit.learner.algorithms.batches import row


def test_a_reward_lands_on_the_last_token_or_on_every_one():
    mask = tensor([[True, True, False], [False, False, False]])
    rewards = tensor([2.0, 3.0])
    assert place_rewards(rewards, loss_mask_NT=mask).tolist() == [[0, 2, 0], [0, 0, 0]]
    assert place_rewards(rewards, loss_mask_NT=mask, placement="every_token").tolist() == [[2, 2, 0], [0, 0, 0]]


def test_what_is_still_to_go_at_a_token_is_itself_and_all_behind_it():
    assert to_go(row(1.0, 0.0, 4.0)).tolist() == [[5.0, 4.0, 4.0]]
