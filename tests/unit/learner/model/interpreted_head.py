"""The head's kernels, interpreted on a CPU, compute what torch computes. Run by `test_fused_head` with TRITON_INTERPRET=1, which Triton
reads when it is imported."""

from typing import Any

import pytest
import torch

from learner.model import fused_head
from learner.model import head as head_module
from learner.model.head import Head
from tests.unit.learner.model.fused_heads import assert_computes_the_same
from tests.unit.learner.model.test_head import HEADS

CPU = torch.device("cpu")


def test_they_prove_themselves():
    assert fused_head.differs(CPU) is None


@pytest.mark.parametrize(
    ("spoiled", "factor", "says"),
    [
        ("target_C", 2.0, "the targets' logits"),
        ("total_C", 2.0, "the normalizer"),
        ("weighted_C", 2.0, "the entropy"),
        (torch.float32, torch.nan, "the gradient"),
        (torch.bfloat16, 2.0, "the gradient"),
    ],
)
def test_those_that_compute_something_else_are_not_used(
    monkeypatch: pytest.MonkeyPatch, spoiled: str | torch.dtype, factor: float, says: str
):
    """`spoiled`: a sum, or the gradient in a type."""
    reduce_, gradient = fused_head.reduce_, fused_head.gradient

    def reduce_otherwise(logits_CV: torch.Tensor, **options: Any) -> None:
        reduce_(logits_CV, **options)
        if options.get(str(spoiled)) is not None:
            options[str(spoiled)].mul_(factor)

    def gradient_otherwise(logits_CV: torch.Tensor, **options: Any) -> torch.Tensor:
        found_CV = gradient(logits_CV, **options)
        return factor * found_CV if options["dtype"] == spoiled else found_CV

    monkeypatch.setattr(fused_head, "reduce_", reduce_otherwise)
    monkeypatch.setattr(fused_head, "gradient", gradient_otherwise)
    assert f"{says} differs by" in str(fused_head.differs(CPU))


def test_a_lack_of_memory_says_nothing_about_them(monkeypatch: pytest.MonkeyPatch):
    def without_memory(*_: Any, **__: Any) -> None:
        raise torch.OutOfMemoryError

    monkeypatch.setattr(fused_head, "reduce_", without_memory)
    with pytest.raises(torch.OutOfMemoryError):
        fused_head.differs(CPU)


def test_those_that_do_not_compile_are_not_used(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(fused_head, "reduce_", lambda *_, **__: 1 / 0)
    assert fused_head.differs(CPU) == "ZeroDivisionError: division by zero"


@pytest.mark.parametrize("is_kept", [False, True])
@pytest.mark.parametrize("with_entropies", [False, True])
@pytest.mark.parametrize("head", HEADS)
def test_the_head_computes_the_same_with_them(
    monkeypatch: pytest.MonkeyPatch, head: Head, with_entropies: bool, is_kept: bool
):
    """Two programs for a row, and steps that do not divide a tile."""
    monkeypatch.setattr(fused_head, "_REDUCED", 4)
    monkeypatch.setattr(fused_head, "_WRITTEN", 8)
    monkeypatch.setattr(head_module, "_kernels", lambda x: None if x.dtype == torch.float64 else fused_head)
    assert_computes_the_same(monkeypatch, head, device=CPU, with_entropies=with_entropies, is_kept=is_kept)
