"""Sampling tokens/s of a rollout worker, prompt text to Arrow batch, against a bare in-process vLLM loop on the same requests."""

import asyncio
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from actors.rollout.worker import RolloutWorker
from cluster.contracts.config import ModelConfig, RolloutConfig, RunConfig, SamplingConfig
from cluster.contracts.prompts_config import PromptsConfig
from cluster.contracts.types import Prompt, Refusal, Ticket, sample_seed
from cluster.weights.manifest import Canary
from tests.models import make_tiny_model, make_tokenizer
from tests.packed import pack

NUM_GROUPS, GROUP_SIZE, MAX_TOKENS = 16, 8, 64
ROUNDS = 15
CONTEXT = 256
PROMPTS = [f"{number}+{3 * number}=" for number in range(10, 10 + NUM_GROUPS)]


def rows() -> list[dict[str, Any]]:
    """One row, as in `build/bench.json`. Rounds alternate, and each side's best counts: other work on the machine only slows."""
    # Of this thread, which is the bare loop's: vLLM lets nobody set it once an engine is there.
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        return asyncio.run(_rows(make_tiny_model(Path(folder), hidden_size=256, max_context=CONTEXT)))


async def _rows(path: Path) -> list[dict[str, Any]]:
    config = RunConfig(
        prompts=PromptsConfig(name="file"),
        model=ModelConfig(path=str(path), dtype="float32"),
        rollout=RolloutConfig(kv_cache_bytes=256 * 1024**2),
        sampling=SamplingConfig(max_tokens=MAX_TOKENS),
    )
    return [{"name": "sampling", **await compared(config, PROMPTS, bare=lambda: bare_engine(path))}]


async def compared(
    config: RunConfig, prompts: list[str], *, bare: Callable[[], Any], num_rounds: int = ROUNDS
) -> dict[str, Any]:
    """A row without its name: a worker, and the engine that `bare` makes once the worker's is there."""
    worker = RolloutWorker.with_vllm(config, name="worker", run_id="bench", num_threads=1)
    await worker.load(*published(Path(config.model.path)))
    engine, max_tokens = bare(), config.sampling.max_tokens
    ours, theirs = [], []
    for _ in range(num_rounds):
        ours.append(await _sample_with(worker, tickets(prompts, max_tokens=max_tokens)))
        theirs.append(sample_bare(engine, prompts, max_tokens=max_tokens))
    worker.stop()
    return against_bare(ours, theirs)


def against_bare(ours: list[float], theirs: list[float]) -> dict[str, Any]:
    """A row without its name, of tokens/s in each round."""
    return {
        "value": max(ours),
        "unit": "tokens/s",
        "baseline": "in-process vLLM loop, tokens in, final outputs only",
        "baseline_value": max(theirs),
        "ratio": max(ours) / max(theirs),
        "aim": ">= 0.92",
    }


def published(path: Path) -> list[Any]:
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    probe = list(range(4, 36))
    with torch.no_grad():
        scores = torch.log_softmax(model(torch.tensor([probe])).logits[0, :-1], -1)
    found = scores.gather(-1, torch.tensor(probe[1:])[:, None]).squeeze(-1)
    logprobs = tuple(found.tolist())
    canary = Canary(token_ids=tuple(probe), logprobs=logprobs, starting_logprobs=logprobs)
    manifest, buckets = pack(model.named_parameters(), policy_version=0, bucket_bytes=2**28, canary=canary)
    return [manifest.model_dump(), *buckets]


async def _sample_with(worker: RolloutWorker, asked: list[Ticket]) -> float:
    began, num_tokens = time.perf_counter(), 0
    async for batch in worker.generate(asked):
        assert not isinstance(batch, Refusal), batch
        num_tokens += len(batch["completion_token_ids"].flatten())
    return num_tokens / (time.perf_counter() - began)


def tickets(prompts: list[str], *, max_tokens: int = MAX_TOKENS) -> list[Ticket]:
    sampling = SamplingConfig(max_tokens=max_tokens)
    return [
        Ticket(
            index=index,
            prompt=Prompt(prompt_id=str(index), text=text, columns={"answer": "0"}),
            num_trajectories=GROUP_SIZE,
            seed=index,
            policy_version=0,
            sampling=sampling,
        )
        for index, text in enumerate(prompts)
    ]


def bare_engine(path: Path, **settings: Any) -> Any:
    """In this process, on one thread, as a rollout worker's is; `settings` of vLLM's go on top."""
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "ERROR"}
    arguments: dict[str, Any] = {
        "model": str(path),
        "dtype": "float32",
        "max_model_len": CONTEXT,
        "enforce_eager": True,
        "distributed_executor_backend": "uni",
        "kv_cache_memory_bytes": 256 * 1024**2,
        "max_num_seqs": 256,
        "logprobs_mode": "processed_logprobs",
        "disable_log_stats": True,
    }
    arguments |= settings
    if arguments["enforce_eager"]:
        os.environ["TORCHDYNAMO_DISABLE"] = "1"
    torch.set_num_threads(1)
    import vllm

    return vllm.LLMEngine.from_engine_args(vllm.EngineArgs(**arguments))


def sample_bare(engine: Any, prompts: list[str], *, max_tokens: int = MAX_TOKENS) -> float:
    from vllm import SamplingParams as Sampling
    from vllm.sampling_params import RequestOutputKind

    tokenizer = make_tokenizer()
    began, num_tokens = time.perf_counter(), 0
    for index, text in enumerate(prompts):
        prompt = {"type": "token", "prompt_token_ids": tokenizer(text).input_ids}
        for sample in range(GROUP_SIZE):
            params = Sampling(
                max_tokens=max_tokens,
                seed=sample_seed(index, sample),
                logprobs=0,
                detokenize=False,
                output_kind=RequestOutputKind.FINAL_ONLY,
            )
            engine.add_request(f"{index}/{sample}", prompt, params)
    while engine.has_unfinished_requests():
        for output in engine.step():
            num_tokens += len(output.outputs[0].token_ids)
    return num_tokens / (time.perf_counter() - began)


if __name__ == "__main__":
    print(rows())
