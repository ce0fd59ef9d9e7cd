from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import tensor
from torch.testing import assert_close

from cluster.contracts.algorithm_config import AlgorithmConfig
from cluster.contracts.errors import DataError
from learner.algorithms.objective import Objective
from learner.assemble import assemble
from tests.unit.learner.segments import segmented
from tests.unit.learner.trajectories import VOCABULARY, make_group


def _assemble(*groups, version: int = 0):
    return assemble(groups, current_version=version, vocabulary_size=VOCABULARY)


def test_failed_rewards_do_not_train_and_their_group_goes_on_without_them():
    batch = _assemble(make_group(0, rewards=(1.0, None, 0.25)), make_group(1, rewards=(None, 0.5, 0.0)))
    assert batch.tensors.rewards_N.tolist() == [1.0, 0.25, 0.5, 0.0]
    assert batch.tensors.group_index_N.tolist() == [0, 0, 1, 1]
    assert batch.tensors.trajectory_ids == ["00000000/0", "00000000/2", "00000001/1", "00000001/2"]
    assert batch.tensors.prompt_ids == ["prompt-0"] * 2 + ["prompt-1"] * 2
    assert batch.tensors.prompt_lengths_N.tolist() == [5] * 4
    assert (batch.num_failed, batch.num_aborted, batch.trajectories.num_rows) == (2, 0, 4)


def test_a_reward_that_came_too_late_or_was_never_asked_for_does_not_train():
    group = make_group(0, rewards=(1.0, None, None, 0.5), reward_status=("ok", "timeout", None, "ok"))
    batch = _assemble(group)
    assert (batch.tensors.rewards_N.tolist(), batch.num_failed) == ([1.0, 0.5], 2)


def test_aborted_trajectories_do_not_train():
    batch = _assemble(make_group(0, rewards=(1.0, 0.0), finish_reason=("aborted", "length")))
    assert batch.tensors.rewards_N.tolist() == [0.0] and batch.num_aborted == 1
    assert batch.tensors.truncated_N.tolist() == [True]


@pytest.mark.parametrize("reasons", [("aborted", "length"), ("stop", "aborted")])
def test_an_episode_of_which_any_segment_was_aborted_does_not_train(reasons):
    batch = _assemble(segmented((1.0, [2, 1]), (0.5, [1, 1]), finish_reason=(*reasons, "stop", "stop")))
    assert (batch.tensors.rewards_N.tolist(), batch.num_aborted) == ([0.5], 1)
    assert (batch.episodes, batch.trajectories.num_rows) == ([range(2)], 2)


def test_a_step_without_any_reward_is_an_error():
    with pytest.raises(DataError, match="2 rewards failed"):
        _assemble(make_group(0, rewards=(None, None)))


def test_tensors_are_padded_with_false_and_zero():
    group = make_group(0)
    batch = _assemble(group)
    for row, length in enumerate(batch.tensors.completion_lengths_N.tolist()):
        assert batch.tensors.loss_mask_NT[row].tolist() == [
            i < length for i in range(batch.tensors.loss_mask_NT.shape[1])
        ]
        assert batch.rows[row].completion.tolist() == group["completion_token_ids"][row].as_py()
        assert batch.tensors.rollout_logprobs_NT[row, :length].tolist() == group["rollout_logprobs"][row].as_py()


@pytest.mark.parametrize("field", ["prompt_token_ids", "completion_token_ids"])
@pytest.mark.parametrize("token", [VOCABULARY, -1])
def test_a_token_outside_the_vocabulary_is_named(field: str, token: int):
    group = make_group(0, rewards=(1.0, 0.0), lengths=(1, 1), **{field: ([VOCABULARY - 1], [token])})
    with pytest.raises(DataError, match=rf"row 1 \(group 00000000, sample 1\), field '{field}': token {token} "):
        _assemble(group)


def test_tokens_of_the_future_are_refused_unless_an_environment_wrote_them():
    with pytest.raises(DataError, match="version 3, but the learner is at 2"):
        _assemble(make_group(0, version=3), version=2)
    written = {"loss_mask": ([True, False],), "policy_versions": ([2, 3],)}
    batch = _assemble(make_group(0, rewards=(1.0,), lengths=(2,), **written), version=2)
    assert batch.tensors.lags_NT.tolist() == [[0, 0]]


def test_a_component_that_a_trajectory_lacks_is_nan_and_the_others_keep_theirs():
    components = ([("a", 1.0), ("b", 2.0)], [("b", 3.0)], [("b", None), ("a", 4.0)])
    batch = _assemble(make_group(0, rewards=(1.0, 0.0, 0.5), reward_components=components))
    nan = torch.nan
    assert batch.tensors.reward_component_names == ("a", "b")
    assert_close(batch.tensors.reward_components_NK, tensor([[1, 2], [nan, 3], [4, nan]]).double(), equal_nan=True)


