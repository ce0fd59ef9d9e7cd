"""A rank at rest: its tensors are in the host's memory, and its GPU's memory is free, except for a part that a process cannot free.

A tensor, its views and a shard's local part stay the same objects: their storage is emptied in place and filled again. Optimizers and
FSDP2 refer to tensors, so nothing changes for them.
"""

import contextlib
import weakref
from collections.abc import Callable, Iterable
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor, UntypedStorage

from learner.distributed import local


class Rest:
    """Puts tensors of a device into the host's memory, and back."""

    def __init__(self, device: torch.device, *, moves: bool | None = None) -> None:
        """`moves`: whether memory moves at all; None: it does unless the device is a CPU."""
        self._device = device
        self._moves = device.type != "cpu" if moves is None else moves
        self._host = torch.empty(0, dtype=torch.uint8)
        """Kept from rest to rest: locking memory takes longer than copying it."""
        self._unlock: Callable[[], Any] | None = None
        """Also called when this object ends: CUDA takes an address for locked until it is unlocked."""
        self._away: list[tuple[UntypedStorage, Tensor]] = []
        """Each emptied storage with its bytes in the host's memory."""

    @property
    def is_resting(self) -> bool:
        return bool(self._away)

    def put_away(self, tensors: Iterable[Tensor]) -> None:
        """Moves tensors to the host and frees their memory on the device; nothing may read them until `bring_back`. Ignores tensors on the
        host, and all tensors if already at rest."""
        if not self._moves or self._away:
            return
        found = {local(tensor).untyped_storage()._cdata: local(tensor).untyped_storage() for tensor in tensors}
        storages = [each for each in found.values() if each.device == self._device]
        assert all(each.resizable() for each in storages), "memory that torch allocated can be emptied, a file's cannot"
        bounds = [0, *accumulate(each.nbytes() for each in storages)]
        self._make_room(bounds[-1])
        self._synchronize()  # other streams may still write
        away = [
            (storage, self._host[start:end]) for storage, (start, end) in zip(storages, pairwise(bounds), strict=True)
        ]
        for storage, host in away:
            host.copy_(_bytes_of(storage), non_blocking=True)
        self._synchronize()
        for storage, _ in away:
            storage.resize_(0)
        self._away = away
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def bring_back(self) -> None:
        """Moves all tensors back to the device."""
        for storage, host in self._away:
            storage.resize_(host.numel())
            _bytes_of(storage).copy_(host, non_blocking=True)
        self._synchronize()
        self._away = []

    def _make_room(self, size_bytes: int) -> None:
        if self._host.numel() >= size_bytes:
            return
        if self._unlock is not None:
            self._unlock()
            self._unlock = None
        self._host = torch.empty(0, dtype=torch.uint8)  # frees the old memory before the larger one is allocated
        self._host = torch.empty(size_bytes, dtype=torch.uint8)
        if self._device.type == "cuda":
            self._unlock = self._locked()

    def _locked(self) -> Callable[[], Any] | None:
        """Locks the host's memory; torch's own pinned memory is rounded up to a power of two. None if it cannot be locked: copies are then
        slower."""
        cuda: Any = torch.cuda.cudart()
        address = self._host.data_ptr()
        if int(cuda.cudaHostRegister(address, self._host.numel(), 0)) == 0:
            unlock = weakref.finalize(self, cuda.cudaHostUnregister, address)
            unlock.atexit = False
            return unlock
        # Clears the error, which torch would otherwise raise in an unrelated call.
        with contextlib.suppress(RuntimeError):
            torch.zeros(1, device=self._device)
        return None

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def _bytes_of(storage: UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)  # pyright: ignore[reportArgumentType]
