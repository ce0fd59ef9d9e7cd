"""What the machine says of its products, as torch tells it."""

import pytest
import torch

from learner.model.compute_type import is_bfloat16_fast_on_cpu, is_bfloat16_fast_on_gpus


@pytest.mark.parametrize(
    ("flags", "is_fast"),
    [
        ({"amx_bf16": True, "avx512_bf16": True}, True),
        ({"amx_bf16": False, "avx512_bf16": True}, True),
        ({"amx_bf16": False, "avx512_bf16": False, "avx512_f": True}, False),
        ({"architecture": "aarch64", "neon": True}, False),
    ],
)
def test_a_processor_is_fast_with_products_of_bfloat16_of_its_own(monkeypatch, flags, is_fast):
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: flags)
    assert is_bfloat16_fast_on_cpu() is is_fast


def test_torch_tells_of_this_processor():
    assert {"amx_bf16", "avx512_bf16"} <= torch.cpu.get_capabilities().keys()


@pytest.mark.parametrize(
    ("capabilities", "is_fast"), [([(8, 0), (9, 0)], True), ([(9, 0), (7, 5)], False), ([], False)]
)
def test_gpus_are_fast_when_all_of_them_are(monkeypatch, capabilities, is_fast):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(capabilities))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda number: capabilities[number])
    assert is_bfloat16_fast_on_gpus() is is_fast
