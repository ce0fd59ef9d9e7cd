"""What a vLLM engine makes of each of its GPUs: weights, what its passes take, and the key-value cache that is left. Nothing is loaded.

vLLM takes `gpu_memory_utilization` of a GPU whatever the model's size, measures at its start what weights and passes take, and gives the
rest to the cache. Here both are estimated; no GPU has measured them yet.
"""

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from cluster.contracts.errors import ConfigError
from learner.shape import head_size, inner_size, largest, num_key_heads, sizes

if TYPE_CHECKING:
    from transformers import PretrainedConfig

_WITHOUT_KEYS = ("linear_attention", "mamba", "conv", "moe", "mlp")
"""Kinds of layers whose state does not grow with a sequence."""
_WITH_WHOLE_HEADS = ("minicpm3",)
"""Models of latent attention for which vLLM caches keys and values by heads."""
_PREFILL_TOKENS = 16_384
"""Prompt tokens of one engine step: vLLM's largest default."""
ENGINE_CONTEXT_BYTES = 2 * 1024**3
"""CUDA's context, NCCL's buffers, CUDA graphs: an allowance, not a measurement."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineMemory:
    """Bytes of one GPU of an engine."""

    taken_bytes: int
    weights_bytes: int
    passes_bytes: int
    bytes_per_sequence: int
    """Of the cache: keys and values of a sequence of the whole context."""
    max_context: int
    """In tokens."""

    @property
    def num_tokens(self) -> int:
        """That the engine's cache holds at one time, in sequences of the whole context; not positive where weights and passes leave
        nothing."""
        left = self.taken_bytes - self.weights_bytes - self.passes_bytes
        return left * self.max_context // self.bytes_per_sequence


def check_divisible(text: "PretrainedConfig", tensor_parallel: int) -> None:
    """Raises ConfigError for layers that vLLM cannot deal out to so many processes in equal shares.

    Key-value heads that are too few are copied, which needs a whole number of copies.
    """
    dealt_out = {
        "attention heads": getattr(text, "num_attention_heads", None),
        "key-value heads": num_key_heads(text),
        **{name: _only(sizes(text, name)) for name in ("intermediate_size", "moe_intermediate_size")},
    }
    for name, number in dealt_out.items():
        if number is None:  # a model without this layer, or with layers of several sizes
            continue
        is_copied = name == "key-value heads" and tensor_parallel % number == 0
        if number % tensor_parallel and not is_copied:
            raise ConfigError(
                f"rollout.tensor_parallel_size={tensor_parallel} does not divide the model's {_told(name, number)}; use a number that does"
            )


def weights_bytes(text: "PretrainedConfig", *, num_parameters: int, item: int, is_quantized: bool) -> int:
    """Of an engine, all its processes together. Linear layers are in 8 bits; embeddings and vocabulary head stay in the compute type."""
    if not is_quantized:
        return item * num_parameters
    num_kept = text.vocab_size * text.hidden_size * (1 if getattr(text, "tie_word_embeddings", False) else 2)
    return item * num_kept + (num_parameters - num_kept)


def _only(found: set[int]) -> int | None:
    return next(iter(found)) if len(found) == 1 else None


def _told(name: str, number: int) -> str:
    return f"{name} of {number}" if "_" in name else f"{number} {name}"


def of_engine(
    text: "PretrainedConfig",
    *,
    num_parameters: int,
    item: int,
    is_quantized: bool,
    gpu_bytes: int,
    utilization: float,
    tensor_parallel: int,
    num_sequences: int,
    max_context: int,
) -> EngineMemory:
    """`text` is the language model's configuration, `item` the bytes of a number in its compute type.

    A token has a key and a value in each layer and key-value head (arXiv:2309.06180); tensor parallelism deals the heads out, and copies
    them where there are fewer heads than GPUs. A pass keeps one layer's inputs and MLP, and at its end float32 logits, what is sampled
    from, and a sorted copy. Raises ConfigError as `check_divisible` does.
    """
    check_divisible(text, tensor_parallel)
    layer = 4 * text.hidden_size + 3 * inner_size(text) // tensor_parallel
    logits = 3 * 4 * num_sequences * text.vocab_size
    weights = weights_bytes(text, num_parameters=num_parameters, item=item, is_quantized=is_quantized)
    return EngineMemory(
        taken_bytes=int(utilization * gpu_bytes),
        weights_bytes=weights // tensor_parallel,
        passes_bytes=_PREFILL_TOKENS * item * layer + logits + ENGINE_CONTEXT_BYTES,
        bytes_per_sequence=item
        * _cached_numbers(text, tensor_parallel=tensor_parallel)
        * _cached_tokens(text, max_context),
        max_context=max_context,
    )


def _cached_numbers(text: "PretrainedConfig", *, tensor_parallel: int) -> int:
    """Of one token in a layer, in each process. Latent attention (MLA, arXiv:2405.04434) keeps a latent and a rotary key that all heads
    share."""
    if caches_latents(text):
        return text.kv_lora_rank + text.qk_rope_head_dim
    return 2 * max(num_key_heads(text) // tensor_parallel, 1) * head_size(text)


def caches_latents(text: "PretrainedConfig") -> bool:
    """Whether vLLM serves the model by latent attention."""
    has_latents = bool(getattr(text, "kv_lora_rank", None))
    return has_latents and getattr(text, "model_type", "") not in _WITH_WHOLE_HEADS


def _cached_tokens(text: "PretrainedConfig", max_context: int) -> int:
    """Of a sequence of the whole context, over all layers.

    As vLLM counts: a layer whose window slides keeps the window and what one step reads, so that it saves something in contexts that are
    longer than both. Layers of either kind are dealt to groups of one size, the last of which is filled up.
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
