"""Whole runs against TRL's and torchrl's: new tokens per second of steps that sample, judge, learn and sample with the new weights.

All sides have the same model, prompts, batch, dtype and number of threads (2), AdamW, no KL, rewards drawn by chance, and compute no
activations again. The peers generate all completions of a step at once by transformers; they learn in passes of several sizes, and their
best counts. TRL is `GRPOTrainer`. torchrl is the parts of its GRPO recipe (`TransformersWrapper`, a replay buffer with `MCAdvantage`,
`GRPOLoss`) in one process, without those that would only cost time there: collector, environment, a second copy of the weights. Ours is
`treadwheel train` with its record and attested weights: synchronous, where sampling and learning take turns on both threads, and with one
off-policy step, where each has one. Time goes from the end of the first step to the end of the last one; of an off-policy run the last
step, which samples nothing beside it, is left out as well. In bfloat16 the peers' parameters and moments are bfloat16 too, ours have
float32 master weights. At 262k tokens ours keeps its logits (`learner.kept_logits_bytes`).

Each prompt says how long its completions are, so that all sides sample the same number of tokens in each step: ours by
`sampling.ignore_eos` and `sampling.columns`, peers by a logits processor that forbids the end before the last token and forces it there.
Lengths between 4 and 64 are 4, 8, ... 64, in an order drawn once: the mean of a uniform draw, without its noise.
"""

import importlib
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from transformers import Gemma3ForCausalLM, Gemma3TextConfig, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from tests.benchmarks.peers import GROUP_SIZE, ROOT, in_process, install, train_trl
from tests.models import save_model

NUM_THREADS = 2
PEERS = {"TRL": __name__, "torchrl": "tests.benchmarks._peers_torchrl"}
"""The module that runs in the peer's process."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A run that all sides make."""

    name: str
    make_model: Callable[[], PreTrainedModel]
    dtype: Literal["float32", "bfloat16"]
    prompt_length: int
    lengths: tuple[int, ...]
    """Of the completions, one for each prompt of a step."""
    choices: Mapping[str, tuple[int, ...]]
    """By the peer, trajectories that it learns from in one pass."""
    num_steps: int
    """That are timed; one comes before."""
    kept_logits_bytes: int = 0
    """Ours; the peers keep logits as they are made."""
    aim: str

    @property
    def tokens_per_step(self) -> int:
        return GROUP_SIZE * sum(self.lengths)


def llama_of_5m() -> PreTrainedModel:
    config = LlamaConfig(
        vocab_size=512,
        hidden_size=256,
        intermediate_size=1024,
        num_hidden_layers=4,
        num_attention_heads=4,
        max_position_embeddings=256,
    )
    return LlamaForCausalLM(config)


def gemma_of_270m() -> PreTrainedModel:
    """The shape of google/gemma-3-270m."""
    config = Gemma3TextConfig(
        vocab_size=262_144,
        hidden_size=640,
        intermediate_size=2048,
        num_hidden_layers=18,
        num_attention_heads=4,
        num_key_value_heads=1,
        head_dim=256,
        query_pre_attn_scalar=256,
        sliding_window=512,
        layer_types=[*["sliding_attention"] * 5, "full_attention"] * 3,
        max_position_embeddings=32_768,
        tie_word_embeddings=True,
    )
    return Gemma3ForCausalLM(config)


_SMALL: dict[str, Any] = {
    "make_model": llama_of_5m,
    "dtype": "float32",
    "prompt_length": 19,
    "choices": dict.fromkeys(PEERS, (8, 32, 128)),
    "num_steps": 5,
}
CASES = (
    Case(name="whole run, fixed lengths", lengths=(64,) * 16, aim=">= 1.8", **_SMALL),
    Case(
        name="whole run, lengths of 4 to 64", lengths=tuple(random.Random(0).sample(range(4, 65, 4), 16)), aim=">= 4", **_SMALL
    ),
    Case(
        name="whole run, 262k vocabulary",
        make_model=gemma_of_270m,
        dtype="bfloat16",
        prompt_length=50,
        lengths=(32,) * 4,
        choices={"TRL": (8, 32), "torchrl": (4, 8, 16)},  # 32 would take torchrl more than 16 GB
        num_steps=2,
        kept_logits_bytes=2 * 1024**3,
        aim=">= 8",
    ),
)  # fmt: skip


def rows() -> Iterator[dict[str, Any]]:
    """Three rows a case: synchronous and with one off-policy step against TRL, synchronous against torchrl."""
    peers = [peer for peer in PEERS if install(peer.lower())]
    for case in CASES:
        yield from compared(case, peers=peers)


def compared(case: Case, *, peers: Sequence[str]) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        model, prompts = save_model(case.make_model, Path(folder) / "model", dtype=case.dtype), Path(folder) / "p.jsonl"
        prompts.write_text("\n".join(map(json.dumps, _prompts(case))))
        task = {"path": str(model), "dtype": case.dtype, "prompts": str(prompts), "num_steps": case.num_steps}
        # Ours stands between the peers' runs: what else the machine does, or how warm it is, falls on all.
        tried = [(peer, _speed(peer, case, task, case.choices[peer][0])) for peer in peers]
        ours = {
            "synchronous": _our_speed(case, Path(folder) / "synchronous", task, bound=0),
            "one off-policy step": _our_speed(case, Path(folder) / "off_policy", task, bound=1),
        }
        tried += [(peer, _speed(peer, case, task, size)) for peer in peers for size in case.choices[peer][1:]]
    best = {peer: max(speed for other, speed in tried if other == peer) for peer in peers}
    against_trl = [_row(case, f", {kind}", speed, peer="TRL", best=best, aim=case.aim) for kind, speed in ours.items()]
    return [*against_trl, _row(case, ": torchrl", ours["synchronous"], peer="torchrl", best=best)]


