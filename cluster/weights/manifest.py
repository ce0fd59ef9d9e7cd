"""The form in which weights travel: buckets of bytes, and a manifest with their content, their digests and the canary.

`packing` makes both; the receiver calls `verify` and `unpack`. A matching digest proves that the bytes arrived. Only the canary proves that
the engine computes with them.
"""

import hashlib
import json
import os
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property, partial
from typing import Any

import numpy as np
import torch
from pydantic import BaseModel, ConfigDict

from cluster.contracts.errors import WeightsError

_ALIGNMENT_BYTES = 64
_MOST_HASHERS = 8
"""Threads that hash buckets, one each; a core hashes one to two gigabytes a second."""
_MOST_UNHASHED = 2
"""Buckets that may be without a digest while the next one fills."""


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


class TensorEntry(_Section):
    """One tensor's place."""

    name: str
    """As in a Hugging Face checkpoint."""
    shape: tuple[int, ...]
    dtype: str
    """Torch's name without the prefix, such as `bfloat16`."""
    bucket: int
    offset_bytes: int
    size_bytes: int


class Canary(_Section):
    """A fixed probe, with the log-probs that an engine with these weights must give its tokens."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    """Natural log at temperature 1, computed by the learner; one per token after the first."""
    starting_logprobs: tuple[float, ...]
    """The same under the files that learner and engines start from, at any version of the run; used to measure the noise."""
    starting_files: str | None = None
    """Fingerprint of these files as the learner read them; None if they have none."""


class Adapter(_Section):
    """Present when the tensors are a LoRA adapter's, not a whole model's."""

    rank: int
    alpha: float
    target_modules: tuple[str, ...]


class Delta(_Section):
    """The changes since the version published before."""

    base_version: int
    base_digest: str
    """Digest of the whole weights that the changes are added to."""
    num_changed: tuple[int, ...]
    """Number of changed elements of each tensor, in the order of the manifest's table."""
    changed_share: float
    """Changed elements as a share of all."""
    sizes_bytes: tuple[int, ...]
    """Size of each bucket's changes."""


class WeightManifest(_Section):
    """The content of one version's buckets. Travels with them as `model_dump()`."""

    policy_version: int
    tensors: tuple[TensorEntry, ...]
    bucket_digests: tuple[str, ...]
    """SHA-256 of each bucket, hexadecimal."""
    digest: str
    """SHA-256 of the tensor table and the bucket digests. Equal weights have equal digests, whatever their version."""
    total_bytes: int
    """Size of all tensors, without the padding between them."""
    canary: Canary
    adapter: Adapter | None = None
    """None: a whole model."""
    delta: Delta | None = None
    """None: the version was published only whole. `digest` is that of the whole weights in any case."""

    @cached_property
    def tensors_of(self) -> Mapping[int, Sequence[TensorEntry]]:
        """Entries by bucket. Cached: a mixture of experts has tens of thousands of tensors in thousands of buckets, and sampling waits."""
        found: dict[int, list[TensorEntry]] = {}
        for entry in self.tensors:
            found.setdefault(entry.bucket, []).append(entry)
        return found


