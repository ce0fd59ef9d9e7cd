"""Memory of a vLLM engine on each of its GPUs: weights, passes, and the key-value cache. Nothing is loaded.

vLLM takes `gpu_memory_utilization` of a GPU for any model, measures weights and passes when it starts, and gives the rest to the cache.
Here weights and passes are estimates, which no GPU has confirmed yet.
"""

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from cluster.contracts.errors import ConfigError
from cluster.contracts.rollout_config import RolloutConfig
from learner.shape import (
    expert_size,
    has_experts,
    head_size,
    inner_size,
    largest,
    num_chosen_experts,
    num_key_heads,
    shared_experts_size,
    sizes,
)

if TYPE_CHECKING:
    from transformers import PretrainedConfig

_WITHOUT_KEYS = ("linear_attention", "mamba", "conv", "moe", "mlp")
"""Kinds of layers whose state does not grow with the sequence."""
_WITH_WHOLE_HEADS = ("minicpm3",)
"""Models with latent attention whose keys and values vLLM caches by head."""
_PREFILL_TOKENS = 16_384
"""Prompt tokens of one engine step: vLLM's largest default."""
ENGINE_CONTEXT_BYTES = 2 * 1024**3
"""CUDA's context, NCCL's buffers, CUDA graphs: an allowance, not a measurement."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineMemory:
    """Memory of an engine on one GPU, in bytes."""

    taken_bytes: int
    weights_bytes: int
    passes_bytes: int
    bytes_per_sequence: int
    """Keys and values of a sequence of `max_context` tokens."""
    max_context: int

    @property
    def num_tokens(self) -> int:
        """Tokens that the cache holds at one time, in sequences of the whole context. Not positive if weights and passes leave nothing."""
        left = self.taken_bytes - self.weights_bytes - self.passes_bytes
        return left * self.max_context // self.bytes_per_sequence


def check_divisible(text: "PretrainedConfig", tensor_parallel: int) -> None:
    """Raises ConfigError for layers that vLLM cannot split into `tensor_parallel` equal shares.

    If there are fewer key-value heads than processes, vLLM copies them, and needs a whole number of copies.
    """
    split = {
        "attention heads": getattr(text, "num_attention_heads", None),
        "key-value heads": num_key_heads(text),
        **{name: _only(sizes(text, name)) for name in ("intermediate_size", "moe_intermediate_size")},
    }
    for name, number in split.items():
        if number is None:  # a model without this layer, or with layers of several sizes
            continue
        is_copied = name == "key-value heads" and tensor_parallel % number == 0
        if number % tensor_parallel and not is_copied:
            shown = f"{name} of {number}" if "_" in name else f"{number} {name}"
            raise ConfigError(
                f"rollout.tensor_parallel_size={tensor_parallel} does not divide the model's {shown}; use a number that does"
            )


def weights_bytes(text: "PretrainedConfig", rollout: RolloutConfig, *, num_parameters: int, item: int) -> int:
    """Weights of an engine, all its processes together. Quantized linear layers take one byte a number. Embeddings and vocabulary head
    stay in the compute type, which takes `item` bytes."""
    if rollout.quantization is None:
        return item * num_parameters
    num_kept = text.vocab_size * text.hidden_size * (1 if getattr(text, "tie_word_embeddings", False) else 2)
    return item * num_kept + (num_parameters - num_kept)


def logits_bytes(text: "PretrainedConfig", num_sequences: int) -> int:
    """At a pass's end: float32 logits, probabilities, and their logarithms or a sorted copy."""
    return 3 * 4 * num_sequences * text.vocab_size


def on_cpus_bytes(text: "PretrainedConfig", rollout: RolloutConfig, *, weights: int) -> int:
    """An engine on CPUs, all its processes together: weights, cache, and logits, whose memory it keeps."""
    return weights + rollout.cpu_cache_bytes + logits_bytes(text, rollout.max_concurrent_sequences)


