"""Changes between two versions of the weights: the publisher's `PublishedCopy` compares them, a worker's `LoadedCopy` applies them.

Elements are compared as integers, so that -0.0, NaN and all other bit patterns are exact. A tensor's changes travel as indices and values,
or the tensor travels whole if that is smaller. The result is proved like any version, by the digests of its whole buckets.
"""

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import torch

from cluster.contracts.errors import WeightsError
from cluster.weights.manifest import (
    Delta,
    TensorEntry,
    WeightManifest,
    owned,
    verify,
    verify_bucket,
    verify_number,
    verify_table,
)

_LARGEST_SHARE = 0.5
"""Largest size of a delta as a share of the whole weights: a larger one saves too little for its memory."""
_INDEX = np.dtype("<u4")
_MOST_ELEMENTS = 2**32
"""Elements of a tensor that an index can address. A larger tensor travels whole."""
_ALIGNMENT_BYTES = 8
_MOST_AT_A_TIME = 4
"""Buckets that are compared, or updated and hashed, at a time, each in its own thread."""


class PublishedCopy:
    """The version published last, in the publisher's memory. The next version is compared with it."""

    def __init__(self) -> None:
        self._manifest: WeightManifest | None = None
        self._buckets: list[np.ndarray] = []

    def compared(self, parts: Iterable[np.ndarray | WeightManifest]) -> Iterator[np.ndarray | WeightManifest]:
        """Yields the buckets of `packing`, which become the new copy, then the changes of each bucket as one array, then the manifest.

        Without a version to compare with, or if too much has changed, there are no changes and the manifest has no `delta`. Buckets are
        compared while the next ones fill, and each old bucket is released after its comparison.
        """
        comparison = _Comparison(self._manifest, self._buckets) if self._manifest else None
        self._manifest, self._buckets = None, []
        buckets: list[np.ndarray] = []
        with _threads() as threads:
            for part in parts:
                if isinstance(part, WeightManifest):
                    delta, changes = comparison.end(part) if comparison else (None, [])
                    yield from changes
                    self._manifest, self._buckets = part, buckets
                    yield part.model_copy(update={"delta": delta})
                    return
                buckets.append(owned(part))
                if comparison:
                    comparison.add(buckets[-1], threads)
                yield buckets[-1]


class _Comparison:
    """Compares a version with the one before it, bucket by bucket."""

    def __init__(self, base: WeightManifest, buckets: Sequence[np.ndarray]) -> None:
        self._base = base
        self._old = dict(enumerate(buckets))
        self._comparing: list[Future[tuple[list[int], np.ndarray]]] = []
        self._num_judged, self._size_bytes = 0, 0
        """Number of buckets whose comparison has been awaited, and the bytes of their changes."""
        self._is_worth_it = True

    def add(self, bucket: np.ndarray, threads: ThreadPoolExecutor) -> None:
        """Starts comparing the next bucket. Does nothing once too much has changed."""
        number = len(self._comparing)
        self._judge(number - _MOST_AT_A_TIME)
        old = self._old.pop(number, None)
        if old is None or old.nbytes != bucket.nbytes:
            self._give_up()
        else:
            self._comparing.append(threads.submit(_changes, self._base.tensors_of.get(number, ()), old, bucket))

    def end(self, manifest: WeightManifest) -> tuple[Delta | None, list[np.ndarray]]:
        """The delta to `manifest`, and the changes by bucket; none if too much has changed, or if the table of tensors has."""
        self._judge(len(self._comparing) - 1)
        if not self._is_worth_it or manifest.tensors != self._base.tensors:
            return None, []
        found = [each.result() for each in self._comparing]
        counts = tuple(count for of_bucket, _ in found for count in of_bucket)
        changes = [content for _, content in found]
        delta = Delta(
            base_version=self._base.policy_version,
            base_digest=self._base.digest,
            num_changed=counts,
            changed_share=sum(counts) / max(1, sum(map(_num_elements, manifest.tensors))),
            sizes_bytes=tuple(content.nbytes for content in changes),
        )
        return delta, changes

    def _judge(self, last: int) -> None:
        """Waits for the comparisons up to bucket number `last`."""
        while self._num_judged <= last:
            self._size_bytes += self._comparing[self._num_judged].result()[1].nbytes
            self._num_judged += 1
        if self._size_bytes > _LARGEST_SHARE * self._base.total_bytes:
            self._give_up()

    def _give_up(self) -> None:
        self._is_worth_it = False
        self._comparing.clear()
        self._old.clear()


