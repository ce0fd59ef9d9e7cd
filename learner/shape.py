"""A language model's configuration, and the sizes that it names. If layers differ, the largest counts."""

import os
from typing import TYPE_CHECKING

from cluster.contracts.config import ModelConfig
from cluster.contracts.errors import ConfigError, headline

if TYPE_CHECKING:
    from transformers import PretrainedConfig


def read_config(model: ModelConfig, *, field: str = "model.path") -> "PretrainedConfig":
    """The model's transformers configuration, loading nothing else. Raises ConfigError naming `field` when there is none."""
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(
            os.path.expanduser(model.path), revision=model.revision, trust_remote_code=model.trust_remote_code
        )
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(
            f"{field}={model.path!r} is no model that transformers reads: {headline(error)}; "
            "give a folder with config.json and weights, or a hub name that is reachable"
        ) from error


def sizes(text: "PretrainedConfig", name: str) -> set[int]:
    """The sizes of this name in all layers."""
    layers = text.per_layer_config if getattr(text, "is_heterogeneous", False) else [text]
    found = [getattr(layer, name, None) for layer in layers]
    return {size for each in found for size in (each if isinstance(each, (list, tuple)) else [each]) if size}


def largest(text: "PretrainedConfig", name: str) -> int | None:
    """None if no layer has it."""
    return max(sizes(text, name), default=None)


def has_experts(text: "PretrainedConfig") -> bool:
    return any(getattr(text, name, None) for name in ("num_experts", "num_local_experts", "n_routed_experts"))


def num_heads(text: "PretrainedConfig") -> int:
    """Query heads of attention; 1 if no layer has attention."""
    return getattr(text, "num_attention_heads", None) or 1


def head_size(text: "PretrainedConfig") -> int:
    """Size of an attention head."""
    return largest(text, "head_dim") or text.hidden_size // num_heads(text)


def num_key_heads(text: "PretrainedConfig") -> int:
    return largest(text, "num_key_value_heads") or num_heads(text)


def inner_size(text: "PretrainedConfig") -> int:
    """Inner size of the MLP."""
    return largest(text, "intermediate_size") or 4 * text.hidden_size


def num_chosen_experts(text: "PretrainedConfig") -> int:
    """Number of experts that the router chooses for a token."""
    return _first(text, "num_experts_per_tok", "top_k_experts", "moe_topk", "moe_k") or 1


def expert_size(text: "PretrainedConfig") -> int:
    """Inner size of an expert."""
    return _first(text, "moe_intermediate_size", "expert_ffn_hidden_size") or inner_size(text)


def shared_experts_size(text: "PretrainedConfig") -> int:
    """Inner size of the experts that all tokens go through, together; 0 without them."""
    own = _first(text, "shared_expert_intermediate_size", "moe_shared_expert_intermediate_size")
    num_shared = _first(text, "n_shared_experts", "num_shared_experts", "moe_num_shared_experts")
    return own or (num_shared or 0) * expert_size(text)


def _first(text: "PretrainedConfig", *names: str) -> int | None:
    """The size of the first of these names that the configuration has."""
    return next((size for name in names if (size := largest(text, name))), None)


def windows(text: "PretrainedConfig") -> set[int]:
    """Window sizes of the layers that do not see all earlier positions."""
    kinds = getattr(text, "layer_types", None)
    named = {"sliding_window": "sliding_attention", "attention_chunk_size": "chunked_attention"}
    found = {largest(text, name) for name, kind in named.items() if kinds is None or kind in kinds}
    return {size for size in found if size}
