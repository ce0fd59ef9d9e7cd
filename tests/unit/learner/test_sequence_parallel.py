"""Slices of a pass: together they are the pass, and none is longer than its share. What ranks find with them is an integration test."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import LlamaConfig

from cluster.contracts.config import ModelConfig, SamplingConfig
from cluster.contracts.errors import ConfigError
from learner.distributed import Ranks
from learner.forward_backward import MiniBatch
from learner.guard import NonFiniteGuard
from learner.model.critic import check_sequence_parallel
from learner.model.packing import TokenRow, cut, lay_out
from learner.model.policy import choose_layout, load, token_row, unproven
from learner.sequence_parallel import SequenceGroup, refuse_what_cannot_be_split
from tests.models import make_tiny_model
from tests.unit.learner.trajectories import make_config


def _group(rank: int, size: int) -> SequenceGroup:
    nobody: Any = None
    return SequenceGroup(rank=rank, size=size, group=nobody)


@given(st.integers(1, 40), st.integers(1, 9), st.integers(0, 2))
def test_slices_of_any_length_are_equal_and_the_last_are_filled_with_zeros(num_positions: int, size: int, dim: int):
    shape = [2, 2, 2]
    shape[dim] = num_positions
    x = torch.arange(1, 1 + 4 * num_positions).view(shape)
    slices = [_group(rank, size).own(x, dim=dim) for rank in range(size)]
    assert {each.shape[dim] for each in slices} == {-(-num_positions // size)}
    whole, beyond = torch.cat(slices, dim).split([num_positions, -num_positions % size], dim)
    assert torch.equal(whole, x) and not beyond.any()


@given(st.integers(1, 12), st.sampled_from(["shared", "packed"]))
def test_every_completion_position_is_in_one_ranks_slice(size: int, layout: Any):
    rows = [
        TokenRow(
            prompt=row.prompt,
            completion=row.completion,
            loss_mask=row.completion != 5,
            candidates=torch.arange(2 * len(row.completion)).view(-1, 2).numpy(),
            # Of more experts than a byte counts.
            experts=300 + np.concatenate([row.prompt, row.completion[:-1]])[:, None, None],
        )
        for row in (token_row([1, 2, 3], [4, 5]), token_row([1, 2, 3], [6, 7, 8]), token_row([9], [4]))
    ]
    whole = lay_out(rows, [0, 1, 2], layout=layout, width=3)
    seen = torch.full_like(whole.targets_C, -1)
    for rank in range(size):
        group = _group(rank, size)
        own, places_C = cut(whole, group)
        assert torch.equal(own.targets_C, whole.targets_C[places_C])
        assert torch.equal(own.candidates_CK, whole.candidates_CK[places_C])
        assert own.routes is not None and own.segments is not None and own.segments.sequence_group == group
        is_token_T = own.routes.is_recorded_T
        assert torch.equal(is_token_T, own.input_ids[0] > 0)
        assert torch.equal(own.routes.experts_TLK[is_token_T, 0, 0].long(), 300 + own.input_ids[0, is_token_T])
        # The hidden state that predicts a target stands where the whole pass has it.
        assert torch.equal(
            own.input_ids.flatten()[own.head_index_C], whole.input_ids.flatten()[whole.head_index_C[places_C]]
        )
        assert torch.equal(
            own.position_ids.flatten()[own.head_index_C], whole.position_ids.flatten()[whole.head_index_C[places_C]]
        )
        assert (seen[places_C] == -1).all()
        seen[places_C] = rank
    assert (seen >= 0).all() and len(seen) == 5


def test_neighbours_share_passes_and_one_of_them_speaks():
    ranks = [
        Ranks(rank=rank, size=4, device=torch.device("cpu"), mesh=None, sequence_group=_group(rank % 2, 2))
        for rank in range(4)
    ]
    assert [each.data_parallel_rank for each in ranks] == [0, 0, 1, 1] and ranks[0].data_parallel_size == 2
    assert [each.leads for each in ranks] == [True, False, True, False]
    alone = replace(ranks[3], sequence_group=None)
    assert (alone.data_parallel_rank, alone.data_parallel_size, alone.leads) == (3, 4, True)


def test_a_micro_batch_that_is_not_finite_is_kept_once_for_all_ranks_that_share_it(tmp_path: Path):
    saved: list[Path] = []
    batch: Any = SimpleNamespace(write_rows=lambda rows, path: saved.append(path))
    update = MiniBatch(rows=[0], micro_batches=[SimpleNamespace(rows=[0])])
    for rank in range(2):
        ranks = Ranks(rank=rank, size=2, device=torch.device("cpu"), mesh=None, sequence_group=_group(rank, 2))
        guard = NonFiniteGuard(max_in_a_row=1, ranks=ranks, folder=tmp_path)
        norms = {"policy": torch.tensor(torch.inf)}
        assert not guard.admits(batch, update, losses=torch.tensor([torch.inf]), gradient_norms=norms, place=(0, 1))
    assert [path.name for path in saved] == ["version-000000-update-1-rank-0.arrow"]


@pytest.mark.parametrize(
    ("config", "size", "message"),
    [
        (
            {"num_attention_heads": 6, "hidden_size": 96},
            4,
            "size=4 does not divide the 6 attention heads of model.path='m'; use a divisor",
        ),
        (
            {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},
            2,
            r"size=2: the rotary embedding \(dynamic\) of model.path='m' depends on the last position",
        ),
    ],
)
def test_a_model_that_ranks_cannot_split_is_refused(config: dict[str, Any], size: int, message: str):
    with pytest.raises(ConfigError, match=message):
        refuse_what_cannot_be_split(LlamaConfig(**config), size=size, named="model.path='m'")
    refuse_what_cannot_be_split(LlamaConfig(num_attention_heads=6, hidden_size=96), size=3, named="model.path='m'")


def test_a_critic_must_have_heads_for_all_ranks_too(tmp_path: Path):
    policy = make_tiny_model(tmp_path / "policy")
    LlamaConfig(num_attention_heads=3, hidden_size=96).save_pretrained(tmp_path / "critic")
    config = make_config(
        policy,
        learner={"num_ranks": 4, "sequence_parallel_size": 4},
        algorithm={"advantage": "gae", "value": {"path": str(tmp_path / "critic")}},
    )
    with pytest.raises(ConfigError, match=r"does not divide the 3 attention heads of algorithm\.value\.path="):
        check_sequence_parallel(config)


def test_a_model_that_sees_other_positions_outside_of_attention_is_refused(tmp_path: Path):
    model = ModelConfig(path=str(make_tiny_model(tmp_path)), dtype="float32")
    policy = unproven(load(model, dtype=torch.float32), sampling=SamplingConfig(), head_chunk_tokens=16)

    def off(batch: Any) -> Any:
        outputs = policy(batch)
        return replace(outputs, logprobs_C=outputs.logprobs_C + 1)

    options = {"own_logits": policy.own_logits, "model": model, "packing": "auto", "dtype": torch.float32}
    with pytest.raises(ConfigError, match="Qwen3ForCausalLM sees other positions outside of the attention that ranks"):
        choose_layout(policy, forward=off, splits_sequences=True, **options)
    choose_layout(policy, forward=policy, splits_sequences=True, **options)
    assert policy.layout == "shared"
