"""Speed of the learner: its share of bare matrix multiplications, and the gains of packing, shared prompts and a second rank.

The bare multiplications are those of every linear layer and its two gradients on the batch's own tokens, the head's at completion
positions only, by the library that is fastest on this processor; attention, norms, loss and optimizer are no part of them. Prompts count
each time, so that sharing them, which saves multiplications, may bring more than packing alone.

Each side runs in a process of its own, with one torch thread a rank: `python -m tests.benchmarks.scaling '{...}'`.
"""

import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import pyarrow as pa
import torch
from torch import nn
from transformers import PreTrainedModel

from cluster.contracts.sockets import bound
from cluster.freed_memory import return_large_blocks
from learner.learner import Learner
from learner.model.products import product
from tests.benchmarks.peers import (
    ROOT,
    Watch,
    in_process,
    make_config,
    make_groups,
    make_model,
    resident_mb,
    result_of,
    trajectories,
)

LAYOUTS = ("padded", "packed", "shared")
NUM_STEPS = 3
TIMEOUT_S = 300


def rows() -> Iterator[dict[str, Any]]:
    """As in `build/bench.json`."""
    with tempfile.TemporaryDirectory() as folder:
        path = make_model(Path(folder) / "small")
        wide = make_model(Path(folder) / "wide", vocab_size=8192, hidden_size=512)
        yield from _share_of_gemm(path)
        yield from _long_prompts(path)
        yield from _two_ranks(wide)


def _share_of_gemm(path: str) -> list[dict[str, Any]]:
    found = in_process(__name__, kind="layouts", path=path, num_groups=8, max_length=90, prompt_length=12)
    return [
        {
            "name": f"gemm-share-{layout}",
            "value": found[layout],
            "unit": "tokens/s",
            "baseline": "bare forward and backward matrix multiplications of the batch's tokens, prompts counted each time",
            "baseline_value": found["gemm"],
            "ratio": found[layout] / found["gemm"],
            "aim": None,
        }
        for layout in LAYOUTS
    ]


def _long_prompts(path: str) -> list[dict[str, Any]]:
    found = in_process(__name__, kind="layouts", path=path, num_groups=2, max_length=63, prompt_length=512)
    return [
        {
            "name": f"shared-long-prompts-against-{layout}",
            "value": found["shared"],
            "unit": "tokens/s",
            "baseline": f"the same batch, {layout}: prompts of 512 tokens, 8 completions of 32 on average",
            "baseline_value": found[layout],
            "ratio": found["shared"] / found[layout],
            "aim": "> 1" if layout == "packed" else None,
        }
        for layout in ("packed", "padded")
    ]


def _two_ranks(path: str) -> list[dict[str, Any]]:
    one, two = (_ranks(path, num_ranks=size) for size in (1, 2))
    return [
        {
            "name": f"two-ranks-{name}",
            "value": two[name],
            "unit": unit,
            "baseline": "1 rank; one thread a rank",
            "baseline_value": one[name],
            "ratio": two[name] / one[name],
            "aim": None,
        }
        for name, unit in (
            ("tokens_per_s", "tokens/s"),
            ("peak_mb", "MB a rank at the peak, weights and moments included"),
        )
    ]


def _ranks(path: str, *, num_ranks: int) -> dict[str, float]:
    """Figures of all ranks together; the larger one's memory."""
    listener, rendezvous = bound("127.0.0.1")
    task = {
        "kind": "rank",
        "path": path,
        "num_ranks": num_ranks,
        "rendezvous": rendezvous,
        "listener": listener.fileno(),
    }
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", __name__, json.dumps(task | {"rank": rank})],
            cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            pass_fds=[listener.fileno()] if rank == 0 else [],
        )
        for rank in range(num_ranks)
    ]  # fmt: skip
    listener.close()
    try:
        outputs = [process.communicate(timeout=TIMEOUT_S) for process in processes]
    finally:
        for process in processes:
            process.kill()
    if any(process.returncode for process in processes):
        raise RuntimeError("a rank failed: " + " ".join(errors[-1500:] for _, errors in outputs))
    found = [result_of(output) for output, _ in outputs]
    return {"tokens_per_s": found[0]["tokens_per_s"], "peak_mb": max(each["peak_mb"] for each in found)}


