"""Which types this machine multiplies itself, and so fast."""

import functools
from pathlib import Path

import torch

_LEAST_CAPABILITY = (8, 0)
"""Of GPUs that multiply bfloat16 themselves (Ampere)."""
_FP8_CAPABILITY = (8, 9)
"""Of GPUs that multiply FP8 themselves (Ada, Hopper)."""
_FACTS = Path("/proc/cpuinfo")


def is_bfloat16_fast_on_cpu() -> bool:
    """Whether the processor multiplies bfloat16 faster than float32: with AMX, or with AMD's AVX512-BF16.

    Intel's AVX512-BF16 alone gains nothing over its float32: torch's products of bfloat16 took 1.6 times as long there. AMD's, which
    are not measured, are trusted.
    """
    found = torch.cpu.get_capabilities()
    return bool(found.get("amx_bf16") or (found.get("avx512_bf16") and _vendor() == "AuthenticAMD"))


def multiplies_in_float32() -> bool:
    """Whether products of bfloat16 are better taken in float32 on this processor. Of those that are not x86 nothing is known, and False.

    It follows from what the processor is and not from a measurement: a run must do the same each time.
    """
    return torch.cpu.get_capabilities().get("architecture") == "x86_64" and not is_bfloat16_fast_on_cpu()


def is_bfloat16_fast_on_gpus() -> bool:
    """Whether all visible GPUs multiply bfloat16 themselves; False where there is none."""
    return _are_all_gpus(_LEAST_CAPABILITY)


def do_gpus_multiply_fp8() -> bool:
    """Whether all visible GPUs multiply FP8 themselves; False where there is none."""
    return _are_all_gpus(_FP8_CAPABILITY)


def _are_all_gpus(capability: tuple[int, int]) -> bool:
    found = [torch.cuda.get_device_capability(number) for number in range(torch.cuda.device_count())]
    return bool(found) and min(found) >= capability


@functools.cache
def _vendor() -> str:
    """As the processor names it; empty where the system does not say."""
    try:
        lines = _FACTS.read_text(encoding="utf-8").splitlines()
    except OSError:
        return ""
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("vendor_id")), "")
