"""The number types that this machine multiplies in hardware."""

import functools

import torch

from learner.processor import cpu_facts, multiplies_bfloat16_fast

_LEAST_CAPABILITY = (8, 0)
"""Compute capability of the first GPUs that multiply bfloat16 in hardware (Ampere)."""
_FP8_CAPABILITY = (8, 9)
"""Compute capability of the first GPUs that multiply FP8 in hardware (Ada)."""


def is_bfloat16_fast_on_cpu() -> bool:
    """Whether the processor multiplies bfloat16 faster than float32, judged by the instructions that torch uses."""
    return multiplies_bfloat16_fast([name for name, is_there in torch.cpu.get_capabilities().items() if is_there])


def multiplies_in_float32() -> bool:
    """Whether bfloat16 factors are multiplied in float32 on this processor because that is faster. False for processors other than x86.

    Decided by the kind of processor, not by a measurement: a run must do the same each time.
    """
    return torch.cpu.get_capabilities().get("architecture") == "x86_64" and not is_bfloat16_fast_on_cpu()


def never_round_to_tf32() -> None:
    """Lets GPUs multiply float32 factors as they are, also where TORCH_ALLOW_TF32_CUBLAS_OVERRIDE is set. For the whole process."""
    torch.set_float32_matmul_precision("highest")


@functools.cache
def is_onednn_faster() -> bool:
    """Whether oneDNN multiplies float32 factors faster than MKL, which torch uses: on AMD's processors with AVX512."""
    has_avx512 = torch.cpu.get_capabilities().get("avx512_f", False)
    return has_avx512 and cpu_facts()[1] == "AuthenticAMD" and torch.backends.mkldnn.is_available()


def is_bfloat16_fast_on_gpus() -> bool:
    """Whether all visible GPUs multiply bfloat16 in hardware; False without a GPU."""
    return _are_all_gpus(_LEAST_CAPABILITY)


def do_gpus_multiply_fp8() -> bool:
    """Whether all visible GPUs multiply FP8 in hardware; False without a GPU."""
    return _are_all_gpus(_FP8_CAPABILITY)


def _are_all_gpus(capability: tuple[int, int]) -> bool:
    found = [torch.cuda.get_device_capability(number) for number in range(torch.cuda.device_count())]
    return bool(found) and min(found) >= capability
