"""Which types this machine multiplies itself, and so fast."""

import torch

from learner.processor import multiplies_bfloat16_fast

_LEAST_CAPABILITY = (8, 0)
"""Of GPUs that multiply bfloat16 themselves (Ampere)."""
_FP8_CAPABILITY = (8, 9)
"""Of GPUs that multiply FP8 themselves (Ada, Hopper)."""


def is_bfloat16_fast_on_cpu() -> bool:
    """Whether the processor multiplies bfloat16 faster than float32, by what torch makes use of."""
    return multiplies_bfloat16_fast([name for name, is_there in torch.cpu.get_capabilities().items() if is_there])


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
