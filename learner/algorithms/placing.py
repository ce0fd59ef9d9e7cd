"""Numbers of the host on a device."""

from typing import Any

import torch
from torch import Tensor

MAX_PINNED_BYTES = 64 * 1024**2
"""Of one tensor: torch keeps pinned memory, in powers of two, until the process ends."""


def placed(numbers: Any, device: torch.device | str, *, dtype: torch.dtype | None = None) -> Tensor:
    """A list, an array or a tensor of the host as a tensor of the device. A GPU takes what is not large when it comes to it: the host does
    not wait for what is still computed there, and tells it more meanwhile. On a CPU an array is not copied."""
    tensor = torch.as_tensor(numbers, dtype=dtype)
    if torch.device(device).type != "cuda" or tensor.is_cuda or tensor.nbytes > MAX_PINNED_BYTES:
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)
