"""Base and changes make the next version bit for bit, whatever its bits; what does not belong together is refused."""

import weakref
from collections.abc import Callable
from concurrent.futures import Future
from types import TracebackType
from typing import Any, Self

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from cluster.contracts.errors import WeightsError
from cluster.weights import delta
from cluster.weights.delta import LoadedCopy, PublishedCopy
from cluster.weights.manifest import Canary, Delta, WeightManifest, packing, unpack

CANARY = Canary(token_ids=(1, 2), logprobs=(-1.0,), starting_logprobs=(-1.0,))
Tensors = dict[str, torch.Tensor]


class Published:
    """What a publisher says of one version."""

    def __init__(self, parts: list[Any]) -> None:
        *arrays_, self.manifest = parts
        assert isinstance(self.manifest, WeightManifest)
        num_buckets = len(self.manifest.bucket_digests)
        self.buckets, self.changes = arrays_[:num_buckets], arrays_[num_buckets:]

    @property
    def delta(self) -> Delta:
        assert self.manifest.delta is not None
        return self.manifest.delta

    @property
    def is_whole(self) -> bool:
        return self.manifest.delta is None and not self.changes


def publish(copy: PublishedCopy, tensors: Tensors, *, version: int, bucket_bytes: int = 2**20) -> Published:
    parts = packing(tensors.items(), policy_version=version, bucket_bytes=bucket_bytes, canary=lambda: CANARY)
    return Published(list(copy.compared(parts)))


def loaded(version: Published) -> LoadedCopy:
    copy = LoadedCopy()
    copy.take_whole(version.manifest, version.buckets)
    return copy


def test_four_changed_elements_of_a_hundred_travel_as_indices_and_values():
    """An index has 4 bytes and a bfloat16 value 2: 16 bytes of indices and 8 of values."""
    copy, weights = PublishedCopy(), {"a": torch.zeros(100, dtype=torch.bfloat16)}
    first = publish(copy, weights, version=3)
    weights["a"][[1, 10, 50, 99]] = torch.tensor([1.0, -2.0, 0.5, 3.0], dtype=torch.bfloat16)
    second = publish(copy, weights, version=4)
    (changes,) = second.changes
    assert first.is_whole and (second.delta.base_version, second.delta.base_digest) == (3, first.manifest.digest)
    assert second.delta.num_changed == (4,) and second.delta.changed_share == 0.04
    assert second.delta.sizes_bytes == (24,) and changes.nbytes == 24
    assert changes[:16].view(np.uint32).tolist() == [1, 10, 50, 99]
    # The upper halves of the float32s 1, -2, 0.5 and 3.
    assert changes[16:].view(np.uint16).tolist() == [0x3F80, 0xC000, 0x3F00, 0x4040]


def test_a_tensor_travels_whole_where_that_is_smaller_and_not_at_all_where_it_stayed():
    """12 bfloat16s have 24 bytes. Four changes would take 16 and 8, no less; three take 12 and 6, padded to 16 and 8."""
    copy = PublishedCopy()
    weights = {name: torch.zeros(12, dtype=torch.bfloat16) for name in ("four", "three", "none")}
    weights["large"] = torch.zeros(1000)
    base = loaded(publish(copy, weights, version=0))
    weights["four"][:4] = 1.0
    weights["three"][-3:] = 1.0
    second = publish(copy, weights, version=1)
    assert second.delta.num_changed == (4, 3, 0, 0)
    assert second.delta.sizes_bytes == (24 + 16 + 8,)
    base.take_changes(second.manifest, second.changes)
    assert dict(unpack(second.manifest, base.buckets))["three"].tolist() == [0.0] * 9 + [1.0] * 3


