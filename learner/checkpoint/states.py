"""Reads rows of whole tensors from the ranks' state files, whose shards divide the first dimension in order of rank.

Only the blocks that hold the rows are read, and each is checked against its digest.
"""

import json
import math
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from hashlib import sha256
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from learner.checkpoint.digests import NUM_THREADS
from learner.checkpoint.manifest import BLOCK_BYTES, FileEntry, Manifest, state_name
from learner.checkpoint.places import Place
from learner.checkpoint.reading import check_size, unfit
from learner.distributed import local, own_rows

_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "I64": torch.int64, "I32": torch.int32, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip
_LENGTH_BYTES = 8
"""A safetensors file begins with the length of its header."""


class States:
    """The state files of one checkpoint."""

    def __init__(self, place: Place, manifest: Manifest) -> None:
        """Raises CheckpointError for a file that is missing or has the wrong size."""
        place = place.holding(manifest)
        names = [state_name(rank, manifest.num_ranks) for rank in range(manifest.num_ranks)]
        for name in names:
            check_size(place, name, manifest.files[name])
        self._files = [_StateFile(place, name, manifest.files[name]) for name in names]

    def names(self) -> list[str]:
        """Names of the tensors in file order; reading them in this order reads no block twice."""
        return list(self._files[0].tensors)

    def is_scalar(self, name: str) -> bool:
        return not self._files[0].tensors[name].shape

    def rows(self, name: str, rows: slice | None = None) -> Tensor:
        """Rows of the whole tensor, by default all; of a scalar, rank 0's value. Raises CheckpointError for an altered block."""
        first = self._files[0]
        if self.is_scalar(name):
            return first.rows(name)
        if len(self._files) == 1:
            return first.rows(name, rows)
        parts: list[Tensor] = []
        begin = 0
        for file in self._files:
            num_rows = file.tensors[name].shape[0]
            wanted = rows or slice(begin, begin + num_rows)
            start, stop = max(wanted.start - begin, 0), min(wanted.stop - begin, num_rows)
            if start < stop:
                parts.append(file.rows(name, slice(start, stop)))
            begin += num_rows
        return torch.cat(parts) if parts else first.rows(name, slice(0, 0))

    @torch.no_grad()
    def load(self, tensor: Tensor, name: str) -> None:
        """Fills a tensor or, if it is sharded, this rank's shard."""
        rows = own_rows(tensor) if isinstance(tensor, DTensor) else None
        local(tensor).copy_(self.rows(name, rows))

    def like(self, master: Tensor, name: str) -> Tensor:
        """The tensor with the master's sharding; a scalar (a step count) on the master's device."""
        if self.is_scalar(name):
            return self.rows(name).to(master.device)
        tensor = torch.zeros_like(master)
        self.load(tensor, name)
        return tensor

    def of_rank(self, name: str, rank: int) -> Tensor | None:
        """One rank's own tensor; None if no such rank saved."""
        return self._files[rank].rows(name) if rank < len(self._files) else None


@dataclass(frozen=True, slots=True, kw_only=True)
class _TensorAt:
    """A tensor's place in its file."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int

    @property
    def row_bytes(self) -> int:
        return self.dtype.itemsize * math.prod(self.shape[1:])


class _StateFile:
    """One state file. The last block read is kept, because neighbouring tensors share blocks."""

    def __init__(self, place: Place, name: str, entry: FileEntry) -> None:
        self._place, self._name, self._entry = place, name, entry
        self._last: tuple[int, memoryview] = (-1, memoryview(b""))

    @cached_property
    def tensors(self) -> dict[str, _TensorAt]:
        """By name, in file order."""
        length = int.from_bytes(self._bytes(0, _LENGTH_BYTES), "little")
        header: dict[str, Any] = json.loads(self._bytes(_LENGTH_BYTES, length))
        header.pop("__metadata__", None)
        in_order = sorted(header.items(), key=lambda item: item[1]["data_offsets"])
        begin = _LENGTH_BYTES + length
        return {
            name: _TensorAt(
                dtype=_DTYPES[entry["dtype"]], shape=tuple(entry["shape"]), start=begin + entry["data_offsets"][0]
            )
            for name, entry in in_order
        }

    def rows(self, name: str, rows: slice | None = None) -> Tensor:
        at = self.tensors[name]
        shape = at.shape if rows is None else (rows.stop - rows.start, *at.shape[1:])
        start = at.start + (0 if rows is None else rows.start * at.row_bytes)
        found = self._bytes(start, at.dtype.itemsize * math.prod(shape))
        # frombuffer refuses an empty buffer.
        return torch.frombuffer(found, dtype=at.dtype).reshape(shape) if found else torch.empty(shape, dtype=at.dtype)

    def _bytes(self, start: int, length: int) -> bytearray:
        """Bytes of the file, from verified blocks."""
        found = bytearray(length)

        def copy(number: int, block: memoryview) -> None:
            begin = number * BLOCK_BYTES
            part = block[max(start - begin, 0) : start + length - begin]
            at = max(begin - start, 0)
            found[at : at + len(part)] = part

        if not length:
            return found
        *most, last = range(start // BLOCK_BYTES, -(-(start + length) // BLOCK_BYTES))
        if most:
            with ThreadPoolExecutor(NUM_THREADS) as threads:
                list(threads.map(lambda number: copy(number, self._block(number)), most))
        self._last = last, self._block(last)
        copy(*self._last)
        return found

    def _block(self, number: int) -> memoryview:
        at, kept = self._last
        if number == at:
            return kept
        start = number * BLOCK_BYTES
        length = min(BLOCK_BYTES, self._entry.size_bytes - start)
        content = memoryview(self._place.read_range(self._name, start, length))
        if sha256(content).hexdigest() != self._entry.blocks[number]:
            raise unfit(
                self._place,
                f"was altered: {self._name} has another digest from byte {start} to {start + len(content)}",
            )
        return content
