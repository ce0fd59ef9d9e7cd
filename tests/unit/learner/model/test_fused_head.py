"""The head's kernels without a GPU: interpreted they compute what torch computes, and they compile."""

import os
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch

from learner.model.head import Head, head_kernels
from tests.unit.learner.model.test_head import HEADS

triton = pytest.importorskip("triton")

ROOT = Path(__file__).parents[4]
POINTERS = {"found": "*bf16", "targets": "*i64", "first": "i32", "width": "i32", "cap": "fp32", "factor": "fp32"}
"""Of arguments; all others point at float32."""


@pytest.mark.slow
def test_interpreted_they_compute_what_torch_computes():
    ended = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-p",
            "no:cacheprovider",
            f"{Path(__file__).parent}/interpreted_head.py",
        ],
        cwd=ROOT,
        env=os.environ | {"TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert " passed" in ended.stdout and "skipped" not in ended.stdout


@pytest.mark.slow
@pytest.mark.parametrize("capability", [80, 90, 100])
def test_they_compile_for_gpus(capability: int):
    from learner.model import fused_head

    for kernel, constants in (
        (fused_head._reduce, {"WEIGHTED": True, "BLOCK": fused_head._REDUCED}),
        (fused_head._gradient, {"ENTROPIES": True, "CAPPED": True, "BLOCK": fused_head._WRITTEN}),
    ):
        signature = {
            name: "constexpr" if name in constants else POINTERS.get(name, "*fp32") for name in kernel.arg_names
        }
        source = triton.compiler.ASTSource(kernel, signature, constexprs=constants)
        with warnings.catch_warnings(action="ignore"):
            compiled = triton.compile(source, target=triton.backends.compiler.GPUTarget("cuda", capability, 32))
        assert compiled.asm["cubin"]


@pytest.mark.gpu
@pytest.mark.parametrize("is_kept", [False, True])
@pytest.mark.parametrize("with_entropies", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("head", HEADS)
def test_on_a_gpu_the_head_computes_the_same_with_them(
    monkeypatch: pytest.MonkeyPatch, head: Head, dtype: torch.dtype, with_entropies: bool, is_kept: bool
):
    from tests.unit.learner.model.fused_heads import assert_computes_the_same

    cuda = torch.device("cuda")
    assert head_kernels(cuda) == "fused"
    assert_computes_the_same(
        monkeypatch, head, device=cuda, with_entropies=with_entropies, is_kept=is_kept, dtype=dtype
    )
