"""Packed attention takes kernels that never hold all scores, in both types, with grouped heads and shared prompts."""

import pytest
import torch
from torch import Tensor

from learner.model.attention import Segments, bucketed, packed_attention
from learner.model.flash import Segment

QUERY_HEADS, KEY_HEADS, SIZE = 14, 2, 64
"""Of Qwen2.5-0.5B."""


def row(prompt_length: int, lengths: list[int]) -> list[Segment]:
    """A prompt, completions that share it, and a sequence of its own."""
    found = [Segment(start=0, length=prompt_length)]
    end = prompt_length
    for length in lengths:
        found.append(Segment(start=end, length=length, prompt_start=0, prompt_length=prompt_length))
        end += length
    return [*found, Segment(start=end, length=prompt_length)]


def attended(
    segments: list[Segment], dtype: torch.dtype, device: torch.device, *, window: int | None = None
) -> list[Tensor]:
    """The result, and the gradients of queries, keys and values; all inputs are exact in bfloat16."""
    generator = torch.Generator().manual_seed(0)
    num_tokens = segments[-1].start + segments[-1].length
    inputs = [
        torch.randn(1, heads, num_tokens, SIZE, generator=generator).bfloat16().to(device, dtype).requires_grad_()
        for heads in (QUERY_HEADS, KEY_HEADS, KEY_HEADS)
    ]
    pull = torch.randn(1, num_tokens, QUERY_HEADS, SIZE, generator=generator).bfloat16().to(device, dtype)
    options = {"segments": on(device, segments), "sliding_window": window}
    found, _ = packed_attention(torch.nn.Identity(), *inputs, None, **options)
    return [found.detach(), *torch.autograd.grad((found * pull).sum(), inputs)]


def on(device: torch.device, segments: list[Segment]) -> Segments:
    return bucketed(segments, num_tokens=segments[-1].start + segments[-1].length, device=device)


@pytest.mark.parametrize("window", [None, 1, 7, 64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_result_and_its_gradients_are_those_of_float64_up_to_rounding(
    dtype: torch.dtype, window: int | None, device: torch.device
):
    segments = row(37, [21, 50, 3])
    exact = attended(segments, torch.float64, torch.device("cpu"), window=window)
    # With a window of one, scores have no gradient.
    pairs = zip(attended(segments, dtype, device, window=window), exact, strict=True)
    for found, expected in [pair for pair in pairs if pair[1].abs().mean() > 1e-9]:
        error = (found.cpu().double() - expected).abs().mean() / expected.abs().mean()
        assert error < (1e-5 if dtype == torch.float32 else 2**-7)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("lengths", [[], [2048, 2048]], ids=["own prompts", "shared prompt"])
def test_no_kernel_makes_every_score(dtype: torch.dtype, lengths: list[int]):
    segments, device = row(4096, lengths), torch.device("cuda")
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    attended(segments, dtype, device)
    num_tokens = segments[-1].start + segments[-1].length
    # Masks have a cell for each score, all heads together: as bool, as what is added to scores, and the distance that they come from. Flash
    # attention makes none.
    is_masked = dtype == torch.float32
    cells = sum(s.length * (s.prompt_length + s.length) for s in segments if s.prompt_length and is_masked)
    masks, tensors = cells * (1 + dtype.itemsize + 8), 20 * num_tokens * QUERY_HEADS * SIZE * dtype.itemsize
    # The scores of all heads, and as many gradients, would be three to six times this.
    assert torch.cuda.max_memory_allocated() - before < masks + tensors
