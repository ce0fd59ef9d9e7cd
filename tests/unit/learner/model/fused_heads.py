"""The vocabulary head with its kernels against itself in float64, which takes none."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from learner.model import fused_head
from learner.model import head as head_module
from learner.model.head import Head, selected_logprobs

TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 2**-6}


def assert_computes_the_same(
    monkeypatch: pytest.MonkeyPatch,
    head: Head,
    *,
    device: torch.device,
    with_entropies: bool,
    is_kept: bool,
    dtype: torch.dtype = torch.float32,
) -> None:
    """Of 7 positions and 23 tokens, by tiles of 11, 11 and 1, or kept whole."""
    for name in ("CPU_TILE_VOCABULARY", "GPU_TILE_VOCABULARY"):
        monkeypatch.setattr(head_module, name, 11)
    if not is_kept:
        monkeypatch.setattr(head_module, "MAX_WHOLE_BYTES", 0)
    calls: list[str] = []
    for name in ("reduce_", "gradient"):
        monkeypatch.setattr(fused_head, name, _counted(name, getattr(fused_head, name), calls))
    expected = _computed(head, dtype=torch.float64, rounded=dtype, device=torch.device("cpu"), entropies=with_entropies)
    # The kernels are not torch's float64.
    assert calls == []
    found = _computed(head, dtype=dtype, rounded=dtype, device=device, entropies=with_entropies)
    for one, other in zip(found, expected, strict=True):
        assert_close(one.cpu().double(), other, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
    assert {*calls} == {"reduce_", "gradient"}


def _computed(
    head: Head, *, dtype: torch.dtype, rounded: torch.dtype, device: torch.device, entropies: bool
) -> list[Tensor]:
    """Values, and gradients in hidden states and weight."""
    generator = torch.Generator("cpu").manual_seed(0)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device="cpu").to(rounded).to(device, dtype)

    hidden_CH, weight_VH = drawn(7, 5).requires_grad_(), drawn(23, 5).requires_grad_()
    targets_C = torch.tensor([0, 22, 3, 4, 4, 10, 11], device=device)
    found = selected_logprobs(hidden_CH, weight_VH, targets_C, head=head, entropies=entropies)
    # Autograd hands one number on for the gradient of all log-probs.
    loss, values = found.logprobs_C.sum(), [found.logprobs_C]
    if found.entropies_C is not None:
        loss = loss + found.entropies_C @ drawn(7).to(found.entropies_C.dtype)
        values.append(found.entropies_C)
    return [*(each.detach() for each in values), *torch.autograd.grad(loss, [hidden_CH, weight_VH])]


def _counted(name: str, function: Any, calls: list[str]) -> Any:
    def count(*args: Any, **kwargs: Any) -> Any:
        calls.append(name)
        return function(*args, **kwargs)

    return count