def packing(
    named_tensors: Iterable[tuple[str, torch.Tensor]],
    *,
    policy_version: int,
    bucket_bytes: int,
    canary: Callable[[], Canary],
    adapter: Adapter | None = None,
) -> Iterator[np.ndarray | WeightManifest]:
    """Yields buckets, uint8 arrays of at most `bucket_bytes` (or one tensor, if that is larger), then the manifest.

    Buckets are hashed while the next ones fill and travel, and the last ones while `canary` computes; it is called after all tensors are
    packed. Memory is bounded by three buckets if the caller releases each before it takes the next. Tensors may be on any device; tensors
    that share memory (tied embeddings) travel once, under the first name. `named_tensors` may be a generator that gathers shards as it
    goes: a tensor is not used after the next one is requested. Raises WeightsError if there are no tensors.

    A tensor in host memory that fills a bucket is not copied: its bucket is read-only and shares the tensor's memory, which may change
    after the manifest is yielded. `owned` makes a bucket that stays.
    """
    hashing: list[Future[str]] = []
    entries: list[TensorEntry] = []
    seen: dict[int, weakref.ref[torch.Tensor]] = {}
    bucket = _Bucket(0)
    with _hashers() as hashers:
        for name, tensor in named_tensors:
            if _is_packed_already(tensor, seen):
                continue
            seen[tensor.data_ptr()] = weakref.ref(tensor)
            if not bucket.has_room_for(tensor):
                if bucket.content.size:
                    hashing.append(hashers.submit(_digest, bucket.content))
                    yield bucket.content
                if len(hashing) >= _MOST_UNHASHED:
                    hashing[-_MOST_UNHASHED].result()
                bucket = _Bucket(max(bucket_bytes, tensor.nbytes))
            fills_it = tensor.nbytes >= bucket_bytes and tensor.device.type == "cpu" and tensor.is_contiguous()
            add = bucket.borrow if fills_it else bucket.add
            entries.append(add(name, tensor, number=len(hashing)))
        if not entries:
            raise WeightsError(f"policy version {policy_version}: no tensors to publish")
        hashing.append(hashers.submit(_digest, bucket.content))
        yield bucket.content
        probed = canary()
        bucket_digests = [digest.result() for digest in hashing]
    yield WeightManifest(
        policy_version=policy_version,
        tensors=tuple(entries),
        bucket_digests=tuple(bucket_digests),
        digest=_digest_of_table(entries, bucket_digests),
        total_bytes=sum(entry.size_bytes for entry in entries),
        canary=probed,
        adapter=adapter,
    )


def owned(bucket: np.ndarray) -> np.ndarray:
    """The bucket, or a copy if it shares a tensor's memory."""
    return bucket if bucket.flags.writeable else bucket.copy()