class LoadedCopy:
    """The version that a worker loaded last, in its own memory. Deltas are added to it."""

    def __init__(self) -> None:
        self._manifest: WeightManifest | None = None
        self._buckets: tuple[np.ndarray, ...] = ()

    @property
    def buckets(self) -> tuple[np.ndarray, ...]:
        """The whole version's verified buckets. They are never written to: the next version gets new ones."""
        return self._buckets

    def take_whole(self, manifest: WeightManifest, buckets: Sequence[np.ndarray]) -> None:
        """Copies whole buckets. Raises WeightsError, and keeps nothing, if they are not the manifest's."""
        self._manifest, self._buckets = None, ()
        verify(manifest, buckets)
        self.keep(manifest, [np.array(bucket) for bucket in buckets])

    def take_changes(self, manifest: WeightManifest, changes: Sequence[np.ndarray]) -> None:
        """Adds changes. Raises WeightsError, and keeps nothing, if this copy is not their base or the result is not the manifest's."""
        added = self.base_of(manifest)
        verify_number(manifest, changes)
        verify_table(manifest)
        with _threads() as threads:
            self.keep(manifest, tuple(threads.map(added, range(len(manifest.bucket_digests)), changes)))

    def base_of(self, manifest: WeightManifest) -> Callable[[int, np.ndarray], np.ndarray]:
        """A function `(bucket number, changes) -> bucket` that builds the manifest's buckets and raises WeightsError for altered changes.

        This copy is empty from now on. Raises WeightsError if it is not the base of the changes.
        """
        base, old = self._manifest, dict(enumerate(self._buckets))
        self._manifest, self._buckets = None, ()
        delta = manifest.delta
        assert delta is not None, "changes come with a delta"
        served = (base.policy_version, base.digest) if base else None
        if served != (delta.base_version, delta.base_digest):
            raise WeightsError(
                f"policy version {manifest.policy_version} came as changes since version {delta.base_version} (digest "
                f"{delta.base_digest[:16]}…), and this worker has "
                f"{f'version {served[0]} (digest {served[1][:16]}…)' if served else 'none'}; it needs the whole weights"
            )
        counted: dict[int, list[tuple[TensorEntry, int]]] = {}
        for entry, count in zip(manifest.tensors, delta.num_changed, strict=True):
            counted.setdefault(entry.bucket, []).append((entry, count))

        def added(index: int, changes: np.ndarray) -> np.ndarray:
            bucket = old.pop(index).copy()
            _apply(counted.get(index, ()), changes, bucket, policy_version=manifest.policy_version)
            verify_bucket(manifest, index, bucket)
            return bucket

        return added

    def keep(self, manifest: WeightManifest, buckets: Sequence[np.ndarray]) -> None:
        """Takes verified buckets without a copy. The caller must not write to them any more."""
        self._manifest, self._buckets = manifest, tuple(buckets)


def _changes(entries: Sequence[TensorEntry], old: np.ndarray, new: np.ndarray) -> tuple[list[int], np.ndarray]:
    """(number of changed elements of each tensor, all tensors' changes in one array) of a bucket."""
    counts: list[int] = []
    pieces: list[np.ndarray] = []
    for entry in entries:
        elements = _elements(entry, new)
        differs = _elements(entry, old) != elements
        counts.append(int(np.count_nonzero(differs)))
        if _is_sparse(entry, counts[-1]):
            indices = np.flatnonzero(differs)  # 8 bytes each, so not for a tensor that changed as a whole
            pieces += [indices.astype(_INDEX), elements[indices]]
        else:
            pieces.append(elements)
    content = np.zeros(sum(_padded(piece.nbytes) for piece in pieces), np.uint8)
    offset = 0
    for piece in pieces:
        content[offset : offset + piece.nbytes] = piece.view(np.uint8)
        offset += _padded(piece.nbytes)
    return counts, content


def _apply(
    counted: Sequence[tuple[TensorEntry, int]], changes: np.ndarray, bucket: np.ndarray, *, policy_version: int
) -> None:
    """Writes changes into a bucket. Raises WeightsError for changes that do not fit."""
    offset = 0

    def next_piece(dtype: np.dtype, length: int) -> np.ndarray:
        nonlocal offset
        piece = changes[offset : offset + length * dtype.itemsize].view(dtype)
        offset += _padded(length * dtype.itemsize)
        if len(piece) != length:
            raise ValueError("too few bytes")
        return piece

    try:
        for entry, count in counted:
            elements = _elements(entry, bucket)
            if _is_sparse(entry, count):
                indices = next_piece(_INDEX, count)
                elements[indices] = next_piece(elements.dtype, count)
            else:
                elements[:] = next_piece(elements.dtype, len(elements))
    except (ValueError, IndexError) as error:
        raise WeightsError(
            f"policy version {policy_version}: the changes of a bucket do not fit ({error}): they were altered on the way; publish "
            "the version again"
        ) from error


def _is_sparse(entry: TensorEntry, num_changed: int) -> bool:
    """Whether this many changes travel as indices and values. Both ends compute it; it is not transmitted."""
    size = num_changed * (_INDEX.itemsize + _item_bytes(entry))
    return size < entry.size_bytes and _num_elements(entry) <= _MOST_ELEMENTS


def _elements(entry: TensorEntry, bucket: np.ndarray) -> np.ndarray:
    """A tensor's bytes in its bucket as flat integers, without a copy."""
    place = bucket[entry.offset_bytes : entry.offset_bytes + entry.size_bytes]
    return place.view(np.dtype(f"<u{_item_bytes(entry)}"))


def _item_bytes(entry: TensorEntry) -> int:
    return getattr(torch, entry.dtype).itemsize


def _num_elements(entry: TensorEntry) -> int:
    return entry.size_bytes // _item_bytes(entry)


def _padded(size_bytes: int) -> int:
    return -(-size_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES


def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(min(os.cpu_count() or 1, _MOST_AT_A_TIME), thread_name_prefix="delta")