def _only(found: set[int]) -> int | None:
    return next(iter(found)) if len(found) == 1 else None


def of_engine(
    text: "PretrainedConfig",
    rollout: RolloutConfig,
    *,
    num_parameters: int,
    item: int,
    gpu_bytes: int,
    max_context: int,
) -> EngineMemory:
    """`text` is the language model's configuration, `item` the bytes of a number in its compute type.

    A token has a key and a value in each layer and key-value head (arXiv:2309.06180). Tensor parallelism splits the heads, and copies
    them if there are fewer heads than GPUs. A pass keeps one layer's inputs and MLP, and at its end logits. Raises ConfigError as
    `check_divisible` does.
    """
    tensor_parallel = rollout.tensor_parallel_size
    check_divisible(text, tensor_parallel)
    layer = 4 * text.hidden_size + _values_of_mlp(text, tensor_parallel)
    weights = weights_bytes(text, rollout, num_parameters=num_parameters, item=item)
    logits = logits_bytes(text, rollout.max_concurrent_sequences)
    return EngineMemory(
        taken_bytes=int(rollout.gpu_memory_utilization * gpu_bytes),
        weights_bytes=weights // tensor_parallel,
        passes_bytes=_PREFILL_TOKENS * item * layer + logits + ENGINE_CONTEXT_BYTES,
        bytes_per_sequence=item
        * _cached_numbers(text, tensor_parallel=tensor_parallel)
        * _cached_tokens(text, max_context),
        max_context=max_context,
    )


def _values_of_mlp(text: "PretrainedConfig", tensor_parallel: int) -> int:
    """Numbers that a layer's MLP keeps of a token in each process: gate, up-projection and their product. Chosen experts each have these,
    and an output of their own."""
    dense = 3 * inner_size(text) // tensor_parallel
    if not has_experts(text):
        return dense
    of_experts = num_chosen_experts(text) * (3 * expert_size(text) // tensor_parallel + text.hidden_size)
    return max(dense, of_experts + 3 * shared_experts_size(text) // tensor_parallel)


def _cached_numbers(text: "PretrainedConfig", *, tensor_parallel: int) -> int:
    """Numbers that the cache keeps of one token in a layer, in each process. Latent attention (MLA, arXiv:2405.04434) keeps a latent and a
    rotary key that all heads share."""
    if caches_latents(text):
        return text.kv_lora_rank + text.qk_rope_head_dim
    return 2 * max(num_key_heads(text) // tensor_parallel, 1) * head_size(text)


def caches_latents(text: "PretrainedConfig") -> bool:
    """Whether vLLM serves the model by latent attention."""
    has_latents = bool(getattr(text, "kv_lora_rank", None))
    return has_latents and getattr(text, "model_type", "") not in _WITH_WHOLE_HEADS


def _cached_tokens(text: "PretrainedConfig", max_context: int) -> int:
    """Tokens that the cache keeps of a sequence of the whole context, summed over all layers.

    As vLLM counts: a layer with a sliding window keeps the window and the tokens of one engine step, so it saves memory only in longer
    contexts. Layers of each kind form groups of one size, and the last group is padded.
    """
    kinds = getattr(text, "layer_types", None) or [None] * text.num_hidden_layers
    window = largest(text, "sliding_window")
    num_keeping = max(sum(kind not in _WITHOUT_KEYS for kind in kinds), 1)
    num_sliding = sum(kind in (None, "sliding_attention") for kind in kinds) if window else 0
    if not window or not num_sliding:
        return num_keeping * max_context
    in_window = min(window - 1 + _PREFILL_TOKENS, max_context)
    num_whole = num_keeping - num_sliding
    if not num_whole:
        return num_sliding * in_window
    fewer, more = sorted((num_whole, num_sliding))
    group = more if more < 1.5 * fewer else fewer
    return math.ceil(num_whole / group) * group * max_context + math.ceil(num_sliding / group) * group * in_window