def test_columns_of_prompts_are_numbers_that_every_prompt_has():
    group = make_group(0, rewards=(1.0, 0.0), info=('{"difficulty": 2, "answer": "a"}', '{"difficulty": 0.5}'))
    given = {"current_version": 0, "vocabulary_size": VOCABULARY}
    assert assemble([group], **given, columns=["difficulty"]).tensors.columns["difficulty"].tolist() == [2.0, 0.5]
    with pytest.raises(DataError, match=r"row 1 \(group 00000000, sample 1\): column 'answer' of its prompt is None"):
        assemble([make_group(0, rewards=(1.0, 0.0), info=('{"answer": 1}', "{}"))], **given, columns=["answer"])


@pytest.mark.parametrize(
    ("number", "found"),
    [(f"1{'0' * 30}", 1e30), (f"1{'0' * 400}", None), ("NaN", None), ("-Infinity", None), ('"2"', None)],
)
def test_a_column_is_a_number_that_float64_has(number: str, found: float | None):
    """JSON has integers of any size."""
    group = make_group(0, rewards=(1.0,), info=(f'{{"difficulty": {number}}}',))
    given: Any = {"current_version": 0, "vocabulary_size": VOCABULARY, "columns": ["difficulty"]}
    if found is not None:
        assert assemble([group], **given).tensors.columns["difficulty"].tolist() == [found]
        return
    with pytest.raises(DataError, match=r"column 'difficulty' of its prompt is .*; give every prompt a number there"):
        assemble([group], **given)


def test_rewards_of_tokens_that_do_not_add_up_to_the_reward_are_refused():
    group = make_group(0, rewards=(1.0, 0.7501), lengths=(2, 2), token_rewards=([0.25, 0.75], [0.25, 0.5]))
    said = r"row 1 \(group 00000000, sample 1\), field 'token_rewards': they sum to 0.75, .* reward is 0.7501"
    with pytest.raises(DataError, match=said):
        _assemble(group)


def test_rewards_of_tokens_add_up_to_float32_rounding():
    """Three times 0.1 is 0.3 in neither type; what adds up to a reward of nothing leaves 7e-9."""
    group = make_group(0, rewards=(0.3, 0.0), lengths=(3, 3), token_rewards=([0.1, 0.1, 0.1], [0.1, 0.2, -0.3]))
    assert _assemble(group).tensors.rewards_N.tolist() == [0.3, 0.0]


def test_a_trajectory_without_rewards_of_tokens_trains_beside_one_that_has_them():
    group = make_group(0, rewards=(1.0, 0.5), lengths=(2, 3), token_rewards=([0.25, 0.75], None))
    objective = Objective.from_config(AlgorithmConfig(advantage="cumulative_returns"))
    prepared = objective.prepare(_assemble(group).tensors)
    assert prepared.batch.token_rewards_NT.tolist() == [[0.25, 0.75, 0.0], [0.0, 0.0, 0.5]]
    assert prepared.advantages_NT.tolist() == [[1.0, 0.75, 0.0], [0.5, 0.5, 0.5]]


def test_an_episode_that_failed_before_its_first_token_does_not_train():
    batch = _assemble(make_group(0, rewards=(1.0, None, 0.5), lengths=(2, 0, 3)))
    assert (batch.num_failed, len(batch.rows), batch.tensors.rewards_N.tolist()) == (1, 2, [1.0, 0.5])


def _with_experts(num_experts: int, *recorded: bytes | None):
    """Of a model with two layers and one expert a token, a trajectory of one prompt token and two of the completion for each record."""
    routing: Any = SimpleNamespace(num_layers=2, num_experts_per_token=1, num_experts=num_experts)
    count = len(recorded)
    group = make_group(0, rewards=(0.0,) * count, lengths=(2,) * count, prompt_length=1, routed_experts=recorded)
    return assemble([group], current_version=0, vocabulary_size=VOCABULARY, routing=routing)


def test_recorded_experts_come_as_positions_by_layers():
    batch = _with_experts(256, bytes([0, 255, 7, 8]), None)
    assert batch.rows[0].segments[0].experts.tolist() == [[[0], [255]], [[7], [8]]]
    assert batch.rows[1].segments[0].experts is None and batch.num_without_experts == 1
    two_bytes = _with_experts(257, bytes([0, 1, 7, 0, 8, 0, 9, 0]))
    assert two_bytes.rows[0].segments[0].experts.tolist() == [[[256], [7]], [[8], [9]]]


def test_experts_of_another_model_are_refused():
    with pytest.raises(
        DataError, match=r"field 'routed_experts': 8 bytes, and 2x2x1 experts of the learner's model are 4"
    ):
        _with_experts(256, bytes(8))
    with pytest.raises(DataError, match=r"field 'routed_experts': expert 8, and the model has 8"):
        _with_experts(8, bytes([0, 8, 7, 7]))
