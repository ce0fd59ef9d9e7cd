"""Real engines on tiny models, and the same weights under transformers to compare with."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from actors.chat.formatter import ChatFormatter
from actors.rollout.vllm_engine import VllmEngine
from actors.rollout.worker import RolloutWorker
from cluster.contracts.config import LearnerConfig, ModelConfig, RolloutConfig, RunConfig, SamplingConfig, WeightsConfig
from cluster.contracts.prompts_config import PromptsConfig
from cluster.contracts.protocols import Engine, EngineRequest
from cluster.contracts.types import Completion, FinishReason, Prompt, RankGroup, Ticket
from cluster.weights.delta import PublishedCopy
from cluster.weights.manifest import Canary, WeightManifest
from cluster.weights.process_group import Incoming, Sender
from tests.packed import pack

PROBE = [4 + (7 * place) % 90 for place in range(32)]


def place() -> dict[str, Any]:
    """Settings of `rollout` for a small engine: so small a part of a GPU, where torch sees one, that others fit beside it."""
    if torch.cuda.is_available():
        return {"gpus_per_worker": 0.2, "gpu_memory_utilization": 0.15}
    return {"kv_cache_bytes": 64 * 1024**2}


def start_engine(
    path: Path,
    *,
    dtype: str = "float32",
    repair_tied_head: bool = True,
    stop: tuple[str, ...] = (),
    max_concurrent_sequences: int = 64,
    **rollout: Any,
) -> VllmEngine:
    config = RunConfig(
        model=ModelConfig(path=str(path), dtype=dtype),
        prompts=PromptsConfig(name="file"),
        rollout=RolloutConfig(max_concurrent_sequences=max_concurrent_sequences, **place() | rollout),
        sampling=SamplingConfig(stop=stop),
        weights=WeightsConfig(repair_tied_head=repair_tied_head),
    )
    return VllmEngine(config, formatter=ChatFormatter.load(config.model), num_threads=1)


def start_worker(
    path: Path,
    *,
    dtype: str = "float32",
    enforce_eager: bool = True,
    deltas: bool = False,
    colocated: bool = False,
    **rollout: Any,
) -> RolloutWorker:
    where = place()
    beside = {"gpus_per_rank": 1 - where["gpus_per_worker"]} if colocated and "gpus_per_worker" in where else {}
    config = RunConfig(
        prompts=PromptsConfig(name="file"),
        model=ModelConfig(path=str(path), dtype=dtype),
        learner=LearnerConfig(**beside),
        rollout=RolloutConfig(
            max_concurrent_sequences=16, enforce_eager=enforce_eager, colocated=colocated, **where | rollout
        ),
        sampling=SamplingConfig(),
        weights=WeightsConfig(deltas=deltas),
    )
    return RolloutWorker.with_vllm(config, name="w0", run_id="run", num_threads=1)


def ticket(index: int, prompt: Prompt, *, max_tokens: int = 12, temperature: float = 1.0) -> Ticket:
    sampling = SamplingConfig(max_tokens=max_tokens).model_copy(update={"temperature": temperature})
    return Ticket(index=index, prompt=prompt, num_trajectories=4, seed=index, policy_version=0, sampling=sampling)


def end(engine: VllmEngine) -> None:
    """A forgotten vLLM ends when it is collected, and takes the process's torch groups along: they may be the next engine's by then."""
    engine._engine.engine_core.shutdown()


def request(
    name: str, prompt: Sequence[int], *, seed: int = 0, kept: Completion | None = None, **sampling: Any
) -> EngineRequest:
    params = SamplingConfig.model_construct(**{"max_tokens": 16, **sampling})
    return EngineRequest(request_id=name, prompt_token_ids=list(prompt), sampling=params, seed=seed, kept=kept)


def run(engine: Engine, *requests: EngineRequest) -> dict[str, Completion]:
    """All requests together, to their ends."""
    for one in requests:
        engine.add(one)
    tokens: dict[str, list[int]] = {one.request_id: [] for one in requests}
    logprobs: dict[str, list[float]] = {one.request_id: [] for one in requests}
    finished: dict[str, Completion] = {}
    while len(finished) < len(requests):
        for output in engine.step():
            tokens[output.request_id] += output.token_ids
            logprobs[output.request_id] += output.logprobs
            if output.finish_reason:
                finished[output.request_id] = replace(
                    completion(tokens[output.request_id], logprobs[output.request_id], reason=output.finish_reason),
                    routed_experts=output.routed_experts,
                )
    return finished


def completion(token_ids: list[int], logprobs: list[float], *, reason: FinishReason) -> Completion:
    return Completion(
        token_ids=token_ids,
        rollout_logprobs=logprobs,
        policy_versions=[0] * len(token_ids),
        finish_reason=reason,
    )


class Reference:
    """The weights under transformers: what a learner would say."""

    def __init__(self, path: Path, *, dtype: torch.dtype = torch.float32) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype)
        self.starting_logprobs = self.logprobs(PROBE)

    def named_parameters(self) -> list[tuple[str, torch.Tensor]]:
        return list(self.model.named_parameters())

    @torch.no_grad()
    def perturb(self, *, seed: int, scale: float = 0.02) -> None:
        """Stands for an optimizer step that changes every weight."""
        generator = torch.Generator().manual_seed(seed)
        for parameter in self.model.parameters():
            parameter.add_(scale * torch.randn(parameter.shape, generator=generator))

    @torch.no_grad()
    def logprobs(self, token_ids: Sequence[int], *, temperature: float = 1.0) -> list[float]:
        """Of each token after the first."""
        ids = torch.tensor([list(token_ids)])
        logits = self.model(ids).logits[0, :-1].float() / temperature
        return torch.log_softmax(logits, -1).gather(-1, ids[0, 1:, None]).squeeze(-1).tolist()

    @torch.no_grad()
    def experts(self, token_ids: Sequence[int]) -> torch.Tensor:
        """That a mixture's routers choose at each position, in ascending order, [positions, layers, experts per token]."""
        chosen: list[torch.Tensor] = []
        routers = [module for module in self.model.modules() if type(module).__name__.endswith("Router")]
        hooks = [router.register_forward_hook(lambda *args: chosen.append(args[-1][-1])) for router in routers]
        self.model(torch.tensor([list(token_ids)]))
        for hook in hooks:
            hook.remove()
        return torch.stack(chosen, 1).sort(-1).values