def test_the_digest_is_that_of_the_whole_weights():
    copy, weights = PublishedCopy(), {"a": torch.zeros(100), "b": torch.zeros(300)}
    publish(copy, weights, version=0, bucket_bytes=512)
    weights["b"][7] = 1.0
    told, alone = (publish(each, weights, version=1, bucket_bytes=512) for each in (copy, PublishedCopy()))
    assert told.changes and alone.is_whole
    assert told.manifest.digest == alone.manifest.digest
    assert told.manifest.bucket_digests == alone.manifest.bucket_digests
    assert [bucket.tolist() for bucket in told.buckets] == [bucket.tolist() for bucket in alone.buckets]


def test_changes_of_more_than_half_of_the_bytes_are_not_published():
    """Of two tensors of 400 bytes one changes whole: 400 of 800 bytes are published, and one more index and value are too many."""
    copy, weights = PublishedCopy(), {"a": torch.zeros(100), "b": torch.zeros(100)}
    publish(copy, weights, version=0)
    weights["a"] += 1
    half = publish(copy, weights, version=1)
    weights["a"] += 1
    weights["b"][0] = 1.0
    more = publish(copy, weights, version=2)
    weights["b"][0] = 2.0
    little = publish(copy, weights, version=3)
    assert half.delta.sizes_bytes == (400,) and more.is_whole
    assert (little.delta.base_version, little.delta.sizes_bytes) == (2, (8 + 8,)), "each is padded to 8 bytes"


def test_a_tensor_with_more_elements_than_an_index_reaches_travels_whole(monkeypatch):
    monkeypatch.setattr(delta, "_MOST_ELEMENTS", 99)
    copy, weights = PublishedCopy(), {"a": torch.zeros(100), "b": torch.zeros(99), "c": torch.zeros(99)}
    publish(copy, weights, version=0)
    weights["a"][0] = weights["b"][0] = 1.0
    assert publish(copy, weights, version=1).delta.sizes_bytes == (400 + 8 + 8,)


def test_too_much_is_noticed_before_the_last_bucket(monkeypatch):
    """Of 40 buckets that change whole, 21 are more than half. Three more are compared meanwhile."""
    compared: list[int] = []

    def changes(entries: Any, old: Any, new: Any) -> Any:
        compared.append(len(entries))
        return found(entries, old, new)

    found = delta._changes
    monkeypatch.setattr(delta, "_changes", changes)
    copy, weights = PublishedCopy(), {f"t{index}": torch.zeros(100) for index in range(40)}
    publish(copy, weights, version=0, bucket_bytes=400)
    for tensor in weights.values():
        tensor += 1
    more = publish(copy, weights, version=1, bucket_bytes=400)
    assert more.is_whole and len(more.buckets) == 40 and len(compared) == 21 + 3


@pytest.mark.parametrize(
    "other",
    [
        {"a": torch.zeros(20)},
        {"a": torch.zeros(5)},
        {"b": torch.zeros(10)},
        {"a": torch.zeros(10), "b": torch.zeros(9)},
    ],
)
def test_weights_of_another_form_are_published_whole(other):
    copy = PublishedCopy()
    publish(copy, {"a": torch.zeros(10)}, version=0)
    assert publish(copy, other, version=1).is_whole
    assert not publish(copy, other, version=2).is_whole


def test_a_publication_that_broke_off_leaves_nothing_to_compare_with():
    copy, weights = PublishedCopy(), {"a": torch.zeros(100), "b": torch.zeros(100)}
    publish(copy, weights, version=0, bucket_bytes=400)
    broken = copy.compared(packing(weights.items(), policy_version=1, bucket_bytes=400, canary=lambda: CANARY))
    next(broken)
    broken.close()
    assert publish(copy, weights, version=1, bucket_bytes=400).is_whole


