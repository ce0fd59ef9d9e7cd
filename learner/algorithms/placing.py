"""Copies of the host's numbers on a device."""

from typing import Any

import torch
from torch import Tensor

MAX_PINNED_BYTES = 64 * 1024**2
"""Largest tensor that is pinned: torch keeps pinned memory, rounded up to powers of two, until the process ends."""


def placed(numbers: Any, device: torch.device | str, *, dtype: torch.dtype | None = None) -> Tensor:
    """A list, array or tensor as a tensor on the device. Copies to a GPU of up to MAX_PINNED_BYTES are asynchronous: the host does not wait
    for the GPU's earlier work. On a CPU an array is not copied."""
    tensor = torch.as_tensor(numbers, dtype=dtype)
    if torch.device(device).type != "cuda" or tensor.is_cuda or tensor.nbytes > MAX_PINNED_BYTES:
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)
