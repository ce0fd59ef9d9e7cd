"""Packing changes how tokens are laid out, and nothing else."""

import math
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.testing import assert_close

from cluster.contracts.config import ModelConfig, SamplingConfig
from learner.model import attention
from learner.model.attention import PACKED, bucketed, packed_attention
from learner.model.flash import Segment, takes_lengths
from learner.model.packing import EpisodeRow, Layout, Row, TokenRow, lay_out, plan
from learner.model.policy import PolicyModel, load, prove, token_row
from tests.models import make_tiny_model
from tests.unit.learner.model import flash

LAYOUTS: tuple[Layout, ...] = ("shared", "packed", "padded")


def _rows(seed: int = 0, *, num_prompts: int = 4, max_length: int = 20) -> list[TokenRow]:
    random = np.random.default_rng(seed)
    prompts = [random.integers(4, 128, random.integers(1, 12)).tolist() for _ in range(num_prompts)]
    return [
        token_row(prompts[i % num_prompts], random.integers(4, 128, random.integers(1, max_length)).tolist())
        for i in range(3 * num_prompts)
    ]


def _logprobs_and_gradient(policy: PolicyModel, rows: list[TokenRow], *, layout: Layout, max_tokens: int):
    policy.causal_lm.set_attn_implementation("sdpa" if layout == "padded" else PACKED)
    policy.zero_grad()
    width = max(len(row.completion) for row in rows)
    result = torch.zeros(len(rows), width, dtype=torch.float64)
    for chosen in plan(rows, max_tokens=max_tokens, layout=layout)[0]:
        micro_batch = lay_out(rows, chosen, layout=layout, width=width, device=policy.causal_lm.device)
        logprobs_BT = micro_batch.scatter(policy(micro_batch).logprobs_C)
        (logprobs_BT * torch.linspace(-1, 2, width, device=logprobs_BT.device)).sum().backward()
        result[list(chosen)] = logprobs_BT.detach().double().cpu()
    return result, {name: p.grad.clone() for name, p in policy.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("architecture", ["qwen3", "gemma3", "qwen3_moe"])
def test_segments_as_they_lie_in_the_row_give_what_padded_rows_give(
    tmp_path: Path, architecture: str, monkeypatch: pytest.MonkeyPatch
):
    kernel = flash.serve(monkeypatch)
    model = ModelConfig(path=str(make_tiny_model(tmp_path, architecture=architecture)), dtype="float32")
    causal_lm = load(model, dtype=torch.float64)
    causal_lm.set_experts_implementation("eager")  # torch's grouped product of experts knows no float64
    policy = prove(causal_lm, model=model, packing="auto", sampling=SamplingConfig(), head_chunk_tokens=16)
    assert policy.layout == "shared"
    rows = _rows(max_length=90)
    expected, expected_gradient = _logprobs_and_gradient(policy, rows, layout="padded", max_tokens=10**6)
    for layout in LAYOUTS[:2]:
        for max_tokens in (40, 10**6):
            result, gradient = _logprobs_and_gradient(policy, rows, layout=layout, max_tokens=max_tokens)
            assert_close(result, expected, rtol=1e-6, atol=1e-9)
            for name, value in expected_gradient.items():
                assert_close(gradient[name], value, rtol=1e-3, atol=1e-5)
    kernel.assert_called()


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("is_served", [False, True])
def test_scores_have_the_factor_and_the_cap_of_their_layer(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, is_served: bool, softcap: float | None
):
    """Scores of 0 and ln 3 weigh values of 0 and 4 by 1/4 and 3/4."""
    kernel = flash.serve(monkeypatch) if is_served else None
    score = math.log(3) if softcap is None else softcap * math.atanh(math.log(3) / softcap)
    query, key, value = (torch.tensor(x, dtype=dtype).view(1, 1, 2, 1) for x in ([1.0, 1], [0, 2 * score], [0.0, 4]))
    segments = bucketed([Segment(start=0, length=2)], num_tokens=2)
    found, _ = packed_attention(
        torch.nn.Identity(), query, key, value, None, segments=segments, scaling=0.5, softcap=softcap
    )
    assert found.flatten().tolist() == pytest.approx([0, 3], rel=1e-5 if dtype == torch.float32 else 0.01)
    # Flash attention has no cap.
    assert kernel is None or kernel.called == (softcap is None)


@pytest.mark.parametrize("softcap", [None, 5.0])
def test_a_padded_query_without_a_key_in_its_window_spoils_no_gradient(softcap: float | None):
    """Completions of 1 and of 30 tokens are one bucket of 31 keys. The first one's padding ends 28 positions after the last key."""
    prompts = [Segment(start=0, length=30), Segment(start=31, length=1)]
    completions = [
        Segment(start=30, length=1, prompt_start=0, prompt_length=30),
        Segment(start=32, length=30, prompt_start=31, prompt_length=1),
    ]
    segments = bucketed([*prompts, *completions], num_tokens=62)
    inputs = [torch.ones(1, 1, 62, 4, requires_grad=True) for _ in range(3)]
    options = {"sliding_window": 8, "softcap": softcap}
    found, _ = packed_attention(torch.nn.Identity(), *inputs, None, segments=segments, **options)
    found.sum().backward()
    assert all(x.grad is not None and x.grad.isfinite().all() for x in inputs)


def test_a_model_with_sinks_of_attention_is_padded():
    query, value = torch.randn(1, 4, 6, 8), torch.randn(1, 4, 6, 16)
    segments = bucketed([Segment(start=0, length=6)], num_tokens=6)
    found, _ = packed_attention(torch.nn.Identity(), query, query, value, None, segments=segments, s_aux=torch.ones(4))
    assert found.shape == (1, 6, 4, 16) and found.isnan().all()


@pytest.mark.parametrize(
    ("dtype", "sizes", "serves"),
    [
        (torch.bfloat16, (64, 64), True),
        (torch.float16, (256, 256), True),
        (torch.float32, (64, 64), False),
        (torch.bfloat16, (60, 60), False),
        (torch.bfloat16, (192, 128), False),
        (torch.bfloat16, (512, 512), False),
    ],
)
def test_flash_attention_takes_half_types_and_heads_of_up_to_256(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, sizes: tuple[int, int], serves: bool
):
    kernel = flash.serve(monkeypatch)
    monkeypatch.setattr(attention, "takes_lengths", takes_lengths)
    query, value = (torch.ones(1, 2, 3, size, dtype=dtype) for size in sizes)
    segments = bucketed([Segment(start=0, length=3)], num_tokens=3)
    found, _ = packed_attention(torch.nn.Identity(), query, query, value, None, segments=segments)
    assert kernel.called is serves and found.shape == (1, 3, 2, sizes[1])


@pytest.mark.parametrize("is_deterministic", [False, True])
def test_the_package_of_flash_attention_is_told_where_sequences_end(
    monkeypatch: pytest.MonkeyPatch, is_deterministic: bool
):
    """By positions, transformers finds it in every layer anew, and waits for the GPU. Of torch's deterministic mode the package knows
    nothing."""
    told: dict[str, Any] = {}

    def attend(module: Any, query: Tensor, *_: Any, **options: Any) -> tuple[Tensor, None]:
        told.update(options)
        return query, None

    monkeypatch.setattr(attention, "has_flash", lambda device: True)
    monkeypatch.setattr(attention, "flash_attention_forward", attend)
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: is_deterministic)
    rows = [token_row([5, 6, 7], [8, 9]), token_row([5], [6, 7, 8]), token_row([9, 9], [9])]
    batch = lay_out(rows, [0, 1, 2], layout="packed", width=3)
    x = torch.zeros(1, 2, 9, 8)
    attention.flash_attention(
        torch.nn.Identity(), x, x, x, None, segments=batch.segments, position_ids=batch.position_ids
    )
    ends = {name: told.pop(name).tolist() for name in ("cu_seq_lens_q", "cu_seq_lens_k")}
    assert ends == {"cu_seq_lens_q": [0, 4, 7, 9], "cu_seq_lens_k": [0, 4, 7, 9]}
    assert told.pop("position_ids") is batch.position_ids
    assert told == {"max_length_q": 4, "max_length_k": 4} | ({"deterministic": True} if is_deterministic else {})