class AtOnce:
    """Threads that have done each task when they return its future."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None: ...

    def submit(self, function: Callable[..., Any], *args: Any) -> Future[Any]:
        done = Future[Any]()
        done.set_result(function(*args))
        return done


def test_each_bucket_of_the_version_before_is_released_once_it_is_compared(monkeypatch):
    monkeypatch.setattr(delta, "_threads", AtOnce)
    copy, weights = PublishedCopy(), {f"t{index}": torch.zeros(100) for index in range(3)}
    before = [weakref.ref(bucket) for bucket in publish(copy, weights, version=0, bucket_bytes=400).buckets]
    parts = copy.compared(packing(weights.items(), policy_version=1, bucket_bytes=400, canary=lambda: CANARY))
    assert [sum(bucket() is not None for bucket in before) for _ in map(next, [parts] * 3)] == [2, 1, 0]


def test_a_version_is_published_again_with_no_changes():
    copy, weights = PublishedCopy(), {"a": torch.zeros(100)}
    base = loaded(publish(copy, weights, version=5))
    again = publish(copy, weights, version=5)
    assert (again.delta.num_changed, again.delta.sizes_bytes) == ((0,), (0,))
    base.take_changes(again.manifest, again.changes)


def test_a_worker_copies_the_buckets_which_are_the_object_stores():
    first = publish(PublishedCopy(), {"a": torch.zeros(100)}, version=0)
    base = loaded(first)
    assert not np.shares_memory(base.buckets[0], first.buckets[0])


def test_the_buckets_of_the_version_before_stay_as_they_were():
    """An engine's layer may still refer to their memory."""
    copy, weights = PublishedCopy(), {"a": torch.zeros(100)}
    base = loaded(publish(copy, weights, version=0))
    (before,) = base.buckets
    weights["a"][0] = 1.0
    second = publish(copy, weights, version=1)
    base.take_changes(second.manifest, second.changes)
    assert before.sum() == 0 and base.buckets[0].sum() > 0


@pytest.fixture
def changed() -> tuple[LoadedCopy, Published, Published]:
    """A copy of version 0, the changes from 0 to 1, and those from 1 to 2."""
    copy, weights = PublishedCopy(), {"a": torch.zeros(100), "b": torch.zeros(100)}
    base = loaded(publish(copy, weights, version=0, bucket_bytes=400))
    weights["a"][3] = 1.0
    one = publish(copy, weights, version=1, bucket_bytes=400)
    weights["b"][5] = 1.0
    return base, one, publish(copy, weights, version=2, bucket_bytes=400)


def test_changes_since_another_version_are_refused(changed):
    base, _, two = changed
    with pytest.raises(
        WeightsError, match=r"^policy version 2 came as changes since version 1 .* has version 0 .*whole weights$"
    ):
        base.take_changes(two.manifest, two.changes)
    with pytest.raises(WeightsError, match="has none"):
        LoadedCopy().take_changes(two.manifest, two.changes)


@pytest.mark.parametrize(("value", "version"), [(1.0, 0), (0.0, 5)], ids=["other weights", "another version"])
def test_changes_are_added_to_the_base_by_version_and_digest(changed, value, version):
    _, one, _ = changed
    weights = {"a": torch.full((100,), value), "b": torch.zeros(100)}
    other = loaded(publish(PublishedCopy(), weights, version=version, bucket_bytes=400))
    with pytest.raises(WeightsError, match=rf"since version 0 .*has version {version}"):
        other.take_changes(one.manifest, one.changes)


@pytest.mark.parametrize(
    ("altered", "said"),
    [
        (lambda changes: np.r_[np.uint8(4), changes[1:]], "bucket 0 of 2 .*was altered on the way"),
        (lambda changes: np.r_[changes[:8], np.uint8(1), changes[9:]], "bucket 0 of 2 .*was altered on the way"),
        (lambda changes: np.r_[np.full(4, 255, np.uint8), changes[4:]], "do not fit .index"),
        (lambda changes: changes[:8], "do not fit .too few bytes"),
        (lambda changes: changes[:10], "do not fit"),
    ],
    ids=["another place", "another value", "a place beyond the tensor", "no value", "half a value"],
)
def test_altered_changes_are_refused_and_leave_nothing(changed, altered, said):
    base, one, _ = changed
    with pytest.raises(WeightsError, match=said):
        base.take_changes(one.manifest, [altered(one.changes[0]), one.changes[1]])
    assert base.buckets == ()
    with pytest.raises(WeightsError, match="has none"):
        base.take_changes(one.manifest, one.changes)


