from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from cluster.contracts.errors import WeightsError
from cluster.weights.manifest import Adapter, Canary, WeightManifest, owned, packing, unpack, verify
from tests.packed import pack

CANARY = Canary(token_ids=(1, 2, 3), logprobs=(-1.0, -2.0), starting_logprobs=(-1.0, -2.0))


def packed(tensors: dict[str, torch.Tensor], *, bucket_bytes: int = 1024, policy_version: int = 7):
    return pack(tensors.items(), policy_version=policy_version, bucket_bytes=bucket_bytes, canary=CANARY)


def parts(tensors: dict[str, torch.Tensor]) -> list[Any]:
    """Buckets of 64 bytes as a learner hands them out, and the manifest."""
    return list(packing(tensors.items(), policy_version=7, bucket_bytes=64, canary=lambda: CANARY))


def test_what_is_packed_is_unpacked():
    tensors = {
        "a": torch.randn(3, 5),
        "b": torch.randn(7).to(torch.bfloat16),
        "scalar": torch.tensor(2.5),
        "transposed": torch.arange(6.0).reshape(2, 3).T,
        "empty": torch.empty(0, 4),
    }
    manifest, buckets = packed(tensors)
    found = dict(unpack(manifest, buckets))
    assert list(found) == list(tensors)
    for name, tensor in tensors.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor)
    assert manifest.total_bytes == 15 * 4 + 7 * 2 + 4 + 6 * 4


def test_unpacked_tensors_live_in_the_buckets():
    manifest, buckets = packed({"a": torch.zeros(4)})
    (_, tensor), *_ = unpack(manifest, buckets)
    buckets[0].view(np.float32)[2] = 5.0
    assert tensor.tolist() == [0.0, 0.0, 5.0, 0.0]


class Counted(tuple[Any, ...]):
    num_walks = 0

    def __iter__(self):
        self.num_walks += 1
        return super().__iter__()


def test_the_table_of_tensors_is_walked_through_once_and_not_once_for_each_bucket():
    """Seen before: a mixture of experts with 40,000 tensors in 4,000 buckets had sampling stand still for 160 million comparisons."""
    manifest, buckets = packed({str(place): torch.zeros(16) for place in range(50)}, bucket_bytes=64)
    counted = WeightManifest.model_construct(**{**dict(manifest), "tensors": Counted(manifest.tensors)})
    assert len(buckets) == len(list(unpack(counted, buckets))) == 50
    assert counted.tensors.num_walks == 1


def test_buckets_keep_to_their_size_except_for_a_larger_tensor():
    manifest, buckets = packed({"a": torch.zeros(16), "b": torch.zeros(16), "c": torch.zeros(64)}, bucket_bytes=128)
    assert [bucket.nbytes for bucket in buckets] == [128, 256]
    assert [(entry.bucket, entry.offset_bytes) for entry in manifest.tensors] == [(0, 0), (0, 64), (1, 0)]


def test_a_tensor_that_fills_a_bucket_is_not_copied_unless_its_bucket_is_kept():
    tensors = {"a": torch.zeros(8), "large": torch.ones(16), "empty": torch.zeros(0), "b": torch.zeros(8)}
    first, large, last, manifest = parts(tensors)
    assert [bucket.flags.writeable for bucket in (first, large, last)] == [True, False, True]
    stays = owned(large)
    verify(manifest, [first, large, last])
    tensors["large"].fill_(2.0)  # as the next step does
    assert large.view(np.float32)[0] == 2.0
    verify(manifest, [first, stays, last])
    assert owned(first) is first


def test_a_large_tensor_that_does_not_lie_in_one_piece_is_copied():
    transposed = torch.arange(32.0).reshape(4, 8).T
    bucket, manifest = parts({"a": transposed})
    assert bucket.flags.writeable
    assert torch.equal(dict(unpack(manifest, [bucket]))["a"], transposed)


def test_the_canary_is_computed_when_the_last_bucket_has_left():
    """So the last buckets are hashed beside it, and with several ranks all are done with gathering."""
    happened: list[str] = []

    def gather():
        for name in ("a", "b"):
            happened.append(f"gathered {name}")
            yield name, torch.zeros(16)

    def canary() -> Canary:
        happened.append("canary")
        return CANARY

    for part in packing(gather(), policy_version=1, bucket_bytes=64, canary=canary):
        happened.append("manifest" if isinstance(part, WeightManifest) else "bucket")
    assert happened == ["gathered a", "gathered b", "bucket", "bucket", "canary", "manifest"]