class _Bucket:
    """Collects tensors' bytes, one after another."""

    def __init__(self, size_bytes: int) -> None:
        # Pages that are never written use no memory, so a large bucket costs a small model nothing.
        self._buffer = np.empty(size_bytes, np.uint8)
        self._used = 0

    @property
    def content(self) -> np.ndarray:
        return self._buffer[: self._used]

    @property
    def _next_offset(self) -> int:
        return -(-self._used // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES

    def has_room_for(self, tensor: torch.Tensor) -> bool:
        return self._next_offset + tensor.nbytes <= len(self._buffer)

    def add(self, name: str, tensor: torch.Tensor, *, number: int) -> TensorEntry:
        """Copies the tensor into this bucket, whose number is `number`."""
        offset, size = self._next_offset, tensor.nbytes
        if self._buffer.flags.writeable:  # a borrowed buffer has room only for an empty tensor
            place = torch.from_numpy(self._buffer[offset : offset + size])
            place.view(tensor.dtype).view(tensor.shape).copy_(tensor.detach())
            self._buffer[self._used : offset] = 0  # padding counts in the digest
        self._used = offset + size
        return _entry(name, tensor, number=number, offset=offset)

    def borrow(self, name: str, tensor: torch.Tensor, *, number: int) -> TensorEntry:
        """Like `add` without a copy, for an empty bucket: its buffer becomes the tensor's memory."""
        assert not self._used, "a tensor that fills a bucket gets a new one"
        self._buffer = tensor.detach().reshape(-1).view(torch.uint8).numpy()
        self._buffer.flags.writeable = False
        self._used = tensor.nbytes
        return _entry(name, tensor, number=number, offset=0)


def _entry(name: str, tensor: torch.Tensor, *, number: int, offset: int) -> TensorEntry:
    return TensorEntry(
        name=name,
        shape=tuple(tensor.shape),
        dtype=str(tensor.dtype).removeprefix("torch."),
        bucket=number,
        offset_bytes=offset,
        size_bytes=tensor.nbytes,
    )


def bucket_sizes(manifest: WeightManifest) -> list[int]:
    """Size of each bucket, including the padding between tensors."""
    sizes = [0] * len(manifest.bucket_digests)
    for entry in manifest.tensors:
        sizes[entry.bucket] = entry.offset_bytes + entry.size_bytes
    return sizes


def verify(manifest: WeightManifest, buckets: Sequence[np.ndarray]) -> None:
    """Checks all digests, buckets in parallel. Raises WeightsError naming the first bucket that differs."""
    verify_number(manifest, buckets)
    with _hashers() as hashers:
        list(hashers.map(partial(verify_bucket, manifest), range(len(buckets)), buckets))
    verify_table(manifest)


def verify_number(manifest: WeightManifest, parts: Sequence[np.ndarray]) -> None:
    """Raises WeightsError unless there is one part for each of the manifest's buckets."""
    if len(parts) != len(manifest.bucket_digests):
        raise WeightsError(
            f"policy version {manifest.policy_version}: {len(parts)} buckets arrived, the manifest lists {len(manifest.bucket_digests)}; "
            "publish the version again"
        )


def verify_bucket(manifest: WeightManifest, index: int, bucket: np.ndarray) -> None:
    """Checks one bucket's digest. Raises WeightsError if it is not the manifest's."""
    found, expected = _digest(bucket), manifest.bucket_digests[index]
    if found != expected:
        raise WeightsError(
            f"policy version {manifest.policy_version}: bucket {index} of {len(manifest.bucket_digests)} ({bucket.nbytes} bytes) "
            f"has digest {found[:16]}…, the manifest says {expected[:16]}…: it was altered on the way; publish the version again"
        )


def verify_table(manifest: WeightManifest) -> None:
    """Raises WeightsError if the manifest's digest does not match its tensor table and bucket digests."""
    found = _digest_of_table(manifest.tensors, manifest.bucket_digests)
    if found != manifest.digest:
        raise WeightsError(
            f"policy version {manifest.policy_version}: the manifest's tensor table has digest {found[:16]}…, it says "
            f"{manifest.digest[:16]}…: it was altered on the way; publish the version again"
        )


def unpack(manifest: WeightManifest, buckets: Sequence[np.ndarray]) -> Iterator[tuple[str, torch.Tensor]]:
    """Names and CPU tensors without a copy: they share the buckets' memory and must not be written to."""
    with warnings.catch_warnings():
        # Buckets from an object store are read-only, which torch cannot express.
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        memory = [torch.from_numpy(bucket) for bucket in buckets]
    for index, bucket in enumerate(memory):
        yield from unpack_bucket(manifest, index, bucket)


def unpack_bucket(manifest: WeightManifest, index: int, bucket: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """Like `unpack` for one bucket (uint8, on any device)."""
    for entry in manifest.tensors_of.get(index, ()):
        content = bucket[entry.offset_bytes : entry.offset_bytes + entry.size_bytes]
        yield entry.name, content.view(getattr(torch, entry.dtype)).view(entry.shape)


def _is_packed_already(tensor: torch.Tensor, seen: dict[int, weakref.ref[torch.Tensor]]) -> bool:
    # The address of a deleted tensor means nothing: a generator's next tensor may get the same memory.
    earlier = seen[tensor.data_ptr()]() if tensor.data_ptr() in seen else None
    return (
        earlier is not None and tensor.numel() > 0 and earlier.shape == tensor.shape and earlier.dtype == tensor.dtype
    )


def _hashers() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(min(os.cpu_count() or 1, _MOST_HASHERS), thread_name_prefix="digest")


def _digest(bucket: np.ndarray) -> str:
    return hashlib.sha256(bucket.data).hexdigest()


def _digest_of_table(entries: Iterable[TensorEntry], bucket_digests: Sequence[str]) -> str:
    table: list[Any] = [entry.model_dump(mode="json") for entry in entries]
    return hashlib.sha256(json.dumps([table, list(bucket_digests)], sort_keys=True).encode()).hexdigest()