def _row(
    case: Case, what: str, speed: float, *, peer: str, best: Mapping[str, float], aim: str | None = None
) -> dict[str, Any]:
    sizes, theirs = ", ".join(map(str, case.choices[peer])), best.get(peer)
    return {
        "name": case.name + what,
        "value": speed,
        "unit": "new tokens/s",
        "baseline": f"{peer} {case.dtype}, best of {sizes} trajectories a pass",
        "baseline_value": theirs,
        "ratio": None if theirs is None else speed / theirs,
        "aim": None if theirs is None else aim,
    }


def _prompts(case: Case) -> Iterator[dict[str, Any]]:
    for number, length in enumerate(case.lengths):
        # They differ in their first two tokens: no cache of prefixes helps one by another.
        yield {"prompt": f"{number:02}".ljust(case.prompt_length, "+"), "length": length}


def _our_speed(case: Case, run_dir: Path, task: dict[str, Any], *, bound: int) -> float:
    """New tokens/s of `treadwheel train`."""
    place = {"num_threads": NUM_THREADS if bound == 0 else NUM_THREADS // 2}
    run = {
        "run_dir": str(run_dir),
        "num_steps": 1 + case.num_steps + bound,
        "model": {"path": task["path"], "dtype": case.dtype, "max_context": 256},
        "prompts": {"name": "file", "path": task["prompts"]},
        "sampling": {"max_tokens": max(case.lengths), "ignore_eos": True, "columns": {"max_tokens": "length"}},
        "reward": {"judge": "tests.benchmarks._chance:chance"},
        "buffer": {
            "groups_per_step": len(case.lengths),
            "trajectories_per_group": GROUP_SIZE,
            "max_off_policy_steps": bound,
        },
        "rollout": {"kv_cache_bytes": 512 * 1024**2, **place},
        "learner": place | {"kept_logits_bytes": case.kept_logits_bytes},
        "checkpoint": {"every_steps": None, "every_s": None},
        "metrics": {"sinks": ["jsonl"]},
    }
    file = run_dir.with_suffix(".yaml")
    file.write_text(json.dumps(run))  # JSON is YAML
    command = [sys.executable, "-m", "deploy.cli", "train", str(file)]
    variables = os.environ | {"HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"treadwheel train failed: {done.stdout[-1500:]} {done.stderr[-1500:]}")
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    first, *timed = lines[: 1 + case.num_steps]
    _require_as_many(case, [step["tokens/sampled"] for step in timed])
    return case.num_steps * case.tokens_per_step / (timed[-1]["time"] - first["time"])


def _speed(peer: str, case: Case, task: dict[str, Any], rows_of_a_pass: int) -> float:
    found = in_process(PEERS[peer], num_threads=NUM_THREADS, rows_of_a_pass=rows_of_a_pass, **task)
    _require_as_many(case, found["num_tokens"][1:])
    return case.num_steps * case.tokens_per_step / found["seconds"]


def _require_as_many(case: Case, num_tokens: list[float]) -> None:
    """Raises RuntimeError when a side sampled other lengths than it was told to."""
    if num_tokens != [case.tokens_per_step] * case.num_steps:
        raise RuntimeError(f"{case.name}: steps sampled {num_tokens} tokens, not {case.tokens_per_step} each")


# In a peer's process


class EndsAt:
    """A logits processor: each row of a generation ends with its own number of tokens, and none of them is padding."""

    def __init__(self, *, eos_token_id: int, pad_token_id: int) -> None:
        self._eos, self._pad = eos_token_id, pad_token_id
        self._lengths = torch.zeros(0)
        self._place = 0

    def begin(self, lengths: list[int]) -> None:
        """Of the rows of the generation that comes."""
        self._lengths = torch.tensor(lengths)
        self._place = 0

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self._place += 1
        scores[:, [self._eos, self._pad]] = -torch.inf
        ends = self._lengths == self._place
        scores[ends] = -torch.inf
        scores[ends, self._eos] = 0.0
        return scores


def measure(task: dict[str, Any]) -> dict[str, Any]:
    """Seconds from the end of the first step to the end of the last one, and the new tokens of each step."""
    torch.set_num_threads(NUM_THREADS)
    transformers = importlib.import_module("transformers")
    prompts = [json.loads(line) for line in Path(task["prompts"]).read_text().splitlines()]
    ends: list[float] = []
    num_tokens: list[int] = []

    class Trainer(importlib.import_module("trl").GRPOTrainer):
        def __init__(self, **given: Any) -> None:
            super().__init__(**given)
            tokenizer = self.processing_class
            self._ends_at = EndsAt(eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id)
            generate = self.model.generate
            self.model.generate = lambda **inputs: generate(**inputs, logits_processor=[self._ends_at])

        def _generate_and_score_completions(self, inputs: Any) -> dict[str, torch.Tensor]:
            self._ends_at.begin([row["length"] for row in inputs])
            made = super()._generate_and_score_completions(inputs)
            num_tokens.append(int(made["completion_mask"].sum()))
            return made

    class Clock(transformers.TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            ends.append(time.perf_counter())

    train_trl(
        Trainer,
        path=task["path"],
        dtype=task["dtype"],
        prompts=prompts,
        num_trajectories=len(prompts) * GROUP_SIZE,
        rows_of_a_pass=task["rows_of_a_pass"],
        max_length=max(row["length"] for row in prompts),
        num_steps=1 + task["num_steps"],
        callback=Clock(),
    )
    return {"seconds": ends[-1] - ends[0], "num_tokens": num_tokens}


if __name__ == "__main__":
    print("RESULT" + json.dumps(measure(json.loads(sys.argv[1]))))