def test_tied_tensors_travel_once():
    embedding = torch.randn(8, 2)
    manifest, _ = packed({"embed_tokens.weight": embedding, "lm_head.weight": embedding, "norm": torch.ones(2)})
    assert [entry.name for entry in manifest.tensors] == ["embed_tokens.weight", "norm"]


def test_tensors_at_one_address_that_are_not_the_same_travel_each():
    memory = torch.arange(8.0)
    tensors = {"whole": memory, "half": memory[:4], "bits": memory[:4].view(torch.int32), "row": memory[None]}
    empty = torch.empty(0)
    manifest, buckets = packed(tensors | {"empty": empty, "also empty": empty})
    assert list(dict(unpack(manifest, buckets))) == [*tensors, "empty", "also empty"]


def test_parameters_with_a_gradient_travel_as_they_are():
    tensors: dict[str, torch.Tensor] = {"a": torch.nn.Parameter(torch.ones(2)), "b": torch.nn.Parameter(torch.ones(16))}
    *buckets, manifest = parts(tensors)
    assert all(torch.equal(tensor, tensors[name]) for name, tensor in unpack(manifest, buckets))
    assert len(buckets) == 2 and not buckets[1].flags.writeable, "the second is not copied"


def test_what_lay_in_memory_before_is_in_no_digest(monkeypatch: pytest.MonkeyPatch):
    """Between tensors there is room."""
    tensors = {"a": torch.ones(3), "b": torch.ones(3)}
    digests = []
    for left in (1, 255):
        monkeypatch.setattr(np, "empty", lambda size, dtype, left=left: np.full(size, left, dtype))
        digests.append(packed(tensors)[0].digest)
    assert digests[0] == digests[1]


def test_tensors_that_are_gathered_one_after_the_other_are_not_taken_for_tied():
    def gather():
        for value in range(20):
            yield f"t{value}", torch.full((1000,), float(value))

    manifest, buckets = pack(gather(), policy_version=1, bucket_bytes=4096, canary=CANARY)
    assert [tensor[0].item() for _, tensor in unpack(manifest, buckets)] == list(range(20))


def test_equal_weights_have_equal_digests_whatever_their_version():
    one, _ = packed({"a": torch.ones(3)}, policy_version=1)
    two, _ = packed({"a": torch.ones(3)}, policy_version=2)
    other, _ = packed({"a": torch.ones(3) + 1e-7}, policy_version=2)
    assert one.digest == two.digest != other.digest


def test_the_manifest_survives_its_journey_as_a_dict():
    adapter = Adapter(rank=4, alpha=8.0, target_modules=("q_proj",))
    manifest, buckets = pack([("a", torch.ones(3))], policy_version=7, bucket_bytes=64, canary=CANARY, adapter=adapter)
    assert (manifest.policy_version, manifest.canary, manifest.adapter) == (7, CANARY, adapter)
    arrived = WeightManifest.model_validate(manifest.model_dump())
    assert arrived == manifest
    verify(arrived, buckets)


def test_an_altered_bucket_is_named():
    manifest, buckets = packed({"a": torch.zeros(16), "b": torch.zeros(64)}, bucket_bytes=64)
    buckets[1][200] ^= 1
    with pytest.raises(WeightsError, match="policy version 7: bucket 1 of 2"):
        verify(manifest, buckets)


def test_a_missing_bucket_and_an_altered_table_are_refused():
    manifest, buckets = packed({"a": torch.zeros(16), "b": torch.zeros(16)}, bucket_bytes=64)
    with pytest.raises(WeightsError, match="1 buckets arrived, the manifest lists 2"):
        verify(manifest, buckets[:1])
    swapped = manifest.model_copy(update={"tensors": manifest.tensors[::-1]})
    with pytest.raises(WeightsError, match="tensor table"):
        verify(swapped, buckets)


def test_nothing_to_publish_is_an_error():
    with pytest.raises(WeightsError, match="no tensors"):
        packed({})


@pytest.fixture
def _torch_warns_each_time() -> Iterator[None]:
    """By default torch warns once in a process, perhaps in another test."""
    before = torch.is_warn_always_enabled()
    torch.set_warn_always(True)
    yield
    torch.set_warn_always(before)


@pytest.mark.usefixtures("_torch_warns_each_time")
def test_read_only_buckets_unpack_without_a_warning(recwarn):
    manifest, buckets = packed({"a": torch.ones(3)})
    buckets[0].flags.writeable = False
    assert dict(unpack(manifest, buckets))["a"].tolist() == [1.0, 1.0, 1.0]
    assert not recwarn.list