@pytest.mark.parametrize("architecture", ["qwen3", "gemma3", "qwen3_moe"])
def test_every_layout_gives_the_same_log_probs_and_gradients(
    tmp_path: Path, architecture: str, monkeypatch: pytest.MonkeyPatch, device: torch.device
):
    # Gemma's sliding window (24) is shorter than the longest rows here; small buckets exercise their limits.
    monkeypatch.setattr(attention, "MAX_MASK_CELLS", 4096)
    model = ModelConfig(path=str(make_tiny_model(tmp_path, architecture=architecture)), dtype="float32")
    causal_lm = load(model, dtype=torch.float64, device=device)
    causal_lm.set_experts_implementation("eager")  # torch's grouped product of experts knows no float64
    policy = prove(
        causal_lm, model=model, packing="auto", sampling=SamplingConfig(temperature=0.8), head_chunk_tokens=16
    )
    assert policy.layout == "shared"
    rows = _rows(max_length=90)
    rows[3] = TokenRow(
        prompt=rows[3].prompt, completion=rows[3].completion, loss_mask=np.arange(len(rows[3].completion)) % 3 == 1
    )
    expected, expected_gradient = _logprobs_and_gradient(policy, rows, layout="padded", max_tokens=10**6)
    for layout in LAYOUTS:
        for max_tokens in (40, 10**6):
            result, gradient = _logprobs_and_gradient(policy, rows, layout=layout, max_tokens=max_tokens)
            assert_close(result, expected, rtol=1e-6, atol=1e-9)
            for name, value in expected_gradient.items():
                # Norms and rotations are float32 inside, even in a float64 model.
                assert_close(gradient[name], value, rtol=1e-3, atol=1e-5)