def test_changes_of_fewer_buckets_are_refused_and_leave_nothing(changed):
    base, one, _ = changed
    with pytest.raises(WeightsError, match="1 buckets arrived, the manifest lists 2"):
        base.take_changes(one.manifest, one.changes[:1])
    assert base.buckets == ()


def test_changes_for_an_altered_table_are_refused_and_leave_nothing(changed):
    base, one, _ = changed
    renamed = [entry.model_copy(update={"name": f"other {entry.name}"}) for entry in one.manifest.tensors]
    with pytest.raises(WeightsError, match="tensor table"):
        base.take_changes(one.manifest.model_copy(update={"tensors": tuple(renamed)}), one.changes)
    assert base.buckets == ()


def test_an_altered_whole_leaves_nothing(changed):
    base, one, _ = changed
    with pytest.raises(WeightsError, match="bucket 1 of 2"):
        base.take_whole(one.manifest, [one.buckets[0], one.buckets[1] + 1])
    assert base.buckets == ()


DTYPES = {np.uint8: torch.float8_e4m3fn, np.uint16: torch.bfloat16, np.uint32: torch.float32, np.uint64: torch.float64}


@st.composite
def two_versions(draw: st.DrawFn) -> tuple[list[tuple[np.ndarray, np.ndarray]], list[torch.dtype]]:
    """Bits of tensors before and after; few of them, many or all differ."""
    pairs, dtypes = [], []
    for _ in range(draw(st.integers(1, 4))):
        unsigned = draw(st.sampled_from(list(DTYPES)))
        length = draw(st.integers(0, 40))
        # Zero, -0.0, infinities and NaNs of the four widths, or any bits.
        info = np.iinfo(unsigned)
        bits = st.sampled_from([0, info.max // 2 + 1, info.max, info.max // 2]) | st.integers(0, int(info.max))
        whole = arrays.arrays(unsigned, length, elements=bits)
        before, after, mask = draw(whole), draw(whole), draw(arrays.arrays(bool, length, elements=st.booleans()))
        share = draw(st.sampled_from(["none", "some", "all"]))
        changes = {"none": np.zeros(length, bool), "some": mask, "all": np.ones(length, bool)}[share]
        pairs.append((before, np.where(changes, after, before).astype(unsigned)))
        dtypes.append(DTYPES[unsigned])
    return pairs, dtypes


@settings(deadline=None)
@given(two_versions(), st.sampled_from([64, 256, 4096]))
def test_base_and_changes_make_the_next_version_bit_for_bit(versions, bucket_bytes):
    pairs, dtypes = versions
    # A large tensor that stays: the others may change whole then.
    still = torch.zeros(2000)
    old, new = (
        {"still": still}
        | {
            f"t{i}": torch.from_numpy(pair[side]).view(dtype)
            for i, (pair, dtype) in enumerate(zip(pairs, dtypes, strict=True))
        }
        for side in (0, 1)
    )
    copy = PublishedCopy()
    base = loaded(publish(copy, old, version=0, bucket_bytes=bucket_bytes))
    second = publish(copy, new, version=1, bucket_bytes=bucket_bytes)
    base.take_changes(second.manifest, second.changes)
    _, *entries = second.manifest.tensors
    for entry, (before, after), count in zip(entries, pairs, second.delta.num_changed[1:], strict=True):
        place = slice(entry.offset_bytes, entry.offset_bytes + entry.size_bytes)
        assert base.buckets[entry.bucket][place].tobytes() == after.tobytes()
        assert count == int((before != after).sum())
