"""How long a broadcast of a model of Gemma-3-270M's shape (536 MB in bfloat16) keeps learner and workers from their work.

The learner stands still from the call of a broadcast until the next step may begin; a worker while its engine takes the weights and
proves them. The baseline is the bare load: an engine in this process takes the same tensors, which lie in its memory, by vLLM's own
weight update, unhashed and unproven. Two threads on each side; rounds alternate, and each side's best counts.
"""

import asyncio
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from actors.chat.formatter import ChatFormatter
from actors.rollout.vllm_engine import VllmEngine
from cluster.metrics import MetricLog
from cluster.record.ledger import Ledger
from cluster.record.run_directory import RunDirectory
from cluster.weights.delta import LoadedCopy, PublishedCopy
from cluster.weights.manifest import Canary, packing, verify
from deploy.cluster_up.connection import connected
from deploy.cluster_up.start_up import cluster as started
from deploy.config.loading import validated
from tests.benchmarks.peers_whole import gemma_of_270m
from tests.models import save_model

NUM_THREADS, ROUNDS = 2, 3


def rows() -> list[dict[str, Any]]:
    """Learner and worker against the bare load, and the learner's part of the broadcast."""
    with tempfile.TemporaryDirectory() as folder:
        model = save_model(gemma_of_270m, Path(folder) / "model", dtype="bfloat16")
        place = {"num_threads": NUM_THREADS}
        settings = {
            "rollout": {"kv_cache_bytes": 256 * 1024**2, **place},
            # Nothing is learned: no memory is needed for long passes.
            "learner": {"max_tokens_per_micro_batch": 1024, **place},
        }
        measured = asyncio.run(measure(Path(folder) / "run", model, settings))
        delta = delta_rows(load_file(model / "model.safetensors"))
    name, loads = f"broadcast of {measured.size_bytes / 1e6:.0f} MB", measured.loads
    return [
        *(
            {
                "name": f"{name}: {kind} stands still",
                "value": min(seconds),
                "unit": "s",
                "baseline": "bare load by vLLM",
                "baseline_value": min(loads),
                "ratio": min(seconds) / min(loads),
                "aim": "<= 1.3",
            }
            for kind, seconds in (("learner", measured.learner), ("worker", measured.workers))
        ),
        {"name": f"{name}: publishing", "value": min(measured.publishing), "unit": "s"},
        *delta,
    ]


def delta_rows(tensors: dict[str, torch.Tensor]) -> list[dict[str, Any]]:
    """A delta (`weights.deltas`) of 1 % of these weights in bfloat16 against the whole: its bytes, the learner's packing, and what a worker
    does before it stands still. Nothing travels: there is no network between them."""
    torch.set_num_threads(NUM_THREADS)
    published, loaded = PublishedCopy(), LoadedCopy()
    _, (*buckets, manifest) = _timed(list, published.compared(_packing(tensors, version=0)))
    loaded.take_whole(manifest, buckets)
    packing_s, worker_s = [], []
    for version in range(1, ROUNDS + 1):
        for tensor in tensors.values():
            tensor.view(torch.int16).bitwise_xor_((torch.rand(tensor.shape) < 0.01).short())
        whole_s, (*buckets, manifest) = _timed(list, _packing(tensors, version=version))
        verified_s, _ = _timed(verify, manifest, buckets)
        delta_s, (*parts, manifest) = _timed(list, published.compared(_packing(tensors, version=version)))
        added_s, _ = _timed(loaded.take_changes, manifest, parts[len(buckets) :])
        packing_s.append((delta_s, whole_s))
        worker_s.append((added_s, verified_s))
    size_bytes = [(manifest.delta.size_bytes, manifest.total_bytes)]
    name = f"delta of {manifest.delta.changed_share:.0%} of {manifest.total_bytes / 1e6:.0f} MB"
    return [
        {
            "name": f"{name}: {what}",
            "value": (value := min(delta for delta, _ in found)),
            "unit": unit,
            "baseline": "the whole",
            "baseline_value": (baseline := min(whole for _, whole in found)),
            "ratio": value / baseline,
        }
        for what, unit, found in (
            ("size", "bytes", size_bytes),
            ("packing", "s", packing_s),
            ("worker, before it stands still", "s", worker_s),
        )
    ]


def _packing(tensors: dict[str, torch.Tensor], *, version: int) -> Any:
    canary = Canary(token_ids=(1, 2), logprobs=(-1.0,), starting_logprobs=(-1.0,))
    return packing(tensors.items(), policy_version=version, bucket_bytes=256 * 1024**2, canary=lambda: canary)


def _timed(work: Callable[..., Any], *args: Any) -> tuple[float, Any]:
    """(seconds, what it returns)."""
    began = time.perf_counter()
    result = work(*args)
    return time.perf_counter() - began, result


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Seconds of each round."""

    learner: list[float]
    workers: list[float]
    publishing: list[float]
    loads: list[float]
    """Bare ones."""
    size_bytes: int


async def measure(run: Path, model: Path, settings: dict[str, Any]) -> Measured:
    """Of a run with these settings, in the folder `run`, of a model in bfloat16."""
    config = validated(
        {
            "run_dir": str(run),
            "model": {"path": str(model), "dtype": "bfloat16", "max_context": 256},
            "prompts": {"name": "reasoning_gym", "task": "basic_arithmetic", "size": 100, "seed": 1},
            "metrics": {"sinks": []},
            **settings,
        }
    )
    # Before the first vLLM, which makes this function do nothing.
    torch.set_num_threads(NUM_THREADS)
    bare = VllmEngine(config, formatter=ChatFormatter.load(config.model), num_threads=NUM_THREADS)
    tensors = load_file(model / "model.safetensors")
    run_dir = RunDirectory(config.run_dir)
    learner, publishing, workers, loads = [], [], [], []
    async with connected(None), started(config, run_dir, Ledger(run_dir), MetricLog([])) as cluster:
        for _ in range(ROUNDS):
            began = time.perf_counter()
            published = await cluster.weights.begin_broadcast()
            sent = await cluster.weights.finish_broadcast(cluster.production.fleet, published)
            learner.append(time.perf_counter() - began)
            publishing.append(sent.publish_seconds)
            workers.append(max(proof.pause_seconds for proof in sent.attestations))
            began = time.perf_counter()
            bare.load(iter(tensors.items()))
            loads.append(time.perf_counter() - began)
    return Measured(learner=learner, workers=workers, publishing=publishing, loads=loads, size_bytes=sent.size_bytes)


if __name__ == "__main__":
    print(*rows(), sep="\n")
