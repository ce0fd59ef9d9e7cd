"""How much memory a rank of the learner needs: estimated from the model's configuration, nothing loaded.

An estimate, meant to be right within about a third: weights, gradients and moments are counted exactly, activations by formula.
"""

import os
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from cluster.contracts.config import LearnerConfig, ModelConfig, RunConfig
from cluster.contracts.errors import ConfigError
from learner.model.critic import critic_config
from learner.model.head import MAX_KEPT_BYTES, MAX_TILE_VOCABULARY
from learner.model.packing import tokens_per_pass
from learner.model.policy import CRITIC_PATH, read_config


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryEstimate:
    """Bytes of one rank."""

    num_parameters: int
    """Of the whole policy, tied ones once; without the critic's."""
    weights_bytes: int
    gradients_bytes: int
    optimizer_bytes: int
    """Two moments, and the averaged policy where one is kept."""
    activations_bytes: int
    """Of one micro-batch."""
    head_bytes: int
    """Logits that exist at one time, and the hidden states that they are made from."""
    saved_bytes: int
    """Of the first rank's files in a checkpoint: its state and the model."""
    saving_bytes: int
    """The copy of a checkpoint that is written while training goes on. 0 with a GPU: the copy lies in the host's memory."""

    @property
    def needed_bytes(self) -> int:
        """While a step is computed. A save that finds no room for its copy makes none, and training waits for it."""
        state = self.weights_bytes + self.gradients_bytes + self.optimizer_bytes
        return state + self.activations_bytes + self.head_bytes

    @property
    def total_bytes(self) -> int:
        """At the peak: while a step is computed and a checkpoint is written."""
        return self.needed_bytes + self.saving_bytes


def check_rank(config: RunConfig, *, device: torch.device) -> None:
    """Raises ConfigError, before anything is loaded, when a rank does not fit into what is free on its device."""
    check_fits(of_run(config), free_bytes=free_bytes(device), model=config.model)


def of_run(config: RunConfig) -> MemoryEstimate:
    """Of one rank, with full float32 masters; LoRA trains so little that only the base counts.

    Raises ConfigError when a model's configuration cannot be read.
    """
    model, learner, checkpoint = config.model, config.learner, config.checkpoint
    policy = _without_memory(model)
    text, num_parameters = policy.config.get_text_config(), _count(policy)
    num_trained, values_per_token = num_parameters, _values_per_token(text, learner=learner)
    critic = critic_config(model, config.algorithm.value)
    if critic is not None:
        own = _without_memory(critic, field=CRITIC_PATH)
        num_trained += _count(own.base_model)
        values_per_token += _values_per_token(own.config.get_text_config(), learner=learner)
    per_rank = num_trained // learner.num_ranks
    item = 2 if model.dtype == "bfloat16" else 4
    is_full = learner.lora is None
    keeps_copy = item < 4 and learner.num_ranks == 1
    weights = per_rank * ((4 if is_full else item) + (item if keeps_copy and is_full else 0))
    # The save after the last step writes at once.
    is_regular = checkpoint.every_steps is not None or checkpoint.every_s is not None
    copies = checkpoint.asynchronous and is_regular
    keeps_average = config.algorithm.clips_around_average and is_full
    averages = 4 * (num_parameters // learner.num_ranks) if keeps_average else 0
    saved = (12 * per_rank + averages if is_full else 0) + item * num_parameters
    device = torch.device("cuda" if learner.gpus_per_rank else "cpu")
    tokens = tokens_per_pass(learner.max_tokens_per_micro_batch, device=device)
    activations = int(tokens * item * values_per_token)
    logits = 4 * learner.head_chunk_tokens * min(text.vocab_size, MAX_TILE_VOCABULARY)
    logits = max(3 * logits, 2 * min(MAX_KEPT_BYTES, 4 * tokens * text.vocab_size))
    return MemoryEstimate(
        num_parameters=num_parameters,
        weights_bytes=weights,
        gradients_bytes=4 * per_rank if is_full else 0,
        optimizer_bytes=8 * per_rank + averages if is_full else 0,
        activations_bytes=activations,
        head_bytes=logits + 8 * tokens * text.hidden_size,
        saved_bytes=saved,
        saving_bytes=saved if copies and not learner.gpus_per_rank else 0,
    )


def check_fits(estimated: MemoryEstimate, *, free_bytes: int, model: ModelConfig) -> None:
    """Raises ConfigError when more is needed than is free."""
    if estimated.needed_bytes <= free_bytes:
        return
    need, free = _gib(estimated.needed_bytes), _gib(free_bytes)
    raise ConfigError(
        f"model.path={model.path!r} needs about {need} GiB on each learner rank (weights {_gib(estimated.weights_bytes)}, gradients "
        f"{_gib(estimated.gradients_bytes)}, optimizer {_gib(estimated.optimizer_bytes)}, activations "
        f"{_gib(estimated.activations_bytes + estimated.head_bytes)}), {free} GiB are free; lower "
        "learner.max_tokens_per_micro_batch, set learner.activation_checkpointing or learner.lora, raise learner.num_ranks, "
        "or take a smaller model"
    )


def free_bytes(device: torch.device) -> int:
    """What a new process can still take here: on a CPU the least of the machine's available memory and the control group's rest."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    found = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    for line in _lines("/proc/meminfo"):
        if line.startswith("MemAvailable:"):
            found.append(int(line.split()[1]) * 1024)
    limit, used = _lines("/sys/fs/cgroup/memory.max"), _lines("/sys/fs/cgroup/memory.current")
    if limit and used and limit[0] != "max":
        found.append(max(int(limit[0]) - int(used[0]), 0))
    return min(found)


def _values_per_token(text: PretrainedConfig, *, learner: LearnerConfig) -> float:
    """Numbers kept for backward per token: per layer its norms, projections, rotated and bucketed copies, attention and MLP."""
    hidden = text.hidden_size
    head = getattr(text, "head_dim", None) or hidden // text.num_attention_heads
    queries = text.num_attention_heads * head
    keys = (getattr(text, "num_key_value_heads", None) or text.num_attention_heads) * head
    inner = getattr(text, "intermediate_size", None) or 4 * hidden
    layer = 8 * hidden + 5 * queries + 6 * keys + 4 * inner
    if learner.activation_checkpointing:
        return text.num_hidden_layers * hidden + layer
    return text.num_hidden_layers * layer


def _without_memory(model: ModelConfig, *, field: str = "model.path") -> PreTrainedModel:
    """The causal model that a configuration describes, to count its parameters."""
    config = read_config(model, field=field)
    with torch.device("meta"):
        causal_lm = AutoModelForCausalLM.from_config(config, trust_remote_code=model.trust_remote_code)
    causal_lm.tie_weights()
    return causal_lm


def _count(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text(encoding="utf-8").splitlines()
    except OSError:
        return []


def _gib(size_bytes: int) -> str:
    return f"{size_bytes / 1024**3:.1f}"