def published(reference: Reference, *, version: int) -> list[Any]:
    """What a worker loads: the manifest, and the weights in several buckets."""
    canary = Canary(
        token_ids=tuple(PROBE),
        logprobs=tuple(reference.logprobs(PROBE)),
        starting_logprobs=tuple(reference.starting_logprobs),
    )
    manifest, buckets = pack(
        reference.named_parameters(), policy_version=version, bucket_bytes=64 * 1024, canary=canary
    )
    assert len(buckets) > 1
    return [manifest.model_dump(), *buckets]


def kept_by(
    sender: Sender,
    reference: Reference,
    *,
    version: int,
    name: str,
    num_receivers: int = 1,
    backend: str = "gloo",
    copy: PublishedCopy | None = None,
) -> Incoming:
    """The same weights in the sender's memory, and the group of that name in which an engine's processes are to take them: what changed
    since those in the `copy`, if there is one."""
    manifest, *buckets = published(reference, version=version)
    parts = [*buckets, WeightManifest.model_validate(manifest)]
    kept = sender.keep(copy.compared(parts) if copy else parts)
    group = RankGroup(
        name=name,
        size=1 + num_receivers,
        sender=sender.id,
        address=sender.address,
        backend=backend,
        timeout_s=240.0,
        lasts=True,
        digest=kept.digest,
        base_digest=kept.delta.base_digest if kept.delta else None,
    )
    return Incoming(group=group, first_rank=1, manifest=kept, keeps=copy is not None)


def largest_error(one: Sequence[float], other: Sequence[float]) -> float:
    return max(abs(a - b) for a, b in zip(one, other, strict=True))


def mean_error(one: Sequence[float], other: Sequence[float]) -> float:
    errors = [abs(a - b) for a, b in zip(one, other, strict=True)]
    return sum(errors) / len(errors)
