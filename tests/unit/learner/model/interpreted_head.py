"""The head's kernels, interpreted on a CPU, compute what torch computes. Run by `test_fused_head` with TRITON_INTERPRET=1, which Triton
reads when it is imported."""

from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from learner.model import fused_head
from learner.model import head as head_module
from learner.model.head import Head, selected_logprobs
from tests.unit.learner.model.test_head import HEADS

CPU = torch.device("cpu")


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Two programs for a row, and steps that do not divide a tile."""
    monkeypatch.setattr(fused_head, "_REDUCED", 4)
    monkeypatch.setattr(fused_head, "_WRITTEN", 8)
    return fused_head


def test_they_prove_themselves():
    assert fused_head.differs(CPU) is None


def test_those_that_compute_something_else_or_do_not_compile_are_not_used(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(fused_head, "gradient", lambda logits_CV, **_: logits_CV)
    fused_head.differs.cache_clear()
    assert "the gradient differs by" in str(fused_head.differs(CPU))
    monkeypatch.setattr(fused_head, "reduce_", lambda *_, **__: 1 / 0)
    fused_head.differs.cache_clear()
    assert fused_head.differs(CPU) == "ZeroDivisionError: division by zero"


@pytest.mark.parametrize("with_entropies", [False, True])
@pytest.mark.parametrize("head", HEADS)
def test_the_head_computes_the_same_with_them(
    kernels: ModuleType, monkeypatch: pytest.MonkeyPatch, head: Head, with_entropies: bool
):
    monkeypatch.setattr(head_module, "MAX_KEPT_BYTES", 0)
    monkeypatch.setattr(head_module, "CPU_TILE_VOCABULARY", 10)
    without = computed(head, with_entropies=with_entropies)
    monkeypatch.setattr(head_module, "_kernels", lambda _: kernels)
    called = []
    monkeypatch.setattr(kernels, "gradient", counted(kernels.gradient, called))
    assert_close(computed(head, with_entropies=with_entropies), without, rtol=1e-4, atol=1e-5)
    assert called


def computed(head: Head, *, with_entropies: bool) -> list[Tensor]:
    """Values, and gradients in hidden states and weight: of 7 positions and 23 tokens."""
    generator = torch.Generator().manual_seed(0)
    hidden_CH = torch.randn(7, 5, generator=generator).requires_grad_()
    weight_VH = torch.randn(23, 5, generator=generator).requires_grad_()
    targets_C = torch.tensor([0, 22, 3, 4, 4, 9, 10])
    found = selected_logprobs(hidden_CH, weight_VH, targets_C, head=head, entropies=with_entropies)
    loss = found.logprobs_C.sum()  # one gradient for all, which autograd hands on as one number
    if found.entropies_C is not None:
        loss = loss + found.entropies_C @ torch.randn(7, generator=generator)
    values = [found.logprobs_C, *([] if found.entropies_C is None else [found.entropies_C])]
    return [*(each.detach() for each in values), *torch.autograd.grad(loss, [hidden_CH, weight_VH])]


def counted(function: Any, calls: list[None]) -> Any:
    def count(*args: Any, **kwargs: Any) -> Any:
        calls.append(None)
        return function(*args, **kwargs)

    return count
