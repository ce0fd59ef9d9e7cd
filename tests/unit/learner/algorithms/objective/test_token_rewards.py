"""Rewards per token: where they land, and what the KL takes."""

import math

from torch import tensor

from learner.algorithms.objective.token_rewards import place_rewards, subtract_kl
from tests.unit.learner.algorithms.batches import row

HOLE = tensor([[True, False, True]])


def test_a_reward_lands_on_the_last_token_or_on_every_one():
    mask = tensor([[True, True, False], [False, False, False]])
    rewards = tensor([2.0, 3.0])
    assert place_rewards(rewards, loss_mask_NT=mask).tolist() == [[0, 2, 0], [0, 0, 0]]
    assert place_rewards(rewards, loss_mask_NT=mask, placement="every_token").tolist() == [[2, 2, 0], [0, 0, 0]]


def test_kl_is_taken_off_the_reward_where_unmasked():
    got = subtract_kl(row(1.0, 1.0, 1.0), kl_NT=row(2.0, math.nan, 0.0), coefficient=0.5, loss_mask_NT=HOLE)
    assert got.tolist() == [[0.0, 0.0, 1.0]]
