"""What the machine says of its products, as torch tells it."""

import os
import subprocess
import sys

import pytest
import torch

from learner import processor
from learner.model.compute_type import (
    is_bfloat16_fast_on_cpu,
    is_bfloat16_fast_on_gpus,
    is_onednn_faster,
    multiplies_in_float32,
)

X86 = {"architecture": "x86_64"}


@pytest.fixture(autouse=True)
def _asks_anew():
    yield
    processor.cpu_facts.cache_clear()
    is_onednn_faster.cache_clear()


@pytest.mark.parametrize(
    ("vendor", "flags", "is_fast", "in_float32", "by_onednn"),
    [
        ("GenuineIntel", X86 | {"amx_bf16": True, "avx512_bf16": True, "avx512_f": True}, True, False, False),
        ("GenuineIntel", X86 | {"amx_bf16": False, "avx512_bf16": True, "avx512_f": True}, False, True, False),
        ("AuthenticAMD", X86 | {"amx_bf16": False, "avx512_bf16": True, "avx512_f": True}, True, False, True),
        ("AuthenticAMD", X86 | {"amx_bf16": False, "avx512_bf16": False, "avx512_f": False}, False, True, False),
        ("", {"architecture": "aarch64", "neon": True}, False, False, False),
    ],
)
def test_a_processor_is_fast_with_amx_or_as_amds_and_other_x86_multiply_in_float32(
    monkeypatch, tmp_path, vendor, flags, is_fast, in_float32, by_onednn
):
    (tmp_path / "cpuinfo").write_text(f"processor\t: 0\nvendor_id\t: {vendor}\n" if vendor else "processor\t: 0\n")
    monkeypatch.setattr(processor, "_FACTS", tmp_path / "cpuinfo")
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: flags)
    processor.cpu_facts.cache_clear()
    is_onednn_faster.cache_clear()
    assert (is_bfloat16_fast_on_cpu(), multiplies_in_float32(), is_onednn_faster()) == (is_fast, in_float32, by_onednn)


def test_a_system_that_tells_no_vendor_is_no_error(monkeypatch, tmp_path):
    monkeypatch.setattr(processor, "_FACTS", tmp_path / "none")
    processor.cpu_facts.cache_clear()
    assert processor.cpu_facts() == (frozenset(), "")


def test_torch_tells_of_this_processor():
    assert {"amx_bf16", "avx512_bf16", "avx512_f", "architecture"} <= torch.cpu.get_capabilities().keys()


@pytest.mark.parametrize(
    ("capabilities", "is_fast"), [([(8, 0), (9, 0)], True), ([(9, 0), (7, 5)], False), ([], False)]
)
def test_gpus_are_fast_when_all_of_them_are(monkeypatch, capabilities, is_fast):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(capabilities))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda number: capabilities[number])
    assert is_bfloat16_fast_on_gpus() is is_fast


LOADING = """
import contextlib
import torch
from cluster.contracts.config import RunConfig
from cluster.contracts.errors import ConfigError
from cluster.contracts.reward_config import RewardModelConfig
from learner.learner import Learner
from learner.model.reference import ReferenceModel
from learner.model.sequence_classification import SequenceClassifier

run = RunConfig.model_validate({"model": {"path": "none"}, "prompts": "none"})
for load in (
    lambda: Learner(run),
    lambda: ReferenceModel(run.model, reference=run.reference, learner=run.learner, sampling=run.sampling),
    lambda: SequenceClassifier(RewardModelConfig(path="none"), field="reward.models.one"),
):
    with contextlib.suppress(ConfigError):
        before = torch.backends.cuda.matmul.allow_tf32
        load()
    print(before, torch.backends.cuda.matmul.allow_tf32)
    torch.set_float32_matmul_precision("high")
"""


def test_float32_is_not_rounded_to_tf32_whatever_the_environment_says():
    """The variable is read when torch is imported. Each model sets the precision before it finds that its folder is missing."""
    environment = os.environ | {"TORCH_ALLOW_TF32_CUBLAS_OVERRIDE": "1", "HF_HUB_OFFLINE": "1"}
    ended = subprocess.run([sys.executable, "-c", LOADING], env=environment, capture_output=True, text=True, check=True)
    assert ended.stdout.splitlines() == ["True False"] * 3
