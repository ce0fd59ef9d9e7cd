"""One learner step against TRL's: GRPOTrainer trains on the same tokens, with its own padding, loss, backward and AdamW.

TRL is installed for the benchmark only, into build/peers: its own packages, on this environment's torch and transformers. Sampling is
left out: the trainer is handed the completions that it would have sampled. Float32 and one thread; neither side computes activations
again to save memory. 128 trajectories, or 32 at the large vocabulary. A step is timed from its first forward pass to the end of the
optimizer's; ours includes reading its Arrow batches. TRL too computes its vocabulary head in chunks: `learning` compares with all logits
at once.

Each side runs in a process of its own, and gives the figures of one task: `python -m tests.benchmarks.peers '{...}'`.
"""

import ctypes
import gc
import importlib
import json
import os
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

from cluster.contracts.config import RunConfig
from cluster.freed_memory import return_large_blocks
from learner.learner import Learner
from tests.models import make_tokenizer
from tests.unit.learner.trajectories import make_group

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "build" / "peers"
_OF_BOTH = ("datasets==5.2.0", "dill==0.4.1", "multiprocess==0.70.19", "xxhash==4.1.0", "pandas==3.1.1")
# verl asks for 0.10 at most; its losses run on this one, which torchrl needs.
_TENSORDICT = ("tensordict==0.14.3", "pyvers==0.2.3")
PEERS = {
    "trl": ("trl==1.16.0", "accelerate==1.15.0", *_OF_BOTH),
    "verl": (
        "verl==0.9.1",
        *_TENSORDICT,
        "hydra-core==1.3.8",
        "omegaconf==2.4.0",
        "antlr4-python3-runtime==4.9.3",
        "codetiming==1.4.0",
        "orjson==3.13.0",
        *_OF_BOTH,
    ),
    "torchrl": ("torchrl==0.14.1", "hoptorch==0.1.4", *_TENSORDICT),
}
"""By the peer, its packages and those of its dependencies that this environment lacks."""
_USED = {
    "trl": "trl.trainer.grpo_trainer",
    "verl": "verl.trainer.ppo.core_algos",
    "torchrl": "torchrl.objectives.llm",
}
"""Modules that must import. The peers themselves import what they need late."""
QUICKSTART = ROOT / "deploy" / "quickstart" / "model"
GROUP_SIZE, NUM_STEPS = 8, 3
ROWS_OF_A_PASS = (8, 32, 128)
"""TRL's default, and what may be faster for it: its best counts."""
LARGE_VOCABULARY = 262_144


def rows() -> Iterator[dict[str, Any]]:
    """As in `build/bench.json`. Prompts have 12 tokens; 128 completions of 1 to 90, or 32 of 1 to 30 at the large vocabulary."""
    has_trl = install("trl")
    with tempfile.TemporaryDirectory() as folder:
        # Logits outweigh everything else.
        large = make_model(Path(folder), vocab_size=LARGE_VOCABULARY, hidden_size=64)
        ragged: dict[str, Any] = {"num_groups": 16, "max_length": 90, "has_trl": has_trl}
        short: dict[str, Any] = {"num_groups": 4, "max_length": 30, "has_trl": has_trl}
        yield _speed("peer-ragged", str(QUICKSTART), aim=">= 3", **ragged)
        yield _memory("peer-memory-ragged", str(QUICKSTART), aim=None, rows_of_a_pass=128, **ragged)
        yield _memory("peer-memory-262k-vocabulary", large, aim="<= 0.35", rows_of_a_pass=32, **short)
        yield _speed("peer-262k-vocabulary", large, aim=">= 12", choices=(8, 32), **short)


def install(peer: str) -> bool:
    """Whether the peer is there to compare with, in the versions of `PEERS`, after trying to fetch it."""
    packages = PEERS[peer]
    stamp, pins = FOLDER / f"{peer}.pins", "\n".join(packages)
    if not stamp.exists() or stamp.read_text(encoding="utf-8") != pins:
        # An earlier install may have left other versions of what peers share.
        how = ("--quiet", "--no-deps", "--upgrade", "--target", str(FOLDER))
        command = [sys.executable, "-m", "pip", "install", *how, *packages]
        if subprocess.run(command, check=False, stdout=sys.stderr).returncode:
            return False
        stamp.write_text(pins, encoding="utf-8")
    probe = [sys.executable, "-c", f"import {_USED[peer]}"]
    return subprocess.run(probe, env=environment(), cwd=ROOT, capture_output=True, check=False).returncode == 0


