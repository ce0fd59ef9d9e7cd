"""Half a billion parameters in bfloat16 on a GPU (the shape of Qwen2.5-0.5B, random weights): learning, sampling, broadcasts, memory.

A learner's tokens are those that it computes: prompts of a group count once where they are shared. Their FLOP are 6 x parameters, which
leaves attention out, and the peak is the GPU's own in bfloat16 without sparsity, by its name. Passes are as large as fit, with the logits
that they keep, of those that `PASSES` names; the aim is for compiled layers, which runs on GPUs are advised to have. Sampling is compiled
with CUDA graphs on both sides. A broadcast is timed from the call until all workers have proven the weights, as in `weights`, and its
baseline is the same. Learner, worker and the bare engine share the first GPU, each with a part of its memory; NCCL takes a second one.
Measured by `make bench GPU=1`, in ten minutes; build/gpu_profile.txt then says which kernels a step of the learner spends its time in.
"""

import asyncio
import gc
import json
import re
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pyarrow as pa
import torch

from cluster.contracts.config import RunConfig
from learner import memory
from learner.learner import Learner
from tests.benchmarks import sampling, weights
from tests.benchmarks._record import ROOT
from tests.benchmarks.peers import in_process
from tests.models import half_a_billion
from tests.unit.learner.trajectories import make_config, make_group

NUM_STEPS = 4
"""The first is not timed."""
NUM_GROUPS, GROUP_SIZE, PROMPT, COMPLETION = 16, 8, 32, 512
LAYOUTS = ("shared", "packed")
COMPILED = "compiled"
"""`shared`, with `learner.compile`."""
PASSES = ((33_280, 24 * 2**30), (16_640, 12 * 2**30), (16_640, 0))
"""`learner.max_tokens_per_micro_batch`, a half of a step's groups or a quarter, and `learner.kept_logits_bytes`: room for all, or none."""
PROFILE, NUM_KERNELS = ROOT / "build" / "gpu_profile.txt", 40
NUM_PROMPTS, MAX_TOKENS, NUM_ROUNDS = 64, 256, 4
PEAKS = {
    "A10": 125e12,
    "A100": 312e12,
    "A40": 149.7e12,
    "B200": 2250e12,
    "GH200": 989.4e12,
    "H100": 989.4e12,
    "H100 NVL": 835e12,
    "H100 PCIe": 756e12,
    "H200": 989.4e12,
    "L4": 121e12,
    "L40": 181e12,
    "L40S": 362e12,
}
"""FLOP/s in dense bfloat16, by a part of the name that torch gives a GPU: NVIDIA's data sheets."""
WITHOUT = "gpu: torch sees no GPU here, so nothing is measured; it takes a machine with one, and make install GPU=1"


def rows() -> Iterator[dict[str, Any]]:
    """As in `build/bench.json`; none without a GPU."""
    if not torch.cuda.is_available():
        print(WITHOUT, file=sys.stderr)
        return
    with tempfile.TemporaryDirectory() as folder:
        path = str(half_a_billion(Path(folder) / "model"))
        found = in_process(__name__, kind="learner", path=path)
        yield from (_learning(layout, found) for layout in (*LAYOUTS, COMPILED))
        yield _memory(found)
        yield in_process(__name__, kind="sampling", path=path)
        for name, options in _transports().items():
            yield _broadcast(name, in_process(__name__, kind="broadcast", path=path, options=options))
        if torch.cuda.device_count() < 2:
            yield {"name": "broadcast, nccl", "value": "NCCL takes no GPU twice: it needs two", "unit": "s"}


def peak_of(name: str) -> float | None:
    """Of a GPU that torch calls so; None for one that is not known here, and for a part of one."""
    known = [part for part in PEAKS if re.search(rf"\b{part}\b", name)]
    return PEAKS[max(known, key=len)] if known and "MIG" not in name else None


def _learning(layout: str, found: dict[str, Any]) -> dict[str, Any]:
    peak, flop_per_token = peak_of(found["device"]), 6 * found["num_parameters"]
    row = {"name": f"learner 0.5B, {layout}", "value": found[layout], "unit": "tokens/s"}
    if peak is None:
        return row | {"baseline": f"the peak of {found['device']} is not known here", "baseline_value": None}
    return row | {
        "baseline": f"the peak of {found['device']}, {peak / 1e12:g} TFLOP/s, at {flop_per_token / 1e9:.2f} GFLOP a token",
        "baseline_value": peak / flop_per_token,
        "ratio": found[layout] * flop_per_token / peak,
        "aim": ">= 0.45" if layout == COMPILED else None,
    }


def _memory(found: dict[str, Any]) -> dict[str, Any]:
    return {
        "name": "learner 0.5B, peak memory",
        "value": found["peak_bytes"] / 2**30,
        "unit": "GiB",
        "baseline": "the estimate of `treadwheel check`, which is to be right within a third",
        "baseline_value": found["estimated_bytes"] / 2**30,
        "ratio": found["peak_bytes"] / found["estimated_bytes"],
        "aim": "0.67 to 1.33",
    }