def test_a_sequence_does_not_see_its_neighbours(tmp_path: Path):
    model = ModelConfig(path=str(make_tiny_model(tmp_path)), dtype="float32")
    policy = prove(
        load(model, dtype=torch.float32), model=model, packing="packed", sampling=SamplingConfig(), head_chunk_tokens=16
    )
    first, second = token_row([5, 6, 7], [8, 9]), token_row([50, 60, 70], [80, 90])
    alone = policy(lay_out([first], [0], layout="shared", width=2)).logprobs_C
    beside = policy(lay_out([first, second], [0, 1], layout="shared", width=2)).logprobs_C[:2]
    assert_close(beside, alone)


def test_bfloat16_attention_over_few_keys_is_off_by_no_more_than_its_rounding():
    torch.manual_seed(0)
    segments = bucketed([Segment(start=0, length=9), Segment(start=9, length=7, prompt_length=9)], num_tokens=16)
    half = [torch.randn(1, 4, 16, 8, dtype=torch.bfloat16, requires_grad=True) for _ in range(3)]
    exact = [x.detach().double().requires_grad_() for x in half]
    module, pull = torch.nn.Identity(), torch.randn(1, 16, 4, 8, dtype=torch.bfloat16)
    found, _ = packed_attention(module, *half, None, segments=segments)
    expected, _ = packed_attention(module, *exact, None, segments=segments)
    (found * pull).sum().backward()
    (expected * pull.double()).sum().backward()
    # One rounding to bfloat16. Sums in float32 are off by far less, in an order that is the processor's.
    assert_close(found.double(), expected, rtol=1.001 * 2**-8, atol=1e-5)
    for one, other in zip(half, exact, strict=True):
        assert one.grad is not None and other.grad is not None
        assert_close(one.grad.double(), other.grad, rtol=1.001 * 2**-8, atol=1e-5)


