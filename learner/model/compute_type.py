"""Which types this machine multiplies itself, and so fast."""

import torch

_LEAST_CAPABILITY = (8, 0)
"""Of GPUs that multiply bfloat16 themselves (Ampere)."""
_FP8_CAPABILITY = (8, 9)
"""Of GPUs that multiply FP8 themselves (Ada, Hopper)."""


def is_bfloat16_fast_on_cpu() -> bool:
    """Whether the processor multiplies bfloat16 itself, with AMX or AVX512-BF16. Elsewhere it is slower than float32."""
    found = torch.cpu.get_capabilities()
    return bool(found.get("amx_bf16") or found.get("avx512_bf16"))


def is_bfloat16_fast_on_gpus() -> bool:
    """Whether all visible GPUs do; False where there is none."""
    return _are_all_gpus(_LEAST_CAPABILITY)


def do_gpus_multiply_fp8() -> bool:
    """The same of FP8."""
    return _are_all_gpus(_FP8_CAPABILITY)


def _are_all_gpus(capability: tuple[int, int]) -> bool:
    found = [torch.cuda.get_device_capability(number) for number in range(torch.cuda.device_count())]
    return bool(found) and min(found) >= capability