def _transports() -> dict[str, dict[str, Any]]:
    """Settings of the run, by the name of the row."""
    part = {"learner": {"gpus_per_rank": 0.4}, "rollout": {"gpus_per_worker": 0.4}}
    ways: dict[str, dict[str, Any]] = {
        "object store": part | {"weights": {"transport": "object_store"}},
        "gloo": part | {"weights": {"transport": "collective", "backend": "gloo"}},
    }
    if torch.cuda.device_count() > 1:
        whole = {"learner": {"gpus_per_rank": 1}, "rollout": {"gpus_per_worker": 1}}
        ways["nccl"] = whole | {"weights": {"transport": "collective", "backend": "nccl"}}
    return ways


def _broadcast(name: str, found: dict[str, Any]) -> dict[str, Any]:
    seconds, load = min(found["learner"]), min(found["loads"])
    return {
        "name": f"broadcast, {name}",
        "value": seconds,
        "unit": f"s for {found['size_bytes'] / 1e6:.0f} MB",
        "baseline": "bare load by vLLM, from the host's memory",
        "baseline_value": load,
        "ratio": seconds / load,
    }


# In the process of one side


def measure(task: dict[str, Any]) -> dict[str, Any]:
    if task["kind"] == "learner":
        return _learner(task["path"])
    if task["kind"] == "sampling":
        return asyncio.run(_sampling(task["path"]))
    with tempfile.TemporaryDirectory() as folder:
        options = task["options"]
        options["learner"]["max_tokens_per_micro_batch"] = 1024
        options["rollout"]["gpu_memory_utilization"] = 0.25
        return asdict(asyncio.run(weights.measure(Path(folder) / "run", Path(task["path"]), options)))


def _learner(path: str) -> dict[str, Any]:
    config = _largest_that_fits(path)
    lengths, rewards = [COMPLETION] * GROUP_SIZE, [1.0, 0.0] * (GROUP_SIZE // 2)
    groups = [make_group(i, rewards=rewards, prompt_length=PROMPT, lengths=lengths) for i in range(NUM_GROUPS)]
    learner = Learner(config)
    found: dict[str, Any] = {"device": torch.cuda.get_device_name()}
    for layout in LAYOUTS:
        # Sharing is not a setting: it is on where it is proven.
        learner.policy.layout = layout
        found[layout] = _speed(learner, groups, layout)
        if layout == LAYOUTS[0]:
            estimated = memory.of_run(config)
            found |= {"peak_bytes": torch.cuda.max_memory_allocated(), "estimated_bytes": estimated.step_bytes}
            found["num_parameters"] = estimated.num_parameters
            _profile(learner, groups)
    del learner
    gc.collect()
    torch.cuda.empty_cache()
    compiled = config.model_copy(update={"learner": config.learner.model_copy(update={"compile": True})})
    learner = Learner(compiled)
    learner.policy.layout = LAYOUTS[0]
    found[COMPILED] = _speed(learner, groups, LAYOUTS[0])
    return found


def _largest_that_fits(path: str) -> RunConfig:
    configs = [
        make_config(
            Path(path),
            dtype="bfloat16",
            learner={"gpus_per_rank": 1, "max_tokens_per_micro_batch": num_tokens, "kept_logits_bytes": kept_bytes},
        )
        for num_tokens, kept_bytes in PASSES
    ]
    free = memory.free_bytes(torch.device("cuda"))
    return next((each for each in configs if memory.of_run(each).needed_bytes < free), configs[-1])


def _speed(learner: Learner, groups: list[pa.RecordBatch], layout: str) -> float:
    """Tokens a second, of the fastest step."""
    learner.update(*groups)
    torch.cuda.reset_peak_memory_stats()
    seconds = [learner.update(*groups).seconds for _ in range(NUM_STEPS - 1)]
    return _num_computed(layout) / min(seconds)


def _profile(learner: Learner, groups: list[pa.RecordBatch]) -> None:
    with torch.profiler.profile() as profile:
        learner.update(*groups)
    table = profile.key_averages().table(sort_by="self_device_time_total", row_limit=NUM_KERNELS)
    PROFILE.parent.mkdir(exist_ok=True)
    PROFILE.write_text(table, encoding="utf-8")


def _num_computed(layout: str) -> int:
    prompts = NUM_GROUPS * (1 if layout == "shared" else GROUP_SIZE)
    return prompts * PROMPT + NUM_GROUPS * GROUP_SIZE * (COMPLETION - 1)


async def _sampling(path: str) -> dict[str, Any]:
    config = RunConfig.model_validate(
        {
            "prompts": "file",
            "model": {"path": path, "dtype": "bfloat16", "max_context": 2 * MAX_TOKENS},
            "rollout": {"gpus_per_worker": 0.5, "gpu_memory_utilization": 0.4, "enforce_eager": False},
            "sampling": {"max_tokens": MAX_TOKENS},
        }
    )
    prompts = [f"{number}+{3 * number}=" for number in range(10, 10 + NUM_PROMPTS)]
    alike = {
        "dtype": "bfloat16",
        "max_model_len": 2 * MAX_TOKENS,
        "enforce_eager": False,
        "kv_cache_memory_bytes": None,
        "gpu_memory_utilization": 0.4,
        "hf_overrides": {"head_dtype": "float32"},
    }
    row = await sampling.compared(
        config, prompts, bare=lambda: sampling.bare_engine(Path(path), **alike), num_rounds=NUM_ROUNDS
    )
    return {"name": "sampling 0.5B, one worker", **row}


if __name__ == "__main__":
    print("RESULT" + json.dumps(measure(json.loads(sys.argv[1]))))
