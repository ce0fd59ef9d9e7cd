"""Estimates the memory of a learner rank from the model's configuration, without loading the model.

The aim is an error of at most about a third. Weights, gradients and moments are counted exactly; activations, and parameters that several
ranks gather, by formula. Where attention makes masks, copies of a shared prompt's keys and values are not counted.
"""

import math
from dataclasses import dataclass
from typing import cast

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from cluster.contracts.config import LearnerConfig, ModelConfig, RunConfig
from cluster.contracts.errors import ConfigError, headline
from cluster.machine import free_memory_bytes
from learner.distributed import MAX_UNREDUCED_BYTES, decoder_layers
from learner.model.attention import FLASH, MAX_MASK_CELLS
from learner.model.compute_type import multiplies_in_float32
from learner.model.critic import critic_config
from learner.model.flash import has_flash, takes_lengths
from learner.model.head import MAX_WHOLE_BYTES, tile_shape
from learner.model.packing import tokens_per_pass
from learner.model.policy import CRITIC_PATH
from learner.model.reference import reference_models
from learner.shape import (
    expert_size,
    has_experts,
    head_size,
    inner_size,
    num_chosen_experts,
    num_heads,
    num_key_heads,
    read_config,
    shared_experts_size,
    windows,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryEstimate:
    """Bytes of one rank."""

    num_parameters: int
    """Of the whole policy, tied parameters once; without the critic."""
    weights_bytes: int
    gradients_bytes: int
    optimizer_bytes: int
    """Two moments, and the averaged policy if there is one."""
    activations_bytes: int
    """Of one micro-batch."""
    head_bytes: int
    """Logits that exist at one time, and the hidden states that they are made from."""
    attention_bytes: int
    """Extra memory where completions share their prompt. Masks: an upper bound, for sequences as long as the run allows, or as long as
    sequences with masks can be. With torch's flash attention no masks, but copies of the prompts' keys and values and the sums of one
    layer's backward pass, for sequences as long as the run allows. 0 with the flash-attn package."""
    factors_bytes: int
    """Float32 factors of the largest linear layer, where bfloat16 is multiplied in float32."""
    gathered_bytes: int
    """With several ranks: parameters and gradients that are whole at one time."""
    loading_bytes: int
    """At the start, when a single rank loads the whole model in float32."""
    saved_bytes: int
    """The first rank's files in a checkpoint: its state and the model."""
    saving_bytes: int
    """The first rank's copy of a checkpoint that is written in the background. 0 with a GPU: the copy is in the host's memory."""
    copied_model_bytes: int
    """Of `saving_bytes`, the model, which the first rank alone copies."""

    @property
    def needed_bytes(self) -> int:
        """The peak of loading and steps. A save without room for its copy makes none, and training waits for it."""
        return max(self.step_bytes, self.loading_bytes)

    @property
    def step_bytes(self) -> int:
        """While a step is computed."""
        return self.weights_bytes + self.gradients_bytes + self.optimizer_bytes + self.passing_bytes

    @property
    def passing_bytes(self) -> int:
        """Additional memory during the pass of a micro-batch."""
        return (
            self.activations_bytes + self.head_bytes + self.attention_bytes + self.factors_bytes + self.gathered_bytes
        )

    @property
    def total_bytes(self) -> int:
        """The first rank's peak, while a step is computed and a checkpoint is written."""
        return self.needed_bytes + self.saving_bytes

    def all_bytes(self, num_ranks: int) -> int:
        """The peak of all ranks."""
        return num_ranks * self.total_bytes - (num_ranks - 1) * self.copied_model_bytes


def check_rank(config: RunConfig, *, device: torch.device) -> None:
    """Raises ConfigError, before anything is loaded, if a rank does not fit into its device's free memory."""
    estimated = of_run(config, has_flash=has_flash(device))
    check_fits(estimated, free_bytes=free_bytes(device), model=config.model)


def of_run(config: RunConfig, *, has_flash: bool = True) -> MemoryEstimate:
    """The memory of one rank, with float32 masters of all weights. LoRA's adapters are too small to count. `has_flash`: the rank's GPU, if
    any, has flash attention.

    Raises ConfigError if a model's configuration cannot be read.
    """
    model, learner, checkpoint = config.model, config.learner, config.checkpoint
    policy = _without_memory(model)
    text, num_parameters = policy.config.get_text_config(), _count(policy)
    num_trained, values_per_token, parts = num_parameters, _values_per_token(text, learner=learner), _parts(policy)
    critic = critic_config(model, config.algorithm.value)
    if critic is not None:
        own = cast(PreTrainedModel, _without_memory(critic, field=CRITIC_PATH).base_model)
        num_trained += _count(own)
        values_per_token += _values_per_token(own.config.get_text_config(), learner=learner)
        parts = (parts[0] + _parts(own)[0], max(parts[1], _parts(own)[1]))
    per_rank = num_trained // learner.num_ranks
    item = model.item_bytes
    is_full = learner.lora is None
    is_sharded = learner.num_ranks > 1
    keeps_copy = item < 4 and not is_sharded
    # Shards are float32 whether they train or not.
    weights = per_rank * ((4 if is_full or is_sharded else item) + (item if keeps_copy and is_full else 0))
    # The save after the last step is not in the background.
    is_regular = checkpoint.every_steps is not None or checkpoint.every_s is not None
    copies = checkpoint.asynchronous and is_regular
    keeps_average = config.algorithm.clips_around_average and is_full
    averages = 4 * (num_parameters // learner.num_ranks) if keeps_average else 0
    state, model_bytes = 12 * per_rank + averages if is_full else 0, item * num_parameters
    copies_here = copies and not learner.gpus_per_rank
    device = torch.device("cuda" if learner.gpus_per_rank else "cpu")
    longest = model.max_context or config.sampling.max_tokens
    # A row longer than the budget gets its own pass. Ranks that share a pass have a slice each, but masks of the whole pass.
    slices = learner.sequence_parallel_size
    tokens = max(tokens_per_pass(learner.max_tokens_per_micro_batch, device=device), -(-longest // slices))
    num_unreduced = num_trained if 4 * num_trained <= MAX_UNREDUCED_BYTES else 0
    in_float32 = item < 4 and device.type == "cpu" and multiplies_in_float32()
    gathered = _gathered_bytes(*parts, num_unreduced=num_unreduced, item=item, trains=is_full) if is_sharded else 0
    return MemoryEstimate(
        num_parameters=num_parameters,
        weights_bytes=weights,
        gradients_bytes=4 * per_rank if is_full else 0,
        optimizer_bytes=8 * per_rank + averages if is_full else 0,
        activations_bytes=tokens * item * values_per_token,
        head_bytes=_head_bytes(
            text,
            tokens=tokens,
            chunk_tokens=learner.head_chunk_tokens,
            kept_bytes=learner.kept_logits_bytes,
            on_gpu=device.type == "cuda",
        ),
        attention_bytes=_attention_bytes(
            text, config=config, tokens=tokens * slices, longest=longest, has_flash=has_flash and device.type == "cuda"
        ),
        factors_bytes=_factors_bytes(text, tokens=tokens) if in_float32 else 0,
        gathered_bytes=gathered,
        loading_bytes=0 if is_sharded else 4 * num_trained,
        saved_bytes=state + model_bytes,
        saving_bytes=state + model_bytes if copies_here else 0,
        copied_model_bytes=model_bytes if copies_here else 0,
    )


def of_reference(config: RunConfig) -> int:
    """Bytes of the reference scorer with all its models. Raises ConfigError as `of_run` does."""
    reference, weights = config.reference, 0
    for source, model in reference_models(config.model, reference).items():
        own = "reference.path" if reference.path else "model.path"
        weights += model.item_bytes * _count(
            _without_memory(model, field=f"reference.by_source.{source}" if source else own)
        )
    return weights + reading_bytes(
        config.model,
        max_tokens=reference.max_tokens_per_micro_batch,
        chunk_tokens=config.learner.head_chunk_tokens,
        has_head=True,
        on_gpu=reference.gpus > 0,
    )


def reading_bytes(
    model: ModelConfig, *, max_tokens: int, on_gpu: bool, has_head: bool = False, chunk_tokens: int | None = None
) -> int:
    """Bytes of a pass without gradients: the activations of one layer, and a head's logits for `chunk_tokens` at a time."""
    text, device = read_config(model).get_text_config(), torch.device("cuda" if on_gpu else "cpu")
    tokens = tokens_per_pass(max_tokens, device=device)
    head = _head_bytes(text, tokens=tokens, chunk_tokens=chunk_tokens, on_gpu=on_gpu) if has_head else 0
    return tokens * model.item_bytes * _values_of_layer(text) + head


def check_fits(estimated: MemoryEstimate, *, free_bytes: int, model: ModelConfig) -> None:
    """Raises ConfigError if more memory is needed than is free."""
    if estimated.needed_bytes <= free_bytes:
        return
    need, free = _gib(estimated.needed_bytes), _gib(free_bytes)
    if estimated.step_bytes < estimated.loading_bytes:
        raise ConfigError(
            f"model.path={model.path!r} needs about {need} GiB on the only learner rank while it loads, in float32, {free} GiB are free; "
            "raise learner.num_ranks, each of which loads its share, or take a smaller model"
        )
    raise ConfigError(
        f"model.path={model.path!r} needs about {need} GiB on each learner rank (weights {_gib(estimated.weights_bytes)}, gradients "
        f"{_gib(estimated.gradients_bytes)}, optimizer {_gib(estimated.optimizer_bytes)}, passes "
        f"{_gib(estimated.passing_bytes)}), {free} GiB are free; lower "
        "learner.max_tokens_per_micro_batch or learner.kept_logits_bytes, set learner.activation_checkpointing or learner.lora, raise "
        "learner.num_ranks (and with it learner.sequence_parallel_size, for long sequences), or take a smaller model"
    )


def free_bytes(device: torch.device | None = None) -> int:
    """Free memory for a new process: of the GPU, or of the machine for a CPU or without a device."""
    if device is not None and device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return free_memory_bytes()


def _attention_bytes(text: PretrainedConfig, *, config: RunConfig, tokens: int, longest: int, has_flash: bool) -> int:
    """Bytes for a pass of `tokens` in sequences of at most `longest`: see `MemoryEstimate.attention_bytes`."""
    if config.model.attention == FLASH or config.buffer.trajectories_per_group == 1:
        return 0
    item = config.model.item_bytes
    num_kept = 1 if config.learner.activation_checkpointing else text.num_hidden_layers
    if has_flash and _takes_flash(text, item=item):
        return _copies_bytes(tokens, text=text, config=config, longest=longest, item=item, num_kept=num_kept)
    # A completion of Q tokens and K keys, P of them its prompt's, has a mask if the mask has few cells or if P > Q
    # (`learner.model.attention`). With P <= Q there are at most 2 · Q keys, so with few cells K is at most √(2 · cells). With P > Q, K is
    # less than 2 · P. A sliding window always needs a mask.
    if not windows(text):
        longest = min(longest, max(math.isqrt(2 * MAX_MASK_CELLS), 2 * (longest - config.sampling.max_tokens)))
    return _mask_bytes(tokens, longest=longest, item=item, num_kept=num_kept)


def _takes_flash(text: PretrainedConfig, *, item: int) -> bool:
    """Whether flash attention supports all of the model's heads, in a type of `item` bytes."""
    if item != 2 or getattr(text, "attn_logit_softcapping", None) is not None:
        return False
    return takes_lengths(torch.bfloat16, *_head_sizes(text))


def _head_sizes(text: PretrainedConfig) -> tuple[int, int]:
    """Head sizes of queries and keys, and of values."""
    latent, rotated = (getattr(text, f"qk_{name}_head_dim", None) for name in ("nope", "rope"))
    if latent and rotated:
        return latent + rotated, getattr(text, "v_head_dim", None) or latent
    return head_size(text), head_size(text)


def _values_per_token(text: PretrainedConfig, *, learner: LearnerConfig) -> int:
    """Numbers kept for backward per token: per layer its norms, projections, rotated and bucketed copies, attention and MLP."""
    num_layers, values = text.num_hidden_layers, _values_of_layer(text)
    return num_layers * text.hidden_size + values if learner.activation_checkpointing else num_layers * values


def _values_of_layer(text: PretrainedConfig) -> int:
    queries, keys = _widths(text)
    return 8 * text.hidden_size + 5 * queries + 6 * keys + _values_of_mlp(text)


def _values_of_mlp(text: PretrainedConfig) -> int:
    if not has_experts(text):
        return 4 * inner_size(text)
    # A token is copied for each chosen expert: sorted by expert as input and as output, and weighted by the router.
    each = 4 * expert_size(text) + 3 * text.hidden_size
    return num_chosen_experts(text) * each + 4 * shared_experts_size(text)


def _widths(text: PretrainedConfig) -> tuple[int, int]:
    """Numbers in all queries of a token, and in its keys."""
    return num_heads(text) * head_size(text), num_key_heads(text) * head_size(text)


def _head_bytes(
    text: PretrainedConfig, *, tokens: int, chunk_tokens: int | None, on_gpu: bool, kept_bytes: int = 0
) -> int:
    """The logits of a tile with their intermediate results and the kept logits, or all logits of a small head; hidden states in float32."""
    positions, width = tile_shape(chunk_tokens, on_gpu=on_gpu)
    tile, all_of_a_pass = 4 * min(positions, tokens) * min(text.vocab_size, width), 4 * tokens * text.vocab_size
    logits = max(3 * tile + min(kept_bytes, all_of_a_pass), 2 * min(MAX_WHOLE_BYTES, all_of_a_pass))
    return logits + 8 * tokens * text.hidden_size


def _mask_bytes(tokens: int, *, longest: int, item: int, num_kept: int) -> int:
    """A cell is a query of the pass with a key of its sequence. Each layer keeps it as bool and in the type that torch adds to scores. The
    distances that make it are int64, of one bucket at a time (`learner.model.attention`)."""
    cells = tokens * longest
    return cells * (1 + item) * num_kept + 8 * min(cells, max(MAX_MASK_CELLS, longest**2))


def _copies_bytes(
    tokens: int, *, text: PretrainedConfig, config: RunConfig, longest: int, item: int, num_kept: int
) -> int:
    """Each completion of a group has a copy of the prompt's keys and values, which every layer keeps. One layer's gradients of queries are
    summed in float32, per segment in blocks of 128, and those of keys and values for each head of the queries."""
    group, completion = config.buffer.trajectories_per_group, min(config.sampling.max_tokens, longest)
    prompt = longest - completion
    num_groups = tokens / (prompt + group * completion)
    num_copied, num_segments = num_groups * group * prompt, num_groups * (1 + group)
    queries, keys = _widths(text)
    kept = 2 * item * keys * num_copied * num_kept
    return int(kept + 4 * queries * (tokens + 128 * num_segments) + 2 * item * queries * (tokens + num_copied))


def _factors_bytes(text: PretrainedConfig, *, tokens: int) -> int:
    """Weight, input and output of an MLP projection."""
    hidden, inner = text.hidden_size, inner_size(text)
    return 4 * (hidden * inner + tokens * (hidden + inner))


def _gathered_bytes(num_root: int, num_layer: int, *, num_unreduced: int, item: int, trains: bool) -> int:
    """Memory that FSDP2 gathers (`learner.distributed.shard`): the root's parameters, which stay for the step, a decoder layer, and the
    next layer, which is gathered ahead. Gradients: the larger of root and layer, in the compute type and in float32 for the reduction; or
    all in float32, if they are reduced once per update.
    """
    parameters = item * (num_root + 2 * num_layer)
    if not trains:
        return parameters
    return parameters + (4 * num_unreduced or (item + 4) * max(num_root, num_layer))


def _parts(model: PreTrainedModel) -> tuple[int, int]:
    """Number of parameters outside decoder layers, and in the largest layer."""
    layers = [_count(layer) for layer in decoder_layers(model)]
    return _count(model) - sum(layers), max(layers, default=0)


def _without_memory(model: ModelConfig, *, field: str = "model.path") -> PreTrainedModel:
    """The causal model of a configuration on `meta`, to count its parameters. Raises ConfigError as `load` does."""
    config = read_config(model, field=field)
    try:
        with torch.device("meta"):
            causal_lm = AutoModelForCausalLM.from_config(config, trust_remote_code=model.trust_remote_code)
    except (OSError, ValueError, ImportError) as error:
        raise ConfigError(f"{field}={model.path!r} does not load: {headline(error)}") from error
    causal_lm.tie_weights()
    return causal_lm


def _count(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _gib(size_bytes: int) -> str:
    return f"{size_bytes / 1024**3:.1f}"
