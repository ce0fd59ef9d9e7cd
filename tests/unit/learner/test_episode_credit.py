"""Credit of episodes of several segments, in numbers worked out by hand."""

import math
from dataclasses import replace
from typing import Any

import pyarrow as pa
import pytest
import torch
from torch import Tensor, tensor
from torch.testing import assert_close

from cluster.contracts.algorithm_config import AlgorithmConfig
from cluster.contracts.errors import DataError
from cluster.contracts.schema import to_batch, with_columns
from learner.algorithms.objective import Objective
from learner.algorithms.objective.batch import BatchTensors, Prepared
from learner.assemble import Batch, assemble
from tests.unit.learner.segments import as_trajectories, segmented
from tests.unit.learner.trajectories import VOCABULARY


def assembled(*groups: pa.RecordBatch) -> Batch:
    return assemble(groups, current_version=0, vocabulary_size=VOCABULARY)


def objective(**config: Any) -> Objective:
    return Objective.from_config(AlgorithmConfig.model_validate({"corrections": (), **config}))


def prepared(batch: BatchTensors, **config: Any) -> Prepared:
    return objective(**config).prepare(batch)


def unmasked(x_NT: Tensor, batch: BatchTensors) -> list[list[float]]:
    return [row[mask].tolist() for row, mask in zip(x_NT, batch.loss_mask_NT, strict=True)]


def test_a_baseline_counts_an_episode_once_however_many_segments_it_has():
    """Rewards 1 and 0: the mean is 1/2. Of four rows it would be 3/4, and a success of three segments were worth half as much."""
    rows = segmented((1.0, [2, 1, 1]), (0.0, [2]))
    whole = assembled(rows).tensors
    assert unmasked(prepared(whole, advantage="dr_grpo").advantages_NT, whole) == [[0.5] * 4, [-0.5] * 2]
    apart = assembled(as_trajectories(rows)).tensors
    assert [row[0] for row in unmasked(prepared(apart, advantage="dr_grpo").advantages_NT, apart)] == [0.25] * 3 + [
        -0.75
    ]


def test_a_mean_per_trajectory_weighs_an_episode_as_one():
    """Two episodes of three tokens and one: 1/2 · 1/3 each, and 1/2. By rows, the episode of two segments would weigh twice the other."""
    rows = segmented((1.0, [2, 1]), (0.0, [1]))
    whole = prepared(assembled(rows).tensors, aggregation="sequence_mean")
    assert_close(whole.weights_NT, tensor([[1, 1, 1], [3, 0, 0]]).double() / 6)
    apart = prepared(assembled(as_trajectories(rows)).tensors, aggregation="sequence_mean")
    assert_close(apart.weights_NT, tensor([[1, 1], [2, 0], [2, 0]]).double() / 6)


def test_gae_runs_across_the_end_of_a_segment_and_ends_behind_the_last():
    """γ = 1, λ = 1/2, reward 1 at the end, values 0.5, 0.25 | 0.75: δ = −0.25, 0.5, 0.25, so A₃ = 0.25, A₂ = 0.5 + A₃/2, A₁ = −0.25 + A₂/2.

    Were the first segment an episode, its last token would have δ = −V = −0.25.
    """
    batch = assembled(segmented((1.0, [2, 1]))).tensors
    batch = replace(batch, values_NT=tensor([[0.5, 0.25, 0.75]]))
    made = prepared(batch, advantage={"name": "gae", "lambda_": 0.5}, value={})
    assert made.advantages_NT.tolist() == [[0.0625, 0.625, 0.25]]
    assert made.returns_NT is not None and made.returns_NT.tolist() == [[0.5625, 0.875, 1.0]]


def test_what_a_later_segment_earns_is_a_return_of_the_earlier_one():
    batch = assembled(segmented((3.0, [2, 2]), token_rewards=([0.0, 1.0], [0.0, 2.0]))).tensors
    assert prepared(batch, advantage="cumulative_returns").advantages_NT.tolist() == [[3.0, 3.0, 2.0, 2.0]]


def test_an_answer_at_the_front_of_a_segment_is_earned_by_the_segment_before():
    rows = segmented((2.0, [1, 2]), loss_mask=([True], [False, True]), token_rewards=([0.0], [2.0, 0.0]))
    assert prepared(assembled(rows).tensors, advantage="token_rewards").advantages_NT.tolist() == [[2.0, 0.0, 0.0]]