def _speed(
    name: str, path: str, *, has_trl: bool, aim: str | None, choices: tuple[int, ...] = ROWS_OF_A_PASS, **task: Any
) -> dict[str, Any]:
    ours = in_process(__name__, side="ours", path=path, **task)
    tried = [{**task, "rows_of_a_pass": size} for size in choices] if has_trl else []
    theirs = [in_process(__name__, side="trl", path=path, **each) for each in tried]
    best = max((found["tokens_per_s"] for found in theirs), default=None)
    return {
        "name": name,
        "value": ours["tokens_per_s"],
        "unit": "tokens/s",
        "baseline": f"TRL GRPO step, best of {', '.join(map(str, choices))} rows a pass",
        "baseline_value": best,
        "ratio": None if best is None else ours["tokens_per_s"] / best,
        "aim": aim if has_trl else None,
    }


def _memory(name: str, path: str, *, has_trl: bool, aim: str | None, **task: Any) -> dict[str, Any]:
    ours = in_process(__name__, side="ours", path=path, watches=True, **task)["peak_mb"]
    theirs = in_process(__name__, side="trl", path=path, watches=True, **task)["peak_mb"] if has_trl else None
    return {
        "name": name,
        "value": ours,
        "unit": "MB above weights, gradients and moments",
        "baseline": f"TRL GRPO step, {task['rows_of_a_pass']} rows a pass",
        "baseline_value": theirs,
        "ratio": None if theirs is None else ours / theirs,
        "aim": aim if has_trl else None,
    }


def in_process(module: str, *, num_threads: int = 1, **task: Any) -> dict[str, Any]:
    """The task's figures from a fresh process."""
    command = [sys.executable, "-m", module, json.dumps(task)]
    variables = environment(num_threads)
    if task.get("watches"):
        # Large tensors then come from the system and go back to it: resident memory is what lives. It costs time.
        variables |= {"MALLOC_MMAP_THRESHOLD_": "131072"}
    done = subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command[2:])} failed: {done.stderr[-3000:]}")
    return result_of(done.stdout)


def result_of(output: str) -> dict[str, Any]:
    line = next(line for line in output.splitlines() if line.startswith("RESULT"))
    return json.loads(line.removeprefix("RESULT"))


def environment(num_threads: int = 1) -> dict[str, str]:
    """Of a process that finds the peers, and takes so many threads."""
    threads = {"OMP_NUM_THREADS": str(num_threads)}
    return os.environ | threads | {"HF_HUB_OFFLINE": "1", "PYTHONPATH": f"{ROOT}{os.pathsep}{FOLDER}"}


# In the process of one side


def measure(task: dict[str, Any]) -> dict[str, float]:
    torch.set_num_threads(1)
    groups = make_groups(task["num_groups"], max_length=task["max_length"])
    side = _ours if task["side"] == "ours" else _trl
    num_tokens = sum(len(p) + len(c) for p, c, _ in trajectories(groups))
    with Watch(task.get("watches", False)) as watch:
        seconds = side(task, groups, watch)
    return {"tokens_per_s": num_tokens / min(seconds), "peak_mb": watch.peak_mb}


def make_groups(num_groups: int, *, max_length: int, prompt_length: int = 12) -> list[pa.RecordBatch]:
    """`GROUP_SIZE` completions of 1 to `max_length` tokens each."""
    rewards = [1.0, 0.0] * (GROUP_SIZE // 2)
    return [
        make_group(i, rewards=rewards, prompt_length=prompt_length, max_length=max_length) for i in range(num_groups)
    ]


def trajectories(groups: list[pa.RecordBatch]) -> Iterator[tuple[list[int], list[int], float]]:
    """Prompt, completion and reward of each."""
    for group in groups:
        names = ("prompt_token_ids", "completion_token_ids", "reward")
        yield from zip(*(group[name].to_pylist() for name in names), strict=True)


class Watch:
    """Peak of resident memory while a step is on, above what lies there before it, gradients counted as lying there."""

    def __init__(self, is_on: bool) -> None:
        self.peak_mb = self.held_mb = 0.0
        self._is_on, self._in_step, self._done = is_on, False, threading.Event()
        self._thread = threading.Thread(target=self._look)

    def __enter__(self) -> "Watch":
        if self._is_on:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        if self._is_on:
            self._thread.join()

    def begin(self, gradients: Callable[[], list[torch.Tensor]]) -> None:
        if not self._is_on:
            return
        gc.collect()
        ctypes.CDLL("libc.so.6").malloc_trim(0)
        # Both sides free gradients after a step; while it runs they are held, and no side's merit.
        held = gradients()
        self.held_mb, self._in_step = resident_mb(), True
        del held

    def end(self) -> None:
        self._in_step = False

    def _look(self) -> None:
        while not self._done.wait(0.002):
            if self._in_step:
                self.peak_mb = max(self.peak_mb, resident_mb() - self.held_mb)


def resident_mb() -> float:
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("VmRSS")) / 1024