@pytest.mark.parametrize("most_in_float32", [0, 512])
def test_gradients_of_a_prompt_that_many_share_are_summed_in_float32(
    most_in_float32: int, monkeypatch: pytest.MonkeyPatch
):
    """1 from its own query and 1/2 from each of 1,022 completions. In bfloat16 a sum of halves ends at 128."""
    monkeypatch.setattr(attention, "FLOAT32_KEYS", most_in_float32)
    completions = [Segment(start=start, length=1, prompt_length=1) for start in range(1, 1023)]
    segments = bucketed([Segment(start=0, length=1), *completions], num_tokens=1023)
    query, key, value = (torch.zeros(1, 1, 1023, 8, dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    found, _ = packed_attention(torch.nn.Identity(), query, key, value, None, segments=segments)
    found.sum().backward()
    assert found.dtype == torch.bfloat16 and value.grad is not None
    assert value.grad[0, 0, :2, 0].tolist() == [512.0, 0.5]


def test_a_shared_prompt_is_computed_once():
    rows = [token_row([1, 2, 3], [4, 5]), token_row([1, 2, 3], [6, 7, 8]), token_row([9], [4])]
    shared = lay_out(rows, [0, 1, 2], layout="shared", width=3)
    assert shared.input_ids.tolist() == [[1, 2, 3, 4, 6, 7, 9]]
    assert shared.position_ids.tolist() == [[0, 1, 2, 3, 3, 4, 0]]
    assert shared.head_index_C.tolist() == [2, 3, 2, 4, 5, 6]
    assert shared.targets_C.tolist() == [4, 5, 6, 7, 8, 4]
    assert shared.scatter(torch.arange(1.0, 7.0)).tolist() == [[1, 2, 0], [3, 4, 5], [6, 0, 0]]


def test_a_long_completion_behind_a_shorter_prompt_takes_no_mask(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(attention, "MAX_MASK_CELLS", 30)

    def has_mask(prompt_length: int, length: int, *, window: int | None = None) -> bool:
        own = Segment(start=prompt_length, length=length, prompt_start=0, prompt_length=prompt_length)
        prompt = Segment(start=0, length=prompt_length)
        found = bucketed([prompt, own], num_tokens=prompt_length + length)
        return attention._mask(found.buckets[0], sliding_window=window) is not None

    assert not has_mask(4, 4)  # 4 queries x 8 keys
    assert has_mask(4, 3)  # 3 x 7: short
    assert has_mask(6, 4)  # 4 x 10, behind a longer prompt
    assert has_mask(4, 4, window=5) and not has_mask(4, 4, window=8)


def _sizes_of_buckets(*lengths: tuple[int, int]) -> list[tuple[int, int, int]]:
    """Segments, queries and keys of each bucket, for sequences of these (prompt, own) lengths. Prompts are not counted."""
    segments: list[Segment] = []
    end = 0
    for prompt_length, length in lengths:
        if prompt_length:
            segments.append(Segment(start=end, length=prompt_length))
        own = {"prompt_start": end, "prompt_length": prompt_length}
        segments.append(Segment(start=end + prompt_length, length=length, **own))
        end += prompt_length + length
    buckets = [each for each in bucketed(segments, num_tokens=end).buckets if each.has_prompts or not lengths[0][0]]
    assert all(each.key_index_SK.max() < end for each in buckets)
    return [(*each.query_index_SQ.shape, each.key_index_SK.shape[1]) for each in buckets]


def test_a_bucket_has_segments_of_similar_length_up_to_its_limit(monkeypatch: pytest.MonkeyPatch):
    # 30 is three quarters of 40.
    assert _sizes_of_buckets((0, 29), (0, 40), (0, 30)) == [(2, 40, 40), (1, 29, 29)]
    # Padding of up to 16 tokens costs less than another bucket.
    assert _sizes_of_buckets((0, 16), (0, 1)) == [(2, 16, 16)]
    assert _sizes_of_buckets((0, 1), (0, 17)) == [(1, 17, 17), (1, 1, 1)]
    # 70 and 69 keys are similar, 40 and 29 queries are not.
    assert _sizes_of_buckets((30, 40), (40, 29)) == [(1, 40, 70), (1, 29, 69)]
    assert _sizes_of_buckets((38, 32), (68, 1)) == [(2, 32, 70)]
    assert _sizes_of_buckets((45, 29), (30, 40), (40, 29)) == [(2, 40, 74), (1, 29, 69)]
    monkeypatch.setattr(attention, "MAX_MASK_CELLS", 27)
    assert _sizes_of_buckets(*[(0, 3)] * 4) == [(3, 3, 3), (1, 3, 3)]


@settings(max_examples=50)
@given(st.integers(0, 10**6), st.integers(1, 4), st.integers(10, 200), st.sampled_from(LAYOUTS))
def test_plans_cover_every_row_once_and_give_ranks_equally_many(
    seed: int, num_ranks: int, max_tokens: int, layout: Layout
):
    rows = _rows(seed, num_prompts=seed % 5 + 1)
    ranks = plan(rows, max_tokens=max_tokens, layout=layout, num_ranks=num_ranks)
    assert len({len(rank) for rank in ranks}) == 1
    assert sorted(row for rank in ranks for chosen in rank for row in chosen) == list(range(len(rows)))
    for chosen in (c for rank in ranks for c in rank if len(c) > 1):
        assert lay_out(rows, chosen, layout=layout, width=20).input_ids.numel() <= max_tokens
    assert ranks == plan(rows, max_tokens=max_tokens, layout=layout, num_ranks=num_ranks)


def _cut(row: TokenRow, *places: int) -> EpisodeRow:
    """In segments, each behind all that stands before it."""
    tokens, bounds = np.concatenate([row.prompt, row.completion]), [0, *places, len(row.completion)]
    size = len(row.prompt)
    return EpisodeRow(
        segments=tuple(
            TokenRow(prompt=tokens[: size + a], completion=row.completion[a:b], loss_mask=row.loss_mask[a:b])
            for a, b in pairwise(bounds)
        )
    )


@pytest.mark.parametrize("layout", LAYOUTS)
def test_segments_give_one_row_of_the_log_probs_that_the_whole_gives(tmp_path: Path, layout: Layout):
    model = ModelConfig(path=str(make_tiny_model(tmp_path)), dtype="float32")
    policy = prove(
        load(model, dtype=torch.float64), model=model, packing="auto", sampling=SamplingConfig(), head_chunk_tokens=16
    )
    policy.causal_lm.set_attn_implementation("sdpa" if layout == "padded" else PACKED)
    rows = [token_row([5, 6, 7], [8, 9, 10, 11, 12]), token_row([5, 6, 7], [20, 21]), token_row([9], [4])]

    def logprobs(rows: Sequence[Row]) -> Tensor:
        batch = lay_out(rows, [0, 1, 2], layout=layout, width=5)
        return batch.scatter(policy(batch).logprobs_C)

    assert_close(logprobs([_cut(rows[0], 2, 3), rows[1], rows[2]]), logprobs(rows), rtol=1e-6, atol=1e-7)
    assert_close(logprobs([_cut(rows[0], 4), _cut(rows[1], 1), rows[2]]), logprobs(rows), rtol=1e-6, atol=1e-7)


@settings(max_examples=50)
@given(st.integers(0, 10**6), st.integers(1, 4), st.integers(40, 200), st.sampled_from(LAYOUTS))
def test_segments_of_an_episode_are_in_one_pass_under_any_budget(
    seed: int, num_ranks: int, max_tokens: int, layout: Layout
):
    rows: list[Row] = list(_rows(seed, num_prompts=seed % 5 + 1))
    for place in range(0, len(rows), 2):
        (whole,) = rows[place].segments
        if len(whole.completion) > 2:
            rows[place] = _cut(whole, 1, 2)
    ranks = plan(rows, max_tokens=max_tokens, layout=layout, num_ranks=num_ranks)
    assert len({len(rank) for rank in ranks}) == 1
    assert sorted(row for rank in ranks for chosen in rank for row in chosen) == list(range(len(rows)))
    for chosen in (c for rank in ranks for c in rank if len(c) > 1):
        assert lay_out(rows, chosen, layout=layout, width=20).input_ids.numel() <= max_tokens


def test_ranks_get_like_loads():
    rows = _rows(3, num_prompts=32)
    loads = [
        sum(lay_out(rows, chosen, layout="shared", width=20).input_ids.numel() for chosen in rank)
        for rank in plan(rows, max_tokens=10**6, layout="shared", num_ranks=4)
    ]
    assert max(loads) <= 1.15 * min(loads)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_group_that_fits_one_pass_is_shared_out_among_ranks(layout: Layout):
    rows = [token_row([1, 2], [5] * 11) for _ in range(4)]
    ranks = plan(rows, max_tokens=10**6, layout=layout, num_ranks=2)
    assert [[len(chosen) for chosen in rank] for rank in ranks] == [[2], [2]]


def test_the_rank_with_the_longest_pass_gets_the_shortest_too():
    """Passes of 5 + 4, 8, 7 and 6 inputs: 9 + 6 and 8 + 7."""
    rows = [token_row([number], [5] * number) for number in (8, 7, 6, 5, 4)]
    assert plan(rows, max_tokens=9, layout="packed", num_ranks=2) == [[(3, 4), (2,)], [(0,), (1,)]]
    # Padded, 5 + 4 take 10: a third turn begins where the first did.
    assert plan(rows, max_tokens=9, layout="padded", num_ranks=2) == [[(0,), (3,), (4,)], [(1,), (2,), ()]]


def test_padded_passes_are_full():
    rows = [token_row([1], [5] * 5) for _ in range(4)]
    assert plan(rows, max_tokens=10, layout="padded") == [[(0, 1), (2, 3)]]
    assert plan(rows[:3], max_tokens=15, layout="padded", num_ranks=2) == [[(0, 1)], [(2,)]]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_rank_without_rows_computes_one_token_without_loss(layout: Layout):
    idle = lay_out([], [], layout=layout, width=3)
    assert idle.input_ids.shape == (1, 1) and idle.rows == () and len(idle.targets_C) == 0
    assert idle.scatter(torch.zeros(0)).shape == (0, 3)


def _num_passes(*, prompt: int, completion: int, max_tokens: int, longest: int = 0) -> int:
    """Of four groups of four, and a row of another."""
    groups = [token_row([group] * prompt, [5] * completion) for group in range(4) for _ in range(4)]
    groups += [token_row([9], [5] * longest)] if longest else []
    return len(plan(groups, max_tokens=max_tokens, layout="shared")[0])


def test_a_group_is_divided_where_that_saves_a_pass_and_its_prompt_costs_little():
    # 4 groups of 1 + 4 * 100 tokens: of 3 passes of 610, one would have two whole groups.
    assert _num_passes(prompt=1, completion=101, max_tokens=610) == 3
    # 4 of 50 + 4 * 100: 6 answers and the 4 prompts fit in a pass, and prompts would be more than one token in fifty.
    assert _num_passes(prompt=50, completion=101, max_tokens=800) == 4
    # A row beyond the budget has a pass of its own, whatever the others do.
    assert _num_passes(prompt=1, completion=101, max_tokens=610, longest=700) == 4


@pytest.mark.parametrize("layout", ["shared", "packed"])
def test_a_row_far_beyond_the_budget_takes_one_pass_and_does_not_spread_the_others(layout: Layout):
    """Rows of 100 and six times 3 inputs, 10 a pass. Seen before: 118 inputs became 7 passes."""
    rows = [token_row([1], [5] * 100), *(token_row([prompt], [5] * 3) for prompt in range(2, 8))]
    assert plan(rows, max_tokens=10, layout=layout) == [[(0,), (1, 3, 5), (2, 4, 6)]]
    assert plan(rows, max_tokens=18, layout=layout, num_ranks=2) == [[(0,)], [(1, 2, 3, 4, 5, 6)]]


def test_a_group_that_fits_stays_whole_also_where_it_is_more_than_a_mean_pass():
    """900 and 600 inputs, 500 and 200 of them prompt, are 750 a pass: a group in two would compute its prompt twice."""
    rows = [token_row([1] * 500, [5] * 101) for _ in range(4)] + [token_row([2] * 200, [5] * 101) for _ in range(4)]
    assert plan(rows, max_tokens=900, layout="shared") == [[(0, 1, 2, 3), (4, 5, 6, 7)]]
    assert plan(rows, max_tokens=900, layout="shared", num_ranks=2) == [[(0, 1, 2, 3)], [(4, 5, 6, 7)]]