def test_rewards_of_tokens_add_up_over_all_segments():
    rows = segmented((3.0, [2, 2]), token_rewards=([0.0, 1.0], [0.0, 1.0]))
    with pytest.raises(DataError, match=r"group 00000000, sample 0\), field 'token_rewards': they sum to 2, .* is 3"):
        assembled(rows)


def later_counts_more(advantages_NT: Tensor, *, segment_index_NT: Tensor) -> Tensor:
    return advantages_NT * (1 + segment_index_NT)


def first_segment(loss_mask_NT: Tensor, *, segment_index_NT: Tensor) -> Tensor:
    return loss_mask_NT & (segment_index_NT == 0)


def test_shaping_and_filters_may_ask_for_the_segment_of_each_token():
    batch = assembled(segmented((1.0, [2, 1, 1]), (0.0, [2]))).tensors
    mine = {"advantage_shaping": [f"{__name__}:later_counts_more"], "filters": [f"{__name__}:first_segment"]}
    made = prepared(batch, advantage="dr_grpo", **mine)
    assert unmasked(made.advantages_NT, batch) == [[0.5, 0.5, 1.0, 1.5], [-0.5, -0.5]]
    assert unmasked(made.gradient_mask_NT, batch) == [[True, True, False, False], [True, True]]


def test_without_rewritten_histories_every_token_is_in_the_first_segment():
    batch = assembled(segmented((1.0, [2]), (0.0, [3]))).tensors
    made = prepared(batch, advantage="dr_grpo", advantage_shaping=[f"{__name__}:later_counts_more"])
    assert unmasked(made.advantages_NT, batch) == [[0.5] * 2, [-0.5] * 3]


def test_a_ratio_of_the_sequence_is_of_all_segments():
    """log ρ = 0.1, 0.2 | 0.6: s = e^0.3 for all three tokens. By segments it would be e^0.15 and e^0.6."""
    rows = segmented((1.0, [2, 1]), rollout_logprobs=([-1.0, -1.0], [-1.0]))
    made = objective(
        policy_loss={"name": "gspo", "epsilon_low": 0.9, "epsilon_high": 9.0},
        advantage="raw_reward",
        aggregation="sequence_mean",
        proximal="rollout",
    )
    policy_NT = tensor([[-0.9, -0.8, -0.4]], dtype=torch.float64)
    loss = made.loss(made.prepare(assembled(rows).tensors), policy_logprobs_BT=policy_NT).loss
    assert loss.item() == pytest.approx(-math.exp(0.3))


def test_an_episode_is_truncated_if_its_last_segment_is_and_as_long_as_all_of_them():
    batch = assembled(
        segmented((1.0, [2, 1]), (0.0, [1, 1]), finish_reason=("length", "stop", "stop", "length"))
    ).tensors
    assert batch.truncated_N.tolist() == [False, True]
    assert (batch.completion_lengths_N.tolist(), batch.prompt_lengths_N.tolist()) == ([3, 2], [5, 5])
    assert batch.trajectory_ids == ["00000000/0", "00000000/1"]


def test_an_episode_that_failed_or_was_aborted_in_a_segment_does_not_train_and_counts_once():
    rows = segmented(
        (1.0, [1, 1]), (0.0, [1, 1]), (0.5, [1]), finish_reason=("stop", "stop", "aborted", "stop", "stop")
    )
    failed = {"reward": [None, None, 0.0, 0.0, 0.5], "reward_status": ["error", "error", "ok", "ok", "ok"]}
    batch = assembled(with_columns(rows, **failed))
    assert (batch.num_failed, batch.num_aborted, batch.tensors.rewards_N.tolist()) == (1, 1, [0.5])


def test_an_episode_without_its_last_segment_is_refused():
    rows = segmented((1.0, [1, 1]), (0.0, [1]))
    with pytest.raises(DataError, match="group 00000000, sample 0: the episode is incomplete: it has 2 segments"):
        assembled(rows.take(pa.array([0, 2])))


def test_a_saved_trajectory_has_all_its_segments(tmp_path):
    batch = assembled(segmented((1.0, [1]), (0.0, [1, 1])))
    batch.write_rows([1], tmp_path / "saved.arrow")
    with pa.ipc.open_file(str(tmp_path / "saved.arrow")) as reader:
        assert to_batch(reader.read_all().to_pylist())["segment_index"].to_pylist() == [0, 1]
