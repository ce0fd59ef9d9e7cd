"""Weights packed all at once, for tests and benchmarks; a run's learner hands them out piece by piece."""

from collections.abc import Iterable
from typing import cast

import numpy as np
import torch

from cluster.weights.manifest import Adapter, Canary, WeightManifest, owned, packing


def pack(
    named_tensors: Iterable[tuple[str, torch.Tensor]],
    *,
    policy_version: int,
    bucket_bytes: int,
    canary: Canary,
    adapter: Adapter | None = None,
) -> tuple[WeightManifest, list[np.ndarray]]:
    """(the manifest, the buckets) that `packing` gives one after the other."""
    *buckets, manifest = packing(
        named_tensors, policy_version=policy_version, bucket_bytes=bucket_bytes, canary=lambda: canary, adapter=adapter
    )
    return cast(WeightManifest, manifest), [owned(bucket) for bucket in cast(list[np.ndarray], buckets)]
