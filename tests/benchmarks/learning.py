"""The learner against bare transformers on the same batch: tokens/s, memory at a large vocabulary, seconds per GB of a checkpoint.

The bare side runs forward and backward over padded rows with all logits, without loss and optimizer. Memory is the peak above weights,
gradients and moments. One thread on each side.
"""

import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import torch
from transformers import PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from cluster.contracts.config import RunConfig
from learner.learner import Learner
from tests.models import make_tokenizer
from tests.unit.learner.trajectories import make_group

NUM_GROUPS, GROUP_SIZE, ROUNDS = 64, 8, 3
LARGE_VOCABULARY = 262_144


def rows() -> Iterator[dict[str, Any]]:
    """As in `build/bench.json`. Rounds alternate, and each side's best counts: other work on the machine only slows."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        yield _learning(Path(folder), max_length=30, name="learning")
        yield _learning(Path(folder), max_length=90, name="learning-ragged", num_groups=16)
        yield _large_vocabulary(Path(folder))
        yield from _saving(Path(folder))


def _learning(folder: Path, *, max_length: int, name: str, num_groups: int = NUM_GROUPS) -> dict[str, Any]:
    path = _model(folder / "small", vocab_size=128)
    groups = _groups(num_groups, max_length=max_length)
    learner, bare = Learner(_config(path)), Qwen3ForCausalLM.from_pretrained(path, dtype=torch.float32)
    num_tokens = sum(len(row) for row in _tokens(groups))
    ours, theirs = [], []
    for _ in range(ROUNDS):
        ours.append(num_tokens / learner.update(*groups).seconds)
        theirs.append(num_tokens / _bare_step(bare, groups))
    return {
        "name": name,
        "value": max(ours),
        "unit": "tokens/s",
        "baseline": "transformers forward and backward, padded, all logits, no loss, no optimizer",
        "baseline_value": max(theirs),
        "ratio": max(ours) / max(theirs),
        "aim": ">= 0.95",
    }


def _large_vocabulary(folder: Path) -> dict[str, Any]:
    """Peak memory of a step above what the process held before it, each side in a process of its own."""
    path = _model(folder / "large", vocab_size=LARGE_VOCABULARY, hidden_size=64)
    ours, theirs = (_in_process(_PEAK, path=str(path), side=side) for side in ("ours", "bare"))
    return {
        "name": "learning-memory-262k-vocabulary",
        "value": ours,
        "unit": "MB above weights, gradients and moments",
        "baseline": "transformers forward and backward, all logits",
        "baseline_value": theirs,
        "ratio": ours / theirs,
        "aim": "<= 0.35",
    }


def _saving(folder: Path) -> list[dict[str, Any]]:
    """Seconds per GB of a checkpoint, synced and digested, against a plain copy of the same files."""
    path = _model(folder / "saved", vocab_size=4096, hidden_size=512)
    learner = Learner(_config(path, checkpoint={"asynchronous": False}))
    learner.update(*_groups(2, max_length=8))
    directory = folder / "checkpoints" / "step-000001"
    began = time.perf_counter()
    learner.save(str(directory), {})
    saved = time.perf_counter()
    learner.restore(str(directory))
    restored = time.perf_counter()
    shutil.copytree(directory, folder / "copy")
    copied = time.perf_counter() - restored
    size = sum(file.stat().st_size for file in directory.rglob("*") if file.is_file()) / 1e9
    return [
        {
            "name": name,
            "value": seconds / size,
            "unit": "s/GB",
            "baseline": "plain copy of the same files, neither synced nor digested",
            "baseline_value": copied / size,
            "ratio": seconds / copied,
            "aim": None,
        }
        for name, seconds in (("checkpoint-save", saved - began), ("checkpoint-restore", restored - saved))
    ]


_PEAK = """
import json, sys, threading, time
import torch
from cluster.freed_memory import return_large_blocks
from tests.benchmarks import learning

def resident():
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("VmRSS")) / 1024

task = json.loads(sys.argv[1])
torch.set_num_threads(1)
groups = learning._groups(8, max_length=30)
if task["side"] == "ours":
    learner = learning.Learner(learning._config(task["path"]))
    step = lambda: learner.update(*groups)
else:
    model = learning.Qwen3ForCausalLM.from_pretrained(task["path"], dtype=torch.float32)
    step = lambda: learning._bare_step(model, groups, keeps_gradients=True)
return_large_blocks()  # resident memory is then what lives
# The first step makes gradients and moments; what the second needs above them is the step's own.
step()
if task["side"] == "ours":
    # The learner frees gradients after a step; they count as held, as the bare side keeps its own.
    held = [torch.ones_like(p) for p in learner.policy.parameters()]
before, peak, done = resident(), [0.0], threading.Event()
if task["side"] == "ours":
    del held

def watch():
    while not done.wait(0.002):
        peak[0] = max(peak[0], resident())

watcher = threading.Thread(target=watch)
watcher.start()
step()
done.set()
watcher.join()
print("RESULT" + json.dumps(peak[0] - before))
"""


def _in_process(script: str, **task: str) -> float:
    root = Path(__file__).parents[2]
    command = [sys.executable, "-c", script, json.dumps(task)]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True)
    return json.loads(next(x for x in done.stdout.splitlines() if x.startswith("RESULT")).removeprefix("RESULT"))


def _bare_step(model: PreTrainedModel, groups: list[pa.RecordBatch], *, keeps_gradients: bool = False) -> float:
    """Seconds of the whole batch, padded, in passes of 128 rows: forward with all logits, log-prob sum, backward."""
    tokens = _tokens(groups)
    width = max(len(row) for row in tokens)
    ids = torch.zeros(len(tokens), width, dtype=torch.int64)
    for place, row in enumerate(tokens):
        ids[place, : len(row)] = torch.tensor(row)
    if not keeps_gradients:
        model.zero_grad()
    began = time.perf_counter()
    for part in ids.split(128):
        logits = model(input_ids=part, use_cache=False).logits[:, :-1]
        logits.log_softmax(-1).gather(2, part[:, 1:, None]).sum().backward()
    return time.perf_counter() - began


def _groups(num_groups: int, *, max_length: int) -> list[pa.RecordBatch]:
    rewards = [1.0, 0.0] * (GROUP_SIZE // 2)
    return [make_group(i, rewards=rewards, prompt_length=12, max_length=max_length) for i in range(num_groups)]


def _tokens(groups: list[pa.RecordBatch]) -> list[list[int]]:
    return [
        p + c
        for g in groups
        for p, c in zip(*(g[n].to_pylist() for n in ("prompt_token_ids", "completion_token_ids")), strict=True)
    ]


def _config(path: Path | str, **sections: Any) -> RunConfig:
    model = {"path": str(path), "dtype": "float32"}
    return RunConfig.model_validate({"model": model, "prompts": "file", "learner": {"num_threads": 1}, **sections})


def _model(path: Path, *, vocab_size: int, hidden_size: int = 256) -> Path:
    if path.exists():
        return path
    config = Qwen3Config(
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=3 * hidden_size,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=32,
        max_position_embeddings=256,
        tie_word_embeddings=True,
    )
    Qwen3ForCausalLM(config).save_pretrained(path)
    make_tokenizer().save_pretrained(path)
    return path