# In the process of one side


def measure(task: dict[str, Any]) -> dict[str, float]:
    torch.set_num_threads(1)
    if task["kind"] == "rank":
        return _rank(task)
    groups = make_groups(task["num_groups"], max_length=task["max_length"], prompt_length=task["prompt_length"])
    learners = {layout: _learner(task["path"], layout) for layout in LAYOUTS}
    seconds = {layout: [learner.update(*groups).seconds] for layout, learner in learners.items()}
    seconds["gemm"] = [_gemm_seconds(learners["padded"].policy.causal_lm, groups)]
    for _ in range(NUM_STEPS - 1):
        # In turns: what else the machine does falls on all.
        for layout, learner in learners.items():
            seconds[layout].append(learner.update(*groups).seconds)
        seconds["gemm"].append(_gemm_seconds(learners["padded"].policy.causal_lm, groups))
    num_tokens = _num_tokens(groups)
    return {name: num_tokens / min(taken[1:]) for name, taken in seconds.items()}


def _learner(path: str, layout: Literal["padded", "packed", "shared"]) -> Learner:
    learner = Learner(make_config(path, packing="padded" if layout == "padded" else "packed"))
    if learner.policy.layout != layout:
        # Sharing is not a setting: it is on where it is proven.
        learner.policy.layout = layout
    return learner


@torch.no_grad()
def _gemm_seconds(causal_lm: PreTrainedModel, groups: list[pa.RecordBatch]) -> float:
    """Seconds of every linear layer's product and its two gradients, in passes of 4,096 tokens; the head's at completions only."""
    num_inputs = sum(len(p) + len(c) - 1 for p, c, _ in trajectories(groups))
    num_targets = sum(len(c) for _, c, _ in trajectories(groups))
    head = causal_lm.get_output_embeddings()
    total = 0.0
    for layer in causal_lm.modules():
        if not isinstance(layer, nn.Linear):
            continue
        weight = layer.weight.detach().clone()
        for begin in range(0, num_targets if layer is head else num_inputs, 4096):
            size = min((num_targets if layer is head else num_inputs) - begin, 4096)
            x, gradient = torch.randn(size, weight.shape[1]), torch.randn(size, weight.shape[0])
            began = time.perf_counter()
            _ = product(x, weight.t()), product(gradient, weight), product(gradient.t(), x)
            total += time.perf_counter() - began
    return total


def _rank(task: dict[str, Any]) -> dict[str, float]:
    before = resident_mb()
    groups = make_groups(8, max_length=60)
    config = make_config(task["path"], num_ranks=task["num_ranks"], timeout_s=TIMEOUT_S)
    with Watch(True) as watch:
        listener = socket.socket(fileno=task["listener"]) if task["rank"] == 0 else None
        learner = Learner(config, rank=task["rank"], rendezvous=task["rendezvous"], listener=listener)
        return_large_blocks()  # a single rank would keep them: resident memory is what lives
        learner.update(*groups)
        watch.begin(list)
        seconds = [learner.update(*groups).seconds for _ in range(NUM_STEPS - 1)]
        watch.end()
    learner.close()
    return {"tokens_per_s": _num_tokens(groups) / min(seconds), "peak_mb": watch.held_mb + watch.peak_mb - before}


def _num_tokens(groups: list[pa.RecordBatch]) -> int:
    return sum(len(p) + len(c) for p, c, _ in trajectories(groups))


if __name__ == "__main__":
    print("RESULT" + json.dumps(measure(json.loads(sys.argv[1]))))
