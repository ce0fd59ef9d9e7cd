"""torchrl's side of `peers_whole`: its wrapper of a transformers model samples, its replay buffer computes advantages and hands out what
its loss learns from.
"""

import importlib
import json
import random
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from tests.benchmarks.peers import GROUP_SIZE
from tests.benchmarks.peers_whole import NUM_THREADS, EndsAt


def measure(task: dict[str, Any]) -> dict[str, Any]:
    """Seconds from the end of the first step to the end of the last one, and the new tokens of each step."""
    torch.set_num_threads(NUM_THREADS)
    importlib.import_module("tensordict").set_list_to_stack(True).set()
    prompts = [json.loads(line) for line in Path(task["prompts"]).read_text().splitlines() for _ in range(GROUP_SIZE)]
    model = AutoModelForCausalLM.from_pretrained(task["path"], dtype=getattr(torch, task["dtype"])).eval()
    steps = _steps(model, task["path"], prompts, rows_of_a_pass=task["rows_of_a_pass"])
    done = [(next(steps), time.perf_counter()) for _ in range(1 + task["num_steps"])]
    return {"seconds": done[-1][1] - done[0][1], "num_tokens": [num_tokens for num_tokens, _ in done]}


def _steps(model: PreTrainedModel, path: str, prompts: list[dict[str, Any]], *, rows_of_a_pass: int) -> Iterator[int]:
    """The new tokens of each step, after it."""
    llm, data, objectives = (
        importlib.import_module(f"torchrl.{name}") for name in ("modules.llm", "data", "objectives.llm")
    )
    tokenizer: Any = AutoTokenizer.from_pretrained(path)
    lengths = [row["length"] for row in prompts]
    # As TRL's. The wrapper refuses this `top_k`.
    model.generation_config.update(do_sample=True, top_k=0)
    sampler = llm.TransformersWrapper(
        model, tokenizer=tokenizer, input_mode="text", generate_kwargs={"max_new_tokens": max(lengths)}
    )
    ends_at = EndsAt(eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id)
    sampler.generate_kwargs["logits_processor"] = [ends_at]
    learner = llm.TransformersWrapper(model, tokenizer=tokenizer, input_mode="tokens", generate=False)
    loss = objectives.GRPOLoss(learner, entropy_bonus=False)
    buffer = data.ReplayBuffer(
        storage=data.LazyStackStorage(len(prompts)),
        sampler=data.SamplerWithoutReplacement(),
        transform=objectives.MCAdvantage(grpo_size=GROUP_SIZE),
        batch_size=rows_of_a_pass,
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, fused=True)
    while True:
        ends_at.begin(lengths)
        sampled = _sampled(sampler, [row["prompt"] for row in prompts])
        buffer.extend(sampled)
        for rows in buffer:
            (loss(rows).loss_objective * len(rows) / len(prompts)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        buffer.empty(empty_write_count=False)
        yield sum(len(tokens) for tokens in sampled.get(("tokens", "response"), as_list=True))


def _sampled(sampler: Any, prompts: list[str]) -> Any:
    """Completions with rewards drawn by chance, each a finished trajectory of one turn."""
    tensordict, llm = (importlib.import_module(name) for name in ("tensordict", "torchrl.modules.llm.policies"))
    shape = (len(prompts),)
    sampled = sampler(
        tensordict.TensorDict(text=llm.Text(prompt=prompts, batch_size=shape), query=prompts, batch_size=shape)
    )
    # The loss reads log-probs of all tokens, this sampler gives those of completions (0 for the first token, and for the forced end).
    prompt_tokens, logprobs = (
        sampled.get(key, as_list=True) for key in (("tokens", "prompt"), ("log_probs", "response"))
    )
    unknown = (torch.full(tokens.shape, torch.nan) for tokens in prompt_tokens)
    sampled["log_probs"].full = [torch.cat(both) for both in zip(unknown, logprobs, strict=True)]
    rewards = torch.tensor([random.random() for _ in prompts]).view(-1, 1, 1)
    done = torch.ones(len(prompts), 1, dtype=torch.bool)
    sampled["next"] = tensordict.TensorDict(reward=rewards, done=done, batch_size=shape)
    return sampled


if __name__ == "__main__":
    print("RESULT" + json.dumps(measure(json.loads(sys.argv[1]))))
