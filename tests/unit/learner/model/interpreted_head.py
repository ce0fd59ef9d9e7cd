"""The head's kernels, interpreted on a CPU, compute what torch computes. Run by `test_fused_head` with TRITON_INTERPRET=1, which Triton
reads when it is imported."""

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


def test_those_that_compute_something_else_are_not_used(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(fused_head, "gradient", lambda logits_CV, **_: logits_CV)
    assert "the gradient differs by" in str(fused_head.differs(CPU))


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
