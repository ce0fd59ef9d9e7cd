"""The head's kernels without a GPU: interpreted they compute what torch computes, and they compile."""

import os
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch

triton = pytest.importorskip("triton")

ROOT = Path(__file__).parents[4]
POINTERS = {"found": "*bf16", "targets": "*i64", "width": "i32", "cap": "fp32", "factor": "fp32"}
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
def test_on_a_gpu_they_prove_themselves():
    from learner.model import fused_head

    assert fused_head.differs(torch.device("cuda")) is None
