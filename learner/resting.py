"""A rank at rest: its tensors are in the host's memory, and its GPU is free for others, but for what a process cannot give back.

A tensor stays the same object, and so do its views and a shard's local part: its storage is emptied in place, and filled again. Optimizers
and FSDP2 refer to tensors, and notice nothing.
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
        """`moves`: whether memory moves at all; None: it does where the device is not the host itself."""
        self._device = device
        self._moves = device.type != "cpu" if moves is None else moves
        self._host = torch.empty(0, dtype=torch.uint8)
        """Kept from rest to rest: to lock memory takes longer than to copy it."""
        self._unlock: Callable[[], Any] | None = None
        """Called with the memory's end, too: CUDA holds an address for locked until it is told."""
        self._away: list[tuple[UntypedStorage, Tensor]] = []
        """The emptied storages, each with its bytes."""

    @property
    def is_resting(self) -> bool:
        return bool(self._away)

    def put_away(self, tensors: Iterable[Tensor]) -> None:
        """Their memory is free when this returns; nothing may read them until `bring_back`. Those that are away, or on the host, stay as
        they are."""
        if not self._moves or self._away:
            return
        found = {local(tensor).untyped_storage()._cdata: local(tensor).untyped_storage() for tensor in tensors}
        storages = [each for each in found.values() if each.device == self._device]
        assert all(each.resizable() for each in storages), "what torch allocates can be emptied; a file's memory cannot"
        bounds = [0, *accumulate(each.nbytes() for each in storages)]
        self._make_room(bounds[-1])
        self._synchronize()  # other streams than this one's have written
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
        """All that is away."""
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
        self._host = torch.empty(0, dtype=torch.uint8)  # before the larger one is there
        self._host = torch.empty(size_bytes, dtype=torch.uint8)
        if self._device.type == "cuda":
            self._unlock = self._locked()

    def _locked(self) -> Callable[[], Any] | None:
        """Not torch's own pinned memory, which is rounded up to a power of two. None where it may not be locked: copies are slower."""
        cuda: Any = torch.cuda.cudart()
        address = self._host.data_ptr()
        if int(cuda.cudaHostRegister(address, self._host.numel(), 0)) == 0:
            unlock = weakref.finalize(self, cuda.cudaHostUnregister, address)
            unlock.atexit = False
            return unlock
        # The next of torch's checks would raise the error, whosever it is.
        with contextlib.suppress(RuntimeError):
            torch.zeros(1, device=self._device)
        return None

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def _bytes_of(storage: UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)  # pyright: ignore[reportArgumentType]