def _ours(task: dict[str, Any], groups: list[pa.RecordBatch], watch: Watch) -> list[float]:
    learner = Learner(make_config(task["path"]))
    if task.get("watches"):
        return_large_blocks()
    seconds = []
    for step in range(NUM_STEPS):
        if step:
            watch.begin(lambda: [torch.ones_like(p) for p in learner.policy.parameters()])
        seconds.append(learner.update(*groups).seconds)
        watch.end()
    return seconds[1:]


def make_config(path: Path | str, **learner: Any) -> RunConfig:
    sections = {"model": {"path": str(path), "dtype": "float32"}, "learner": {"num_threads": 1} | learner}
    return RunConfig.model_validate({"prompts": "file", **sections})


def _trl(task: dict[str, Any], groups: list[pa.RecordBatch], watch: Watch) -> list[float]:
    tokens, seconds = list(trajectories(groups)), []
    transformers = importlib.import_module("transformers")

    class Trainer(importlib.import_module("trl").GRPOTrainer):
        def _generate_and_score_completions(self, inputs: Any) -> dict[str, torch.Tensor]:
            return _sampled(tokens, device=self.accelerator.device)

    class Clock(transformers.TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step:
                watch.begin(lambda: [torch.ones_like(p) for p in kwargs["model"].parameters()])
            self.began = time.perf_counter()

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            seconds.append(time.perf_counter() - self.began)
            watch.end()

    train_trl(
        Trainer,
        path=task["path"],
        dtype="float32",
        prompts=[{"prompt": str(index)} for index in range(len(tokens))],
        num_trajectories=len(tokens),
        rows_of_a_pass=task["rows_of_a_pass"],
        max_length=task["max_length"],
        num_steps=NUM_STEPS,
        callback=Clock(),
    )
    return seconds[1:]


def train_trl(
    trainer: Any,
    *,
    path: str,
    dtype: str,
    prompts: list[dict[str, Any]],
    num_trajectories: int,
    rows_of_a_pass: int,
    max_length: int,
    num_steps: int,
    callback: Any,
) -> None:
    """`num_steps` steps of a GRPOTrainer, with rewards drawn by chance and all parameters and moments in `dtype`."""
    trl, datasets = (importlib.import_module(name) for name in ("trl", "datasets"))
    num_passes = max(num_trajectories // rows_of_a_pass, 1)
    with tempfile.TemporaryDirectory() as folder:
        arguments = trl.GRPOConfig(
            output_dir=folder,
            per_device_train_batch_size=num_trajectories // num_passes,
            gradient_accumulation_steps=num_passes,
            num_generations=GROUP_SIZE,
            max_completion_length=max_length,
            max_steps=num_steps,
            # As here: nothing is computed twice to save memory, and no autocast.
            gradient_checkpointing=False,
            bf16=False,
            use_cpu=True,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
        )
        trainer(
            model=AutoModelForCausalLM.from_pretrained(path, dtype=getattr(torch, dtype)),
            processing_class=AutoTokenizer.from_pretrained(path),
            reward_funcs=lambda completions, **_: [random.random() for _ in completions],
            args=arguments,
            train_dataset=datasets.Dataset.from_list(prompts),
            callbacks=[callback],
        ).train()


def _sampled(tokens: list[tuple[list[int], list[int], float]], *, device: torch.device) -> dict[str, torch.Tensor]:
    """What the trainer's sampling returns: prompts padded on the left, completions on the right, advantages."""
    before, after = max(len(prompt) for prompt, _, _ in tokens), max(len(completion) for _, completion, _ in tokens)
    ids = torch.zeros(len(tokens), before + after, dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for place, (prompt, completion, _) in enumerate(tokens):
        span = slice(before - len(prompt), before + len(completion))
        ids[place, span], mask[place, span] = torch.tensor(prompt + completion), 1
    rewards = torch.tensor([reward for _, _, reward in tokens]).view(-1, GROUP_SIZE)
    advantages = (rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-4)
    sampled = {
        "prompt_ids": ids[:, :before],
        "prompt_mask": mask[:, :before],
        "completion_ids": ids[:, before:],
        "completion_mask": mask[:, before:],
        "advantages": advantages.flatten(),
        "num_items_in_batch": mask[:, before:].sum(),
    }
    return {name: tensor.to(device) for name, tensor in sampled.items()}


def make_model(folder: Path, **sizes: int) -> str:
    """Few narrow layers with random weights, and a tokenizer; the path."""
    config = Qwen3Config.from_dict(
        {
            "vocab_size": 128,
            "hidden_size": 256,
            "intermediate_size": 768,
            "num_hidden_layers": 4,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "head_dim": 32,
            "max_position_embeddings": 1024,
            "tie_word_embeddings": True,
        }
        | sizes
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return str(folder)


if __name__ == "__main__":
    print("RESULT" + json.dumps(measure(json.loads(sys.argv[1]))))
