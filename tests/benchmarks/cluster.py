"""The cluster as a whole: sampling against a bare in-process vLLM loop on the same requests, broadcasts, start-up to the first step."""

import asyncio
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from cluster.contracts.config import RunConfig
from cluster.metrics import MetricLog
from cluster.record.ledger import Ledger
from cluster.record.run_directory import RunDirectory
from deploy.cluster_up.connection import connected
from deploy.cluster_up.start_up import cluster as started
from deploy.cluster_up.wiring import Cluster
from deploy.config.loading import validated
from tests.benchmarks.sampling import (
    CONTEXT,
    GROUP_SIZE,
    MAX_TOKENS,
    PROMPTS,
    ROUNDS,
    against_bare,
    bare_engine,
    sample_bare,
    tickets,
)
from tests.models import make_tiny_model

ROOT = Path(__file__).parents[2]
STARTS = 3


def rows() -> Iterator[dict[str, Any]]:
    """Four rows, as in `build/bench.json`. The start comes first: it is measured in processes of its own."""
    with tempfile.TemporaryDirectory() as folder:
        yield _startup(Path(folder))
        yield from asyncio.run(_running(Path(folder)))


async def _running(folder: Path) -> list[dict[str, Any]]:
    model = make_tiny_model(folder / "model", hidden_size=256, max_context=CONTEXT)
    config = _config(folder, model)
    bare = bare_engine(model)
    run_dir = RunDirectory(config.run_dir)
    async with connected(None), started(config, run_dir, Ledger(run_dir), MetricLog([])) as cluster:
        ours, theirs = [], []
        # Rounds alternate, and each side's best counts: other work on the machine only slows.
        for _ in range(ROUNDS):
            ours.append(await _sample(cluster))
            theirs.append(sample_bare(bare, PROMPTS))
        broadcasts = [await _broadcast(cluster) for _ in range(ROUNDS)]
    seconds, bytes_per_s = min(broadcasts)
    return [
        {"name": "cluster sampling", **against_bare(ours, theirs)},
        {"name": "broadcast, attested", "value": seconds, "unit": "s"},
        {"name": "broadcast, attested: throughput", "value": bytes_per_s, "unit": "bytes/s"},
    ]


async def _sample(cluster: Cluster) -> float:
    """From tickets to judged groups: what a step waits for."""
    began = time.perf_counter()
    held_out = await cluster.production.evaluate(tickets(PROMPTS), stall_s=600.0)
    return sum(summary.num_tokens for summary in held_out.summaries) / (time.perf_counter() - began)


async def _broadcast(cluster: Cluster) -> tuple[float, float]:
    """(seconds, bytes/s): gathered, packed, carried, loaded and proven by the canary."""
    await cluster.weights.finish_broadcast(cluster.production.fleet, await cluster.weights.begin_broadcast())
    stats = cluster.weights.stats()
    return stats["time/broadcast_s"], stats["weights/bytes_per_s"]


def _config(folder: Path, model: Path) -> RunConfig:
    return validated(
        {
            "run_dir": str(folder / "run"),
            "model": {"path": str(model), "dtype": "float32"},
            "prompts": {"name": "reasoning_gym", "task": "basic_arithmetic", "size": 100, "seed": 1},
            "sampling": {"max_tokens": MAX_TOKENS},
            "buffer": {"groups_per_step": len(PROMPTS), "trajectories_per_group": GROUP_SIZE},
            "rollout": {"num_threads": 1, "kv_cache_bytes": 256 * 1024**2},
            "metrics": {"sinks": []},
        }
    )


def _startup(folder: Path) -> dict[str, Any]:
    """The quickstart's own command, from its process's start to the end of step 1, the first evaluation included: the best of a few.

    One step more than that: the last one ends with an evaluation, which no first step of a run that trains does."""
    command = [str(Path(sys.executable).parent / "treadwheel"), "train", "deploy/runs/quickstart.yaml"]
    seconds: list[float] = []
    for number in range(STARTS):
        run_dir = folder / f"startup-{number}"
        subprocess.run([*command, f"run_dir={run_dir}", "num_steps=2"], cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
        seconds.append(json.loads((run_dir / "summary.json").read_text())["seconds_to_first_step"])
    return {"name": "start-up to the first trained step", "value": min(seconds), "unit": "s", "aim": "<= 15 s"}
