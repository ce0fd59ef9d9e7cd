"""What peers compute and a run does not: in sentences, with numbers worked out by hand."""

import math

import pytest
import torch
from torch import Tensor, tensor
from torch.testing import assert_close

from tests.golden import logprobs, mismatch, peer_parts, sequences

BOTH = tensor([[True, True]])


def row(*values: float) -> Tensor:
    return tensor([values], dtype=torch.float64)


def test_the_absolute_log_ratio():
    given = {"other_logprobs_BT": row(-1.0 - math.log(2), 0.0), "loss_mask_BT": BOTH}
    assert_close(peer_parts.absolute(row(-1.0, -1.0), **given), row(math.log(2), 1.0))


def test_a_masked_variance_has_a_ddof_and_is_zero_for_nothing():
    given = {"loss_mask_BT": tensor([[True, True, False]])}
    assert_close(peer_parts.masked_var(row(1.0, 3.0, 9.0), **given), tensor(2.0).double())
    assert_close(peer_parts.masked_var(row(1.0, 3.0, 9.0), **given, ddof=0), tensor(1.0).double())
    assert peer_parts.masked_var(row(math.nan, 1.0), loss_mask_BT=~BOTH).item() == 0


def test_remax_subtracts_what_the_greedy_answer_earned():
    result = peer_parts.remax(
        tensor([[2.0, 1.0]]), greedy_rewards_N=tensor([0.5]), loss_mask_NT=tensor([[True, False]])
    )
    assert result.tolist() == [[1.5, 0.0]]


def test_the_optimal_token_baseline_leaves_the_last_one_standing():
    returns = tensor([[1.0, 1.0], [0.0, 0.0]])
    mask = tensor([[True, True], [True, False]])
    result = peer_parts.optimal_token_baseline(
        returns,
        logprobs_NT=torch.full((2, 2), 0.5).log(),
        sum_squared_probs_NT=torch.full((2, 2), 0.5),
        loss_mask_NT=mask,
        group_index_N=tensor([0, 0]),
    )
    assert_close(result, tensor([[0.5, 1.0], [-0.5, 0.0]]))


def test_none_leaves_losses_as_they_are():
    assert peer_parts.none(row(1.0, math.nan), loss_mask_NT=tensor([[True, False]])).tolist() == [[1.0, 0.0]]


def test_a_straight_through_kl_has_one_value_and_another_gradient():
    policy = row(-1.0).requires_grad_()
    peer_parts.straight_through(policy * 0 + 5.0, gradient_BT=3 * policy).sum().backward()
    assert policy.grad.item() == 3


def test_log_probs_and_entropy_of_even_logits():
    logits = torch.zeros(1, 2, 4)
    ids = tensor([[1, 3]])
    assert_close(logprobs.token_logprobs(logits, token_ids_BT=ids), torch.full((1, 2), -math.log(4)))
    assert_close(logprobs.entropies(logits), torch.full((1, 2), math.log(4)))
    assert_close(logprobs.next_token_logprobs(logits, token_ids_BT=ids), tensor([[0.0, -math.log(4)]]))


def test_a_temperature_divides_logits():
    logits = tensor([[[0.0, math.log(9.0)]]])
    assert_close(
        logprobs.token_logprobs(logits, token_ids_BT=tensor([[1]]), temperature=2.0), tensor([[math.log(0.75)]])
    )


def test_a_forbidden_token_has_no_entropy():
    assert_close(logprobs.entropies(tensor([[[0.0, 0.0, -math.inf]]])), tensor([[math.log(2)]]))


def test_log_probs_by_role():
    of_all, assistant = tensor([[-1.0, -2.0, -3.0]]), tensor([[False, True, True]])
    assert logprobs.of_role(of_all, role_mask_BT=assistant).tolist() == [[0.0, -2.0, -3.0]]
    assert logprobs.of_role_only(of_all[0], role_mask_T=assistant[0]).tolist() == [-2.0, -3.0]
    assert logprobs.sequence_logprobs(of_all, loss_mask_BT=assistant, average=True).tolist() == [-2.5]
    assert logprobs.completion_logits(torch.zeros(1, 5, 2), prompt_length=3).shape == (1, 2, 2)


def test_sequences_end_at_their_first_stop_token():
    tokens, after = sequences.truncate_at_stop(tensor([[5, 2, 7], [5, 6, 7]]), stop_tokens=tensor([2]), fill=0)
    assert tokens.tolist() == [[5, 2, 0], [5, 6, 7]]
    assert sequences.penalty_mask(after, lengths_B=tensor([2, 3])).tolist() == [False, True]
    assert sequences.penalty_mask(after, lengths_B=tensor([2, 3]), penalise_no_stop=False, min_length=3).tolist() == [
        True,
        False,
    ]


def test_off_policy_metrics_of_a_policy_that_did_not_move():
    found = mismatch.off_policy_metrics(row(-1.0, -1.0), rollout_logprobs_BT=row(-1.0, -1.0), loss_mask_BT=BOTH)
    assert found["k3"].item() == 0 and found["chi2_token"].item() == 0
    assert found["learner_perplexity"].item() == pytest.approx(math.e)
