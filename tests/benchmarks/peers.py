"""One learner step against TRL's: GRPOTrainer trains on the same tokens, with its own padding, loss, backward and AdamW.

TRL is installed for the benchmark only, into build/peers: its own packages, on this environment's torch and transformers. Sampling is
left out: the trainer is handed the completions that it would have sampled. Where it cannot be installed, baselines stay empty.
Each side runs in a process of its own, and gives the figures of one task: `python -m tests.benchmarks.peers '{...}'`.
"""

import ctypes
import gc
import importlib
import json
import os
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
from learner.learner import Learner
from tests.models import make_tokenizer
from tests.unit.learner.trajectories import make_group

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "build" / "peers"
PACKAGES = (
    "trl==1.16.0",
    "accelerate==1.15.0",
    "datasets==5.2.0",
    "dill==0.4.1",
    "multiprocess==0.70.19",
    "xxhash==4.1.0",
    "pandas==3.1.1",
)
QUICKSTART = ROOT / "deploy" / "quickstart" / "model"
GROUP_SIZE, NUM_STEPS = 8, 3
ROWS_OF_A_PASS = (8, 32, 128)
"""TRL's default, and what may be faster for it: its best counts."""
LARGE_VOCABULARY = 262_144


def rows() -> list[dict[str, Any]]:
    """As in `build/bench.json`. Prompts have 12 tokens; 128 completions of 1 to 90, or 32 of 1 to 30 at the large vocabulary."""
    has_trl = install()
    with tempfile.TemporaryDirectory() as folder:
        # Logits outweigh everything else.
        large = make_model(Path(folder), vocab_size=LARGE_VOCABULARY, hidden_size=64)
        ragged: dict[str, Any] = {"num_groups": 16, "max_length": 90}
        short: dict[str, Any] = {"num_groups": 4, "max_length": 30, "rows_of_a_pass": 32}
        return [
            _speed("peer-ragged", str(QUICKSTART), has_trl=has_trl, aim=">= 1.5", **ragged),
            _memory("peer-memory-ragged", str(QUICKSTART), has_trl=has_trl, aim=None, rows_of_a_pass=128, **ragged),
            _memory("peer-memory-262k-vocabulary", large, has_trl=has_trl, aim="<= 0.35", **short),
            _speed("peer-262k-vocabulary", large, has_trl=has_trl, aim=None, choices=(8, 32), **short),
        ]


def install() -> bool:
    """Whether TRL is there to compare with, after trying to fetch it."""
    if not (FOLDER / "trl").exists():
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(FOLDER), *PACKAGES]
        subprocess.run(command, check=False, stdout=sys.stderr)
    probe = [sys.executable, "-c", "from trl import GRPOTrainer"]
    return subprocess.run(probe, env=_environment(), cwd=ROOT, capture_output=True, check=False).returncode == 0


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


def in_process(module: str, **task: Any) -> dict[str, Any]:
    """The task's figures from a fresh process with one torch thread."""
    command = [sys.executable, "-m", module, json.dumps(task)]
    environment = _environment()
    if task.get("watches"):
        # Large tensors then come from the system and go back to it: resident memory is what lives. It costs time.
        environment |= {"MALLOC_MMAP_THRESHOLD_": "131072"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command[2:])} failed: {done.stderr[-3000:]}")
    return result_of(done.stdout)


def result_of(output: str) -> dict[str, Any]:
    line = next(line for line in output.splitlines() if line.startswith("RESULT"))
    return json.loads(line.removeprefix("RESULT"))


def _environment() -> dict[str, str]:
    fixed = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": f"{ROOT}{os.pathsep}{FOLDER}"}
    return os.environ | fixed


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
    trl, datasets, transformers = (importlib.import_module(name) for name in ("trl", "datasets", "transformers"))
    tokens, seconds = list(trajectories(groups)), []
    num_passes = max(len(tokens) // task["rows_of_a_pass"], 1)

    class Trainer(trl.GRPOTrainer):
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

    with tempfile.TemporaryDirectory() as folder:
        arguments = trl.GRPOConfig(
            output_dir=folder,
            per_device_train_batch_size=len(tokens) // num_passes,
            gradient_accumulation_steps=num_passes,
            num_generations=GROUP_SIZE,
            max_completion_length=task["max_length"],
            max_steps=NUM_STEPS,
            # As here: nothing is computed twice to save memory, and float32.
            gradient_checkpointing=False,
            bf16=False,
            use_cpu=True,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
        )
        prompts = datasets.Dataset.from_list([{"prompt": str(index)} for index in range(len(tokens))])
        Trainer(
            model=AutoModelForCausalLM.from_pretrained(task["path"], dtype=torch.float32),
            processing_class=AutoTokenizer.from_pretrained(task["path"]),
            reward_funcs=lambda completions, **_: [0.0] * len(completions),
            args=arguments,
            train_dataset=prompts,
            callbacks=[Clock()],
        ).train()
    return seconds[1:]


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
